"""Real `dask scheduler` and `dask worker` processes on loopback, started as a user would, named, and always ended: also
when the process that started them ends, however that happens. A failing test shows their logs.
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

TIMEOUT = 300.0  # seconds for a process to come up; it takes one or two, a loaded machine many times that
# As docs/how-to/many-machines.md tells users to start a worker. The dashboard is for people.
WORKER = ["--nthreads", "1", "--resources", "unit=1", "--memory-limit", "0", "--death-timeout", "120", "--no-dashboard"]
SCHEDULER = ["--port", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
KEEPER = ("setpriv", "--pdeathsig", "KILL")
DASK = (sys.executable, "-P", "-m", "dask")
ROLES = ("CLIENT", "SCHEDULER", "WORKER")


class Cluster(contextlib.AbstractContextManager[Any]):
    """A scheduler and its workers, started by a thread that lives as long as they shall.

    file     what `--executor dask:FILE` names
    address  tcp://127.0.0.1:PORT, or tls://
    env      what every process of this cluster has in its environment, and whoever is to reach it with TLS
    """

    def __init__(self, folder: Path, *, tls: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        """Start the scheduler. tls: the folder of `certificates`."""
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
        """What comes next starts others, under any names."""
        self._end([name for name in self._processes if name != "scheduler"])

    def _end(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[name].pid, signal.SIGKILL)  # ends stopped ones, too, and what a nanny started
        for name in names:
            self._processes.pop(name).wait()
            print(f"--- {name}: {self.log(name)}")
        self._nannies.clear()

    @property
    def address(self) -> str:
        _wait(lambda: "Scheduler at:" in self.log("scheduler"), self, "scheduler")
        return next(line.split()[-1] for line in self.log("scheduler").splitlines() if "Scheduler at:" in line)

    def start(
        self, *names: str, nanny: bool = False, env: Any = None, words: Sequence[str] = (), prefix: Sequence[str] = ()
    ) -> Self:
        """Start workers at the same time and wait until the scheduler knows them. nanny: a process of its own starts each
        one again when it ends; env: beside that of the cluster; prefix: a program that starts them, such as nsenter."""
        for name in names:
            command = ["worker", *WORKER, *self._protocol, "--nanny" if nanny else "--no-nanny", "--name", name]
            if nanny:
                self._nannies.add(name)
            self._start(name, [*command, *words], env or {}, prefix)
        for name in names:
            _wait(lambda name=name: "Registered to:" in self.log(name), self, name)
        return self

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def pid(self, name: str) -> int:
        """The process that computes: of a worker with a nanny, that which the nanny started; or the scheduler's."""
        own = self._processes[name].pid
        if name not in self._nannies:
            return own
        for thread in Path(f"/proc/{own}/task").iterdir():  # any of its threads may have started it
            for child in _read(thread / "children").split():
                if b"spawn_main" in _read(Path(f"/proc/{int(child)}/cmdline")):
                    return int(child)
        raise ProcessLookupError(f"{name} has no process just now")

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process that computes: SIGKILL, SIGSTOP, SIGCONT ..."""
        os.kill(self.pid(name), number)

    def ended(self, name: str) -> int:
        """Wait until a process (with a nanny, the nanny) has ended; its return code."""
        return self._processes[name].wait(TIMEOUT)

    def given_up(self, name: str) -> None:
        """Have the scheduler take a worker for dead, as it does with one that has been silent for its ttl."""
        from distributed import Client

        async def remove(dask_scheduler: Any) -> None:
            [worker] = [one for one in dask_scheduler.workers.values() if one.name == name]
            await dask_scheduler.remove_worker(worker.address, stimulus_id="silent")

        with Client(self.address, timeout=TIMEOUT) as client:
            client.run_on_scheduler(remove)

    def alive(self, name: str) -> bool:
        """Whether a process (with a nanny, the nanny) still runs."""
        return self._processes[name].poll() is None

    def wait_until_stopped(self, name: str) -> None:
        """Until a process has stopped itself (killpoint.c)."""
        stat = Path(f"/proc/{self.pid(name)}/stat")
        _wait(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", self, name)

    def _start(self, name: str, words: list[str], env: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        assert name not in self._processes, f"there is a {name} already"
        host = ["--host", "127.0.0.1", "--scheduler-file", str(self.file)]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*KEEPER, *prefix, *DASK, *words, *host],
                env={**os.environ, **self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _read(path: Path) -> bytes:
    """What /proc says, nothing of what ended just now."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return path.read_bytes()
    return b""


def _wait(done: Callable[[], bool], cluster: Cluster, name: str) -> None:
    """Until done(); fails where the process has ended, or takes too long."""
    until = time.monotonic() + TIMEOUT
    while not done():
        assert cluster.alive(name) and time.monotonic() < until, f"{name} did not come up:\n{cluster.log(name)}"
        time.sleep(0.01)


def certificates(folder: Path) -> Path:
    """Make a key and a certificate that vouches for itself: ca.pem and key.pem. Each call makes others."""
    from distributed.security import Security

    made = Security.temporary()
    folder.mkdir(parents=True)
    (folder / "ca.pem").write_text(str(made.tls_ca_file))
    (folder / "key.pem").write_text(str(made.tls_client_key))
    return folder


def tls_environment(folder: Path) -> dict[str, str]:
    """Dask's own settings for TLS, as environment: who holds these certificates is let in, nobody else."""
    at = "DASK_DISTRIBUTED__COMM__"
    roles = {f"{at}TLS__{role}__CERT": str(folder / "ca.pem") for role in ROLES}
    roles |= {f"{at}TLS__{role}__KEY": str(folder / "key.pem") for role in ROLES}
    return {f"{at}REQUIRE_ENCRYPTION": "true", f"{at}TLS__CA_FILE": str(folder / "ca.pem"), **roles}


def other_version(folder: Path, version: str) -> dict[str, str]:
    """The environment of a worker that has this version of ktconvert, whose code is otherwise the one under test."""
    folder.mkdir()
    program = f"import ktconvert.pipeline\nktconvert.pipeline.__version__ = {version!r}\n"
    (folder / "sitecustomize.py").write_text(program)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def cluster(scheduler: Cluster) -> Iterator[Cluster]:
    """A cluster whose workers end with the test; it has none to begin with."""
    yield scheduler
    scheduler.end_workers()
