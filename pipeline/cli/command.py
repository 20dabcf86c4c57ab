"""From a settings class to a click command, and from what was given back to settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
from click.core import ParameterSource

from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.options.declare import NONE, Leaf, O, Option, Options, build, leaves


class Command(click.Command):
    """A command whose --help shows options under the titles of their groups."""

    def __init__(self, name: str, cls: type[Options], function: Callable[[Any], None]) -> None:
        self.settings, self.function = cls, function
        text, title, examples = inspect.cleandoc(function.__doc__ or "").partition("Examples:\n")

        def callback(**params: Any) -> None:
            function(settings(cls, params))

        super().__init__(
            name,
            params=[parameter for leaf in leaves(cls) for parameter in parameters(leaf)],
            callback=callback,
            help=text,
            epilog=f"\b\n{title}{examples}",
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = {leaf.name: leaf.title for leaf in leaves(self.settings)}
        declared = [leaf.declared for leaf in leaves(self.settings) if isinstance(leaf.declared, Option)]
        arguments = {option.argument: option.help for option in declared}
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in sorted(self.get_params(ctx), key=lambda each: not isinstance(each, click.Argument)):
            if isinstance(parameter, click.Argument):  # of which click before 8.5 says nothing
                record: tuple[str, str] | None = (parameter.human_readable_name, arguments[parameter.name])
            else:
                record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(titles.get(parameter.name or "", "Options"), []).append(record)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class SeveralValues(Command):
    """A command whose options that may be repeated take several values after one flag, as argparse's nargs="*" does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from ktconvert.pipeline.cli import normal

        several = {leaf.flag for leaf in leaves(self.settings) if leaf.kind is tuple}
        spread: list[str] = []
        flag: str | None = None
        for word in args:
            if word.startswith("-"):
                flag = normal(word) if normal(word) in several else None
                spread += [] if flag else [word]
            else:
                spread += [flag, word] if flag else [word]
        return super().parse_args(ctx, spread)


def command(name: str, cls: type[O], kind: type[Command] = Command) -> Callable[[Callable[[O], None]], Command]:
    """Decorator: a function of the settings, whose docstring is the help, with examples at its end, as a command."""
    return lambda function: kind(name, cls, function)


def parameters(leaf: Leaf) -> Iterator[click.Parameter]:
    """What click reads for an option: nothing, an argument, an option, or both, of which one is given."""
    option = leaf.declared
    if not isinstance(option, Option):
        return
    text = f"Accepted and ignored: {option.ignored}." if option.ignored else option.help
    if option.argument is not None:
        yield click.Argument([option.argument], type=leaf.type, required=not option.flags)
        if not option.flags:
            return
        text = f"Other ways to give {option.argument.upper()}."
    explicit = not any(leaf.default is without for without in (NONE, None, False, ()))
    keywords: dict[str, Any] = {"is_flag": True} if leaf.kind is bool else {"type": leaf.type}
    if leaf.default is not NONE:
        keywords["default"] = leaf.default
    yield click.Option(
        [leaf.name, *(option.flags or (leaf.flag,))],
        required=leaf.default is NONE and option.argument is None,
        multiple=leaf.kind is tuple,
        show_default=explicit or None,
        help=f"{text} [default: {option.unset}]" if option.unset else text,
        **keywords,
    )


def settings(cls: type[O], params: Mapping[str, Any]) -> O:
    """The settings that a command line gives. Raises UsageError for what is there twice, or not at all."""
    values = {}
    for leaf in leaves(cls):
        if not isinstance(leaf.declared, Option):
            continue
        argument, flags = leaf.declared.argument, leaf.declared.flags
        if argument is None:
            values[leaf.name] = params[leaf.name]
        elif not flags:
            values[leaf.name] = params[argument]
        else:
            values[leaf.name] = _one_of(argument, params[argument], params[leaf.name])
    return build(cls, values)


def given(cls: type[Options]) -> Iterator[Leaf]:
    """The options that stand on the command line."""
    context = click.get_current_context()
    for leaf in leaves(cls):
        if context.get_parameter_source(leaf.name) is ParameterSource.COMMANDLINE:
            yield leaf


def _one_of(name: str, argument: Any, option: Any) -> Any:
    if (argument is None) == (option is None):
        what = "is missing" if argument is None else "is given twice"
        raise UsageError(f"{name.upper()} {what}; see `{click.get_current_context().command_path} --help`.")
    return option if argument is None else argument
