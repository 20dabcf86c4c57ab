"""Tasks of workers, which make one unit or portion each.

A worker opens the plan itself, checks that it sees the same files as the coordinator, and writes under the name of its
own attempt. Only small objects travel: a task names a unit, an attempt names files.
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

from ktconvert.layouts.errors import KTConvertError, OutputError, ResourceError, UsageError, WorkerLostError
from ktconvert.layouts.files.direct_file import DISK_FULL_REMEDIES
from ktconvert.native_quant import kernels, machine
from ktconvert.pipeline.engine import attempts
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.paths import Paths, has_content, locate
from ktconvert.pipeline.engine.plan import Plan, require_unchanged, tool_version
from ktconvert.pipeline.engine.threads import fit_threads, make_packing_pool, window_size
from ktconvert.pipeline.engine.units import Context, Portion, Stage, Unit
from ktconvert.pipeline.report.progress import Reporter

MAX_DEATHS = 3  # deaths of attempts at a unit until the run fails

# (output, tuning of this machine) -> the output's saved plan, built again. It is a module-level function, so that any
# executor can pickle it.
Reopen = Callable[[Path, Mapping[str, Any]], Plan]


@dataclass(frozen=True)
class Conversion:
    """The conversion that a worker opens.

    run      the token in the work directory
    version  of ktconvert
    threads  packing threads; None for the CPUs that the worker may use
    """

    output: str
    run: str
    version: str
    reopen: Reopen
    threads: int | None


@dataclass(frozen=True)
class Task:
    """A unit as it travels to a worker.

    stage, key, fingerprint  those of the unit
    portion                  the portion of the unit to make; None for the whole unit
    """

    conversion: Conversion
    stage: str
    key: str
    fingerprint: str
    portion: Portion | None = None


def run_task(task: Task) -> Attempt | KTConvertError:
    """Make a unit or portion, unless an attempt has finished it before.

    Errors that a retry would not help are returned, since executors treat exceptions differently.
    """
    reporter = CollectingReporter()
    try:
        with _opening:
            plan = _open_plan(task.conversion)
        return make_attempt(plan, *plan.find_unit(task), task.conversion.run, reporter, task.portion)
    except (KTConvertError, OSError, MemoryError) as error:
        return to_reported_error(error)


def to_reported_error(error: Exception) -> KTConvertError:
    """Return an error as it travels to the coordinator, with the name of this host if it happened here."""
    if isinstance(error, MemoryError):
        error = ResourceError("not enough memory; give each worker fewer threads with --threads")
    if isinstance(error, OSError):
        kind = ResourceError if error.errno in (*DISK_FULL_REMEDIES, errno.ENOMEM) else KTConvertError
        error = kind(f"{error.filename or 'the system'}: {error.strerror or error}")
    if isinstance(error, WorkerLostError):  # exit codes of other processes
        return error
    kind = type(error) if isinstance(error, KTConvertError) else KTConvertError
    return kind(f"host {machine.host()}: {error}")


@dataclass(frozen=True)
class OpenPlan:
    """A plan that this process has opened, with its packing threads."""

    plan: Plan
    paths: Paths
    pool: ThreadPoolExecutor
    window: int

    def find_unit(self, task: Task) -> tuple[Stage[Any], Unit[Any]]:
        """Return the unit of a task and its stage. Raises OutputError if this host has a different unit there."""
        for stage in self.plan.stages:
            for unit in stage.units:
                if (stage.name, unit.key, unit.fingerprint) == (task.stage, task.key, task.fingerprint):
                    return stage, unit
        raise OutputError(
            f"{self.paths.plan}: {task.stage}.{task.key} differs between this host and the host of the conversion; "
            "install the same ktconvert on all hosts, with the same input files."
        )


def worker_threads(threads: int | None) -> int:
    """Return the number of threads of a worker that was given this number; None for the CPUs that it may use."""
    return machine.usable_cpus() if threads is None else min(threads, machine.usable_cpus())


def require_same_version(version: str) -> None:
    """Raise OutputError if the coordinator's ktconvert differs, UsageError for a KTCONVERT_ISA that this host lacks."""
    if version != tool_version():
        raise OutputError(
            f"ktconvert {tool_version()} is installed here, but {version} on the host of the command; "
            "install the same version."
        )
    try:
        kernels.isa()
    except ValueError as error:
        raise UsageError(str(error)) from error


