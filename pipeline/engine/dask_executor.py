"""Dask as a concurrent.futures.Executor: a cluster that the user started, or one on this machine for trying."""

from __future__ import annotations

import contextlib
import importlib
import logging
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import msgspec

from ktconvert.layouts.errors import KtconvertError, UsageError, WorkerLostError
from ktconvert.layouts.files import documents
from ktconvert.native_quant import machine
from ktconvert.pipeline.report.text import duration

UNIT = {"unit": 1}  # what a worker offers once for each unit that it may make at a time
START = "dask worker --scheduler-file FILE --nthreads 1 --resources unit=1 --memory-limit 0 --death-timeout 120"
TIMEOUT = 3600.0  # seconds that tasks wait without any worker, unless the user says otherwise
SILENT = 30.0  # seconds after which it is said that nothing is heard of workers; they send a sign every few
LOOK_EVERY = 1.0  # seconds
LOCAL = "local"
MOST_HERE = 1024
NOTHING = logging.CRITICAL + 1  # is logged: Dask calls it critical that a client has gone


class DaskExecutor(Executor):
    """Tasks for a Dask client, of which its caller disposes.

    A future is released as soon as it has ended: while somebody holds it, Dask makes it once more if its worker dies.

    heard  the newest sign of life of the workers that offer units, by the scheduler's clock; None where there are none
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._pending: dict[Future[Any], Any] = {}  # our future -> Dask's; who removes it, settles it
        self.heard: float | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have fn(*args, **kwargs) called by a worker that offers a unit; what it raises is not tried again."""
        ours: Future[Any] = Future()
        packed = pickle.dumps((fn, args, kwargs))
        theirs = self._client.submit(_unpacking(), packed, pure=False, resources=UNIT, retries=0)
        self._pending[ours] = theirs

        def settle(theirs: Any) -> None:
            try:
                result, error = theirs.result(), None
            except BaseException as caught:
                result, error = None, _explained(caught)
            theirs.release()
            if self._pending.pop(ours, None) and ours.set_running_or_notify_cancel():
                ours.set_result(result) if error is None else ours.set_exception(error)

        def cancel(ours: Future[Any]) -> None:
            if ours.cancelled():
                theirs.cancel()

        theirs.add_done_callback(settle)
        ours.add_done_callback(cancel)
        return ours

    def listen(self) -> None:
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        self.heard = max((w["last_seen"] for w in workers if w.get("resources", {}).get("unit")), default=None)

    def waiting(self) -> int:
        return len(self._pending)

    def give_up(self, error: Exception) -> None:
        """Have all tasks that have not ended fail with this error; Dask forgets them when the client is closed."""
        for ours in list(self._pending):
            if self._pending.pop(ours, None) and ours.set_running_or_notify_cancel():
                ours.set_exception(error)


def _unpacking() -> Callable[[bytes], Any]:
    """A function that calls what was pickled. It travels by value, so that schedulers need not have ktconvert."""

    def call(packed: bytes) -> Any:
        import pickle

        function, arguments, named = pickle.loads(packed)
        return function(*arguments, **named)

    return call


def _explained(error: BaseException) -> BaseException:
    from distributed import KilledWorker

    if isinstance(error, CancelledError):
        return ConnectionError("Dask's scheduler does not answer any more")
    if isinstance(error, ModuleNotFoundError):
        return KtconvertError(f"a worker lacks what it needs ({error}); install the same ktconvert on every host.")
    if not isinstance(error, KilledWorker):
        return error
    return WorkerLostError(
        f"the workers that were to make it ended again and again, the last one at {error.last_worker.address}; see "
        "what they wrote to their standard error."
    )


