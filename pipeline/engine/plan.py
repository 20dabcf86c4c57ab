"""The plan of an output: options, identity of the input, stages, and the files beside the weights; plan.json."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.files.documents import Number
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.layouts.files.unfinished import WORK_FOLDER
from ktconvert.pipeline import __version__
from ktconvert.pipeline.engine.download import Download
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.units import Stage, Unit

if TYPE_CHECKING:
    from ktconvert.pipeline.options.option_groups import OutputOptions

UnitStats = Sequence[Mapping[str, Any]]  # the figures of units (Result.stats)

PLAN_VERSION = 1
CONFIG = "config.json"
CARD = "README.md"


def tool_version() -> str:
    return __version__


class SavedPlan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The content of plan.json.

    settings   options that can change the output
    tuning     recorded options that cannot change the output
    source     the input files with their identity
    units      number of units
    overwrite  whether the old output may be replaced
    """

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
    """A second folder that a plan fills with the files of the units of these keys; they are not in the output."""

    folder: Path
    keys: tuple[str, ...]

    @property
    def partial(self) -> Path:
        """The folder in which the files are collected before they appear."""
        return self.folder.with_name(f".{self.folder.name}{WORK_FOLDER}")


@dataclass(frozen=True)
class KeptFolder:
    """A folder of the output that an earlier run finished and that stays as it is.

    files  pattern of its files
    """

    name: str
    files: str


@dataclass(frozen=True)
class Needs:
    """Disk and memory that a plan needs beside its units.

    scratch_bytes  size of files that exist only while the plan runs
    portion_bytes  additional size of such files if workers make portions
    advice         sentences about the needs, for readers of the plan
    remedies       advice if memory does not suffice
    """

    scratch_bytes: int = 0
    portion_bytes: int = 0
    advice: tuple[str, ...] = ()
    remedies: str = "Raise --max-memory, or use a machine with more memory."


@dataclass(frozen=True)
class Hooks:
    """Functions of a command that the engine calls.

    peak_memory     packing threads -> bytes of memory that a run with that many may need
    render_card     figures of the units -> README.md of the output
    measured_facts  figures of the units -> facts for the manifest that are known only once the units are finished
    extra_files     figures of the units -> name of a small file of the output -> its content
    require_ready   raises KTConvertError if this machine must not run the remaining units
    check           checks the complete folder before it appears; raises VerificationError
    """

    peak_memory: Callable[[int], int]
    render_card: Callable[[UnitStats], bytes]
    measured_facts: Callable[[UnitStats], OutputFacts] = lambda stats: {}
    extra_files: Callable[[UnitStats], Mapping[str, bytes]] = lambda stats: {}
    require_ready: Callable[[], None] = lambda: None
    check: Callable[[Path], object] = lambda assembled: None


@dataclass(frozen=True)
class Plan:
    """Everything that will be done, known before anything is written.

    files         the input files with their identity when they were opened or listed
    reads         all files that are read, including those that are not part of the input
    facts         properties of the output (method, sizes, layers ...) for manifest, card and people
    warnings      the notes that are printed as warnings, since results may be wrong or much worse
    serving       a sentence with the command that serves the output; empty if it cannot be served
    hooks         the command's functions
    companions    (path below the output, file to copy)
    config        content of the output's config.json, if it has one
    has_index     whether shards have an index; not for loose folders and outputs without weights
    kept_folders  folders that were in the output before and stay as they are; None if the output must not contain any
    read_once     whether the command reads its input completely at the beginning, so that it may change afterwards
    download      the download of an input that is fetched while it is needed; None for local files
    next_command  the command to run once the output is finished; empty if there is none
    """

    options: OutputOptions
    files: Mapping[Path, SourceFile] = field(repr=False)
    reads: tuple[Path, ...] = field(repr=False)
    stages: tuple[Stage[Any], ...] = field(repr=False)
    facts: OutputFacts
    notes: tuple[str, ...]
    hooks: Hooks = field(repr=False)
    warnings: tuple[str, ...] = field(default=(), repr=False)
    serving: str = field(default="", repr=False)
    needs: Needs = field(default_factory=Needs, repr=False)
    companions: tuple[tuple[str, Path], ...] = field(default=(), repr=False)
    config: bytes | None = field(default=None, repr=False)
    has_index: bool = field(default=True, repr=False)
    kept_folders: tuple[KeptFolder, ...] | None = field(default=None, repr=False)
    side_output: SideOutput | None = field(default=None, repr=False)
    read_once: bool = field(default=False, repr=False)
    download: Download | None = field(default=None, repr=False)
    next_command: str = field(default="", repr=False)

    def locate(self) -> Paths:
        """Return the paths of the work directory for this plan."""
        return locate(self.options.output, adopt=self.extends_output)

    @property
    def extends_output(self) -> bool:
        """True if the output already holds loose layer folders that stay in it (--resume-layer)."""
        return self.kept_folders is not None

    @property
    def source(self) -> tuple[SourceFile, ...]:
        return tuple(self.files.values())

    @property
    def side_units(self) -> tuple[Unit[Any], ...]:
        side = self.side_output
        return () if side is None else tuple(unit for unit in self.units if unit.key in side.keys)

    @functools.cached_property
    def companion_bytes(self) -> int:
        return sum(path.stat().st_size for _, path in self.companions)

    @property
    def units(self) -> tuple[Unit[Any], ...]:
        return tuple(unit for stage in self.stages for unit in stage.units)

    def units_reading(self, files: Collection[str]) -> set[Unit[Any]]:
        """Return the units that read one of these files, and those that follow them in a chain."""
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

    def document(self, overwrite: bool = False) -> SavedPlan:
        return SavedPlan(
            version=PLAN_VERSION,
            tool_version=tool_version(),
            command=self.options.command,
            input=self.options.input,
            settings=self.options.settings,
            tuning=self.options.tuning,
            source=self.source,
            units=len(self.units),
            overwrite=overwrite,
        )


def identify_by_stat(path: Path, name: str) -> SourceFile:
    """Return the identity of a file without a header: its size and time of modification now."""
    status = path.stat()
    return SourceFile(name, status.st_size, None, status.st_mtime_ns)


def require_unchanged(plan: Plan) -> None:
    """Raise InputError if a file of the input has changed since the plan was made."""

    def is_same(path: Path, file: SourceFile) -> bool:
        try:
            status = path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)

    if changed := [file.name for path, file in plan.files.items() if not is_same(path, file)]:
        remedy = "restore the old file and resume"
        raise InputError(f"{plan.options.input}: {', '.join(changed[:3])} changed while it was being read; {remedy}.")


def require_independent_units(plan: Plan) -> None:
    """Raise UsageError for a plan with a chain: processes of --part do not wait for units of each other."""
    if any(stage.chain for stage in plan.stages):
        problem = (
            "each layer's calibration needs the results of the previous layer, "
            "so the work cannot be divided into job shares"
        )
        raise UsageError(f"{plan.options.command}: {problem}; use --executor instead of --part.")
