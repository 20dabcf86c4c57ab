"""What a worker does: it opens the plan itself, makes sure that it sees what the coordinator sees, and makes one unit
under a name of its own attempt. Nothing large travels: a task names a unit, an attempt names files.
"""

from __future__ import annotations

import errno
import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import KtconvertError, OutputError, ResourceError, UsageError, WorkerLostError
from ktconvert.layouts.files.direct_file import FULL
from ktconvert.native_quant import kernels, machine
from ktconvert.pipeline.engine import attempts
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.disk_space import fit_threads
from ktconvert.pipeline.engine.paths import Paths, has_content, locate
from ktconvert.pipeline.engine.plan import Plan, require_unchanged, tool_version
from ktconvert.pipeline.engine.threads import packing_pool, window_of
from ktconvert.pipeline.engine.units import Context, Stage, Unit
from ktconvert.pipeline.report.progress import Reporter

DEATHS = 3  # attempts at a unit that may die in a run

# (output, tuning of this machine) -> the plan that was saved there, made again. A function of a module, so that any
# executor can send it.
Reopen = Callable[[Path, Mapping[str, Any]], Plan]


@dataclass(frozen=True)
class Conversion:
    """What a worker opens. run: the token in the work directory; threads: for packing, None: those it may use."""

    output: str
    run: str
    version: str
    reopen: Reopen
    threads: int | None


@dataclass(frozen=True)
class Task:
    """A unit as it travels. portion: as of Unit; None: the unit itself."""

    of: Conversion
    stage: str
    key: str
    fingerprint: str
    portion: Callable[[Unit[Any]], Unit[Any]] | None


def make_unit(task: Task) -> Attempt | KtconvertError:
    """Make a unit, or find it made. What trying again would not help comes back, whatever executors do to errors."""
    reporter = Collecting()
    try:
        with _opening:
            opened = _opened(task.of)
        return make_attempt(opened, *opened.find(task), task.of.run, reporter)
    except (KtconvertError, OSError, MemoryError) as error:
        return failure_of(error)


def failure_of(error: Exception) -> KtconvertError:
    """An error as it travels, with this host's name where it is this host's."""
    if isinstance(error, MemoryError):
        error = ResourceError("not enough memory; give each worker fewer threads with --cpuinfer-threads")
    if isinstance(error, OSError):
        kind = ResourceError if error.errno in (*FULL, errno.ENOMEM) else KtconvertError
        error = kind(f"{error.filename or 'the system'}: {error.strerror or error}")
    if isinstance(error, WorkerLostError):  # that happened elsewhere
        return error
    kind = type(error) if isinstance(error, KtconvertError) else KtconvertError
    return kind(f"host {machine.host()}: {error}")


@dataclass(frozen=True)
class Opened:
    """A plan, opened by this process; pool: its packing threads."""

    plan: Plan
    paths: Paths
    pool: ThreadPoolExecutor
    window: int

    def find(self, task: Task) -> tuple[Stage[Any], Unit[Any]]:
        """The unit of a task. Raises OutputError where this host would make something else of it."""
        for stage, unit in [(one, unit) for one in self.plan.stages for unit in one.units]:
            if (stage.name, unit.key) == (task.stage, task.key):
                own = unit if task.portion is None else task.portion(unit)
                if own.fingerprint == task.fingerprint:
                    return stage, own
        raise OutputError(
            f"{self.paths.plan}: {task.stage}.{task.key} is another unit here than where the conversion runs; install "
            "the same ktconvert on all hosts, and see that they read the same files."
        )


def threads_here(threads: int | None) -> int:
    """How many threads a worker uses that was told so many; None: the CPUs that it may use."""
    return machine.usable_cpus() if threads is None else min(threads, machine.usable_cpus())


def require_able(version: str) -> None:
    """Raise OutputError for another ktconvert than the coordinator's, UsageError for a KTCONVERT_ISA it lacks."""
    if version != tool_version():
        raise OutputError(
            f"ktconvert {tool_version()} is installed here, {version} where the command runs; install the same one."
        )
    try:
        kernels.isa()
    except ValueError as error:
        raise UsageError(str(error)) from error


OPEN = 4  # plans that a worker keeps open: outputs that are made together take turns

_opening = threading.Lock()


@functools.lru_cache(OPEN)
def _opened(conversion: Conversion) -> Opened:
    """Raises KtconvertError where this process does not see what the coordinator sees, or is another ktconvert."""
    require_able(conversion.version)
    paths = locate(Path(conversion.output))
    try:
        found = paths.token.read_text(errors="replace")
    except OSError as error:
        raise OutputError(
            f"{paths.root}: cannot be read here ({error.strerror}); every host needs the file system of --output at "
            "the same path."
        ) from error
    if found != conversion.run:
        raise OutputError(
            f"{paths.root}: is not the folder of this conversion, or is that of another run by now; every host needs "
            "the file system of --output at the same path."
        )
    attempts.free(paths)
    count = threads_here(conversion.threads)
    plan = conversion.reopen(paths.output, {"cpuinfer_threads": count, "verify_inputs": False})
    plan.require_ready()
    count = fit_threads([plan])
    return Opened(plan, paths, packing_pool(count), window_of(count, 1))


def make_attempt(
    opened: Opened, stage: Stage[Any], unit: Unit[Any], run: str, reporter: Reporter
) -> Attempt | KtconvertError:
    """An ended attempt at a unit, of before or made now. WorkerLostError where too many of this run ended silently."""
    paths = opened.paths
    before = attempts.read(paths, unit)
    for attempt in before:
        if attempt.is_whole(paths):
            if all(has_content(*file) for file in attempt.recorded_files(paths)):
                return attempt
            attempts.forget(paths, attempt)
            reporter.warn(
                f"{unit.name} is made again: {attempt.name} is not what {attempt.worker} wrote; check the disk."
            )
    dead = [attempt for attempt in before if attempt.run == run and attempt.ended is None]
    if len(dead) >= DEATHS:
        raise WorkerLostError(
            f"{unit.name}: {len(dead)} processes that made it ended or stopped answering, the last one on "
            f"{dead[-1].worker}: {attempts.words_of(paths, dead[-1])}."
        )
    require_unchanged(opened.plan)  # what became shorter would end the process that reads it
    attempt = attempts.begin(paths, unit, run)
    try:
        with attempts.last_words(paths, attempt):
            result = stage.run(unit, paths.partial / attempt.name, Context(opened.pool, opened.window, reporter))
        require_unchanged(opened.plan)
    except (KtconvertError, OSError, MemoryError) as error:
        failure = failure_of(error)
        attempts.fail(paths, attempt, str(failure))
        return failure
    return attempts.finish(paths, attempt, result, reporter.warnings if isinstance(reporter, Collecting) else ())


class Collecting(Reporter):
    """Keeps warnings for the coordinator to give; says nothing."""

    def __init__(self) -> None:
        super().__init__(verbosity=-2)
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)
