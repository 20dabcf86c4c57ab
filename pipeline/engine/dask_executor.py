"""Dask as a concurrent.futures.Executor: a cluster that the user started, or one on this machine for trials."""

from __future__ import annotations

import contextlib
import importlib
import logging
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import msgspec

from ktconvert.layouts.errors import KTConvertError, UsageError, WorkerLostError
from ktconvert.layouts.extras import require_packages
from ktconvert.layouts.files import documents
from ktconvert.native_quant import machine
from ktconvert.pipeline.report.text import duration

UNIT = {"unit": 1}  # Dask resource of workers: the number of units that a worker may make at the same time
START = "dask worker --scheduler-file FILE --nthreads 1 --resources unit=1 --memory-limit 0 --death-timeout 120"
TIMEOUT = 3600.0  # default of --executor-timeout: seconds to wait while there are no workers
CONNECT_ATTEMPTS = 3
SILENT_SECONDS = 30.0  # seconds without a heartbeat until a warning; workers send one every few seconds
POLL_SECONDS = 1.0
RESULT_SECONDS = 10.0  # to wait for a result at a time, since a closed client never answers
LOCAL = "local"
MAX_LOCAL_WORKERS = 1024
NO_LOGGING = logging.CRITICAL + 1  # Dask logs the end of a client as critical


class DaskExecutor(Executor):
    """An executor for a Dask client, which the caller closes.

    A Dask future is released as soon as it has ended, since Dask runs a task again if its worker dies while the future
    is held.

    last_heartbeat  newest heartbeat of workers that offer units, by the scheduler's clock; None without such workers
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        # Our future -> Dask's. The thread that removes an entry sets its result.
        self._pending: dict[Future[Any], Any] = {}
        self.last_heartbeat: float | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call fn(*args, **kwargs) on a worker that offers a unit, once, even if it raises."""
        future: Future[Any] = Future()
        packed = pickle.dumps((fn, args, kwargs))
        dask_future = self._client.submit(_make_unpickler(), packed, pure=False, resources=UNIT, retries=0)
        self._pending[future] = dask_future

        def settle(dask_future: Any) -> None:
            if future not in self._pending:
                return  # failed already. A client that is being closed may never answer result()
            try:
                result, error = self._read_result(future, dask_future), None
            except BaseException as caught:
                result, error = None, _explain(caught)
            dask_future.release()
            if self._pending.pop(future, None) and future.set_running_or_notify_cancel():
                future.set_result(result) if error is None else future.set_exception(error)

        def cancel(future: Future[Any]) -> None:
            if future.cancelled():
                dask_future.cancel()

        dask_future.add_done_callback(settle)
        future.add_done_callback(cancel)
        return future

    def _read_result(self, future: Future[Any], dask_future: Any) -> Any:
        """Return a task's result, or raise its error. Raises ConnectionError if the future fails meanwhile."""
        while True:
            try:
                return dask_future.result(timeout=RESULT_SECONDS)
            except TimeoutError:
                if dask_future.status == "error":  # the task's own error
                    raise
                if future not in self._pending:
                    raise ConnectionError("the client was closed") from None

    def update_heartbeat(self) -> None:
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        self.last_heartbeat = max((w["last_seen"] for w in workers if w.get("resources", {}).get("unit")), default=None)

    def count_pending(self) -> int:
        return len(self._pending)

    def fail_all(self, error: Exception) -> None:
        """Fail all pending tasks with this error; Dask forgets them when the client is closed."""
        for future in list(self._pending):
            if self._pending.pop(future, None) and future.set_running_or_notify_cancel():
                future.set_exception(error)


def _make_unpickler() -> Callable[[bytes], Any]:
    """Return a function that calls a pickled function. It travels by value, so schedulers need no ktconvert."""

    def call(packed: bytes) -> Any:
        import pickle

        function, arguments, named = pickle.loads(packed)
        return function(*arguments, **named)

    return call


def _explain(error: BaseException) -> BaseException:
    from distributed import KilledWorker

    if isinstance(error, CancelledError):
        return ConnectionError("Dask's scheduler no longer answers")
    if isinstance(error, ModuleNotFoundError):
        return KTConvertError(f"a worker lacks a module ({error}); install the same ktconvert on every host.")
    if not isinstance(error, KilledWorker):
        return error
    return WorkerLostError(
        f"its workers ended repeatedly, the last one at {error.last_worker.address}; see their standard error."
    )


