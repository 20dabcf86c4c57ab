"""Stages, units and portions: the pieces of work of a plan, and the files that they read and write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ktconvert.layouts.files import documents
from ktconvert.layouts.files.documents import Number
from ktconvert.pipeline.report.progress import Reporter

HANDOVER = ".handed_on"  # suffix of a unit's file for the next unit of its chain
SIDE = ".side"  # suffix of a unit's second file, for later units of its chain
WEIGHTS = ".safetensors"  # suffix of a unit's own file
Work = TypeVar("Work")


def _hash_identity(*identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _store_name(name: str, fingerprint: str, ending: str) -> str:
    """Return a name in the store; it contains the fingerprint, so a file is never mistaken for a different unit's."""
    return f"{name}.{fingerprint[:16]}{ending}"


@dataclass(frozen=True)
class Unit(Generic[Work]):
    """The smallest piece of work of a plan: one published file, or one folder of files.

    versions        (stage, quantizer, layout ...) integers, raised when bytes change
    params          (name, value) of every option that can change a byte
    inputs          (tensor name, dtype, shape, content id) of every tensor that the unit reads
    files           names of the input files that it reads, for content ids that do not begin with the hash of a header
                    and the size of its file
    final           path of the finished file or folder below the output; not part of the fingerprint
    folder          whether the unit makes a folder
    in_output       whether the file becomes part of the output; otherwise it stays in the store for other units, and
                    is removed with the store
    handover_bytes  size of the file for the next unit of its chain; 0 for none
    side_bytes      size of a second file in the store, for later units of its chain; 0 for none
    work            data with which the stage runs the unit; follows from the other fields
    """

    stage: str
    key: str
    versions: tuple[int, ...]
    bytes_out: int
    work: Work = field(compare=False, repr=False)
    params: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    inputs: tuple[tuple[Any, ...], ...] = field(default=(), repr=False)
    files: frozenset[str] = field(default=frozenset(), repr=False)
    final: str = ""
    bytes_in: int = 0
    folder: bool = False
    in_output: bool = True
    handover_bytes: int = 0
    side_bytes: int = 0

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of everything that can change a byte, as canonical JSON; not of ISA, threads, paths or time."""
        return _hash_identity(self.stage, self.key, self.versions, self.params, self.inputs)

    @property
    def name(self) -> str:
        """The name in the journal, in events and in messages."""
        return f"{self.stage}.{self.key}"

    @property
    def stored_name(self) -> str:
        return _store_name(self.name, self.fingerprint, "" if self.folder else WEIGHTS)

    @property
    def handover_name(self) -> str:
        return _store_name(self.name, self.fingerprint, HANDOVER)

    @property
    def side_name(self) -> str:
        return _store_name(self.name, self.fingerprint, SIDE)


@dataclass(frozen=True)
class Portion:
    """A worker's share of one unit, such as some experts of a layer. The executor sends it to a worker.

    key               names the portion in its stage, as the key of a unit does
    unit_key          key of the unit
    unit_fingerprint  fingerprint of the unit
    folder            path of the folder in which the unit's run left the inputs of its portions
    sha256            hash of the file there that describes the inputs
    first             first item of the unit that belongs to the portion
    stop              the item after the last one
    """

    stage: str
    key: str
    unit_key: str
    unit_fingerprint: str
    folder: str
    sha256: str
    first: int
    stop: int

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of everything that can change a byte: the unit's fingerprint, the items, and their inputs."""
        return _hash_identity(self.stage, self.key, self.unit_fingerprint, self.sha256)

    @property
    def name(self) -> str:
        """The name in the journal, in events and in messages."""
        return f"{self.stage}.{self.key}"

    @property
    def stored_name(self) -> str:
        return _store_name(self.name, self.fingerprint, WEIGHTS)


class Written(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A finished file: path below the unit's final place ("" for the unit itself), bytes, sha256."""

    path: str
    nbytes: Number
    sha256: str


class Figures(msgspec.Struct):
    """Distance of a projection from its source."""

    relative_error: float
    cosine: float


class Stats(msgspec.Struct):
    """The figures of a unit that are read again; a unit may have others."""

    layer: Number = 0
    gate: Figures | msgspec.UnsetType = msgspec.UNSET
    up: Figures | msgspec.UnsetType = msgspec.UNSET
    down: Figures | msgspec.UnsetType = msgspec.UNSET


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of running a unit.

    files    the unit's files
    tensors  number of tensors in them
    stats    figures for the report (Stats)
    """

    files: tuple[Written, ...]
    tensors: Number
    stats: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        documents.as_type(self.stats, Stats)


@dataclass(frozen=True)
class ChainPaths:
    """Paths at which a unit of a chain finds and leaves files; None if there is no such file.

    previous    file that the unit before this one handed over
    handover    where to write the file for the next unit
    scratch     folder for files that are removed once the unit is done
    finished    unit key -> file of an earlier unit of the chain, or the old file of this unit if it is made again
    side        where to write the unit's side file
    side_files  unit key -> side file of an earlier unit
    """

    previous: Path | None
    handover: Path | None
    scratch: Path
    finished: Mapping[str, Path]
    side: Path | None = None
    side_files: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class FinishedUnit:
    """A finished unit or portion that is not published yet; its file has a name of its own.

    path         the file or folder that was made
    seconds      time that making it took
    worker       host, pid and attempt of the process that made it, for records and events; empty for this process
    chain        paths of a unit of a chain; None for other units
    chain_files  files of the unit for later units of its chain
    """

    path: Path
    result: Result
    seconds: float
    worker: dict[str, Any] = field(default_factory=dict)
    chain: ChainPaths | None = None
    chain_files: tuple[Written, ...] = ()


# Has workers make all portions of a unit at the same time, and yields the finished portions in order. Their files exist
# until the last portion is consumed.
MakePortions = Callable[[Sequence[Portion]], Generator[FinishedUnit, None, None]]


@dataclass(frozen=True)
class Context:
    """The resources with which a stage runs a unit.

    pool           threads for the items of a unit, of which `window` may be in flight
    chain          paths of a unit of a chain; None for other units
    make_portions  lets workers make portions of the unit; None without workers
    """

    pool: ThreadPoolExecutor
    window: int
    reporter: Reporter
    chain: ChainPaths | None = None
    make_portions: MakePortions | None = None

    @property
    def chain_paths(self) -> ChainPaths:
        assert self.chain is not None  # the stage is a chain
        return self.chain


@dataclass(frozen=True)
class Stage(Generic[Work]):
    """Units of one kind, and the function that makes one.

    title        description of the units' work, for people
    run          makes a unit at a path
    chain        whether each unit needs files of the one before it
    replaces     whether a finished unit replaces those before it, whose files may be removed
    run_portion  makes a portion of a unit, for a chain whose units can be divided
    prepare      reads the data of the first unit before a work directory exists, so that a signal stops at once
    """

    name: str
    title: str
    units: tuple[Unit[Work], ...] = field(repr=False)
    run: Callable[[Unit[Work], Path, Context], Result] = field(repr=False)
    chain: bool = False
    replaces: bool = False
    run_portion: Callable[[Unit[Work], Portion, Path], Result] | None = field(default=None, repr=False)
    prepare: Callable[[Reporter], object] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Status:
    """The state of a unit, with the reason why it will or will not run."""

    unit: Unit[Any]
    done: bool
    reason: str
