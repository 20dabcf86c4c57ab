"""What --executor names: threads of this process, or the workers of an engine behind concurrent.futures.Executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from ktconvert.layouts.errors import UsageError
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import dask_executor

DEFAULT = "threads"


@dataclass(frozen=True)
class Engine:
    """Who makes units. executor: None for threads of this process; threads: of each for packing, None: its CPUs."""

    executor: Executor | None = None
    threads: int | None = None


@contextlib.contextmanager
def opened(name: str, note: Callable[[str], None], timeout: float | None = None) -> Iterator[Engine]:
    """The engine that --executor names, until it is left; note, timeout (None: TIMEOUT): as of dask_executor.connected.
    Raises UsageError for a name that is none, KtconvertError where it cannot be had.
    """
    require_known(name)
    kind, _, where = name.partition(":")
    with ENGINES[kind](where, note, timeout or dask_executor.TIMEOUT) as engine:
        yield engine


def require_known(name: str) -> None:
    if name.partition(":")[0] not in ENGINES:
        raise UsageError(f"--executor {name}: give one of {', '.join(ENGINES)}, as `ktconvert cpu --help` shows.")


@contextlib.contextmanager
def _threads(where: str, note: Callable[[str], None], timeout: float) -> Iterator[Engine]:
    if where and not (where.isdecimal() and 0 < int(where) < 1 << 31):
        raise UsageError(f"--executor threads:{where}: give a number of threads.")
    yield Engine(None, int(where) if where else None)


@contextlib.contextmanager
def _dask(where: str, note: Callable[[str], None], timeout: float) -> Iterator[Engine]:
    with dask_executor.connected(where, note, timeout) as executor:
        here = dask_executor.workers_here(where)
        yield Engine(executor, None if here is None else max(1, machine.usable_cpus() // here))


ENGINES: Mapping[str, Callable[[str, Callable[[str], None], float], contextlib.AbstractContextManager[Engine]]] = {
    "threads": _threads,
    "dask": _dask,
}
