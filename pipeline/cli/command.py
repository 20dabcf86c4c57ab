"""Click commands from settings classes, and settings from parsed command lines."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from ktconvert.layouts.errors import KTConvertError, UsageError, absent_path
from ktconvert.pipeline.cli.config_file import find_wrong_variables, name_config_file, name_variable, read_defaults
from ktconvert.pipeline.options.declare import REQUIRED, Group, O, Option, OptionField, Options, build, option_fields
from ktconvert.pipeline.options.types import FilePath, Integer, NamedPath, OutputPath

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

SHOW_ALL = "ktconvert.help-all"  # key of click's context
ONCE = {"-i", "-o"}  # options that must not be repeated; of the others, the last value counts, as in most programs
# Commands and options for which a wrong config file is only a warning, since they help to correct it
WITHOUT_CONFIG = ("doctor", "version")
HELP_FLAGS = {"-h", "--help", "--help-all"}
MAX_CHOICES = 56  # characters of choices that --help shows next to the option; longer lists follow the text


class Command(click.Command):
    """A command whose --help lists common options, and --help-all every option, under the headings of their groups."""

    def __init__(self, name: str, cls: type[Options], function: Callable[[Any], None]) -> None:
        self.settings = cls
        self.function = function
        text, title, examples = inspect.cleandoc(function.__doc__ or "").partition("Examples:\n")

        def callback(**params: Any) -> None:
            try:
                options = build_settings(cls, params)
                _require_existing_paths(options)
                function(options)
            except KTConvertError as error:
                raise _name_origins(error, click.get_current_context()) from error

        super().__init__(
            name,
            params=[p for option_field in option_fields(cls) for p in click_parameters(option_field, name)]
            + [HELP_ALL],
            callback=callback,
            help=text,
            epilog=f"\b\n{title}{examples}",
        )

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if parent is not None and not parent.resilient_parsing:  # which completions are
            command = (self.name or "", self.settings, parent)
            for sentence in find_wrong_variables(*command):
                click.echo(f"warning: {sentence}", err=True)
            try:
                extra["default_map"] = read_defaults(*command)
            except UsageError as error:
                if self.name not in WITHOUT_CONFIG and not HELP_FLAGS & {*map(str.lower, args)}:
                    raise
                click.echo(f"warning: {error}", err=True)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            values, _, order = self.make_parser(ctx).parse_args([*args])
            if not ctx.resilient_parsing:
                self._check_once(values, Counter(order), ctx)
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            assert error.param is not None
            value = error.param.make_metavar(ctx)
            _refuse_missing(value if isinstance(error.param, click.Argument) else f"{error.param.opts[0]} {value}")
        except click.BadOptionUsage as error:
            option = next(parameter for parameter in self.params if error.option_name in parameter.opts)
            if isinstance(option, click.Option) and option.is_flag:
                raise click.BadOptionUsage(error.option_name, error.message, ctx) from None
            _refuse_missing(f"the value of {error.option_name}")

    def _check_once(self, values: Mapping[str, Any], counts: Mapping[click.Parameter, int], ctx: click.Context) -> None:
        """Raise UsageError if an option of ONCE is given several times, or its value is another option."""
        for parameter, count in counts.items():
            if ONCE & {*parameter.opts}:
                if count > 1:
                    raise UsageError(f"{parameter.opts[0]} is given {count} times; give it once.")
                if self._is_option(str(values[parameter.name]), ctx):
                    _refuse_missing(f"the value of {parameter.opts[0]}")

    def _is_option(self, word: str, ctx: click.Context) -> bool:
        """Return whether a word is a long option of this command, with or without its value."""
        name = (ctx.token_normalize_func or str)(word.partition("=")[0])
        return name.startswith("--") and any(name in parameter.opts for parameter in self.params)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        parameters = {parameter.name: parameter for parameter in self.params}
        groups: dict[Group, list[tuple[str, str]]] = {group: [] for group in Group}
        for option_field in option_fields(self.settings):
            option = option_field.declaration
            if isinstance(option, Option):
                groups[option.group].append(_help_row(option, parameters[option_field.name], ctx))
        hidden = [group for group, rows in groups.items() if rows and group.is_hidden and not ctx.meta.get(SHOW_ALL)]
        for group, rows in groups.items():
            if rows and group not in hidden:
                with formatter.section(self.settings.find_heading(group)):
                    formatter.write_dl(rows)
        sentences: list[str] = []
        if hidden:
            titles = ", ".join(group.title[0].lower() + group.title[1:] for group in hidden)
            sentences.append(f"More options with --help-all: {titles}.")
        if any(parameter.envvar for parameter in self.params):
            variable = name_variable(self.name or "", "option")
            sentences.append(f"Defaults are read from {variable}, then from [{self.name}] in {name_config_file()}.")
        if sentences:
            formatter.write_paragraph()
            formatter.write_text(" ".join(sentences))


def _help_row(option: Option, parameter: click.Parameter, ctx: click.Context) -> tuple[str, str]:
    """Return the spellings and the text of an option, or of a positional argument without flags, for --help."""
    argument = "" if option.argument is None else option.argument.upper()
    if isinstance(parameter, click.Argument):  # click before 8.5 has no help for arguments
        return argument, option.help
    spellings, text = parameter.get_help_record(ctx) or ("", "")
    for alias in () if ctx.meta.get(SHOW_ALL) else option.aliases:
        spellings = re.sub(rf", {alias}(?![\w-])", "", spellings)
    return (f"{argument}, {spellings}" if argument else spellings), text


def _print_all_options(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[SHOW_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


HELP_ALL = click.Option(["--help-all"], is_flag=True, expose_value=False, is_eager=True, callback=_print_all_options)


class HelpOption(click.Option):
    """An option whose --help shows the default of an unset value, and not that a number must be at least 1.

    unset  shown as the default, if it is not None

    Only --help-all shows environment variables.
    """

    def __init__(self, unset: str | None, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._unset = unset

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Name the environment variable only if it has the wrong value, and no aliases."""
        is_variable = ctx is not None and ctx.get_parameter_source(self.name or "") is ParameterSource.ENVIRONMENT
        return super().get_error_hint(ctx) if is_variable else f"'{self.opts[0]}'"

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        extra = super().get_help_extra(ctx)
        if isinstance(self.type, Integer):
            extra.pop("range", None)
        if not ctx.meta.get(SHOW_ALL):
            extra.pop("envvars", None)
        default = (ctx.default_map or {}).get(self.name or "", self._unset)  # of the config file
        return extra if default is None else {**extra, "default": str(default)}