@contextlib.contextmanager
def connected(where: str, note: Callable[[str], None], timeout: float = TIMEOUT) -> Iterator[DaskExecutor]:
    """An executor for the cluster at tcp://HOST:PORT or tls://HOST:PORT, in a scheduler's file, or `local[:N]`, which
    starts N workers here (by default one for each NUMA node) and ends them. Certificates are those of Dask's settings.

    note     is told what keeps workers from working
    timeout  seconds after which tasks fail with TimeoutError while no worker is there

    Raises KtconvertError where Dask is missing or no scheduler answers, UsageError for what is none of these places.
    """
    if find_spec("distributed") is None:
        raise KtconvertError("`--executor dask:...` needs Dask, not installed here: pip install 'ktconvert[dask]'")
    distributed: Any = importlib.import_module("distributed")  # untyped
    _say_nothing()
    with contextlib.ExitStack() as stack:
        if (count := workers_here(where)) is not None:
            with _without_ctrl_c():
                cluster = distributed.LocalCluster(
                    n_workers=count,
                    threads_per_worker=1,
                    resources=UNIT,
                    memory_limit=None,
                    dashboard_address=None,
                    scheduler_kwargs={"dashboard": False},
                    host="127.0.0.1",
                    silence_logs=NOTHING,
                )
            client = distributed.Client(stack.enter_context(cluster))
        else:
            client = _client(distributed.Client, where)
        stack.callback(client.close)
        executor = DaskExecutor(client)
        executor.listen()
        if executor.heard is None:
            note(f"no worker offers to make units yet; {_advice(timeout)}")
        ended = threading.Event()
        stack.callback(ended.set)
        threading.Thread(target=_listen, args=(executor, ended), daemon=True).start()
        threading.Thread(target=_watch, args=(executor, note, timeout, ended), daemon=True).start()
        yield executor


def _listen(executor: DaskExecutor, ended: threading.Event) -> None:
    """Listen again and again. A scheduler that does not answer keeps this thread from going on, and no other."""
    while not ended.wait(LOOK_EVERY):
        with contextlib.suppress(Exception):  # that the scheduler is gone, tasks tell
            executor.listen()


def _watch(executor: DaskExecutor, note: Callable[[str], None], timeout: float, ended: threading.Event) -> None:
    """While tasks wait and nothing is heard of workers, say so once, and in the end give the tasks up. Looks are
    counted, not time: this process may be stopped for hours, and nothing was heard then, either.
    """
    last = executor.heard
    silent, reported = 0.0, last is None
    while not ended.wait(LOOK_EVERY):
        if executor.heard not in (None, last):
            last, silent, reported = executor.heard, 0.0, False
        silent = silent + LOOK_EVERY if executor.waiting() else 0.0
        if silent >= timeout:
            executor.give_up(
                TimeoutError(f"nothing was heard of any worker for {duration(silent)}, --executor-timeout")
            )
        elif silent >= min(SILENT, timeout / 2) and not reported:
            reported = True
            note(f"nothing was heard of any worker for {duration(silent)}; {_advice(timeout - silent)}")


def _advice(seconds: float) -> str:
    return (
        f"start one on each host: {START}. Without any, the command ends in {duration(seconds)} (--executor-timeout); "
        "what is finished stays, and `ktconvert resume` goes on"
    )


def _say_nothing() -> None:
    """Keep Dask's loggers off stderr: what happens, we say. They get their levels when Dask is imported."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in ("distributed", "tornado"):
            logging.getLogger(name).setLevel(NOTHING)


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Processes that are started within never see Ctrl-C, which a terminal sends to all: we say what happens."""
    resource_tracker.ensure_running()  # multiprocessing starts it with the first process, and then unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def workers_here(where: str) -> int | None:
    """How many workers `local[:N]` asks for; None for another place. Raises UsageError for no number."""
    name, _, count = where.partition(":")
    if name != LOCAL:
        return None
    if count and not (count.isdecimal() and 0 < int(count) <= MOST_HERE):
        raise UsageError(f"--executor dask:{where}: give a number of workers from 1 to {MOST_HERE}.")
    return int(count or len(machine.numa_nodes()))


class _SchedulerFile(msgspec.Struct):
    address: str


def _client(connect: Callable[..., Any], where: str) -> Any:
    address = where
    if not where.startswith(("tcp://", "tls://")):
        path = Path(where).expanduser()
        if not path.is_file():
            raise UsageError(
                f"--executor dask:{where}: there is no such file; give tcp://HOST:PORT, tls://HOST:PORT, local[:N] or "
                "the file that `dask scheduler --scheduler-file` writes."
            )
        try:
            address = documents.read(path.read_bytes(), _SchedulerFile).address
        except ValueError as error:
            what = f"is not what `dask scheduler --scheduler-file` writes ({error})"
            raise UsageError(f"--executor dask:{where}: {what}; give its file.") from error
    try:
        return connect(address)
    except (OSError, TimeoutError, ValueError, TypeError) as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise KtconvertError(f"--executor dask:{where}: no Dask scheduler answers there ({why[0]}).") from error
