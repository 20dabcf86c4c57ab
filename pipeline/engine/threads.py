"""Units made by threads of this process: some with a unit each, and one pool that packs for all of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ktconvert.layouts.files import publish
from ktconvert.native_quant.own_cpus import use_own_cpus
from ktconvert.pipeline.engine.journal import Start
from ktconvert.pipeline.engine.runner import Made
from ktconvert.pipeline.engine.units import Context, Link, Stage, Unit, Written
from ktconvert.pipeline.engine.workdir import WorkDir
from ktconvert.pipeline.ui.progress import Reporter

WAITING = 2  # packing threads beyond those asked for: so many wait for the disk at any time
UNITS_AT_ONCE = 2  # units in flight: while one is hashed in file order, the next is already being packed


class ThreadRunner:
    """A runner of threads. Use `thread_runners`."""

    def __init__(self, work: WorkDir, pool: ThreadPoolExecutor, context: Context, most: int, about: str) -> None:
        self.most = most  # the next unit begins when one is recorded: a power cut loses the work on so many
        self._work, self._pool, self._context, self._about = work, pool, context, about

    def submit(self, stage: Stage[Any], unit: Unit[Any]) -> Future[Made]:
        """Have a unit made."""
        return self._pool.submit(self._make, stage, unit)

    def take(self, unit: Unit[Any], future: Future[Made]) -> Made:
        """What came of it."""
        return future.result()

    def give_up(self, unit: Unit[Any], future: Future[Made]) -> bool:
        """Take a unit back that nobody makes yet."""
        return future.cancel()

    def watch(self) -> None:
        """What is to be reported, units report themselves."""

    def _make(self, stage: Stage[Any], unit: Unit[Any]) -> Made:
        work, context, begun = self._work, self._context, time.monotonic()
        if stage.chain:
            context = replace(context, chain=_link(work, stage, unit))
        work.journal.append(Start(unit=unit.name))
        context.reporter.at(f"{self._about}{unit.key}")
        context.reporter.event("start", output=str(work.paths.output), unit=unit.name)
        partial = work.paths.partial / unit.stored_name
        result = stage.run(unit, partial, context)
        for_chain = _for_chain(context.chain)
        return Made(partial, result, time.monotonic() - begun, link=context.chain, for_chain=for_chain)


@contextlib.contextmanager
def thread_runners(
    works: Sequence[WorkDir], reporter: Reporter, threads: int, units: int
) -> Iterator[list[ThreadRunner]]:
    """A runner for each output; all share so many packing threads, for so many units. Raises RuntimeError where the
    system gives no threads.
    """
    with pools(threads, units) as (pool, window, runner, most):
        context = Context(pool, window, reporter)
        about = [f"{work.paths.output.name} " if len(works) > 1 else "" for work in works]
        yield [ThreadRunner(work, runner, context, most, which) for work, which in zip(works, about, strict=True)]


@contextlib.contextmanager
def pools(threads: int, units: int) -> Iterator[tuple[ThreadPoolExecutor, int, ThreadPoolExecutor, int]]:
    """Threads for so many units: those that pack and the window of a unit (Context), the threads with a unit each, and
    their number.

    Raises RuntimeError where the system gives no threads.
    """
    count = max(1, min(UNITS_AT_ONCE, threads, units))
    with packing_pool(threads) as pool, ThreadPoolExecutor(count, "unit", use_own_cpus) as runner:
        start_threads(runner, count)
        yield pool, window_of(threads, count), runner, count


def packing_pool(threads: int) -> ThreadPoolExecutor:
    """Threads for the parts of units, so that so many are busy. Raises RuntimeError where the system gives none."""
    pool = ThreadPoolExecutor(threads + WAITING, thread_name_prefix="pack", initializer=use_own_cpus)
    start_threads(pool, threads + WAITING)
    return pool


def window_of(threads: int, thread_runner: int) -> int:
    """How many parts of a unit may be in flight."""
    return -(-(threads + WAITING) // thread_runner) + 1


def start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    """Start them before there is work: a submit() that cannot start one leaves its work to those there are."""
    ready = threading.Event()
    try:
        for _ in range(count):
            pool.submit(ready.wait)
    finally:
        ready.set()


def _for_chain(link: Link | None) -> tuple[Written, ...]:
    """What a unit made for others of its chain, hashed for the run that reads it after this one was cut off."""
    paths = () if link is None else (link.handed_on, link.side)
    return tuple(
        Written(path.name, path.stat().st_size, publish.sha256_file(path)) for path in paths if path is not None
    )


def _link(work: WorkDir, stage: Stage[Any], unit: Unit[Any]) -> Link:
    at = stage.units.index(unit)
    store, scratch = work.paths.store, work.paths.partial / unit.name
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
