"""The loop that has the remaining units of one or several outputs made, publishes and records them; Ctrl-C stops it."""

from __future__ import annotations

import contextlib
import heapq
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ktconvert.layouts.errors import KTConvertError, ResourceError, WorkerLostError
from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine.journal import End, Run
from ktconvert.pipeline.engine.lock import Holder
from ktconvert.pipeline.engine.plan import Plan, require_unchanged
from ktconvert.pipeline.engine.runners import Runner, report_finished
from ktconvert.pipeline.engine.units import HANDOVER, FinishedUnit, Stage, Unit
from ktconvert.pipeline.engine.workdir import WorkDir
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.terminal import escape, shorten_paths

SIGNAL_DELAY = 0.05  # seconds; the main thread waits here, and Python runs signal handlers in it


class Interrupted(KeyboardInterrupt):
    """Error for a run that the user stopped (SIGINT or SIGTERM); everything finished is recorded.

    exit_code  as shells expect it
    """

    def __init__(self, number: int, outputs: Sequence[Path]) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; {_resume_remedy(outputs)}")
        self.exit_code = 128 + number


def _resume_remedy(outputs: Sequence[Path]) -> str:
    commands = " and ".join(f"`ktconvert resume {output}`" for output in outputs)
    return f"run {commands} to continue"


