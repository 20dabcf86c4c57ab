"""Defaults of options from the config file, with a table for each command and one for all, and from the environment."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.options.declare import Option, OptionField, Options, option_fields

ALL = "all"  # the table for all commands
PREFIX = "KTCONVERT_"  # of our environment variables
# Environment variables that belong to no option
OTHER_VARIABLES = tuple(f"{PREFIX}{name}" for name in ("API_KEY", "ARCH", "CFLAGS", "DEBUG", "HOST", "ISA", "NUMA"))
SIMILAR = 0.85  # ratio of difflib above which a variable that names no command is taken for a mistyped one


def name_config_file() -> str:
    """Return the path of the config file, as messages and help show it, whether it exists or not."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    is_absolute = folder.startswith("/")  # the XDG specification says to ignore others
    return f"{folder.rstrip('/') if is_absolute else '~/.config'}/ktconvert/config.toml"


def find_config_file() -> Path | None:
    """Return the path of the config file; None if there is none."""
    path = os.path.expanduser(name_config_file())  # noqa: PTH111  # pathlib raises errors for unreadable homes
    return Path(path) if os.path.exists(path) else None  # noqa: PTH110


def read_defaults(command: str, cls: type[Options], parent: click.Context) -> dict[str, Any]:
    """Return the values that the config file has for a command's options: name -> words as on the command line.

    parent  the context of the group of all commands

    Raises UsageError for a file that cannot be read, for wrong tables and keys, also those of other commands, and for
    wrong values of this command.
    """
    if (path := find_config_file()) is None:
        return {}
    tables = _read_tables(path, parent)
    by_key = _options_by_key(cls)
    defaults: dict[str, Any] = {}
    for title in (ALL, command, *(title for title in tables if title not in (ALL, command))):
        for key, value in tables.get(title, {}).items():
            place, name = f"{path}: [{title}] {key}", key.replace("-", "_")
            if title in (ALL, command) and name in by_key:
                defaults[by_key[name].name] = _to_words(by_key[name], value, place)
            elif name not in (known := _list_keys(title, parent)):
                if name in _list_flags(title, parent):
                    raise UsageError(f"{place}: no default can be set for this option; give it on the command line.")
                keys = [known_key.replace("_", "-") for known_key in known] if "-" in key else known
                raise _unknown_name(place, "option with a default", key, keys, "" if title == ALL else title)
    return defaults


def name_variable(command: str, key: str) -> str:
    """Return the environment variable with the default of a command's option."""
    return f"{PREFIX}{command}_{key}".upper().replace("-", "_")


def find_wrong_variables(command: str, cls: type[Options], parent: click.Context) -> Iterator[str]:
    """Yield a sentence for each environment variable that looks like ours, or like one of this command, and is not."""
    own = [name_variable(command, key) for key in _options_by_key(cls)]
    options = [option for option in option_fields(cls) if isinstance(option.declaration, Option)]
    unread = {name_variable(command, option.flag.removeprefix("--")): option.flag for option in options}
    known = [*own, *OTHER_VARIABLES]
    names = _get_group(parent).list_commands(parent)
    for variable in sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known):
        owners = [name for name in names if variable.startswith(name_variable(name, ""))]
        is_own = command == max(owners, key=len, default=None)
        if is_own and variable in unread:
            yield f"{variable}: no environment variable sets {unread[variable]}; give it on the command line."
        elif is_own or (not owners and difflib.get_close_matches(variable, known, 1, SIMILAR)):
            yield str(_unknown_name(variable, "environment variable", variable, own if is_own else known))


def _read_tables(path: Path, parent: click.Context) -> dict[str, Mapping[str, Any]]:
    """Return the tables of the config file by command."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        problem = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else problem
        raise UsageError(f"{path}: cannot be read ({problem}); correct or remove it.") from error
    names = _get_group(parent).list_commands(parent)
    for title, table in document.items():
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {title} is in no table; write it below [{ALL}] or below the name of a command.")
        if title not in (ALL, *names):
            raise _unknown_name(f"{path}: [{title}]", "command", title, names)
    return document


def _get_group(parent: click.Context) -> click.Group:
    assert isinstance(parent.command, click.Group)
    return parent.command


def _options_by_key(cls: type[Options]) -> dict[str, OptionField]:
    return {each.config_key: each for each in option_fields(cls) if each.config_key is not None}


def _list_keys(title: str, parent: click.Context) -> tuple[str, ...]:
    """Return the keys of a table: those of its command, or of all commands. This imports the commands' modules."""
    return tuple(dict.fromkeys(key for cls in _list_classes(title, parent) for key in _options_by_key(cls)))


def _list_flags(title: str, parent: click.Context) -> set[str]:
    """Return the options of a table's commands, written as keys, also those without a default."""
    options = [option for cls in _list_classes(title, parent) for option in option_fields(cls)]
    return {
        option.flag.removeprefix("--").replace("-", "_") for option in options if isinstance(option.declaration, Option)
    }


def _list_classes(title: str, parent: click.Context) -> list[type[Options]]:
    group = _get_group(parent)
    names = group.list_commands(parent) if title == ALL else [title]
    commands: list[Any] = [group.get_command(parent, name) for name in names]
    return [command.settings for command in commands]


def _unknown_name(place: str, kind: str, name: str, known: Iterable[str], command: str = "") -> UsageError:
    similar = difflib.get_close_matches(name, known, 1)
    remedy = f"did you mean {similar[0]}?" if similar else f"see `ktconvert {command or 'COMMAND'} --help-all`."
    return UsageError(f"{place}: no {kind} has this name; {remedy}")


def _to_words(option_field: OptionField, value: Any, place: str) -> str | bool | list[str]:
    """Return a value as the command line has it. Raises UsageError for a wrong one."""
    is_flag, is_list = option_field.value_type is bool, option_field.value_type is tuple
    items = value if is_list and isinstance(value, list) else [value]
    expected = "true or false" if is_flag else "a list of values" if is_list else "a number or a text in quotes"
    if any(isinstance(item, bool) != is_flag or not isinstance(item, bool | int | float | str) for item in items):
        raise UsageError(f"{place}: the value has the wrong type; give {expected}.")
    try:
        words = [*map(str, items)]  # ValueError for integers with thousands of digits
        for word in words:
            option_field.click_type.convert(word, None, None)
    except (click.BadParameter, ValueError) as error:
        problem = error.message if isinstance(error, click.BadParameter) else str(error)
        raise UsageError(f"{place}: {problem.rstrip('.')}; correct the value.") from error
    return value if is_flag else words if is_list else words[0]
