"""The rig's own clusters: what tests of many machines stand on. Real processes, addressed by name."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rig.dask_cluster import TIMEOUT, Cluster

Start = Callable[..., Cluster]


def test_nothing_outlives_whoever_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, os, signal; sys.path.insert(0, sys.argv[2])\n"
        "from rig.dask_cluster import Cluster\n"
        "cluster = Cluster(pathlib.Path(sys.argv[1])).start('a', nanny=True)\n"
        "print(cluster.nanny('a'), cluster.pid('a'), cluster.pid('scheduler'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    rig = Path(__file__).parent
    command = [sys.executable, "-c", code, str(tmp_path / "cluster"), str(rig)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL
    pids = done.stdout.split()
    assert len(pids) == 3
    wait(lambda: not any(running(int(pid)) for pid in pids))


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait(done: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_worker_that_does_not_come_up_fails_with_its_log(dask_cluster: Start) -> None:
    cluster = dask_cluster()
    with pytest.raises(AssertionError, match="at least one process"):
        cluster.start("a", words=("--nworkers", "0"))