class Argument(click.Argument):
    """A positional argument that errors name without brackets."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        return f"'{(self.name or '').upper()}'"


class MultiValueCommand(Command):
    """A command whose repeatable options take several values after one flag, like argparse's nargs="*"."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        normalize = ctx.token_normalize_func or str
        repeatable = {
            option_field.flag for option_field in option_fields(self.settings) if option_field.value_type is tuple
        }
        expanded: list[str] = []
        flag: str | None = None
        for word in args:
            if word.startswith("-"):
                flag = normalize(word) if normalize(word) in repeatable else None
                expanded += [] if flag else [word]
            else:
                expanded += [flag, word] if flag else [word]
        return super().parse_args(ctx, expanded)


def command(name: str, cls: type[O], kind: type[Command] = Command) -> Callable[[Callable[[O], None]], Command]:
    """Return a decorator that makes a command from a function of its settings; the docstring is the help."""
    return lambda function: kind(name, cls, function)


def click_parameters(option_field: OptionField, command: str) -> Iterator[click.Parameter]:
    """Yield the click parameters of a command's option: an argument, an option, or both; none for a recorded value."""
    option = option_field.declaration
    default = option_field.default
    if not isinstance(option, Option):
        return
    text = f"Accepted and ignored: {option.ignored}." if option.ignored else option.help
    if option.argument is not None:
        name, kind = option.argument.upper(), option_field.click_type
        required = not option.flags and default is REQUIRED
        number = -1 if option_field.value_type is tuple else 1
        name = f"[{name}]..." if number < 0 else name
        yield Argument([option.argument], type=kind, required=required, nargs=number, metavar=name)
        if not option.flags:
            return
    show_default = not any(default is hidden_default for hidden_default in (REQUIRED, None, False, ()))
    metavar = getattr(option_field.click_type, "metavar", None)
    if len("|".join(words := getattr(option_field.click_type, "choices", ()))) > MAX_CHOICES:
        metavar = "WORD"
        text = f"{text} One of {', '.join(words)}."
    is_flag = option_field.value_type is bool
    keywords: dict[str, Any] = {"type": option_field.click_type, **({"is_flag": True} if is_flag else {})}
    if default is not REQUIRED:
        keywords["default"] = default
    yield HelpOption(
        option.unset,
        [option_field.name, *(option.flags or (option_field.flag,)), *option.aliases],
        required=default is REQUIRED and option.argument is None,
        multiple=option_field.value_type is tuple,
        envvar=None if option_field.config_key is None else name_variable(command, option_field.config_key),
        show_envvar=True,
        show_default=show_default or None,
        metavar=metavar,
        help=text,
        **keywords,
    )


