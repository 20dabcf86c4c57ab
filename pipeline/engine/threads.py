"""Threads of this process: their number, their pools, and work whose results are needed in order."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from ktconvert.layouts.errors import ResourceError
from ktconvert.native_quant import machine
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import size

Item = TypeVar("Item")
Slot = TypeVar("Slot")
Result = TypeVar("Result")
WAITING = 2  # packing threads beyond the requested number, since about as many wait for the disk
UNITS_AT_ONCE = 2  # units in flight: one is hashed in file order while the next is packed


@dataclass(frozen=True)
class Pools:
    """The threads of a run.

    packing  threads for the items of units
    window   number of items of one unit that may be in flight
    units    one thread for each unit in flight
    count    number of units in flight
    """

    packing: ThreadPoolExecutor
    window: int
    units: ThreadPoolExecutor
    count: int


@contextlib.contextmanager
def open_pools(threads: int, units: int) -> Iterator[Pools]:
    """Start the threads for this number of units. Raises RuntimeError if the system gives no threads."""
    count = max(1, min(UNITS_AT_ONCE, threads, units))
    with make_packing_pool(threads) as packing, ThreadPoolExecutor(count, "unit", unbind_thread) as pool:
        start_threads(pool, count)
        yield Pools(packing, window_size(threads, count), pool, count)


def make_packing_pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool that keeps this many threads busy. Raises RuntimeError if the system gives none."""
    pool = ThreadPoolExecutor(threads + WAITING, thread_name_prefix="pack", initializer=unbind_thread)
    start_threads(pool, threads + WAITING)
    return pool


def window_size(threads: int, units: int) -> int:
    """Return how many items of each unit may be in flight, for this number of packing threads and of units."""
    return -(-(threads + WAITING) // units) + 1


def start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Start all threads of a pool now: a later submit() that cannot start one would silently use fewer."""
    ready = threading.Event()
    try:
        for _ in range(count):
            pool.submit(ready.wait)
    finally:
        ready.set()


def fit_threads(plans: Sequence[Plan], reporter: Reporter | None = None, requested: int | None = None) -> int:
    """Return the number of threads asked for, or as many as fit into memory.

    requested  None: the number that the options of the plans name

    Raises ResourceError if not even one fits.
    """

    def peak_memory(count: int) -> int:
        # Outputs that are made together have no more units in flight than a single output.
        return max(plan.hooks.peak_memory(count) for plan in plans)

    execution = plans[0].options.execution
    requested = requested or execution.thread_count
    budget = execution.max_memory or machine.memory_available()
    threads = requested
    while threads > 1 and peak_memory(threads) > budget:
        threads -= 1
    if peak_memory(threads) > budget:
        limit = "--max-memory" if execution.max_memory else "free memory"
        raise ResourceError(
            f"one thread needs {size(peak_memory(1))}, {limit} is {size(budget)}. {plans[0].needs.remedies}"
        )
    if threads < requested and reporter is not None:
        reporter.note(f"{threads} of {requested} threads, so that memory stays below {size(budget)}")
    return threads


def run_in_order(
    pool: ThreadPoolExecutor, items: Iterable[Item], slots: list[Slot], make: Callable[[Item, Slot], Result]
) -> Iterator[tuple[Item, Slot, Result]]:
    """Run make(item, slot) in the pool, and yield (item, slot, result) in the order of the items.

    So a file is hashed front to back while its items are computed. A slot, such as a buffer, is used again once its
    item was consumed. The first failure is raised here, after the calls that already run have ended.
    """
    free = deque(slots)
    in_flight: deque[tuple[Item, Slot, Future[Result]]] = deque()
    try:
        for item in items:
            if not free:
                first, slot, future = in_flight.popleft()
                yield first, slot, future.result()
                free.append(slot)
            slot = free.popleft()
            in_flight.append((item, slot, pool.submit(make, item, slot)))
        while in_flight:
            first, slot, future = in_flight.popleft()
            yield first, slot, future.result()
    finally:
        for _, _, future in in_flight:
            future.cancel()
        wait([future for _, _, future in in_flight])
