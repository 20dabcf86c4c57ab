"""Declarations of options. Their click options, typed values and entries in plan.json follow from them.

    class Gptq(Options):
        dampening_frac: float = weights_option("Dampening, as a fraction of ...", FiniteFloat(0, 1), default=0.1)

A settings object is a tree: its fields are options, or groups of options that several commands share. Names are unique
within a command, so documents and messages list them flat.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import numbers
import os
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

import click
import msgspec

from ktconvert.layouts.errors import ArgumentError, CallError, UsageError
from ktconvert.layouts.files import documents
from ktconvert.pipeline.options.types import (
    ChoiceList,
    FilePath,
    FiniteFloat,
    Flag,
    Integer,
    OutputPath,
    PathOrHubId,
    Size,
    Text,
)

REQUIRED = MISSING  # the default of required options
AS_BEFORE = "as before"  # `unset` of options whose default is a value of the plan


class Effect(enum.Enum):
    """Consequences of a different value of an option."""

    CALL = "only this call; the value is not saved"
    TUNING = "how the work is done; saved in plan.json, and may differ on resume"
    FILES = "which files exist or what they contain; must be the same on resume"
    WEIGHTS = "the bytes of experts: as FILES, and part of the fingerprint of every unit that makes experts"


class Group(enum.Enum):
    """Headings in --help, in this order, and whether only --help-all lists the options below them."""

    INPUT = ("Input", False)
    OUTPUT = ("Output", False)
    EXPERTS = ("Experts", False)
    ADAPTER = ("Adapter", False)
    QUANTIZATION = ("Quantization", False)
    CHECKS = ("Checks", False)
    CALIBRATION = ("Calibration", False)
    TRAINING = ("Training", False)
    OPTIONS = ("Options", False)
    RESOURCES = ("Resources", False)
    REPORTING = ("Reporting", False)
    CALIBRATION_DETAILS = ("Details of the calibration", True)
    MACHINES = ("Several machines", True)
    ADVANCED = ("Advanced", True)
    IGNORED = ("Ignored options of kt-kernel", True)

    def __init__(self, title: str, is_hidden: bool) -> None:
        self.title = title
        self.is_hidden = is_hidden


@dataclass(frozen=True)
class Option:
    """An option of the command line. Its name is the field's, with dashes; a bool is a flag, a tuple may be repeated.

    type      reads a value; by default it follows from the field's annotation
    flags     spellings, if they do not follow from the name
    aliases   other spellings, such as kt-kernel's; only --help-all lists them
    argument  name of the positional argument that may replace the flags; without flags, the field's name
    unset     shown as the default if None, False or an empty text would not explain it
    excludes  name of the option of the same command that must not be given, too
    ignored   reason why the option is accepted (for compatibility with kt-kernel) without effect
    group     heading in --help
    """

    help: str = ""
    type: click.ParamType | None = None  # type: ignore[type-arg]  # generic only since click 8.5
    flags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    effect: Effect = Effect.CALL
    argument: str | None = None
    unset: str | None = None
    excludes: str | None = None
    ignored: str | None = None
    group: Group = Group.OPTIONS


@dataclass(frozen=True)
class RecordedValue:
    """A value that no option sets: the plan finds and records it. None means that there is no value.

    flag   the option that it follows from
    shape  the TypedDict that a mapping must fit
    """

    effect: Effect
    flag: str | None = None
    shape: Any = None


def declare(declaration: Option | RecordedValue, default: Any = None) -> Any:
    """Return a field of settings. The default is REQUIRED if a value must be given."""
    return field(default=default, metadata={"declaration": declaration})


def option(
    help: str = "", type: Any = None, effect: Effect = Effect.CALL, default: Any = None, **arguments: Any
) -> Any:
    """Return a field that an option of the command line sets; arguments as for Option, and its default."""
    return declare(Option(help, type, effect=effect, **arguments), default)


tuning_option, files_option, weights_option = (
    functools.partial(option, effect=effect) for effect in (Effect.TUNING, Effect.FILES, Effect.WEIGHTS)
)


def record(effect: Effect, flag: str | None = None, shape: Any = None, default: Any = None) -> Any:
    """Return a field for a recorded value; arguments as for RecordedValue, and its default."""
    return declare(RecordedValue(effect, flag, shape), default)


@dataclass_transform(eq_default=False, frozen_default=True, kw_only_default=True)
class Options:
    """Base class of settings: frozen dataclasses whose fields are declarations or groups.

    Argument of a subclass: `command`, the name of the command with these settings.
    """

    command: ClassVar[str] = ""  # name of the command with these settings
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, command: str | None = None) -> None:
        cls.command = command or cls.command
        dataclass(frozen=True, kw_only=True, repr=False)(cls)

    def __repr__(self) -> str:
        """Return the class with the options that differ from their defaults."""
        values = [(each, each.get(self)) for each in option_fields(type(self))]
        changed = [f"{each.name}={value!r}" for each, value in values if value != each.default]
        return f"{type(self).__name__}({', '.join(changed)})"

    @classmethod
    def find_heading(cls, group: Group) -> str:
        """Return the heading of a group of options in --help."""
        return group.title


O = TypeVar("O", bound=Options)  # noqa: E741


@dataclass(frozen=True)
class OptionField:
    """One option of a settings class.

    path        names of the fields that lead to it
    annotation  type of its field
    default     default value; REQUIRED if a value must be given
    """

    path: tuple[str, ...]
    declaration: Option | RecordedValue
    annotation: Any = field(hash=False)
    default: Any = field(hash=False)

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def flag(self) -> str:
        """The spelling that messages use."""
        declaration = self.declaration
        flags = declaration.flags if isinstance(declaration, Option) else (declaration.flag or "",)
        return next((flag for flag in flags if flag.startswith("--")), f"--{self.name.replace('_', '-')}")

    @property
    def config_key(self) -> str | None:
        """The name of the option in the config file, and in its environment variable; None if neither sets it.

        They set no input, no output, nothing that is required, and nothing that `resume` takes from the plan. They do
        not set --json either, which errors follow that precede the parsing of options.
        """
        option = self.declaration
        if not isinstance(option, Option) or option.ignored or option.argument or self.default is REQUIRED:
            return None
        if option.unset == AS_BEFORE or "--json" in option.flags:
            return None
        return self.flag.partition("/")[0].removeprefix("--").replace("-", "_")

    @property
    def value_type(self) -> type:
        """The type of a value that is not None: bool, int, float, str, Path, tuple, dict."""
        return _value_type(self.annotation)

    @property
    def click_type(self) -> click.ParamType:  # type: ignore[type-arg]
        """The reader of a value on the command line and in plan.json."""
        if isinstance(self.declaration, Option) and self.declaration.type is not None:
            return self.declaration.type
        by_type: Mapping[type, Callable[[], Any]]
        by_type = {bool: Flag, int: Integer, float: FiniteFloat, Path: FilePath}
        read: click.ParamType = by_type.get(self.value_type, Text)()  # type: ignore[type-arg]
        return read

    def get(self, options: Options) -> Any:
        """Return the value in a settings object."""
        return functools.reduce(getattr, self.path, options)


def _value_type(annotation: Any) -> type:
    if get_origin(annotation) in (Union, types.UnionType):
        return _value_type(next(member for member in get_args(annotation) if member is not type(None)))
    value_type: type = get_origin(annotation) or annotation
    return value_type


_cache: dict[type[Options], tuple[OptionField, ...]] = {}  # functools.cache: mypy takes no class for hashable


def option_fields(cls: type[Options]) -> tuple[OptionField, ...]:
    """Return the options of a settings class: its own first, then inherited ones, including those of groups."""
    if cls not in _cache:
        by_name = cls.__dataclass_fields__
        hints = get_type_hints(cls)
        declared_names = [name for name in inspect.get_annotations(cls) if name in by_name]
        _cache[cls] = tuple(
            option_field
            for name in dict.fromkeys((*declared_names, *by_name))
            for option_field in _flatten_field(cls, by_name[name], hints[name])
        )
    return _cache[cls]


def _flatten_field(cls: type[Options], class_field: Field[Any], hint: Any) -> Iterator[OptionField]:
    """Yield the option of a field, or those of its group."""
    if class_field.metadata:
        declaration = class_field.metadata["declaration"]
        yield OptionField((class_field.name,), declaration, hint, class_field.default)
        return
    group = getattr(cls, class_field.name)
    for option_field in option_fields(type(group)):
        path = (class_field.name, *option_field.path)
        yield replace(option_field, path=path, default=option_field.get(group))


def _option_names(cls: type[Options]) -> set[str]:
    return {option_field.name for option_field in option_fields(cls)}


def build(cls: type[O], values: Mapping[str, Any]) -> O:
    """Return a settings object from values by name, with defaults for the others.

    Raises TypeError for other names, UsageError for options that exclude each other.
    """
    if unknown := sorted({*values} - _option_names(cls)):
        raise TypeError(f"{cls.__name__} has no option {', '.join(unknown)}")
    arguments: dict[str, Any] = {}
    for class_field in fields(cls):
        name = class_field.name
        if not class_field.metadata:
            group = getattr(cls, name)
            group_values = {key: values[key] for key in _option_names(type(group)) & {*values}}
            arguments[name] = with_values(group, **group_values)
        elif name in values:
            arguments[name] = values[name]
    options = cls(**arguments)
    given = {each.name: each for each in option_fields(cls) if each.get(options) != each.default}
    for option_field in given.values():
        declaration = option_field.declaration
        if isinstance(declaration, Option) and (other := given.get(declaration.excludes or "")):
            raise UsageError(f"{other.flag} and {option_field.flag} exclude each other; give one of them.")
    return options


def with_values(options: O, **values: Any) -> O:
    """Return the same settings with other values of some options. Raises TypeError for names that they lack."""
    old_values = {option_field.name: option_field.get(options) for option_field in option_fields(type(options))}
    return build(type(options), {**old_values, **values})


class PlannedOptions(Options):
    """Settings that plan.json holds, and with which an interrupted run resumes."""

    def find_unused(self) -> dict[str, str]:
        """Return the options that have no effect with these values -> why. They are neither recorded nor compared."""
        return {}

    def _select(self, *effects: Effect) -> dict[str, Any]:
        """Return name -> JSON value of the options with these effects; skip recorded values that are None."""
        unused = self.find_unused()
        selected: dict[str, Any] = {}
        for option_field in option_fields(type(self)):
            name = option_field.name
            value = option_field.get(self)
            is_missing = value is None and isinstance(option_field.declaration, RecordedValue)
            if option_field.declaration.effect in effects and name not in unused and not is_missing:
                selected[name] = to_json_value(value)
        return selected

    def find_flag(self, name: str) -> str:
        """Return how messages name an option; the name itself if there is no such option."""
        flags = (option_field.flag for option_field in option_fields(type(self)) if option_field.name == name)
        return next(flags, name)

    def input_paths(self) -> Iterator[Path]:
        """Yield the local files and directories that options name for reading."""
        for option_field in option_fields(type(self)):
            value = option_field.get(self)
            click_type = option_field.click_type
            if not isinstance(option_field.declaration, Option) or value is None or isinstance(click_type, OutputPath):
                continue
            if isinstance(click_type, PathOrHubId | FilePath):
                yield Path(value)

    @property
    def settings(self) -> dict[str, Any]:
        """The options that can change the output: name -> value."""
        return self._select(Effect.FILES, Effect.WEIGHTS)

    @property
    def tuning(self) -> dict[str, Any]:
        """The recorded options that cannot change the output: name -> value."""
        return self._select(Effect.TUNING)

    @property
    def weights(self) -> tuple[tuple[str, Any], ...]:
        """The options that change the bytes of experts: (name, value), for fingerprints of units."""
        return tuple((name, to_hashable(value)) for name, value in sorted(self._select(Effect.WEIGHTS).items()))


# Type of an option's value -> how messages name it; the command line has only text
KINDS = {
    bool: "a bool",
    int: "an int",
    float: "a float",
    str: "a str",
    Path: "a path",
    ChoiceList: "a str or a list of at least one str",
    Size: "an int, or a str such as '5GB' or '500MiB'",
}


def convert_value(option_field: OptionField, value: Any) -> Any:
    """Return a value of plan.json or of a caller as the option has it. Raises ArgumentError for an invalid one."""
    name = option_field.name
    declaration = option_field.declaration
    is_tuple = option_field.value_type is tuple
    try:
        if value is None and option_field.default is None:
            return None
        if isinstance(declaration, RecordedValue):
            if declaration.shape is not None:
                documents.as_type(value, declaration.shape)
            return documents.as_type(value, option_field.annotation)
        kind = _find_kind(option_field)
        json_type: Any = {ChoiceList: str, Path: str, Size: int | str}.get(kind, kind)
        if kind is ChoiceList and value and isinstance(value, list):
            value = ",".join(map(str, value))
        converted = [
            option_field.click_type.convert(documents.as_type(item, json_type), None, None)
            for item in (value if is_tuple and isinstance(value, list) else [value])
        ]
    except msgspec.ValidationError as error:
        if isinstance(declaration, RecordedValue):
            raise ArgumentError(f"{name}: {error}") from error
        required = f"a list of {kind.__name__}" if is_tuple else KINDS[kind]
        legal: Any = [f"{key}={item}" for key, item in value.items()] if is_tuple and isinstance(value, dict) else ""
        if kind is str and isinstance(value, list | tuple | range):
            legal = ",".join(map(str, value))
        elif kind is str and type(value) is int and not is_tuple:
            legal = str(value)
        remedy = f"; give {name}={legal!r}" if legal else ""
        raise ArgumentError(f"{name} must be {required}, not {value!r}{remedy}") from error
    except click.BadParameter as error:
        click_type = option_field.click_type
        if isinstance(click_type, click.Choice) and not isinstance(click_type, ChoiceList):
            choices = ", ".join(repr(option_field.value_type(word)) for word in click_type.choices)  # not in lower case
            raise ArgumentError(f"{name} must be one of {choices}, not {value!r}") from error
        raise ArgumentError(f"{name}: {error.message}") from error
    return tuple(converted) if is_tuple else converted[0]


def _find_kind(option_field: OptionField) -> Any:
    """Return the key in KINDS for an option, or for an item of its list."""
    click_type = option_field.click_type
    if isinstance(click_type, Size):
        return Size
    if isinstance(click_type, ChoiceList):
        return ChoiceList
    if isinstance(click_type, PathOrHubId | FilePath):
        return Path
    return get_args(option_field.annotation)[0] if option_field.value_type is tuple else option_field.value_type


def convert_options(
    cls: type[O],
    values: Mapping[str, Any],
    names: Collection[str] = (),
    others: Mapping[str, Collection[str]] = types.MappingProxyType({}),
) -> O:
    """Return options from values of plan.json or of a caller. Raises ArgumentError, naming the option.

    names   the options that the caller may give, if not all
    others  command -> its options, which the message about an unknown option recommends
    """
    by_name = {each.name: each for each in option_fields(cls) if not names or each.name in names}
    missing = [name for name, each in by_name.items() if each.default is REQUIRED and name not in values]
    if unknown := sorted({*values} - {*by_name}):
        flag = f"--{unknown[0].replace('_', '-')}"
        same = [name for name, each in by_name.items() if flag in _list_flags(each.declaration)]
        owners = [command for command, options in others.items() if unknown[0] in options]
        similar = same or difflib.get_close_matches(unknown[0], by_name, 1)
        if owners and not same:
            remedy = f"it is an option of {', '.join(map(repr, owners))}"
        elif similar:
            remedy = f"did you mean {similar[0]}?"
        elif missing:
            remedy = f"give {' and '.join(missing)}"
        else:
            remedy = f"`ktconvert {cls.command} --help-all` lists the options"
        raise CallError(f"unknown option {unknown[0]}; {remedy}")
    if missing:
        raise CallError(f"argument {missing[0]} is missing; give {missing[0]}=...")
    return build(cls, {name: convert_value(by_name[name], to_json_value(value)) for name, value in values.items()})


def _list_flags(declaration: object) -> tuple[str, ...]:
    return (*declaration.flags, *declaration.aliases) if isinstance(declaration, Option) else ()


def to_hashable(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists and dicts."""
    if isinstance(value, dict):
        return tuple((key, to_hashable(value[key])) for key in sorted(value))
    return tuple(map(to_hashable, value)) if isinstance(value, list | tuple) else value


def to_json_value(value: Any) -> Any:
    """Return a path as text, a tuple as a list, and a number of NumPy as one of Python; anything else unchanged."""
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else list(value) if isinstance(value, tuple) else value
