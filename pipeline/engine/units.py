"""Stages and units: what there is to do, and why each unit will or will not run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ktconvert.layouts.files import documents
from ktconvert.layouts.files.documents import Number
from ktconvert.pipeline.report.progress import Reporter

HANDED_ON = ".handed_on"  # names of what units hand to the next one of their chain end so
SIDE = ".side"  # and its side file so
Work = TypeVar("Work")


@dataclass(frozen=True)
class Unit(Generic[Work]):
    """The smallest thing that is done or not done: one published file, or one folder of files.

    versions   (stage, quantizer, layout ...) integers, raised when bytes change
    params     (name, value) of every option that can change a byte
    inputs     (tensor name, dtype, shape, content id) of everything it reads; files: their names, where a content
               id is none of a checkpoint's file, which begins with the hash of its header and its size
    final      path below the output, where the finished thing will appear (not part of the fingerprint)
    kept       whether it becomes a part of the output; else it stays in the store for other units, and goes with it
    handed_on  bytes of the file that it hands to the next unit of its chain; side: of a second file in the store, for
               later ones; 0 for none
    portion    of what is no unit of a plan, but what a worker makes of one: that one's key, and a picklable function
               that gives this one for it
    work       what the stage needs to know to run it; follows from the above
    """

    stage: str
    key: str
    versions: tuple[int, ...]
    bytes_out: int
    work: Work = field(compare=False, repr=False)
    params: tuple[tuple[str, Any], ...] = ()
    inputs: tuple[tuple[Any, ...], ...] = ()
    files: frozenset[str] = frozenset()
    final: str = ""
    bytes_in: int = 0
    folder: bool = False
    kept: bool = True
    handed_on: int = 0
    side: int = 0
    portion: tuple[str, Callable[[Unit[Any]], Unit[Any]]] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON of everything that can change a byte: never ISA, threads, paths or time."""
        identity = [self.stage, self.key, self.versions, self.params, self.inputs]
        return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def name(self) -> str:
        """In the journal, in events and in messages."""
        return f"{self.stage}.{self.key}"

    def _stored(self, ending: str) -> str:
        return f"{self.name}.{self.fingerprint[:16]}{ending}"

    @property
    def stored_name(self) -> str:
        """Its name in the store: a name that says what the content is cannot lie."""
        return self._stored("" if self.folder else ".safetensors")

    @property
    def handed_on_name(self) -> str:
        return self._stored(HANDED_ON)

    @property
    def side_name(self) -> str:
        return self._stored(SIDE)


class Written(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One finished file: path below the unit's final place ("" for the unit itself), bytes, sha256."""

    path: str
    nbytes: Number
    sha256: str


class Figures(msgspec.Struct):
    """How far a projection is from its source."""

    relative_error: float
    cosine: float


class Stats(msgspec.Struct):
    """Of a unit's figures, what is read of them again; there may be others."""

    layer: Number = 0
    gate: Figures | msgspec.UnsetType = msgspec.UNSET
    up: Figures | msgspec.UnsetType = msgspec.UNSET
    down: Figures | msgspec.UnsetType = msgspec.UNSET


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What running a unit gave: its files, the number of tensors, and figures for the report (Stats)."""

    files: tuple[Written, ...]
    tensors: Number
    stats: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        documents.as_type(self.stats, Stats)


@dataclass(frozen=True)
class Link:
    """Where a unit of a chain finds and leaves things; None where there is nothing.

    before     what the unit before it handed on; handed_on: where to put what the next one needs
    scratch    folder for files that are gone when the unit is done
    store      unit key -> the finished file of an earlier unit of the chain, or of this one where it is made again
    side       where to put the unit's side file; sides: unit key -> that of an earlier unit
    """

    before: Path | None
    handed_on: Path | None
    scratch: Path
    store: Mapping[str, Path]
    side: Path | None = None
    sides: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What a stage's run function may use.

    pool  threads for parts of a unit, of which `window` may be in flight
    away  has portions of the unit made by workers, all at the same time: what they made, in order, with files that are
          there until the last is taken; None where there are no workers
    """

    pool: ThreadPoolExecutor
    window: int
    reporter: Reporter
    chain: Link | None = None
    away: Callable[[Sequence[Unit[Any]]], Generator[Made, None, None]] | None = None

    @property
    def link(self) -> Link:
        assert self.chain is not None  # the stage says that it is a chain
        return self.chain


@dataclass(frozen=True)
class Stage(Generic[Work]):
    """Units of one kind, and the function that makes one. chain: each unit needs what the one before it left."""

    name: str
    title: str
    units: tuple[Unit[Work], ...]
    run: Callable[[Unit[Work], Path, Context], Result]
    chain: bool = False
    needs: tuple[str, ...] = ("source",)


@dataclass(frozen=True)
class Made:
    """A unit that was made, and lies under a name of its own until it is published. who: the host and the process that
    made it, for records and events; link: of a unit of a chain; for_chain: the files that it has for others of that.
    """

    path: Path
    result: Result
    seconds: float
    who: dict[str, Any] = field(default_factory=dict)
    link: Link | None = None
    for_chain: tuple[Written, ...] = ()


class Runner:
    """Who makes the units of a plan, in any order and several at a time: threads here, or tasks for an executor. most:
    units that it takes at a time.
    """

    most: int

    def submit(self, stage: Stage[Any], unit: Unit[Any]) -> Future[Any]:
        """Have a unit made."""
        raise NotImplementedError

    def take(self, unit: Unit[Any], future: Future[Any]) -> Made | None:
        """What came of it; None: it is to be submitted once more. Raises what prevented it."""
        made: Made = future.result()
        return made

    def give_up(self, unit: Unit[Any], future: Future[Any]) -> bool:
        """Take a unit back that nobody makes yet; False where somebody does."""
        return future.cancel()

    def watch(self) -> None:
        """Called several times a second: look around, and report what there is to report."""


@dataclass(frozen=True)
class Status:
    unit: Unit[Any]
    done: bool
    reason: str
