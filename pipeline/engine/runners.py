"""Runners, which make the units of a plan: threads of this process, or the workers of a concurrent.futures.Executor."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from ktconvert.layouts.errors import KTConvertError, ResourceError, WorkerLostError
from ktconvert.layouts.files import publish
from ktconvert.pipeline.engine import attempts
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.journal import Failed, Lost, Start, Taken
from ktconvert.pipeline.engine.paths import Paths
from ktconvert.pipeline.engine.plan import tool_version
from ktconvert.pipeline.engine.threads import open_pools
from ktconvert.pipeline.engine.units import (
    ChainPaths,
    Context,
    FinishedUnit,
    MakePortions,
    Portion,
    Stage,
    Unit,
    Written,
)
from ktconvert.pipeline.engine.workdir import WorkDir
from ktconvert.pipeline.engine.worker import MAX_DEATHS, Conversion, Reopen, Task, run_task
from ktconvert.pipeline.report.progress import Reporter

Result = TypeVar("Result")
POLL_SECONDS = 1.0  # seconds between readings of attempts' records


class Runner:
    """Base class of runners, which make units in any order, several at a time.

    limit  number of units that may be in flight
    """

    limit: int

    def submit(self, stage: Stage[Any], unit: Unit[Any]) -> Future[Any]:
        """Start to make a unit."""
        raise NotImplementedError

    def collect(self, unit: Unit[Any], future: Future[Any]) -> FinishedUnit | None:
        """Return the finished unit, or None if it must be submitted again. Raise its failure."""
        finished: FinishedUnit = future.result()
        return finished

    def withdraw(self, unit: Unit[Any], future: Future[Any]) -> bool:
        """Cancel a unit that nothing has begun. Return False if it was begun."""
        return future.cancel()

    def poll(self) -> None:
        """Report news of units in flight. The loop calls it several times a second."""


def report_finished(output: Path, reporter: Reporter, item: Unit[Any] | Portion, finished: FinishedUnit) -> None:
    """Report a finished unit or portion to the user."""
    worker = finished.worker
    reporter.event(
        "done",
        output=str(output),
        unit=item.name,
        seconds=round(finished.seconds, 3),
        bytes=sum(file.nbytes for file in finished.result.files),
        stats=finished.result.stats,
        **worker,
    )
    host = f" on {worker['host']}" if worker else ""
    reporter.say(f"{output.name}: {item.name}: {finished.seconds:.2f} s{host}", level=1)


class ThreadRunner(Runner):
    """A runner with one thread of this process per unit in flight, which calls `make`."""

    def __init__(
        self, pool: ThreadPoolExecutor, limit: int, make: Callable[[Stage[Any], Unit[Any]], FinishedUnit]
    ) -> None:
        self.limit = limit
        self._pool = pool
        self._make = make

    def submit(self, stage: Stage[Any], unit: Unit[Any]) -> Future[FinishedUnit]:
        return self._pool.submit(self._make, stage, unit)


@contextlib.contextmanager
def open_thread_runners(
    workdirs: Sequence[WorkDir],
    reporter: Reporter,
    threads: int,
    units: int,
    make_portions: MakePortions | None = None,
) -> Iterator[list[ThreadRunner]]:
    """Start threads, and yield a runner for each output; all share the threads.

    units          number of units to make
    make_portions  as of Context, for a single output
    """
    with open_pools(threads, units) as pools:
        context = Context(pools.packing, pools.window, reporter, make_portions=make_portions)
        prefixes = [f"{workdir.paths.output.name} " if len(workdirs) > 1 else "" for workdir in workdirs]
        yield [
            ThreadRunner(pools.units, pools.count, partial(_make_unit, workdir, context, prefix))
            for workdir, prefix in zip(workdirs, prefixes, strict=True)
        ]


def _make_unit(workdir: WorkDir, context: Context, prefix: str, stage: Stage[Any], unit: Unit[Any]) -> FinishedUnit:
    """Run the stage of a unit in this process, after a record of its start; hash the files that a chain leaves."""
    start_time = time.monotonic()
    chain = _make_chain_paths(workdir, stage, unit) if stage.chain else None
    workdir.journal.append(Start(unit=unit.name))
    context.reporter.set_current(f"{prefix}{unit.key}")
    context.reporter.event("start", output=str(workdir.paths.output), unit=unit.name)
    path = workdir.paths.partial / unit.stored_name
    result = stage.run(unit, path, replace(context, chain=chain))
    seconds = time.monotonic() - start_time
    # Hashed for a later run, which verifies these files before it continues the chain.
    chain_paths = () if chain is None else (chain.handover, chain.side)
    chain_files = tuple(
        Written(chain_path.name, chain_path.stat().st_size, publish.sha256_file(chain_path))
        for chain_path in chain_paths
        if chain_path is not None
    )
    return FinishedUnit(path, result, seconds, chain=chain, chain_files=chain_files)


def _make_chain_paths(workdir: WorkDir, stage: Stage[Any], unit: Unit[Any]) -> ChainPaths:
    """Make the scratch folder of a unit of a chain, and return the unit's paths."""
    store = workdir.paths.store
    partial = workdir.paths.partial
    # The name is random, so that a worker of a dead run that wakes up finds no file of this run.
    scratch = partial / f"{unit.name}.{secrets.token_hex(4)}"
    scratch.mkdir()
    earlier = stage.units[: stage.units.index(unit)]
    finished = {earlier_unit.key: store / earlier_unit.stored_name for earlier_unit in earlier}
    if unit.fingerprint in workdir.finished:
        finished[unit.key] = store / unit.stored_name
    return ChainPaths(
        previous=store / earlier[-1].handover_name if earlier and earlier[-1].handover_bytes else None,
        handover=partial / unit.handover_name if unit.handover_bytes else None,
        scratch=scratch,
        finished=finished,
        side=partial / unit.side_name if unit.side_bytes else None,
        side_files={u.key: store / u.side_name for u in earlier if u.side_bytes},
    )


