"""Units made by threads of this process: some with a unit each, and one pool that packs for all of them."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ktconvert.layouts.files import publish
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.pipeline.engine.journal import Start
from ktconvert.pipeline.engine.units import Context, Link, Made, Runner, Stage, Unit, Written
from ktconvert.pipeline.engine.workdir import WorkDir
from ktconvert.pipeline.report.progress import Reporter

Item = TypeVar("Item")
Slot = TypeVar("Slot")
Result = TypeVar("Result")
WAITING = 2  # packing threads beyond those asked for: so many wait for the disk at any time
UNITS_AT_ONCE = 2  # units in flight: while one is hashed in file order, the next is already being packed


class ThreadRunner(Runner):
    """A runner of threads with a unit each. most: the next unit begins when one is recorded."""

    def __init__(self, pool: ThreadPoolExecutor, most: int, make: Callable[[Stage[Any], Unit[Any]], Made]) -> None:
        self._pool, self.most, self._make = pool, most, make

    def submit(self, stage: Stage[Any], unit: Unit[Any]) -> Future[Made]:
        return self._pool.submit(self._make, stage, unit)


@contextlib.contextmanager
def thread_runners(
    works: Sequence[WorkDir], reporter: Reporter, threads: int, units: int, away: Any = None
) -> Iterator[list[ThreadRunner]]:
    """A runner for each output; all share the packing threads. away: as of Context, where there is one output."""
    with pools(threads, units) as (pool, window, runner, most):
        context = Context(pool, window, reporter, away=away)
        about = [f"{work.paths.output.name} " if len(works) > 1 else "" for work in works]
        yield [
            ThreadRunner(runner, most, partial(_make, work, context, which))
            for work, which in zip(works, about, strict=True)
        ]


def _make(work: WorkDir, context: Context, about: str, stage: Stage[Any], unit: Unit[Any]) -> Made:
    begun = time.monotonic()
    link = _link(work, stage, unit) if stage.chain else None
    work.journal.append(Start(unit=unit.name))
    context.reporter.at(f"{about}{unit.key}")
    context.reporter.event("start", output=str(work.paths.output), unit=unit.name)
    path = work.paths.partial / unit.stored_name
    result = stage.run(unit, path, replace(context, chain=link))
    seconds = time.monotonic() - begun
    # Hashed for the run that reads it after this one was cut off.
    paths = [path for path in (link.handed_on, link.side) if path is not None] if link is not None else []
    for_chain = tuple(Written(path.name, path.stat().st_size, publish.sha256_file(path)) for path in paths)
    return Made(path, result, seconds, link=link, for_chain=for_chain)


@contextlib.contextmanager
def pools(threads: int, units: int) -> Iterator[tuple[ThreadPoolExecutor, int, ThreadPoolExecutor, int]]:
    """Threads for so many units: those that pack and the window of a unit (Context), the threads with a unit each, and
    their number. Raises RuntimeError where the system gives no threads.
    """
    count = max(1, min(UNITS_AT_ONCE, threads, units))
    with packing_pool(threads) as pool, ThreadPoolExecutor(count, "unit", unbind_thread) as runner:
        start_threads(runner, count)
        yield pool, window_of(threads, count), runner, count


def packing_pool(threads: int) -> ThreadPoolExecutor:
    """Threads for the parts of units, so that so many are busy. Raises RuntimeError where the system gives none."""
    pool = ThreadPoolExecutor(threads + WAITING, thread_name_prefix="pack", initializer=unbind_thread)
    start_threads(pool, threads + WAITING)
    return pool


def window_of(threads: int, units: int) -> int:
    """How many parts of each of so many units may be in flight."""
    return -(-(threads + WAITING) // units) + 1


def start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Start them before there is work: a submit() that cannot start one leaves its work to those there are."""
    ready = threading.Event()
    try:
        for _ in range(count):
            pool.submit(ready.wait)
    finally:
        ready.set()


def _link(work: WorkDir, stage: Stage[Any], unit: Unit[Any]) -> Link:
    at = stage.units.index(unit)
    # No other run's: a worker of one that died may wake and look there, and must not find what is being written.
    store, scratch = work.paths.store, work.paths.partial / f"{unit.name}.{secrets.token_hex(4)}"
    scratch.mkdir()
    return Link(
        before=store / stage.units[at - 1].handed_on_name if at and stage.units[at - 1].handed_on else None,
        handed_on=work.paths.partial / unit.handed_on_name if unit.handed_on else None,
        scratch=scratch,
        store={
            u.key: store / u.stored_name
            for u in stage.units[: at + 1]
            if u is not unit or u.fingerprint in work.finished
        },
        side=work.paths.partial / unit.side_name if unit.side else None,
        sides={u.key: store / u.side_name for u in stage.units[:at] if u.side},
    )


def in_order(
    pool: ThreadPoolExecutor, items: Iterable[Item], slots: list[Slot], make: Callable[[Item, Slot], Result]
) -> Iterator[tuple[Item, Slot, Result]]:
    """Run make(item, slot) in the pool and yield (item, slot, what it gave) in the order of the items: a file is hashed
    front to back while parts are computed. A slot (a buffer, say) is used again once its item was taken. The first
    failure is raised here, after the calls that already run have ended.
    """
    free = deque(slots)
    flying: deque[tuple[Item, Slot, Future[Result]]] = deque()
    try:
        for item in items:
            if not free:
                taken, slot, future = flying.popleft()
                yield taken, slot, future.result()
                free.append(slot)
            slot = free.popleft()
            flying.append((item, slot, pool.submit(make, item, slot)))
        while flying:
            taken, slot, future = flying.popleft()
            yield taken, slot, future.result()
    finally:
        for _, _, future in flying:
            future.cancel()
        wait([future for _, _, future in flying])
