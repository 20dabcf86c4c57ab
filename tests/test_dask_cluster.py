"""The rig's own clusters: what tests of many machines stand on. Real processes, addressed by name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.dask_cluster import TIMEOUT, Cluster, certificates, other_version, tls_environment

Start = Callable[..., Cluster]


@contextlib.contextmanager
def connected(cluster: Cluster) -> Iterator[Any]:
    from distributed import Client

    with Client(cluster.address, timeout=TIMEOUT) as client:
        yield client


def named(client: Any) -> dict[str, str]:
    """Worker's name -> its address."""
    return {info["name"]: address for address, info in client.scheduler_info(n_workers=-1)["workers"].items()}


def test_workers_have_names_environments_and_versions_of_their_own(tmp_path: Path, dask_cluster: Start) -> None:
    cluster = dask_cluster().start("a", env={"KTCONVERT_HOST": "a"})
    cluster.start("old", env=other_version(tmp_path / "old", "0.0.1"))

    def who() -> tuple[int, str | None, str]:
        from ktconvert.pipeline import __version__

        return os.getpid(), os.environ.get("KTCONVERT_HOST"), __version__

    from ktconvert.pipeline import __version__

    with connected(cluster) as client:
        said = client.run(who)
        at = named(client)
    assert said[at["a"]] == (cluster.pid("a"), "a", __version__)
    assert said[at["old"]] == (cluster.pid("old"), None, "0.0.1")


def test_a_killed_worker_is_gone_and_a_nanny_starts_it_again(dask_cluster: Start) -> None:
    cluster = dask_cluster("kept", nanny=True).start("alone")
    before = cluster.pid("kept")
    assert before != cluster.nanny("kept")
    cluster.send("alone", signal.SIGKILL)
    assert cluster.ended("alone") == -signal.SIGKILL
    cluster.send("kept", signal.SIGKILL)
    cluster.wait_until_known("kept", 2)
    assert cluster.alive("kept") and cluster.pid("kept") != before


@pytest.mark.long
def test_a_frozen_worker_is_given_up_after_the_ttl_and_ends_when_it_wakes(dask_cluster: Start) -> None:
    """Dask gives one up after ten heartbeats at the earliest, five seconds for two workers, whatever the ttl says."""
    cluster = dask_cluster("a", "b", ttl="1s")
    with connected(cluster) as client:
        cluster.send("a", signal.SIGSTOP)
        wait(lambda: set(named(client)) == {"b"})
        cluster.send("a", signal.SIGCONT)
        assert cluster.ended("a") == 0
        assert set(named(client)) == {"b"}


def test_only_who_holds_the_certificates_is_let_in(tmp_path: Path, dask_cluster: Start) -> None:
    ours, theirs = certificates(tmp_path / "ours"), certificates(tmp_path / "theirs")
    cluster = dask_cluster("a", tls=ours)
    assert cluster.address.startswith("tls://127.0.0.1:")
    ask = (
        "import sys; from distributed import Client\n"
        "print(Client(sys.argv[1], timeout=sys.argv[2]).submit(abs, -7).result())"
    )
    asked = [
        subprocess.Popen(
            [sys.executable, "-c", ask, cluster.address, f"{TIMEOUT}s" if env is cluster.env else "2s"],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for env in (cluster.env, tls_environment(theirs), {})
    ]
    said = [process.communicate(timeout=300)[0] for process in asked]
    assert said == ["7\n", "", ""]
    assert [process.returncode == 0 for process in asked] == [True, False, False]


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
