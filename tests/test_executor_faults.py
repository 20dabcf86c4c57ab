"""What may happen to workers, their scheduler and the coordinator: the finished output is byte for byte that of threads, or
there is one sentence, and all can be resumed.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rig import conversion, forks, killpoint, shims
from rig.dask_cluster import Cluster

UNITS = 4


@dataclass
class Setting:
    """A source, what threads make of it, and coordinators that need not be started."""

    source: Path
    wanted: Any
    shim: Path
    servers: forks.Forks
    pool: ThreadPoolExecutor

    def begin(self, output: Path, cluster: Cluster, *words: str, env: dict[str, str] | None = None) -> Future[Any]:
        """A conversion with the cluster's workers, in the background."""
        return self.pool.submit(self.run, "cpu", "-i", self.source, "-o", output, *at(cluster), *words, env=env)

    def run(self, *words: str | Path, env: dict[str, str] | None = None) -> Any:
        output = Path(words[words.index("-o") + 1] if "-o" in words else words[1])
        log = output.parent.parent / f"{output.parent.name}-{time.monotonic_ns()}.said"
        return self.servers.run(words, log, env)

    def finished(self, done: Any, output: Path) -> None:
        """The output is that of threads, and nothing lies beside it."""
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert conversion.find_differences(conversion.tree(output), self.wanted) == []
        assert conversion.names(output.parent) == [output.name]

    def resumed(self, output: Path, *words: str) -> None:
        """Resume by threads, or with the given words, and compare."""
        self.finished(self.run("resume", output, *words), output)

    def stopping(self, output: Path, unit: str = "", call: int = 2, number: int = signal.SIGSTOP) -> dict[str, str]:
        """The environment of a worker that stops, or sends itself another signal, in the middle of a unit."""
        return killpoint.signal_environment(self.shim, f"{output}.work/partial/experts.{unit}", call, number)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    base = tmp_path_factory.mktemp("setting")
    source = conversion.checkpoint(base / "source", layers=UNITS)
    done = conversion.ktconvert("cpu", "-i", source, "-o", base / "whole", "-q")
    assert done.returncode == 0, done.stderr
    wanted = conversion.tree(base / "whole")
    with forks.Forks([], 2, modules=("distributed",)) as servers, ThreadPoolExecutor(2) as pool:
        yield Setting(source, wanted, killpoint.build(base), servers, pool)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "o").mkdir()
    return tmp_path / "o" / "out"


def at(cluster: Cluster) -> tuple[str, str]:
    return "--executor", f"dask:{cluster.file}"


def book(output: Path) -> list[dict[str, Any]]:
    return conversion.parse_events((output.with_name(f"{output.name}.work") / "journal.jsonl").read_text())


