"""The loop: skip what is done; have made, publish and record what is not; stop on Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

from ktconvert.layouts.errors import KtconvertError, ResourceError, WorkerLostError
from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine.holder import Holder
from ktconvert.pipeline.engine.journal import End, Run
from ktconvert.pipeline.engine.plan import Plan, require_unchanged
from ktconvert.pipeline.engine.runner import Made, Runner
from ktconvert.pipeline.engine.units import HANDED_ON, Stage, Unit
from ktconvert.pipeline.engine.workdir import WorkDir, done_reason
from ktconvert.pipeline.ui.progress import Reporter

SIGNAL_DELAY = 0.05  # seconds; Python's handler waits for the main thread, whichever thread the signal went to


class Interrupted(Exception):
    """The user asked to stop; everything finished is recorded. exit_code as the shell expects it."""

    def __init__(self, number: int, output: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; `ktconvert resume {output}` goes on")
        self.exit_code = 128 + number


class StopFlag:
    """The first SIGINT or SIGTERM finishes the units in flight, the second ends the process at once."""

    def __init__(self) -> None:
        self.number = 0

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self.number:
            os.write(2, b"\nstopped at once; `ktconvert resume` goes on from the last finished layer\n")
            os._exit(128 + number)
        self.number = number
        os.write(2, b"\nfinishing the layers in flight; once more to stop at once\n")

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopFlag]:
        """Handle signals within; a no-op outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        old = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def recorded(work: WorkDir) -> Iterator[None]:
    """Let the journal say that this process works, until it ends by itself: a run without an end was killed."""
    work.journal.append(Run(process=Holder.this(), oom_kills=machine.oom_kills()))
    why = None
    try:
        yield
    except (KtconvertError, OSError, Interrupted) as error:
        why = str(error)
        raise
    finally:
        with contextlib.suppress(ResourceError):  # the disk may be full, and that was reported already
            work.journal.append(End(why=why))


ToDo = Sequence[tuple[Stage[Any], tuple[Unit[Any], ...]]]  # units that are made one after the other, and their stage


def run_units(
    plan: Plan, to_do: ToDo, runner: Runner, keep: Callable[[Unit[Any], Made], None], reporter: Reporter, stop: StopFlag
) -> None:
    """Have units made, and keep each.

    Raises the first failure after what was under way has ended. What is only this unit's (WorkerLostError) does not
    keep the others from being made.
    """
    ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    flying: dict[Future[Any], tuple[Stage[Any], tuple[Unit[Any], ...]]] = {}
    failures: list[BaseException] = []

    def stopped() -> bool:
        return bool(stop.number) or any(not isinstance(error, WorkerLostError) for error in failures)

    total = sum(unit.bytes_in for unit in plan.units)
    to_make = [unit for _, units in to_do for unit in units]
    done = (len(plan.units) - len(to_make), len(plan.units))
    reporter.begin(total, total - sum(unit.bytes_in for unit in to_make), units=done)
    waiting = deque(to_do)
    try:
        while flying or (waiting and not stopped()):
            while waiting and len(flying) < runner.most and not stopped():
                stage, units = waiting.popleft()
                future = runner.submit(stage, units[0])
                flying[future] = (stage, units)
                future.add_done_callback(ended.put)
            for future in list(flying) if stopped() else []:
                if runner.give_up(flying[future][1][0], future):
                    del flying[future]
            runner.watch()
            with contextlib.suppress(queue.Empty):
                future = ended.get(timeout=SIGNAL_DELAY)
                if future not in flying:  # given up
                    continue
                stage, units = flying.pop(future)
                try:
                    made = runner.take(units[0], future)
                    if made is None:
                        waiting.appendleft((stage, units))
                        continue
                    keep(units[0], made)
                    reporter.unit_done()
                except BaseException as error:
                    failures.append(error)
                    if isinstance(error, WorkerLostError):  # the others may take hours
                        reporter.warn(f"{error} All other units are made first.")
                    continue
                if units[1:]:
                    waiting.appendleft((stage, units[1:]))
    finally:
        reporter.end()
    if failures:
        raise next((error for error in failures if not isinstance(error, WorkerLostError)), failures[0])
    if stop.number:
        raise Interrupted(stop.number, plan.request.output)


def left_to_do(plan: Plan, work: WorkDir) -> ToDo:
    """Every unit that is to be made; those of a chain together."""
    runs = [(stage, to_run(stage, work)) for stage in plan.stages]
    return [
        (stage, units) for stage, run in runs for units in ([run] if stage.chain and run else [(unit,) for unit in run])
    ]


def to_run(stage: Stage[Any], work: WorkDir) -> tuple[Unit[Any], ...]:
    """The units of a stage that are to be made, in order; what earlier ones of a chain left and nothing needs is
    removed.

    A chain starts again at the last unit whose forerunner's file is still there: units after it that are finished
    may have to be made once more, to the same bytes.
    """
    undone = [n for n, u in enumerate(stage.units) if done_reason(work.paths, work.finished, u) is None]
    if not stage.chain:
        return tuple(stage.units[n] for n in undone)
    if not undone:
        return ()
    first = undone[0]
    before = stage.units[first - 1]
    while first and before.handed_on and not (work.paths.store / before.handed_on_name).exists():
        first -= 1
        before = stage.units[first - 1]
    needed = before.handed_on_name if first else None
    for path in work.paths.store.iterdir():
        if path.name.endswith(HANDED_ON) and path.name != needed:
            path.unlink()
    return stage.units[first : undone[-1] + 1]


def publish_unit(plan: Plan, work: WorkDir, reporter: Reporter, unit: Unit[Any], made: Made) -> None:
    """Publish what was made, and record it: in this order, each step durable before the next."""
    require_unchanged(plan)
    stored = work.paths.store / unit.stored_name
    if unit.folder:
        publish.remove_tree(stored)  # left by a kill before its record; a rename does not replace a folder
    link = made.link
    if link is not None:
        publish.remove_tree(link.scratch)
        if link.side is not None:
            publish.publish(link.side, work.paths.store / unit.side_name)
        if link.handed_on is not None:
            publish.publish(link.handed_on, work.paths.store / unit.handed_on_name)
    if made.who:
        publish.make_readable(made.path)
    publish.publish(made.path, stored)
    work.record(unit, made)
    if link is not None and link.before is not None:
        link.before.unlink(missing_ok=True)
    tell_done(reporter, unit, made)


def tell_done(reporter: Reporter, unit: Unit[Any], made: Made) -> None:
    """Report a unit that was made."""
    seconds, nbytes = round(made.seconds, 3), sum(w.nbytes for w in made.result.files)
    reporter.event("done", unit=unit.name, seconds=seconds, bytes=nbytes, stats=made.result.stats, **made.who)
    where = f" on {made.who['host']}" if made.who else ""
    reporter.say(f"{unit.name}: {made.seconds:.2f} s{where}", level=1)
