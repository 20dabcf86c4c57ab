"""The plan of a conversion: request, identity of the input, stages and assembly; plan.json, compared on resume."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.files.documents import Number
from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.pipeline import __version__
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.units import Stage, Unit
from ktconvert.pipeline.options.option_groups import OutputOptions

S = TypeVar("S", bound=OutputOptions, covariant=True)
Stats = Sequence[Mapping[str, Any]]  # the figures of units (Result.stats)

FORMAT = 1
CONFIG = "config.json"
CARD = "README.md"


def tool_version() -> str:
    return __version__


@dataclass(frozen=True)
class Request(Generic[S]):
    """A command, and its settings as the user gave them."""

    command: str
    options: S

    @property
    def input(self) -> str:
        return self.options.input

    @property
    def output(self) -> Path:
        return self.options.output


class SavedPlan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """plan.json; settings and tuning are the command's own. overwrite: whether the old output may be replaced."""

    version: Number = msgspec.field(name="ktconvert-plan")
    tool_version: str
    command: str
    input: str
    settings: dict[str, Any]
    tuning: dict[str, Any]
    source: tuple[SourceFile, ...]
    units: Number
    overwrite: bool = False


@dataclass(frozen=True)
class SideOutput:
    """A second folder that a plan fills, with the files of the units of these keys; they are no part of the output."""

    folder: Path
    keys: tuple[str, ...]

    @property
    def partial(self) -> Path:
        """Where it is put together."""
        return self.folder.with_name(f".{self.folder.name}.ktconvert")


@dataclass(frozen=True)
class Plan:
    """Everything that will be done, before anything is.

    files          the input's, as they were when they were opened or listed; reads: all that are read, others too
    facts          what the output is (method, sizes, layers ...), for manifest, card and people
    peak_memory    packing threads -> bytes that so many may need, with everything else
    card           figures of the units -> README.md of the output
    found          figures of the units -> facts that are known only when these are done, for the manifest
    companions     (path below the output, file to copy); config: config.json, to be written, if there is one
    loose          whether there is no index: weights are loose folders, or there are none
    kept_layers    loose layer folders that were in the output before and stay as they are; None where it must hold none
    scratch_bytes  of files that exist while it runs, beside the units; portion_bytes: more, where workers make portions
    advice         sentences on what it takes, for who looks at the plan; remedies: where memory is not enough
    read_once      whether the input is read at the beginning and may change afterwards
    require_ready  raises KtconvertError where this machine must not run what is left to do
    check          looks at the complete folder before it appears: VerificationError where it is not what it should be
    """

    request: Request[OutputOptions]
    files: Mapping[Path, SourceFile]
    reads: tuple[Path, ...]
    stages: tuple[Stage[Any], ...]
    facts: dict[str, Any]
    notes: tuple[str, ...]
    peak_memory: Callable[[int], int]
    card: Callable[[Stats], bytes]
    found: Callable[[Stats], Mapping[str, Any]] = lambda stats: {}
    companions: tuple[tuple[str, Path], ...] = ()
    config: bytes | None = None
    loose: bool = False
    kept_layers: tuple[int, ...] | None = None
    side_output: SideOutput | None = None
    scratch_bytes: int = 0
    portion_bytes: int = 0
    advice: tuple[str, ...] = ()
    remedies: str = "Give it more memory."
    read_once: bool = False
    require_ready: Callable[[], None] = lambda: None
    check: Callable[[Path], object] = lambda assembled: None

    def locate(self) -> Paths:
        """Where the work for it lies or will lie."""
        return locate(self.request.output, adopt=self.adopts)

    @property
    def adopts(self) -> bool:
        """Whether the output already holds loose layer folders that --resume-layer builds upon."""
        return self.kept_layers is not None

    @property
    def source(self) -> tuple[SourceFile, ...]:
        return tuple(self.files.values())

    @property
    def side_units(self) -> tuple[Unit[Any], ...]:
        side = self.side_output
        return () if side is None else tuple(unit for unit in self.units if unit.key in side.keys)

    @functools.cached_property
    def extra_bytes(self) -> int:
        """Of companion files."""
        return sum(path.stat().st_size for _, path in self.companions)

    @property
    def units(self) -> tuple[Unit[Any], ...]:
        return tuple(unit for stage in self.stages for unit in stage.units)

    def units_reading(self, files: Collection[str]) -> set[Unit[Any]]:
        """The units that read one of these files, and those that follow them in a chain."""
        headers = {(file.header_sha256, file.size) for file in self.source if file.name in files}
        reading: set[Unit[Any]] = set()
        for stage in self.stages:
            hit = [
                n
                for n, unit in enumerate(stage.units)
                if not unit.files.isdisjoint(files)
                or (not unit.files and any(content[:2] in headers for *_, content in unit.inputs))
            ]
            reading.update(stage.units[hit[0] :] if stage.chain and hit else (stage.units[n] for n in hit))
        return reading

    def shared_out(self) -> Plan:
        """The plan where an executor's workers do the work."""
        return replace(self, scratch_bytes=self.scratch_bytes + self.portion_bytes, portion_bytes=0)

    def document(self, overwrite: bool = False) -> SavedPlan:
        return SavedPlan(
            version=FORMAT,
            tool_version=tool_version(),
            command=self.request.command,
            input=self.request.input,
            settings=self.request.options.settings,
            tuning=self.request.options.tuning,
            source=self.source,
            units=len(self.units),
            overwrite=overwrite,
        )


def seen(path: Path, name: str) -> SourceFile:
    """What tells a file without a header from another, now."""
    status = path.stat()
    return SourceFile(name, status.st_size, None, status.st_mtime_ns)


def require_unchanged(plan: Plan) -> None:
    """Raise InputError if a file of the input is not what it was when the plan was made."""

    def is_same(path: Path, file: SourceFile) -> bool:
        try:
            status = path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)

    if not plan.read_once and (changed := [file.name for path, file in plan.files.items() if not is_same(path, file)]):
        remedy = "put the old file back and resume"
        raise InputError(f"{plan.request.input}: {', '.join(changed[:3])} changed while it was being read; {remedy}.")


def require_parts(plan: Plan) -> None:
    """Raise UsageError for a plan whose units need each other: nobody would wait for them."""
    if any(stage.chain for stage in plan.stages):
        what = "each layer's calibration needs what the layer before left, so parts cannot be made one by one"
        raise UsageError(f"{plan.request.command}: {what}; give --executor instead of --part.")