def of(records: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [record for record in records if record.get("event") == event]


def wait(done: Callable[[], bool], seconds: float = conversion.TIMEOUT) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_worker_killed_in_the_middle_of_a_unit(setting: Setting, cluster: Cluster, output: Path) -> None:
    cluster.start("a", env={**setting.stopping(output), "KTCONVERT_HOST": "a"})
    coordinator = setting.begin(output, cluster, "--json")
    cluster.wait_until_stopped("a")
    cluster.start("b", env={"KTCONVERT_HOST": "b"})
    cluster.send("a", signal.SIGKILL)
    done = coordinator.result()
    setting.finished(done, output)
    said = conversion.parse_events(done.stderr)
    assert {event["host"] for event in of(said, "done")} == {"b"}
    [lost] = of(said, "lost")
    assert (lost["host"], lost["pid"]) == ("a", cluster.pid("a"))
    begun = {event["attempt"] for event in of(said, "start")}
    assert begun == {event["attempt"] for kind in ("done", "lost") for event in of(said, kind)}
    assert len(begun) == UNITS + 1


@pytest.mark.parametrize("loose", [False, pytest.param(True, marks=pytest.mark.long)], ids=["merged", "loose"])
def test_a_worker_frozen_until_after_the_end(setting: Setting, cluster: Cluster, output: Path, loose: bool) -> None:
    words = ("--no-merge-safetensor",) if loose else ()
    cluster.start("a", env=setting.stopping(output, call=5))
    coordinator = setting.begin(output, cluster, *words)
    cluster.wait_until_stopped("a")
    cluster.start("b")
    cluster.remove_silent_worker("a")
    done = coordinator.result()
    assert done.returncode == 0, done.stderr
    before = conversion.tree(output.parent)
    cluster.send("a", signal.SIGCONT)
    assert cluster.wait_for_end("a") == 0
    assert conversion.tree(output.parent) == before
    assert conversion.names(output.parent) == ["out"]
    if not loose:
        setting.finished(done, output)


def test_units_that_end_their_workers(setting: Setting, cluster: Cluster, output: Path, tmp_path: Path) -> None:
    """They fail with their names, the host, and what Python said, and take no other with them: Dask gives a task up when
    four workers have died that were to make it, whether they had begun it or not."""
    killed = setting.stopping(output, "layer-000", number=signal.SIGKILL)
    crash = shims.build_crashing(tmp_path, "layer-001")
    env = killed | {"LD_PRELOAD": f"{crash}:{setting.shim}", "KTCONVERT_HOST": "mortal"}
    cluster.start("a", nanny=True, env=env)
    done = setting.begin(output, cluster).result()
    words = ("ktconvert: experts.layer-00", ": 3 processes that made it ended", "on mortal, process ")
    conversion.check_refusal(done, 1, *words)
    for unit, words in (("000", "no traceback"), ("001", "Segmentation fault")):
        assert re.search(rf"warning: experts\.layer-{unit}: 3 processes .* on mortal, .*{words}", done.stderr)
    records = book(output)
    assert sorted(r["unit"] for r in of(records, "done")) == ["experts.layer-002", "experts.layer-003"]
    begun = {r["attempt"]: r["at"] for r in of(records, "start")}
    lost = of(records, "lost")
    assert sorted(r["unit"] for r in lost) == ["experts.layer-000"] * 3 + ["experts.layer-001"] * 3
    assert all(begun[r["attempt"]] < r["at"] for r in lost)
    setting.resumed(output)


@pytest.mark.long
def test_workers_that_end_before_they_begin(setting: Setting, cluster: Cluster, output: Path) -> None:
    """There is no attempt on record: Dask gives them up, several times."""
    dying = {**setting.stopping(output, call=1, number=signal.SIGKILL), "KILLPOINT_ROOT": f"{output}.work/attempts/"}
    cluster.start("a", nanny=True, env=dying)
    done = setting.begin(output, cluster).result()
    conversion.check_refusal(
        done, 1, "experts.layer-00", "the workers that were to make it ended again and again", "tcp://"
    )
    setting.resumed(output)


def test_a_disk_that_is_full_for_a_worker(setting: Setting, cluster: Cluster, output: Path, tmp_path: Path) -> None:
    full = shims.build(tmp_path, "full", Path(forks.__file__).with_name("full.c").read_text())
    env = {"FULL_ROOT": f"{output}.work/partial/", "FULL_N": "9", "LD_PRELOAD": str(full), "KTCONVERT_HOST": "tiny"}
    cluster.start("a", env=env)
    done = setting.begin(output, cluster).result()
    conversion.check_refusal(done, 4, "host tiny: ", "No space left on device", "run the command again")
    assert of(book(output), "failed")[0]["host"] == "tiny"
    partial = output.with_name("out.work") / "partial"
    wait(lambda: conversion.names(partial) == [])  # it may have begun another unit before that was taken back
    setting.resumed(output)


def test_all_workers_vanish(setting: Setting, cluster: Cluster, output: Path) -> None:
    """One is killed in the middle of a unit, one is frozen, which Dask notices after minutes only."""
    cluster.start("a", "b", env=setting.stopping(output))
    coordinator = setting.begin(output, cluster, "--executor-timeout", "8", "--json")
    cluster.wait_until_stopped("a")
    cluster.wait_until_stopped("b")
    cluster.send("a", signal.SIGKILL)
    done = coordinator.result()
    conversion.check_refusal(
        done, 1, "nothing was heard of any worker", "--executor-timeout", f"ktconvert resume {output}"
    )
    [told] = [e["text"] for e in of(conversion.parse_events(done.stderr), "note") if "nothing was heard" in e["text"]]
    assert "start one on each host: dask worker" in told and "the command ends in 4.0 s" in told
    cluster.send("b", signal.SIGKILL)
    setting.resumed(output)


def orphans(setting: Setting, cluster: Cluster, output: Path) -> set[str]:
    """The attempts that two workers finished after their coordinator was killed: one each, or more. No worker is left then."""
    cluster.start("a", "b", env=setting.stopping(output))
    command = [*conversion.KTCONVERT, "cpu", "-i", str(setting.source), "-o", str(output), *at(cluster)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    cluster.wait_until_stopped("a")
    cluster.wait_until_stopped("b")
    process.kill()
    process.wait()
    for name in ("a", "b"):
        cluster.send(name, signal.SIGCONT)

    def finished() -> set[str]:
        records = output.with_name("out.work").glob("attempts/experts*.json")
        return {path.stem for path in records if b'"result": null' not in path.read_bytes()}

    wait(lambda: len(finished()) >= 2)
    for name in ("a", "b"):
        cluster.send(name, signal.SIGKILL)
        cluster.wait_for_end(name)
    return finished()


def test_a_killed_coordinator_and_one_on_another_host(setting: Setting, cluster: Cluster, output: Path) -> None:
    """What workers finished meanwhile is adopted, by an executor and by threads."""
    made = orphans(setting, cluster, output)
    other = output.parent.parent / "p" / "out"
    other.parent.mkdir()
    shutil.copytree(output.with_name("out.work"), other.with_name("out.work"))
    cluster.start("c")
    again = [
        setting.pool.submit(setting.run, "resume", output, *at(cluster), "--json", env={"KTCONVERT_HOST": "elsewhere"}),
        setting.pool.submit(setting.run, "resume", other, "--json", env={"KTCONVERT_HOST": "elsewhere"}),
    ]
    for done, place in zip([future.result() for future in again], (output, other), strict=True):
        setting.finished(done, place)
        said = conversion.parse_events(done.stderr)
        assert {event.get("attempt") for event in of(said, "done")} >= made
        assert len(of(said, "start")) == UNITS - len(made)
        [note] = [event for event in of(said, "note") if "died" in event["text"]]
        assert f"{len(made)} of {UNITS} units are finished" in note["text"]


def test_a_killed_scheduler(setting: Setting, output: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start("a", env=setting.stopping(output))
        coordinator = setting.begin(output, cluster)
        cluster.wait_until_stopped("a")
        cluster.send("scheduler", signal.SIGKILL)
        cluster.send("a", signal.SIGCONT)
        conversion.check_refusal(coordinator.result(), 1, "scheduler", f"ktconvert resume {output}")
    setting.resumed(output)


@pytest.mark.parametrize(("times", "workers"), [(1, 2), (2, 1)])
def test_ctrl_c_in_a_terminal(setting: Setting, output: Path, tmp_path: Path, times: int, workers: int) -> None:
    """It goes to all processes that were started there. No unit ends before the others were taken back."""
    gate, address, preload = tmp_path / "gate", tmp_path / "address", tmp_path / "preload.py"
    preload.write_text(f"def dask_setup(scheduler):\n    open({str(address)!r}, 'w').write(scheduler.address)\n")
    env = {**os.environ, "DASK_DISTRIBUTED__SCHEDULER__PRELOAD": str([str(preload)])}
    env["LD_PRELOAD"] = str(shims.build_waiting(tmp_path, gate))
    where = ["-i", str(setting.source), "-o", str(output), "--executor", f"dask:local:{workers}"]
    command = [*conversion.KTCONVERT, "cpu", *where]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    work = output.with_name("out.work")
    wait(lambda: len(list(work.glob("partial/experts.*"))) == workers)
    assert process.stderr is not None
    said = ""
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        for line in process.stderr:
            said += line
            if "finishing" in line:
                break
    if times == 1:
        wait(lambda: tasks_of_workers(address.read_text()) == [1, 1])
    else:
        process.wait(conversion.TIMEOUT)
    gate.touch()
    stderr = said + process.communicate(timeout=conversion.TIMEOUT)[1]
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert ("stopped at once" in stderr) == (times == 2), stderr
    wait(lambda: not alive(process.pid))
    units = len(of(book(output), "done"))
    assert units == (workers if times == 1 else 0), stderr
    setting.resumed(output)


def test_verify_is_interrupted_while_it_waits_for_workers(setting: Setting, cluster: Cluster, tmp_path: Path) -> None:
    from distributed import Client

    command = [*conversion.KTCONVERT, "verify", setting.source.with_name("whole"), *at(cluster)]
    process = subprocess.Popen(command, env={**os.environ, **cluster.env}, stderr=subprocess.PIPE, text=True)
    with Client(cluster.address, timeout=conversion.TIMEOUT) as client:  # there is no worker to run its tasks
        wait(lambda: client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) > 0)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=conversion.TIMEOUT)
    assert process.returncode == 130, stderr
    assert "the executor has lost it" not in stderr


def tasks_of_workers(scheduler: str) -> list[int]:
    """How many tasks each worker has, those that it is to begin among them."""
    from distributed import Client

    with Client(scheduler, timeout=conversion.TIMEOUT) as client:
        return sorted(client.run(lambda dask_worker: len(dask_worker.state.tasks)).values())


def alive(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, own, *_ = path.read_text().rpartition(")")[2].split()
            found += [int(path.parent.name)] if int(own) == session and state != "Z" else []
    return found
