"""How an option is declared, and what follows: its click option, its typed value, its entry in plan.json.

    class Gptq(Options):
        dampening_frac: float = weights("Part of ...", Real(0, 1), default=0.1)

A settings object is a tree: fields are options, or groups of options that several commands share. Names are unique in a
command, so documents and messages have them flat.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

import click
import msgspec

from ktconvert.layouts.files import documents
from ktconvert.pipeline.options.types import FilePath, Number, OutputPath, PathOrHubId, Real, Text

NONE = MISSING  # the default of what must be given


class Effect(enum.Enum):
    """What another value of an option changes."""

    CALL = "this call alone; it is not kept"
    TUNING = "how the work is done; kept in the plan, and may be another one on resume"
    FILES = "which files there are, or what they say; must be the same on resume"
    WEIGHTS = "the bytes of experts: as FILES, and in the fingerprint of every unit that makes experts"


@dataclass(frozen=True)
class Option:
    """An option of the command line. Its name is the field's, with dashes; a bool is a flag, a tuple may be repeated.

    type      of a value; by default what the field's type says
    flags     its spellings, where the name alone is not enough
    argument  the name under which it may stand without a flag (and must, where there are no flags)
    unset     what holds where it is not given, if None, False or an empty text does not say so
    ignored   accepted for kt-kernel's sake, for this reason without effect
    """

    help: str = ""
    type: click.ParamType | None = None  # type: ignore[type-arg]  # generic only since click 8.5
    flags: tuple[str, ...] = ()
    effect: Effect = Effect.CALL
    argument: str | None = None
    unset: str | None = None
    ignored: str | None = None


@dataclass(frozen=True)
class Recorded:
    """A value that no option gives, found by the plan and recorded; None: no value. flag: what it follows from."""

    effect: Effect
    flag: str | None = None
    shape: Any = None  # of a mapping: the TypedDict that its values must fit


def declared(what: Option | Recorded, default: Any = None) -> Any:
    """A field of settings. default: NONE where it must be given."""
    return field(default=default, metadata={"declared": what})


def option(help: str = "", type: Any = None, effect: Effect = Effect.CALL, default: Any = None, **other: Any) -> Any:
    """A field that an option of the command line gives; arguments as of Option, and its default."""
    return declared(Option(help, type, effect=effect, **other), default)


def recorded(effect: Effect, flag: str | None = None, shape: Any = None, default: Any = None) -> Any:
    """A field that is recorded; arguments as of Recorded, and its default."""
    return declared(Recorded(effect, flag, shape), default)


tuning, files, weights = (
    functools.partial(option, effect=effect) for effect in (Effect.TUNING, Effect.FILES, Effect.WEIGHTS)
)


@dataclass_transform(eq_default=False, frozen_default=True, kw_only_default=True)
class Options:
    """Base of settings, frozen dataclasses: fields are declared, or are groups. title: of a group in --help."""

    TITLE: ClassVar[str] = "Options"
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, title: str | None = None) -> None:
        cls.TITLE = title or cls.TITLE
        dataclass(frozen=True, kw_only=True)(cls)


O = TypeVar("O", bound=Options)  # noqa: E741


@dataclass(frozen=True)
class Leaf:
    """One option of a settings class; path: the fields that lead to it; default: NONE where it must be given."""

    path: tuple[str, ...]
    title: str
    declared: Option | Recorded
    annotation: Any = field(hash=False)
    default: Any = field(hash=False)

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def flag(self) -> str:
        """As messages name it."""
        declared = self.declared
        flags = declared.flags if isinstance(declared, Option) else (declared.flag or "",)
        return next((flag for flag in flags if flag.startswith("--")), f"--{self.name.replace('_', '-')}")

    @property
    def kind(self) -> type:
        """The type of a value that is not None: bool, int, float, str, Path, tuple, dict."""
        return _kind(self.annotation)

    @property
    def type(self) -> click.ParamType:  # type: ignore[type-arg]
        """What reads a value, of the command line and of plan.json."""
        if isinstance(self.declared, Option) and self.declared.type is not None:
            return self.declared.type
        by_kind: Mapping[type, Callable[[], Any]] = {bool: lambda: click.BOOL, int: Number, float: Real, Path: FilePath}
        read: click.ParamType = by_kind.get(self.kind, Text)()  # type: ignore[type-arg]
        return read

    def of(self, options: Options) -> Any:
        return functools.reduce(getattr, self.path, options)


def _kind(annotation: Any) -> type:
    if get_origin(annotation) in (Union, types.UnionType):
        return _kind(next(each for each in get_args(annotation) if each is not type(None)))
    kind: type = get_origin(annotation) or annotation
    return kind


_known: dict[type[Options], tuple[Leaf, ...]] = {}  # mypy takes no class of Options for hashable, as a cache wants it


def leaves(cls: type[Options]) -> tuple[Leaf, ...]:
    """The options of a settings class: its own first, then those it inherits, and those of its groups."""
    if cls not in _known:
        by_name, hints = cls.__dataclass_fields__, get_type_hints(cls)
        own = [name for name in inspect.get_annotations(cls) if name in by_name]
        each = (by_name[name] for name in dict.fromkeys((*own, *by_name)))
        _known[cls] = tuple(leaf for one in each for leaf in _leaves_of(cls, one, hints[one.name]))
    return _known[cls]


def _leaves_of(cls: type[Options], each: Field[Any], hint: Any) -> Iterator[Leaf]:
    if each.metadata:
        yield Leaf((each.name,), cls.TITLE, each.metadata["declared"], hint, each.default)
        return
    group = getattr(cls, each.name)
    for leaf in leaves(type(group)):
        yield replace(leaf, path=(each.name, *leaf.path), default=leaf.of(group))


def build(cls: type[O], values: Mapping[str, Any]) -> O:
    """A settings object from values by name; defaults for those that are not there."""
    own = {each.name: values[each.name] for each in fields(cls) if each.metadata and each.name in values}
    groups = {each.name: with_values(getattr(cls, each.name), **values) for each in fields(cls) if not each.metadata}
    return cls(**own, **groups)


def with_values(options: O, **values: Any) -> O:
    """The same settings with other values of some options; names that it does not have are passed over."""
    return build(type(options), {**{leaf.name: leaf.of(options) for leaf in leaves(type(options))}, **values})


class PlannedOptions(Options):
    """Settings that plan.json holds, and with which a run that was cut off goes on."""

    def unused(self) -> dict[str, str]:
        """The options that have no meaning with the others -> why. They are neither recorded nor compared."""
        return {}

    def _of(self, *effects: Effect) -> dict[str, Any]:
        """name -> value as JSON has it, of the options with these effects; without values recorded as None."""
        unused, found = self.unused(), dict[str, Any]()
        for leaf in leaves(type(self)):
            value = leaf.of(self)
            missing = value is None and isinstance(leaf.declared, Recorded)
            if leaf.declared.effect in effects and leaf.name not in unused and not missing:
                found[leaf.name] = plain(value)
        return found

    @property
    def settings(self) -> dict[str, Any]:
        """What can change the output: name -> value."""
        return self._of(Effect.FILES, Effect.WEIGHTS)

    @property
    def tuning(self) -> dict[str, Any]:
        """What cannot: name -> value."""
        return self._of(Effect.TUNING)

    @property
    def weights(self) -> tuple[tuple[str, Any], ...]:
        """What changes the bytes of experts: (name, value), for fingerprints of units."""
        return tuple((name, hashable(value)) for name, value in sorted(self._of(Effect.WEIGHTS).items()))


def paths_read(options: Options) -> Iterator[Path]:
    """The local files and directories that options name for reading."""
    for leaf in leaves(type(options)):
        value = leaf.of(options)
        if not isinstance(leaf.declared, Option) or value is None or isinstance(leaf.type, OutputPath):
            continue
        if isinstance(leaf.type, PathOrHubId | FilePath):
            yield Path(value)


def checked(leaf: Leaf, value: Any) -> Any:
    """A value of plan.json as the option has it. Raises ValueError, naming the option, for one that it cannot have."""
    try:
        if value is None and leaf.default is None:
            return None
        if isinstance(leaf.declared, Recorded):
            if leaf.declared.shape is not None:
                documents.as_type(value, leaf.declared.shape)
            return documents.as_type(value, leaf.annotation)
        several = leaf.kind is tuple
        kind = get_args(leaf.annotation)[0] if several else leaf.kind
        stored: Any = str if kind is Path else kind
        read = [
            leaf.type.convert(documents.as_type(one, stored), None, None)
            for one in (documents.as_type(value, list[Any]) if several else [value])
        ]
    except msgspec.ValidationError as error:
        raise ValueError(f"{leaf.name}: {error}") from error
    except click.BadParameter as error:
        raise ValueError(f"{leaf.name}: {error.format_message()}") from error
    return tuple(read) if several else read[0]


def hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, hashable(value[key])) for key in sorted(value))
    return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