@contextlib.contextmanager
def stop_at_once(output: Path) -> Iterator[None]:
    """Raise Interrupted for SIGINT and SIGTERM inside the block; a no-op outside the main thread."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number, [output])

    with _handle_signals(stop):
        yield


@contextlib.contextmanager
def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM inside the block; a no-op outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


class StopFlag:
    """A handler of SIGINT and SIGTERM: the first finishes the units in flight, the second ends the process at once.

    number  the first signal; 0 before it
    """

    def __init__(self, outputs: Sequence[Path], action: str = "finishing the layers in flight") -> None:
        """Prepare the messages; `action` says what happens after the first signal."""
        self.number = 0
        self._first_message = f"\n{action}; a second Ctrl-C or SIGTERM stops at once\n".encode()
        text = f"stopped at once; {_resume_remedy(outputs)} with the units that are not finished"
        self._second_message = f"\nktconvert: {shorten_paths(escape(text))}.\n".encode(errors="backslashreplace")

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number:
            os.write(2, self._second_message)
            os._exit(128 + number)
        self.number = number
        os.write(2, self._first_message)

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[StopFlag]:
        """Handle signals inside the block; a no-op outside the main thread."""
        with _handle_signals(self.handle):
            yield self


@contextlib.contextmanager
def record_run(workdir: WorkDir) -> Iterator[None]:
    """Record in the journal that this process begins and ends a run; a run without an end was killed."""
    workdir.journal.append(Run(process=Holder.this(), oom_kills=machine.oom_kills()))
    why = None
    try:
        yield
    except (KTConvertError, OSError, Interrupted) as error:
        why = str(error)
        raise
    finally:
        with contextlib.suppress(ResourceError):  # the disk may be full, which has been reported
            workdir.journal.append(End(why=why))


Remaining = Sequence[tuple[Stage[Any], tuple[Unit[Any], ...]]]  # units to make in this order, with their stage


@dataclass(frozen=True)
class OutputSchedule:
    """The scheduling state of one output.

    runner        makes the units
    chain_runner  makes the units of chains; None if `runner` makes them, too
    publish       is called with each finished unit
    finish        is called once all units are published
    """

    plan: Plan
    remaining: Remaining
    runner: Runner
    publish: Callable[[Unit[Any], FinishedUnit], None]
    finish: Callable[[], None] = lambda: None
    chain_runner: Runner | None = None

    def sequences(self) -> Iterator[tuple[int, str, UnitSequence]]:
        """Yield the remaining sequences with the number of their stage and their key, for sorting."""
        numbers = {stage.name: number for number, stage in enumerate(self.plan.stages)}
        for stage, units in self.remaining:
            runner = self.chain_runner if stage.chain and self.chain_runner is not None else self.runner
            yield numbers[stage.name], units[0].key, UnitSequence(self, runner, stage, units)

    def poll(self) -> None:
        self.runner.poll()
        if self.chain_runner is not None:
            self.chain_runner.poll()


@dataclass(frozen=True)
class UnitSequence:
    """Units of one output to make one after the other."""

    output: OutputSchedule
    runner: Runner
    stage: Stage[Any]
    units: tuple[Unit[Any], ...]

    @property
    def unit(self) -> Unit[Any]:
        """The first unit, which is made next."""
        return self.units[0]

    @property
    def begins_chain(self) -> bool:
        """Return whether the next unit is the first of a chain, which fails if the data set cannot be read."""
        return self.stage.chain and self.unit is self.stage.units[0]


def run_units(outputs: Sequence[OutputSchedule], reporter: Reporter, stop: StopFlag) -> None:
    """Have the remaining units of all outputs made, and publish each.

    The first unit of a chain is made before other units, so that its failure leaves nothing behind. Raise the first
    failure once the units in flight have ended. A WorkerLostError concerns one unit: the other units are made first.
    """
    ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    in_flight: dict[Future[Any], UnitSequence] = {}
    failures: list[BaseException] = []
    unfinished = {id(output): sum(len(units) for _, units in output.remaining) for output in outputs}

    def is_stopping() -> bool:
        return bool(stop.number) or any(not isinstance(error, WorkerLostError) for error in failures)

    def may_start_next() -> bool:
        begins_chain = any(sequence.begins_chain for sequence in in_flight.values())
        return bool(waiting) and len(in_flight) < waiting[0].runner.limit and not is_stopping() and not begins_chain

    def finish_output(output: OutputSchedule) -> None:
        if not unfinished[id(output)] and not is_stopping():
            output.finish()
            del unfinished[id(output)]

    all_units = [unit for output in outputs for unit in output.plan.units]
    remaining_units = [unit for output in outputs for _, units in output.remaining for unit in units]
    total_bytes = sum(unit.bytes_in for unit in all_units)
    done_bytes = total_bytes - sum(unit.bytes_in for unit in remaining_units)
    unit_counts = (len(all_units) - len(remaining_units), len(all_units))
    chained = [unit for output in outputs for stage, units in output.remaining if stage.chain for unit in units]
    chained_bytes = sum(unit.bytes_in for unit in chained) if chained else None
    reporter.begin(total_bytes, done_bytes, units=unit_counts, chained_bytes=chained_bytes)
    # Units that read the same layer follow each other, while its weights are in the page cache.
    merged = heapq.merge(*(output.sequences() for output in outputs), key=lambda entry: entry[:2])
    waiting = deque(sequence for _, _, sequence in merged)
    try:
        for output in outputs:
            finish_output(output)
        while in_flight or (waiting and not is_stopping()):
            while may_start_next():
                sequence = waiting.popleft()
                future = sequence.runner.submit(sequence.stage, sequence.unit)
                in_flight[future] = sequence
                future.add_done_callback(ended.put)
            for future, sequence in [*in_flight.items()] if is_stopping() else []:
                if sequence.runner.withdraw(sequence.unit, future):
                    del in_flight[future]
            for output in outputs:
                if unfinished.get(id(output)):
                    output.poll()
            with contextlib.suppress(queue.Empty):
                future = ended.get(timeout=SIGNAL_DELAY)
                if future not in in_flight:  # cancelled
                    continue
                sequence = in_flight.pop(future)
                try:
                    if (finished := sequence.runner.collect(sequence.unit, future)) is None:
                        waiting.appendleft(sequence)
                        continue
                    sequence.output.publish(sequence.unit, finished)
                    reporter.finish_unit(sequence.unit.bytes_in if sequence.stage.chain else None)
                    unfinished[id(sequence.output)] -= 1
                    finish_output(sequence.output)
                except BaseException as error:
                    failures.append(error)
                    if isinstance(error, WorkerLostError):  # the other units may take hours
                        reporter.warn(f"{error} The other units continue.")
                    continue
                if sequence.units[1:]:
                    waiting.appendleft(replace(sequence, units=sequence.units[1:]))
    finally:
        reporter.end()
    if failures:
        raise next((error for error in failures if not isinstance(error, WorkerLostError)), failures[0])
    stopped = [output.plan.options.output for output in outputs if id(output) in unfinished]
    if stop.number and stopped:
        raise Interrupted(stop.number, stopped)


def find_remaining(plan: Plan, workdir: WorkDir) -> Remaining:
    """Return the units to make: those of a chain together, all others one by one."""
    remaining = []
    for stage in plan.stages:
        units = find_remaining_units(stage, workdir)
        groups = [units] if stage.chain and units else [(unit,) for unit in units]
        remaining += [(stage, group) for group in groups]
    return remaining


def find_remaining_units(stage: Stage[Any], workdir: WorkDir) -> tuple[Unit[Any], ...]:
    """Return the units of a stage to make, in order.

    A chain begins with the last unit before the first unfinished one whose predecessor's handover file still exists.
    """
    unfinished = [n for n, unit in enumerate(stage.units) if workdir.why_finished(unit) is None]
    if not stage.chain:
        return tuple(stage.units[n] for n in unfinished)
    if not unfinished:
        return ()
    first = unfinished[0]
    previous = stage.units[first - 1]
    while first and previous.handover_bytes and not (workdir.paths.store / previous.handover_name).exists():
        first -= 1
        previous = stage.units[first - 1]
    needed = previous.handover_name if first else None
    for path in workdir.paths.store.iterdir():
        if path.name.endswith(HANDOVER) and path.name != needed:
            path.unlink()
    return stage.units[first : unfinished[-1] + 1]


def publish_unit(plan: Plan, workdir: WorkDir, reporter: Reporter, unit: Unit[Any], finished: FinishedUnit) -> None:
    """Publish a finished unit, and record it: in this order, each step durable before the next."""
    if not plan.read_once:
        require_unchanged(plan)
    stored = workdir.paths.store / unit.stored_name
    if unit.folder:
        # A run that was killed before it recorded the folder leaves it, and renaming cannot replace a folder.
        publish.remove_tree(stored)
    if (chain := finished.chain) is not None:
        publish.remove_tree(chain.scratch)
        if chain.side is not None:
            publish.publish_path(chain.side, workdir.paths.store / unit.side_name)
        if chain.handover is not None:
            publish.publish_path(chain.handover, workdir.paths.store / unit.handover_name)
    if finished.worker:
        publish.make_readable(finished.path)
    publish.publish_path(finished.path, stored)
    workdir.record_finished(unit, finished)
    if chain is not None and chain.previous is not None:
        chain.previous.unlink(missing_ok=True)
    report_finished(plan.options.output, reporter, unit, finished)
