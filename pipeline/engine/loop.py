"""The loop: skip what is done; run, publish, record what is not; then assemble. Threads, memory
and Ctrl-C live here.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from ktconvert.layouts.errors import ResourceError
from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine
from ktconvert.native_quant.own_cpus import use_own_cpus
from ktconvert.pipeline.engine.plan import Plan, require_unchanged
from ktconvert.pipeline.engine.units import LEFT, Context, Link, Stage, Unit
from ktconvert.pipeline.engine.workdir import WorkDir, done_reason
from ktconvert.pipeline.tell.report import Reporter

SIGNAL_DELAY = 0.05  # seconds; Python's handler waits for the main thread, whichever thread the signal went to
WAITING = 2  # packing threads beyond those asked for: so many wait for the disk at any time
LANES = 2  # units in flight: while one is hashed in file order, the next is already being packed


class Interrupted(Exception):
    """The user asked to stop; everything finished is recorded. exit_code as the shell expects it."""

    def __init__(self, number: int, output: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; `ktconvert resume {output}` goes on")
        self.exit_code = 128 + number


class StopFlag:
    """The first SIGINT or SIGTERM finishes the units in flight, the second ends the process at once. Both can be
    resumed.
    """

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
    work.journal.append({"event": "run", "pid": os.getpid(), "oom_kills": machine.oom_kills()})
    try:
        yield
    finally:
        with contextlib.suppress(ResourceError):  # the disk may be full, and that was reported already
            work.journal.append({"event": "end"})


def run_units(plan: Plan, work: WorkDir, reporter: Reporter, threads: int, stop: StopFlag) -> None:
    """Make every unit that is not done. Raises the first failure after the other lanes have finished their unit."""
    todo: queue.SimpleQueue[tuple[Stage[Any], tuple[Unit[Any], ...]]] = queue.SimpleQueue()
    done_bytes = 0
    for stage in plan.stages:
        run = to_run(stage, work)
        done_bytes += sum(unit.bytes_in for unit in stage.units) - sum(unit.bytes_in for unit in run)
        for units in [run] if stage.chain and run else [(unit,) for unit in run]:
            todo.put((stage, units))
    lanes = max(1, min(LANES, threads, todo.qsize()))
    failures: list[BaseException] = []
    reporter.begin(sum(u.bytes_in for u in plan.units), done_bytes)

    def lane(context: Context) -> None:
        use_own_cpus()
        while not stop.number and not failures:
            try:
                stage, units = todo.get_nowait()
            except queue.Empty:
                return
            for unit in units:
                if stop.number or failures:
                    return
                try:
                    run_one(plan, work, stage, unit, context)
                except BaseException as error:
                    failures.append(error)

    try:
        with ThreadPoolExecutor(threads + WAITING, thread_name_prefix="pack", initializer=use_own_cpus) as pool:
            _start_threads(pool, threads + WAITING)
            context = Context(pool, window=-(-(threads + WAITING) // lanes) + 1, reporter=reporter)
            crew = [threading.Thread(target=lane, args=(context,), name=f"lane-{i}") for i in range(lanes)]
            try:
                for thread in crew:
                    thread.start()
            except RuntimeError as error:  # no more threads to be had; the lanes that there are end with their unit
                failures.append(error)
            for thread in crew:
                while thread.is_alive():
                    thread.join(SIGNAL_DELAY)
    finally:
        reporter.end()
    if failures:
        raise failures[0]
    if stop.number:
        raise Interrupted(stop.number, plan.request.output)


def _start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Start them before there is work: a submit() that cannot start one fails, but leaves its work to those that there
    are.
    """
    ready = threading.Event()
    try:
        for _ in range(count):
            pool.submit(ready.wait)
    finally:
        ready.set()


def to_run(stage: Stage[Any], work: WorkDir) -> tuple[Unit[Any], ...]:
    """The units of a stage that are to be made, in order; what earlier ones of a chain left and nothing needs is
    removed.

    A chain starts again at the last unit whose forerunner's file is still there: units after it that are finished
    may have to be made once more, to the same bytes.
    """
    undone = [n for n, u in enumerate(stage.units) if done_reason(work.places, work.finished, u) is None]
    if not stage.chain:
        return tuple(stage.units[n] for n in undone)
    if not undone:
        return ()
    first = undone[0]
    before = stage.units[first - 1]
    while first and before.leaves and not (work.places.store / before.left_name).exists():
        first -= 1
        before = stage.units[first - 1]
    needed = before.left_name if first else None
    for path in work.places.store.iterdir():
        if path.name.endswith(LEFT) and path.name != needed:
            path.unlink()
    return stage.units[first : undone[-1] + 1]


def _link(work: WorkDir, stage: Stage[Any], unit: Unit[Any]) -> Link:
    at = stage.units.index(unit)
    store, scratch = work.places.store, work.places.partial / f"{unit.stage}.{unit.key}"
    scratch.mkdir()
    return Link(
        before=store / stage.units[at - 1].left_name if at and stage.units[at - 1].leaves else None,
        leaves=work.places.partial / unit.left_name if unit.leaves else None,
        scratch=scratch,
        store={u.key: store / u.stored_name for u in stage.units[: at + 1]},
        side=work.places.partial / unit.side_name if unit.side else None,
        sides={u.key: store / u.side_name for u in stage.units[:at] if u.side},
    )


def run_one(plan: Plan, work: WorkDir, stage: Stage[Any], unit: Unit[Any], context: Context) -> None:
    """Run one unit, publish what it wrote, record it: in this order, each step durable before the next."""
    name = f"{unit.stage}.{unit.key}"
    begun = time.monotonic()
    if stage.chain:
        context = replace(context, chain=_link(work, stage, unit))
    work.journal.append({"event": "start", "unit": name})
    context.reporter.at(unit.key)
    context.reporter.event("start", unit=name)
    partial = work.places.partial / unit.stored_name
    result = stage.run(unit, partial, context)
    require_unchanged(plan)
    stored = work.places.store / unit.stored_name
    if unit.folder:
        publish.remove_tree(stored)  # left by a kill before its record; a rename does not replace a folder
    link = context.chain
    if link is not None:
        publish.remove_tree(link.scratch)
        if link.side is not None:
            publish.publish(link.side, work.places.store / unit.side_name)
        if link.leaves is not None:
            publish.publish(link.leaves, work.places.store / unit.left_name)
    publish.publish(partial, stored)
    seconds = time.monotonic() - begun
    work.record(unit, result, seconds)
    if link is not None and link.before is not None:
        link.before.unlink(missing_ok=True)
    context.reporter.event(
        "done", unit=name, seconds=round(seconds, 3), bytes=sum(w.nbytes for w in result.files), stats=result.stats
    )
    context.reporter.say(f"{name}: {seconds:.2f} s", level=1)