class ExecutorRunner(Runner):
    """A runner that sends units and portions to an executor's workers.

    Workers see the source and the work directory under the same paths as this process.

    reopen   opens the plan in a worker
    threads  packing threads of each worker; None: the CPUs that the worker may use
    """

    limit = sys.maxsize  # free workers take the next unit; their number is unknown

    def __init__(
        self, workdir: WorkDir, reporter: Reporter, executor: Executor, reopen: Reopen, threads: int | None
    ) -> None:
        self._workdir = workdir
        self._reporter = reporter
        self._executor = executor
        self._run = workdir.new_token()
        self._conversion = Conversion(str(workdir.paths.output), self._run, tool_version(), reopen, threads)
        self._known: dict[str, Attempt] = {}  # attempts of this run; without results, which may be long
        self._ended: set[str] = set()
        self._retries: Counter[str] = Counter()
        self._polled = 0.0
        self._polling = threading.Lock()  # the thread that makes a unit collects its portions

    def submit(self, stage: Stage[Any], unit: Unit[Any]) -> Future[Attempt | KTConvertError]:
        return self._submit_task(Task(self._conversion, unit.stage, unit.key, unit.fingerprint))

    def _submit_task(self, task: Task) -> Future[Attempt | KTConvertError]:
        try:
            return self._executor.submit(run_task, task)
        except Exception as error:  # the executor was closed, or is broken
            broken: Future[Attempt | KTConvertError] = Future()
            broken.set_exception(error)
            return broken

    def make_portions(self, portions: Sequence[Portion]) -> Generator[FinishedUnit, None, None]:
        """Make portions of one unit, as Context has it.

        Attempts stay until all portions were consumed, for a coordinator that resumes after this one.
        """

        def submit(portion: Portion) -> Future[Attempt | KTConvertError]:
            return self._submit_task(
                Task(self._conversion, portion.stage, portion.unit_key, portion.unit_fingerprint, portion)
            )

        futures = [submit(portion) for portion in portions]
        try:
            for n, portion in enumerate(portions):
                while (finished := self._collect_item(portion, futures[n])) is None:
                    futures[n] = submit(portion)
                self._workdir.journal.append(Taken(unit=portion.name, **finished.worker))
                report_finished(self._workdir.paths.output, self._reporter, portion, finished)
                yield finished
        finally:
            for future in futures:
                future.cancel()
        for portion in portions:
            for attempt in attempts.read_attempts(self._workdir.paths, portion):
                if attempt.ended is not None:
                    attempts.remove_attempt(self._workdir.paths, attempt)

    def collect(self, unit: Unit[Any], future: Future[Any]) -> FinishedUnit | None:
        finished = self._collect_item(unit, future)
        if finished is not None:
            self._reporter.advance(unit.bytes_in)
        return finished

    def _collect_item(self, item: Unit[Any] | Portion, future: Future[Any]) -> FinishedUnit | None:
        """Return the finished item, or None if workers died that made it and it has to be submitted again.

        Raises the item's failure, and WorkerLostError if workers died too often.
        """
        try:
            attempt: Attempt = unwrap_result(future, item.name, "run the same command again")
        except WorkerLostError as error:
            by_executor = future.exception() is not None  # otherwise a worker has counted the deaths
            if by_executor and self._retries[item.fingerprint] < MAX_DEATHS:
                self._retries[item.fingerprint] += 1
                return None
            self._mark_lost(item)
            raise WorkerLostError(f"{item.name}: {error}" if by_executor else str(error)) from error
        for text in attempt.warnings:
            self._reporter.warn(text)
        self._mark_lost(item, attempt)
        self._reporter.show_worker(attempt.worker, None)
        return as_finished_unit(self._workdir.paths, attempt)

    def withdraw(self, unit: Unit[Any], future: Future[Any]) -> bool:
        self._read_attempts()
        begun = any(a.fingerprint == unit.fingerprint and a.failure is None for a in [*self._known.values()])
        return not begun and future.cancel()

    def poll(self) -> None:
        if time.monotonic() - self._polled >= POLL_SECONDS:
            self._read_attempts()

    def _read_attempts(self) -> None:
        """Record starts and failures of this run's attempts that are new since the last call."""
        with self._polling:
            self._polled = time.monotonic()
            for attempt in attempts.read_attempts(self._workdir.paths, known=self._ended):
                if attempt.ended is not None:
                    self._ended.add(attempt.name)
                if attempt.run != self._run:
                    continue
                known = self._known.get(attempt.name)
                self._known[attempt.name] = structs.replace(attempt, result=None)
                if known is None:
                    self._record(attempt.start_record())
                    self._reporter.set_current(attempt.unit)
                    self._reporter.show_worker(attempt.worker, attempt.unit)
                if attempt.failure is not None:
                    self._record(attempt.failure_record(), why=attempt.failure)
                    self._reporter.show_worker(attempt.worker, None)

    def _mark_lost(self, item: Unit[Any] | Portion, finished: Attempt | None = None) -> None:
        """Record that all other attempts at an item are useless now: it is finished, or is given up."""
        self._read_attempts()
        for attempt in attempts.read_attempts(self._workdir.paths, item):
            if (finished is None or attempt.name != finished.name) and attempt.failure is None:
                self._record(attempt.loss_record())
                self._reporter.show_worker(attempt.worker, None)

    def _record(self, record: Start | Failed | Lost, **why: str) -> None:
        """Add a record to the journal, and report it."""
        self._workdir.journal.append(record)
        fields = {"unit": record.unit, "host": record.host, "pid": record.pid, "attempt": record.attempt}
        kind = str(record.__struct_config__.tag)
        self._reporter.event(kind, output=str(self._workdir.paths.output), **fields, **why)


