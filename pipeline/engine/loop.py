"""The loop: skip what is done; have made, publish and record what is not, of one output or several; stop on Ctrl-C."""

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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ktconvert.layouts.errors import KtconvertError, ResourceError, WorkerLostError
from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine.journal import End, Run
from ktconvert.pipeline.engine.lock import Holder
from ktconvert.pipeline.engine.plan import Plan, require_unchanged
from ktconvert.pipeline.engine.units import HANDED_ON, Made, Runner, Stage, Unit
from ktconvert.pipeline.engine.workdir import WorkDir
from ktconvert.pipeline.report.progress import Reporter

SIGNAL_DELAY = 0.05  # seconds; Python's handler waits for the main thread, whichever thread the signal went to


class Interrupted(Exception):
    """The user asked to stop; everything finished is recorded. exit_code as the shell expects it."""

    def __init__(self, number: int, outputs: Sequence[Path]) -> None:
        again = " and ".join(f"`ktconvert resume {output}`" for output in outputs)
        super().__init__(
            f"stopped by {signal.Signals(number).name}; {again} {'goes' if len(outputs) == 1 else 'go'} on"
        )
        self.exit_code = 128 + number


class StopFlag:
    """The first SIGINT or SIGTERM finishes the units in flight, the second ends the process at once."""

    def __init__(self) -> None:
        self.number = 0

    def handle(self, number: int, _frame: FrameType | None) -> None:
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


@dataclass(frozen=True)
class Share:
    """What the loop does for one output: `runner` makes what is to do, each is kept, and in the end there is an end."""

    plan: Plan
    to_do: ToDo
    runner: Runner
    keep: Callable[[Unit[Any], Made], None]
    end: Callable[[], None] = lambda: None

    def in_order(self) -> Iterator[tuple[int, str, Share, Stage[Any], tuple[Unit[Any], ...]]]:
        """What is to be made, by stage and key: units that read a layer follow one another, from the page cache."""
        numbers = {stage.name: number for number, stage in enumerate(self.plan.stages)}
        return ((numbers[stage.name], units[0].key, self, stage, units) for stage, units in self.to_do)


def run_units(shares: Sequence[Share], reporter: Reporter, stop: StopFlag) -> None:
    """Have the units of all shares made, and keep each. Raises the first failure after what was under way has ended.
    What is only this unit's (WorkerLostError) does not keep the others from being made.
    """
    ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    flying: dict[Future[Any], tuple[Share, Stage[Any], tuple[Unit[Any], ...]]] = {}
    failures: list[BaseException] = []
    left = {id(share): sum(len(units) for _, units in share.to_do) for share in shares}

    def stopped() -> bool:
        return bool(stop.number) or any(not isinstance(error, WorkerLostError) for error in failures)

    def end_if_done(share: Share) -> None:
        if not left[id(share)] and not stopped():
            share.end()
            del left[id(share)]

    every = [unit for share in shares for unit in share.plan.units]
    to_make = [unit for share in shares for _, units in share.to_do for unit in units]
    total = sum(unit.bytes_in for unit in every)
    done = (len(every) - len(to_make), len(every))
    reporter.begin(total, total - sum(unit.bytes_in for unit in to_make), units=done)
    merged = heapq.merge(*(share.in_order() for share in shares), key=lambda each: each[:2])
    waiting = deque((share, stage, units) for _, _, share, stage, units in merged)
    try:
        for share in shares:
            end_if_done(share)
        while flying or (waiting and not stopped()):
            while waiting and len(flying) < waiting[0][0].runner.most and not stopped():
                share, stage, units = waiting.popleft()
                future = share.runner.submit(stage, units[0])
                flying[future] = (share, stage, units)
                future.add_done_callback(ended.put)
            for future in list(flying) if stopped() else []:
                share, _, units = flying[future]
                if share.runner.give_up(units[0], future):
                    del flying[future]
            for share in shares:
                if left.get(id(share)):
                    share.runner.watch()
            with contextlib.suppress(queue.Empty):
                future = ended.get(timeout=SIGNAL_DELAY)
                if future not in flying:  # given up
                    continue
                share, stage, units = flying.pop(future)
                try:
                    if (made := share.runner.take(units[0], future)) is None:
                        waiting.appendleft((share, stage, units))
                        continue
                    share.keep(units[0], made)
                    reporter.unit_done()
                    left[id(share)] -= 1
                    end_if_done(share)
                except BaseException as error:
                    failures.append(error)
                    if isinstance(error, WorkerLostError):  # the others may take hours
                        reporter.warn(f"{error} All other units are made first.")
                    continue
                if units[1:]:
                    waiting.appendleft((share, stage, units[1:]))
    finally:
        reporter.end()
    if failures:
        raise next((error for error in failures if not isinstance(error, WorkerLostError)), failures[0])
    unended = [share.plan.request.output for share in shares if id(share) in left]
    if stop.number and unended:
        raise Interrupted(stop.number, unended)


def left_to_do(plan: Plan, work: WorkDir) -> ToDo:
    runs = [(stage, to_run(stage, work)) for stage in plan.stages]
    return [
        (stage, units) for stage, run in runs for units in ([run] if stage.chain and run else [(unit,) for unit in run])
    ]


def to_run(stage: Stage[Any], work: WorkDir) -> tuple[Unit[Any], ...]:
    """The units to be made, in order; of a chain, from the last one on whose forerunner's file is still there."""
    undone = [n for n, u in enumerate(stage.units) if work.done_reason(u) is None]
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
    if (link := made.link) is not None:
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
    tell_done(plan.request.output, reporter, unit, made)


def tell_done(output: Path, reporter: Reporter, unit: Unit[Any], made: Made) -> None:
    name, seconds = unit.name, round(made.seconds, 3)
    nbytes, stats = sum(w.nbytes for w in made.result.files), made.result.stats
    reporter.event("done", output=str(output), unit=name, seconds=seconds, bytes=nbytes, stats=stats, **made.who)
    where = f" on {made.who['host']}" if made.who else ""
    reporter.say(f"{output.name}: {name}: {made.seconds:.2f} s{where}", level=1)