@contextlib.contextmanager
def connect(address: str, warn: Callable[[str], None], timeout: float = TIMEOUT) -> Iterator[DaskExecutor]:
    """Connect to a Dask cluster: tcp://HOST:PORT, tls://HOST:PORT, a scheduler's file, or `local[:N]`.

    `local` starts N workers here (by default one for each NUMA node) and ends them. Certificates come from Dask's
    settings.

    warn     is called with sentences about missing workers
    timeout  seconds after which tasks fail with TimeoutError if there are no workers

    Raises KTConvertError if Dask is missing or no scheduler answers, UsageError for any other place.
    """
    require_packages("`--executor dask:...`", ["distributed"], "dask")
    distributed: Any = importlib.import_module("distributed")  # untyped
    _silence_loggers()
    with contextlib.ExitStack() as resources:
        if (count := count_local_workers(address)) is not None:
            with _block_ctrl_c():
                cluster = distributed.LocalCluster(
                    n_workers=count,
                    threads_per_worker=1,
                    resources=UNIT,
                    memory_limit=None,
                    dashboard_address=None,
                    scheduler_kwargs={"dashboard": False},
                    host="127.0.0.1",
                    silence_logs=NO_LOGGING,
                )
            client = distributed.Client(resources.enter_context(cluster))
        else:
            client = _connect_client(distributed.Client, address)
        resources.callback(client.close)
        executor = DaskExecutor(client)
        resources.callback(executor.fail_all, ConnectionError("the client was closed"))
        executor.update_heartbeat()
        if executor.last_heartbeat is None:
            warn(f"waiting for workers; {_advice(timeout)}")
        ended = threading.Event()
        resources.callback(ended.set)
        threading.Thread(target=_poll_heartbeat, args=(executor, ended), daemon=True).start()
        threading.Thread(target=_watch_workers, args=(executor, warn, timeout, ended), daemon=True).start()
        yield executor


def _poll_heartbeat(executor: DaskExecutor, ended: threading.Event) -> None:
    """Update the heartbeat until the end, in a separate thread, because a scheduler that does not answer blocks it."""
    while not ended.wait(POLL_SECONDS):
        with contextlib.suppress(Exception):  # tasks fail if the scheduler is gone
            executor.update_heartbeat()


def _watch_workers(executor: DaskExecutor, warn: Callable[[str], None], timeout: float, ended: threading.Event) -> None:
    """Warn once if tasks wait and no worker sends a heartbeat, and fail the tasks after the timeout.

    Polls are counted instead of time, since this process may be suspended for hours.
    """
    last_heartbeat = executor.last_heartbeat
    silent_seconds = 0.0
    is_reported = last_heartbeat is None
    while not ended.wait(POLL_SECONDS):
        if executor.last_heartbeat not in (None, last_heartbeat):
            last_heartbeat = executor.last_heartbeat
            silent_seconds = 0.0
            is_reported = False
        silent_seconds = silent_seconds + POLL_SECONDS if executor.count_pending() else 0.0
        problem = f"no worker has answered for {duration(silent_seconds)}"
        if silent_seconds >= timeout:
            executor.fail_all(TimeoutError(f"{problem} (--executor-timeout)"))
        elif silent_seconds >= min(SILENT_SECONDS, timeout / 2) and not is_reported:
            is_reported = True
            warn(f"{problem}; {_advice(timeout - silent_seconds)}")


def _advice(seconds: float) -> str:
    return (
        f"start one on each host: {START}. Otherwise the command ends in {duration(seconds)} (--executor-timeout); "
        "finished units are kept, and the same command continues"
    )


def _silence_loggers() -> None:
    """Silence Dask's loggers, since we report errors ourselves. They get their levels when Dask is imported."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in ("distributed", "tornado"):
            logging.getLogger(name).setLevel(NO_LOGGING)


@contextlib.contextmanager
def _block_ctrl_c() -> Iterator[None]:
    """Block SIGINT for processes that are started inside, since a terminal sends Ctrl-C to all processes."""
    resource_tracker.ensure_running()  # otherwise the first process starts it and unblocks signals
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def count_local_workers(address: str) -> int | None:
    """Return the number of workers of `local[:N]`, None for any other address. Raises UsageError for a wrong number."""
    name, _, count = address.partition(":")
    if name != LOCAL:
        return None
    if count and not (count.isdecimal() and 0 < int(count) <= MAX_LOCAL_WORKERS):
        raise UsageError(f"--executor dask:{address}: give a number of workers from 1 to {MAX_LOCAL_WORKERS}.")
    return int(count or len(machine.numa_nodes()))


class _SchedulerFile(msgspec.Struct):
    address: str


def _connect_client(connect: Callable[..., Any], address: str) -> Any:
    """Return a client of the scheduler at tcp://HOST:PORT or tls://HOST:PORT, or of a scheduler's file."""
    scheduler = address
    if not address.startswith(("tcp://", "tls://")):
        path = Path(address).expanduser()
        if not path.is_file():
            raise UsageError(
                f"--executor dask:{address}: file not found; give tcp://HOST:PORT, tls://HOST:PORT, local[:N] or the "
                "file of `dask scheduler --scheduler-file`."
            )
        try:
            scheduler = documents.decode_document(path.read_bytes(), _SchedulerFile).address
        except ValueError as error:
            problem = f"not a file of `dask scheduler --scheduler-file` ({error})"
            raise UsageError(f"--executor dask:{address}: {problem}; give the scheduler's file.") from error
    try:
        return _connect(connect, scheduler)
    except (AssertionError, OSError, TimeoutError, ValueError, TypeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise KTConvertError(
            f"--executor dask:{address}: no Dask scheduler answers ({lines[0]}); start it first."
        ) from error


def _connect(connect: Callable[..., Any], address: str) -> Any:
    """Connect to a scheduler, again if the client meets a busy one.

    Dask's client asserts that the scheduler's first batch has one message. If another client connects meanwhile, the
    batch may have two.
    """
    for _ in range(CONNECT_ATTEMPTS - 1):
        with contextlib.suppress(AssertionError):
            return connect(address)
    return connect(address)