def unwrap_result(future: Future[Result | KTConvertError], task: str, remedy: str) -> Result:
    """Return the result of a task. Raise its failure, or KTConvertError if the executor lost it.

    task    name of the task for messages
    remedy  advice if the executor lost it
    """
    try:
        error = future.exception()  # not result(), which would confuse Ctrl-C here with an error of a worker
    except CancelledError as cancelled:
        error = cancelled
    if isinstance(error, KTConvertError):
        raise error
    if error is not None:
        raise KTConvertError(
            f"{task}: lost by the executor ({type(error).__name__}: {error}); "
            f"check its workers and scheduler, then {remedy}."
        ) from error
    result = future.result()
    if isinstance(result, KTConvertError):
        raise result
    return result


def as_finished_unit(paths: Paths, attempt: Attempt) -> FinishedUnit:
    """Return a finished attempt as a unit to be published. Raises ResourceError if its files are not visible here."""
    if not attempt.is_whole(paths):
        raise ResourceError(
            f"{paths.partial / attempt.name}: written by {attempt.worker}, but incomplete here; mount the same file "
            "system on both hosts, then resume."
        )
    assert attempt.ended is not None
    seconds = max(0.0, attempt.ended - attempt.began)  # clocks of hosts may differ
    return FinishedUnit(paths.partial / attempt.name, attempt.require_result(), seconds, attempt.process_fields)
