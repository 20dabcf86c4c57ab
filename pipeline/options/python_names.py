"""Messages for callers in Python: the names of keyword arguments in place of the command line's options."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import click

from ktconvert.layouts.errors import KTConvertError
from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS
from ktconvert.pipeline.options.declare import Option, OptionField, Options, option_fields
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.options.types import Size

# A command in backticks, which stays as it is; or an option, the next word, and the colon of `--option VALUE: problem`.
COMMAND_OR_OPTION = re.compile(r"`[^`-][^`]*`|(?<![\w-])(--[a-z][a-z-]*[a-z])(?: ((?!-)[\w./~,:+-]*\w)(:(?!\S))?)?")
PLACEHOLDER = re.compile("[A-Z]+")  # of a value


@contextmanager
def use_python_names(cls: type[Options]) -> Iterator[Callable[[str], str]]:
    """Name keyword arguments in errors; the function that `with` returns names them in other messages of a command.

    cls  the command's options. Those of other commands are also renamed, since messages recommend them
    """
    rename = functools.partial(rename_options, by_flag=_list_flags(cls))
    try:
        yield rename
    except KTConvertError as error:
        error.problem, error.remedy = rename(error.problem), rename(error.remedy)
        error.args = (error.problem,)
        if isinstance(error.path, str):
            error.path = rename(error.path)
        raise


def _list_flags(cls: type[Options]) -> dict[str, OptionField]:
    """Return the options of all commands by their spelling in messages; those of `cls` precede others."""
    return {
        each.flag.partition("/")[0]: each
        for other in (*CONVERSION_OPTIONS.values(), VerifyOptions, cls)
        for each in option_fields(other)
        if isinstance(each.declaration, Option)
    }


def rename_options(text: str, by_flag: Mapping[str, OptionField]) -> str:
    """Return a text with keyword arguments in place of options: `quant_method='int8'` for --quant-method int8."""

    def rename(match: re.Match[str]) -> str:
        flag, word, colon = match.groups()
        if flag not in by_flag:
            return match[0]
        option_field = by_flag[flag]
        name = option_field.name
        if option_field.value_type is bool:
            return match[0].replace(flag, f"{name}=True")
        value = _write_value(option_field, word or "", is_given=colon is not None)
        return match[0].replace(flag, name) if value is None else f"{name}={value}{colon or ''}"

    return COMMAND_OR_OPTION.sub(rename, text)


def _write_value(option_field: OptionField, word: str, *, is_given: bool) -> str | None:
    """Return the Python source of an option's value; None if the word after the option is no value.

    is_given  whether the message says that the word is the value
    """
    click_type = option_field.click_type
    is_placeholder = PLACEHOLDER.fullmatch(word) is not None
    if isinstance(click_type, click.Choice):
        is_word = is_placeholder or set(word.split(",")) <= set(click_type.choices)  # RTN may be of another command
        return (word if word.isdecimal() else repr(word)) if is_word else None
    if option_field.value_type in (int, float):
        if word[:1].isdecimal():
            return repr(word) if isinstance(click_type, Size) and not word.isdecimal() else word
    elif is_given:
        return repr(word)
    return word if is_placeholder else None
