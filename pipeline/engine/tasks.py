"""Units made by any concurrent.futures.Executor: what travels to a worker, and what is known of it meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from msgspec.structs import replace

from ktconvert.layouts.errors import KtconvertError, ResourceError, WorkerLostError
from ktconvert.pipeline.engine import attempts
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.journal import Failed, Lost, Start, Taken
from ktconvert.pipeline.engine.loop import tell_done
from ktconvert.pipeline.engine.paths import Paths
from ktconvert.pipeline.engine.plan import tool_version
from ktconvert.pipeline.engine.threads import ThreadRunner
from ktconvert.pipeline.engine.units import Made, Runner, Stage, Unit
from ktconvert.pipeline.engine.workdir import WorkDir
from ktconvert.pipeline.engine.worker import DEATHS, Conversion, Reopen, Task, make_unit
from ktconvert.pipeline.report.progress import Reporter

Result = TypeVar("Result")
LOOK_EVERY = 1.0  # seconds between two looks at the records of attempts


class Tasks(Runner):
    """A runner of whatever an executor's workers are: they see the source and the work directory under the same paths,
    `reopen` the plan and pack with so many threads each (None: the CPUs that they may use).

    here  makes the units of chains, and has portions of them made by workers (away)
    """

    most = sys.maxsize  # who is free takes the next one: nothing here knows how many workers there are

    def __init__(
        self, work: WorkDir, reporter: Reporter, executor: Executor, reopen: Reopen, threads: int | None
    ) -> None:
        self._work, self._reporter, self._executor = work, reporter, executor
        self._run = work.new_token()
        self._conversion = Conversion(str(work.paths.output), self._run, tool_version(), reopen, threads)
        self._known: dict[str, Attempt] = {}  # of this run, without results, which may be long
        self._ended: set[str] = set()
        self._again: Counter[str] = Counter()
        self._looked = 0.0
        self._looking = threading.Lock()  # portions are taken by the thread that makes their unit
        self.here: ThreadRunner | None = None
        self._made_here: set[Future[Any]] = set()

    def submit(self, stage: Stage[Any], unit: Unit[Any]) -> Future[Any]:
        if self.here is None or not stage.chain:
            return self._submit(unit)
        self._made_here.add(future := self.here.submit(stage, unit))
        return future

    def _submit(self, unit: Unit[Any]) -> Future[Attempt | KtconvertError]:
        key, portion = unit.portion or (unit.key, None)
        task = Task(self._conversion, unit.stage, key, unit.fingerprint, portion)
        try:
            return self._executor.submit(make_unit, task)
        except Exception as error:  # an executor that was closed, or is broken
            broken: Future[Attempt | KtconvertError] = Future()
            broken.set_exception(error)
            return broken

    def away(self, portions: Sequence[Unit[Any]]) -> Generator[Made, None, None]:
        """As Context has it. Attempts stay until all were taken, for a coordinator that comes after this one."""
        flying = [self._submit(portion) for portion in portions]
        try:
            for n, portion in enumerate(portions):
                while (made := self.take(portion, flying[n])) is None:
                    flying[n] = self._submit(portion)
                self._work.journal.append(Taken(unit=portion.name, **made.who))
                tell_done(self._work.paths.output, self._reporter, portion, made)
                yield made
        finally:
            for future in flying:
                future.cancel()
        for attempt in (each for portion in portions for each in attempts.read(self._work.paths, portion)):
            if attempt.ended is not None:
                attempts.forget(self._work.paths, attempt)

    def take(self, unit: Unit[Any], future: Future[Any]) -> Made | None:
        """What came of it; None where workers died with it, perhaps by another's fault. Raises failures."""
        if future in self._made_here and self.here is not None:
            return self.here.take(unit, future)
        try:
            made = result_of(future, unit.name, f"`ktconvert resume {self._work.paths.output}`")
        except WorkerLostError as error:
            if future.exception() is not None and self._again[unit.fingerprint] < DEATHS:  # no worker says so
                self._again[unit.fingerprint] += 1
                return None
            self._lose(unit)
            raise WorkerLostError(str(error) if future.exception() is None else f"{unit.name}: {error}") from error
        self._reporter.advance(unit.bytes_in)
        for text in made.warnings:
            self._reporter.warn(text)
        self._lose(unit, made)
        self._reporter.worker(made.worker, None)
        return made_of(self._work.paths, made)

    def give_up(self, unit: Unit[Any], future: Future[Attempt | KtconvertError]) -> bool:
        self._look()
        begun = any(a.fingerprint == unit.fingerprint and a.failure is None for a in [*self._known.values()])
        return not begun and future.cancel()

    def watch(self) -> None:
        if time.monotonic() - self._looked >= LOOK_EVERY:
            self._look()

    def _look(self) -> None:
        with self._looking:
            self._looked = time.monotonic()
            for attempt in attempts.read(self._work.paths, known=self._ended):
                if attempt.ended is not None:
                    self._ended.add(attempt.name)
                if attempt.run != self._run:
                    continue
                known = self._known.get(attempt.name)
                self._known[attempt.name] = replace(attempt, result=None)
                if known is None:
                    self._note(attempt.started())
                    self._reporter.at(attempt.unit)
                    self._reporter.worker(attempt.worker, attempt.unit)
                if attempt.failure is not None:
                    self._note(attempt.failed(), why=attempt.failure)
                    self._reporter.worker(attempt.worker, None)

    def _lose(self, unit: Unit[Any], made: Attempt | None = None) -> None:
        """Note that the attempts at a unit that have not ended are of no use any more: it was made, or is given up."""
        self._look()
        for attempt in attempts.read(self._work.paths, unit):
            if (made is None or attempt.name != made.name) and attempt.failure is None:
                self._note(attempt.lost())
                self._reporter.worker(attempt.worker, None)

    def _note(self, record: Start | Failed | Lost, **why: str) -> None:
        """Put it into the journal, and report it."""
        self._work.journal.append(record)
        who = {"unit": record.unit, "host": record.host, "pid": record.pid, "attempt": record.attempt}
        kind = str(record.__struct_config__.tag)
        self._reporter.event(kind, output=str(self._work.paths.output), **who, **why)


def result_of(future: Future[Result | KtconvertError], what: str, remedy: str) -> Result:
    """What a worker gave back. Raises its failure, and KtconvertError where the executor lost the task."""
    try:
        result = future.result()
    except KtconvertError:
        raise
    except BaseException as error:  # CancelledError is no Exception
        raise KtconvertError(
            f"{what}: the executor has lost it ({type(error).__name__}: {error}); see that its workers and its "
            f"scheduler run, then {remedy}."
        ) from error
    if isinstance(result, KtconvertError):
        raise result
    return result


def made_of(paths: Paths, attempt: Attempt) -> Made:
    """A finished attempt, to be published. Raises ResourceError where its files cannot be seen here."""
    if not attempt.is_whole(paths):
        raise ResourceError(
            f"{paths.partial / attempt.name}: {attempt.worker} has made it, and it cannot be seen here in full; "
            "see that the file systems of both hosts are the same one, then resume."
        )
    assert attempt.ended is not None
    seconds = max(0.0, attempt.ended - attempt.began)  # clocks go wrong
    return Made(paths.partial / attempt.name, attempt.written(), seconds, attempt.who)
