"""Click commands from settings classes, and settings from parsed command lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
from click.core import ParameterSource

from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.options.declare import REQUIRED, O, Option, OptionField, Options, build, option_fields


class Command(click.Command):
    """A command whose --help lists options under the titles of their groups."""

    def __init__(self, name: str, cls: type[Options], function: Callable[[Any], None]) -> None:
        self.settings = cls
        self.function = function
        text, title, examples = inspect.cleandoc(function.__doc__ or "").partition("Examples:\n")

        def callback(**params: Any) -> None:
            function(build_settings(cls, params))

        super().__init__(
            name,
            params=[parameter for option_field in option_fields(cls) for parameter in click_parameters(option_field)],
            callback=callback,
            help=text,
            epilog=f"\b\n{title}{examples}",
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = {option_field.name: option_field.title for option_field in option_fields(self.settings)}
        declarations = [option_field.declaration for option_field in option_fields(self.settings)]
        arguments = {option.argument: option.help for option in declarations if isinstance(option, Option)}
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in sorted(self.get_params(ctx), key=lambda parameter: not isinstance(parameter, click.Argument)):
            if isinstance(parameter, click.Argument):  # click before 8.5 has no help for arguments
                row: tuple[str, str] | None = (parameter.human_readable_name, arguments[parameter.name])
            else:
                row = parameter.get_help_record(ctx)
            if row is not None:
                groups.setdefault(titles.get(parameter.name or "", "Options"), []).append(row)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


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


def click_parameters(option_field: OptionField) -> Iterator[click.Parameter]:
    """Yield the click parameters of an option: an argument, an option, or both; none for a recorded value."""
    option = option_field.declaration
    default = option_field.default
    if not isinstance(option, Option):
        return
    text = f"Accepted and ignored: {option.ignored}." if option.ignored else option.help
    if option.argument is not None:
        required = not option.flags and default is REQUIRED
        number = -1 if option_field.value_type is tuple else 1
        yield click.Argument([option.argument], type=option_field.click_type, required=required, nargs=number)
        if not option.flags:
            return
        text = f"Same as {option.argument.upper()}."
    show_default = not any(default is hidden_default for hidden_default in (REQUIRED, None, False, ()))
    is_flag = option_field.value_type is bool
    keywords: dict[str, Any] = {"is_flag": True} if is_flag else {"type": option_field.click_type}
    if default is not REQUIRED:
        keywords["default"] = default
    yield click.Option(
        [option_field.name, *(option.flags or (option_field.flag,))],
        required=default is REQUIRED and option.argument is None,
        multiple=option_field.value_type is tuple,
        show_default=show_default or None,
        help=f"{text} [default: {option.unset}]" if option.unset else text,
        **keywords,
    )


def build_settings(cls: type[O], params: Mapping[str, Any]) -> O:
    """Return the settings of a command line. Raises UsageError for a value that is missing or given twice."""
    values = {}
    for option_field in option_fields(cls):
        option = option_field.declaration
        name = option_field.name
        if not isinstance(option, Option):
            continue
        if option.argument is None:
            values[name] = params[name]
        elif not option.flags:
            values[name] = params[option.argument]
        else:
            values[name] = _choose_value(option.argument, params[option.argument], params[name])
    return build(cls, values)


def find_given_options(cls: type[Options]) -> Iterator[OptionField]:
    """Yield the options that the user wrote on the command line."""
    context = click.get_current_context()
    for option_field in option_fields(cls):
        if context.get_parameter_source(option_field.name) is ParameterSource.COMMANDLINE:
            yield option_field


def _choose_value(name: str, argument: Any, option: Any) -> Any:
    if (argument is None) == (option is None):
        problem = "is missing" if argument is None else "is given twice"
        raise UsageError(f"{name.upper()} {problem}; see `{click.get_current_context().command_path} --help`.")
    return option if argument is None else argument