def build_settings(cls: type[O], params: Mapping[str, Any]) -> O:
    """Return the settings of a command line. Raises UsageError for a value that is missing or given twice."""
    options = [(f, f.declaration) for f in option_fields(cls) if isinstance(f.declaration, Option)]
    values = {option_field.name: params[option_field.name] for option_field, _ in options}
    either = [(f, option.argument) for f, option in options if option.argument and option.flags]
    words = [word for _, argument in either if (word := params[argument]) is not None]
    by_flag = [(f, argument) for f, argument in either if values[f.name] is not None]
    same = [
        argument
        for f, argument in by_flag
        if values[f.name] in (f.click_type.convert(word, None, None) for word in words)
    ]
    is_input_given = len(either) > 1 and values[either[0][0].name] is not None
    if (same and is_input_given) or len(by_flag) + len(words) > len(either):
        twice = " or ".join(argument.upper() for argument in same or [argument for _, argument in by_flag])
        raise UsageError(f"{twice} is given twice; give it once.")
    for option_field, argument in either:  # positional arguments stand for the options that are not given
        if values[option_field.name] is None:
            word = words.pop(0) if words else _refuse_missing(argument.upper())
            values[option_field.name] = option_field.click_type.convert(word, None, None)
    given = {option_field.name for option_field in find_given_options(cls)}
    pairs = {frozenset((option_field.name, option.excludes)) for option_field, option in options if option.excludes}
    for option_field, _ in options:  # an option of the command line replaces one of the config file that it excludes
        if option_field.name not in given and any(option_field.name in pair and pair & given for pair in pairs):
            values[option_field.name] = option_field.default
    return build(cls, values)


def require_one(given: Mapping[str, bool]) -> None:
    """Raise UsageError unless exactly one of several options is given.

    given  option, as messages name it -> whether it is given
    """
    count = sum(given.values())
    if count == 0:
        _refuse_missing(" or ".join(given))
    if count > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other; leave out one of them.")


def _refuse_missing(what: str) -> NoReturn:
    raise UsageError(f"{what} is missing; add it, as `{click.get_current_context().command_path} --help` shows.")


def _require_existing_paths(options: Options) -> None:
    """Raise InputError for a path to read that does not exist. Code that resolves hub ids raises it for these.

    Raises VerificationError for an output that is not finished.
    """
    for option_field in option_fields(type(options)):
        click_type, value = option_field.click_type, option_field.get(options)
        if value is None or not isinstance(click_type, FilePath) or isinstance(click_type, OutputPath):
            continue
        for item in value if isinstance(value, tuple) else (value,):
            path = item[1] if isinstance(click_type, NamedPath) else item
            try:
                path.expanduser().stat()
            except (FileNotFoundError, NotADirectoryError):
                raise absent_path(path) from None
            except OSError:  # the command explains why it cannot be read
                continue


def _name_origins(error: KTConvertError, context: click.Context) -> KTConvertError:
    """Return the error, with the variables and the config file from which the options in its sentence have values."""
    named = {word.removesuffix("=") for word in re.findall(r"--[\w-]+", error.text)}
    origins = []
    for parameter in context.command.params:
        if flag := next((name for name in parameter.opts if name in named), None):
            source = context.get_parameter_source(parameter.name or "")
            if source is ParameterSource.ENVIRONMENT:
                origins.append(f"{flag} is set by {parameter.envvar}")
            elif source is ParameterSource.DEFAULT_MAP:
                origins.append(f"{flag} is set by {name_config_file()}")
    return error.with_addition(f" ({'; '.join(origins)})") if origins else error


def find_given_options(cls: type[Options]) -> Iterator[OptionField]:
    """Yield the options that the user wrote on the command line."""
    context = click.get_current_context()
    for option_field in option_fields(cls):
        if context.get_parameter_source(option_field.name) is ParameterSource.COMMANDLINE:
            yield option_field