MAX_OPEN_PLANS = 4  # open plans of a worker: outputs that are made together take turns

_opening = threading.Lock()


@functools.lru_cache(MAX_OPEN_PLANS)
def _open_plan(conversion: Conversion) -> OpenPlan:
    """Open the plan of a conversion, once per process.

    Raises KTConvertError if this process sees different files than the coordinator, or is a different ktconvert.
    """
    require_same_version(conversion.version)
    paths = locate(Path(conversion.output))
    try:
        token = paths.token.read_text(errors="replace")
    except OSError as error:
        raise OutputError(
            f"{paths.root}: cannot be read on this host ({error.strerror}); every host needs the file system of "
            "--output at the same path."
        ) from error
    if token != conversion.run:
        raise OutputError(
            f"{paths.root}: not the folder of this conversion, or not anymore; every host needs "
            "the file system of --output at the same path."
        )
    attempts.remove_dead_files(paths)
    count = worker_threads(conversion.threads)
    plan = conversion.reopen(paths.output, {"threads": count, "verify_inputs": False})
    plan.hooks.require_ready()
    count = fit_threads([plan])
    return OpenPlan(plan, paths, make_packing_pool(count), window_size(count, 1))


def make_attempt(
    opened: OpenPlan,
    stage: Stage[Any],
    unit: Unit[Any],
    run: str,
    reporter: Reporter,
    portion: Portion | None = None,
) -> Attempt | KTConvertError:
    """Make a unit, or a portion of it, and return the ended attempt; an earlier one if that finished it.

    Raises WorkerLostError if too many attempts of this run died.
    """
    paths = opened.paths
    item = unit if portion is None else portion
    earlier = attempts.read_attempts(paths, item)
    for attempt in earlier:
        if attempt.is_whole(paths):
            if all(has_content(*file) for file in attempt.list_files(paths)):
                return attempt
            attempts.remove_attempt(paths, attempt)
            reporter.warn(
                f"{item.name} is converted again: {attempt.name} changed after {attempt.worker} wrote it; "
                "check the disk."
            )
    dead = [attempt for attempt in earlier if attempt.run == run and attempt.ended is None]
    if len(dead) >= MAX_DEATHS:
        raise WorkerLostError(
            f"{item.name}: {len(dead)} processes ended or stopped answering while they made it, the last one on "
            f"{dead[-1].worker}: {attempts.explain_death(paths, dead[-1])}."
        )
    require_unchanged(opened.plan)  # reading a truncated file would end the process
    attempt = attempts.begin_attempt(paths, item, run)
    try:
        with attempts.record_traceback(paths, attempt):
            path = paths.partial / attempt.name
            if portion is None:
                result = stage.run(unit, path, Context(opened.pool, opened.window, reporter))
            else:
                assert stage.run_portion is not None  # this worker made the portions
                result = stage.run_portion(unit, portion, path)
        require_unchanged(opened.plan)
    except (KTConvertError, OSError, MemoryError) as error:
        failure = to_reported_error(error)
        attempts.record_failure(paths, attempt, str(failure))
        return failure
    return attempts.record_result(
        paths, attempt, result, reporter.warnings if isinstance(reporter, CollectingReporter) else ()
    )


class CollectingReporter(Reporter):
    """A reporter that prints nothing and keeps warnings for the coordinator."""

    def __init__(self) -> None:
        super().__init__(verbosity=-2)
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)
