"""Real `dask scheduler` and `dask worker` processes on loopback, started as a user would start them.

They always end, even if the process that started them ends in any way. A failing test shows their logs.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

TIMEOUT = 300.0  # seconds for a process to start; it takes one or two, and much longer on a loaded machine
# As docs/how-to/many-machines.md starts a worker, but without the dashboard.
WORKER = ["--nthreads", "1", "--resources", "unit=1", "--memory-limit", "0", "--death-timeout", "120", "--no-dashboard"]
SCHEDULER = ["--port", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
DASK = (sys.executable, "-P", "-m", "dask")
ROLES = ("CLIENT", "SCHEDULER", "WORKER")


class Cluster(contextlib.AbstractContextManager[Any]):
    """A scheduler and its workers. The thread that starts them must outlive them.

    file     FILE of `--executor dask:FILE`
    address  tcp://127.0.0.1:PORT, or tls://
    env      environment of the cluster's processes, which clients need too with TLS
    """

    def __init__(self, folder: Path, *, tls: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        """Start the scheduler. tls: folder that make_certificates wrote."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / "scheduler.json"
        self.env = {"DASK_TEMPORARY_DIRECTORY": str(folder), **(env or {})}
        self._protocol = ["--protocol", "tls" if tls else "tcp"]
        self._nannies: set[str] = set()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        if tls is not None:
            self.env |= tls_environment(tls)
        self._start("scheduler", ["scheduler", *SCHEDULER, *self._protocol], {})

    def __exit__(self, *_: object) -> None:
        self._end([*self._processes])

    def end_workers(self) -> None:
        """End all workers, so that new ones can use their names."""
        self._end([name for name in self._processes if name != "scheduler"])

    def _end(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                # Also ends stopped processes, and those of a nanny
                os.killpg(self._processes[name].pid, signal.SIGKILL)
        for name in names:
            self._processes.pop(name).wait()
            print(f"--- {name}: {self.log(name)}")
        self._nannies.clear()

    @property
    def address(self) -> str:
        """Return the scheduler's address, once it has one."""
        _wait(lambda: "Scheduler at:" in self.log("scheduler"), self, "scheduler")
        return next(line.split()[-1] for line in self.log("scheduler").splitlines() if "Scheduler at:" in line)

    def start(
        self, *names: str, nanny: bool = False, env: Any = None, options: Sequence[str] = (), prefix: Sequence[str] = ()
    ) -> Self:
        """Start workers at the same time, and wait until the scheduler knows them.

        nanny: a separate process restarts each worker when it ends; env: variables besides those of the cluster;
        prefix: a program that starts them, such as nsenter.
        """
        for name in names:
            command = ["worker", *WORKER, *self._protocol, "--nanny" if nanny else "--no-nanny", "--name", name]
            if nanny:
                self._nannies.add(name)
            self._start(name, [*command, *options], env or {}, prefix)
        for name in names:
            _wait(lambda name=name: "Registered to:" in self.log(name), self, name)
        return self

    def log(self, name: str) -> str:
        """Return the output of a process so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def pid(self, name: str) -> int:
        """Return the id of the process that computes: with a nanny, the process that the nanny started."""
        own = self._processes[name].pid
        if name not in self._nannies:
            return own
        for thread in Path(f"/proc/{own}/task").iterdir():  # any thread of the nanny may have started it
            for child in _read(thread / "children").split():
                if b"spawn_main" in _read(Path(f"/proc/{int(child)}/cmdline")):
                    return int(child)
        raise ProcessLookupError(f"{name} has no process at the moment")

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process that computes: SIGKILL, SIGSTOP, SIGCONT ..."""
        os.kill(self.pid(name), number)

    def wait_for_end(self, name: str) -> int:
        """Wait until a process (with a nanny, the nanny) has ended; return its exit code."""
        return self._processes[name].wait(TIMEOUT)

    def remove_silent_worker(self, name: str) -> None:
        """Make the scheduler remove a worker, as it does with a worker that was silent for its ttl."""
        from distributed import Client

        async def remove(dask_scheduler: Any) -> None:
            [worker] = [w for w in dask_scheduler.workers.values() if w.name == name]
            await dask_scheduler.remove_worker(worker.address, stimulus_id="silent")

        with Client(self.address, timeout=TIMEOUT) as client:
            client.run_on_scheduler(remove)

    def is_alive(self, name: str) -> bool:
        """Return whether a process (with a nanny, the nanny) still runs."""
        return self._processes[name].poll() is None

    def wait_until_stopped(self, name: str) -> None:
        """Wait until a process has stopped itself (killpoint.c)."""
        stat = Path(f"/proc/{self.pid(name)}/stat")
        _wait(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", self, name)

    def _start(self, name: str, arguments: list[str], env: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        assert name not in self._processes, f"there is a {name} already"
        host = ["--host", "127.0.0.1", "--scheduler-file", str(self.file)]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*ENDS_WITH_PARENT, *prefix, *DASK, *arguments, *host],
                env={**os.environ, **self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _read(path: Path) -> bytes:
    """Read a file of /proc; return nothing if the process has just ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return path.read_bytes()
    return b""


def _wait(done: Callable[[], bool], cluster: Cluster, name: str) -> None:
    """Wait until done(); fail if the process has ended, or takes too long."""
    until = time.monotonic() + TIMEOUT
    while not done():
        assert cluster.is_alive(name) and time.monotonic() < until, f"{name} did not start:\n{cluster.log(name)}"
        time.sleep(0.01)


def make_certificates(folder: Path) -> Path:
    """Write a new key and its self-signed certificate: key.pem and ca.pem."""
    from distributed.security import Security

    security = Security.temporary()
    folder.mkdir(parents=True)
    (folder / "ca.pem").write_text(str(security.tls_ca_file))
    (folder / "key.pem").write_text(str(security.tls_client_key))
    return folder


def tls_environment(folder: Path) -> dict[str, str]:
    """Return Dask's settings for TLS as an environment: only holders of these certificates can connect."""
    prefix = "DASK_DISTRIBUTED__COMM__"
    roles = {f"{prefix}TLS__{role}__CERT": str(folder / "ca.pem") for role in ROLES}
    roles |= {f"{prefix}TLS__{role}__KEY": str(folder / "key.pem") for role in ROLES}
    return {f"{prefix}REQUIRE_ENCRYPTION": "true", f"{prefix}TLS__CA_FILE": str(folder / "ca.pem"), **roles}


def version_environment(folder: Path, version: str) -> dict[str, str]:
    """Return the environment of a worker that reports a different version of ktconvert, with the code under test."""
    folder.mkdir()
    program = f"import ktconvert.pipeline\nktconvert.pipeline.__version__ = {version!r}\n"
    (folder / "sitecustomize.py").write_text(program)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a scheduler for the tests of a module."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(scheduler: Cluster) -> Iterator[Cluster]:
    """Return a cluster without workers; end the workers that the test starts."""
    yield scheduler
    scheduler.end_workers()
