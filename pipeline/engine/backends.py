"""The backend that --executor selects: threads of this process, or the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from ktconvert.layouts.errors import UsageError
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import dask_executor

THREADS, DASK = NAMES = ("threads", "dask")
FORMS = (
    "threads, threads:N, dask:local, dask:local:N, dask:tcp://HOST:PORT, dask:tls://HOST:PORT, or dask:FILE with the "
    "file of `dask scheduler --scheduler-file`"
)


@dataclass(frozen=True)
class Backend:
    """An open backend.

    executor  None for threads of this process; otherwise its workers make the units
    threads   packing threads of this process or of each worker; None for the CPUs that it may use
    """

    executor: Executor | None = None
    threads: int | None = None


@contextlib.contextmanager
def open_backend(name: str, warn: Callable[[str], None], timeout: float | None = None) -> Iterator[Backend]:
    """Open the backend that --executor names, and close it on exit.

    warn, timeout (None: TIMEOUT): as for dask_executor.connect.

    Raises UsageError for an unknown name, KTConvertError if the backend is not available.
    """
    require_backend(name)
    kind, _, argument = name.partition(":")
    if kind == THREADS:
        if argument and not (argument.isdecimal() and 0 < int(argument) < 1 << 31):
            raise UsageError(f"--executor threads:{argument}: not a number of threads; give one.")
        yield Backend(threads=int(argument) if argument else None)
        return
    with dask_executor.connect(argument, warn, timeout or dask_executor.TIMEOUT) as executor:
        workers = dask_executor.count_local_workers(argument)
        yield Backend(executor, None if workers is None else max(1, machine.usable_cpus() // workers))


def require_backend(name: str) -> None:
    """Raise UsageError for an unknown backend."""
    if name.partition(":")[0] not in NAMES:
        raise UsageError(f"--executor {name}: unknown; give {FORMS}.")
