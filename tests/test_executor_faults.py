"""Faults of workers, their scheduler and the coordinator.

The finished output has the same bytes as with threads, or one sentence reports the fault and the run can be resumed.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
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
    """A source, the files that threads make of it, and server processes for coordinators."""

    source: Path
    expected: Any
    shim: Path
    servers: forks.Forks
    pool: ThreadPoolExecutor

    def begin(self, output: Path, cluster: Cluster, *options: str, env: dict[str, str] | None = None) -> Future[Any]:
        """Start a conversion with the cluster's workers in the background."""
        return self.pool.submit(
            self.run, "cpu", "-i", self.source, "-o", output, *executor_option(cluster), *options, env=env
        )

    def run(self, *arguments: str | Path, env: dict[str, str] | None = None) -> Any:
        output = Path(arguments[arguments.index("-o") + 1] if "-o" in arguments else arguments[1])
        log = output.parent.parent / f"{output.parent.name}-{time.monotonic_ns()}.log"
        return self.servers.run(arguments, log, env)

    def check_finished(self, done: Any, output: Path) -> None:
        """Require that the output equals that of threads, and that no other file is beside it."""
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert conversion.find_differences(conversion.tree(output), self.expected) == []
        assert conversion.names(output.parent) == [output.name]

    def resume_and_check(self, output: Path, *options: str) -> None:
        """Resume with threads, or with the given options, and check the output."""
        self.check_finished(self.run("resume", output, *options), output)

    def signal_environment(
        self, output: Path, unit: str = "", call: int = 2, number: int = signal.SIGSTOP
    ) -> dict[str, str]:
        """Return the environment of a worker that stops, or sends itself another signal, during a unit."""
        return killpoint.signal_environment(self.shim, f"{output}.work/partial/experts.{unit}", call, number)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    base = tmp_path_factory.mktemp("setting")
    source = conversion.checkpoint(base / "source", layers=UNITS)
    result = conversion.ktconvert("cpu", "-i", source, "-o", base / "expected", "-q")
    assert result.returncode == 0, result.stderr
    expected = conversion.tree(base / "expected")
    with forks.Forks([], modules=("distributed",)) as servers, ThreadPoolExecutor(2) as pool:
        yield Setting(source, expected, killpoint.build(base), servers, pool)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "o").mkdir()
    return tmp_path / "o" / "out"


def executor_option(cluster: Cluster) -> tuple[str, str]:
    return "--executor", f"dask:{cluster.file}"


def read_journal(output: Path) -> list[dict[str, Any]]:
    return conversion.parse_events((output.with_name(f"{output.name}.work") / "journal.jsonl").read_text())


def select(records: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """Return the records of an event."""
    return [record for record in records if record.get("event") == event]


def wait(condition: Callable[[], bool], seconds: float = conversion.TIMEOUT) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_unit_of_a_killed_worker_is_made_by_another(setting: Setting, cluster: Cluster, output: Path) -> None:
    cluster.start("a", env={**setting.signal_environment(output), "KTCONVERT_HOST": "a"})
    coordinator = setting.begin(output, cluster, "--json")
    cluster.wait_until_stopped("a")
    cluster.start("b", env={"KTCONVERT_HOST": "b"})
    cluster.send("a", signal.SIGKILL)
    result = coordinator.result()
    setting.check_finished(result, output)
    events = conversion.parse_events(result.stderr)
    assert {event["host"] for event in select(events, "done")} == {"b"}
    [lost] = select(events, "lost")
    assert (lost["host"], lost["pid"]) == ("a", cluster.pid("a"))
    started = {event["attempt"] for event in select(events, "start")}
    assert started == {event["attempt"] for kind in ("done", "lost") for event in select(events, kind)}
    assert len(started) == UNITS + 1


@pytest.mark.parametrize("loose", [False, pytest.param(True, marks=pytest.mark.long)], ids=["merged", "loose"])
def test_a_worker_that_wakes_after_the_end_changes_nothing(
    setting: Setting, cluster: Cluster, output: Path, loose: bool
) -> None:
    options = ("--no-merge-safetensor",) if loose else ()
    cluster.start("a", env=setting.signal_environment(output, call=5))
    coordinator = setting.begin(output, cluster, *options)
    cluster.wait_until_stopped("a")
    cluster.start("b")
    cluster.remove_silent_worker("a")
    result = coordinator.result()
    assert result.returncode == 0, result.stderr
    before = conversion.tree(output.parent)
    cluster.send("a", signal.SIGCONT)
    assert cluster.wait_for_end("a") == 0
    assert conversion.tree(output.parent) == before
    assert conversion.names(output.parent) == ["out"]
    if not loose:
        setting.check_finished(result, output)


def test_units_that_kill_their_workers_fail_with_a_reason(
    setting: Setting, cluster: Cluster, output: Path, tmp_path: Path
) -> None:
    """The message has the unit, the host and Python's traceback, and other units finish.

    Dask gives a task up when four workers that were assigned to it have died, even if they had not begun it.
    """
    killed = setting.signal_environment(output, "layer-000", number=signal.SIGKILL)
    crash = shims.build_crashing(tmp_path, "layer-001")
    env = killed | {"LD_PRELOAD": f"{crash}:{setting.shim}", "KTCONVERT_HOST": "mortal"}
    cluster.start("a", nanny=True, env=env)
    result = setting.begin(output, cluster).result()
    messages = ("ktconvert: experts.layer-00", ": 3 processes ended", "on mortal, process ")
    conversion.check_refusal(result, 1, *messages)
    for unit, reason in (("000", "no traceback"), ("001", "Segmentation fault")):
        assert re.search(rf"warning: experts\.layer-{unit}: 3 processes .* on mortal, .*{reason}", result.stderr)
    records = read_journal(output)
    assert sorted(r["unit"] for r in select(records, "done")) == ["experts.layer-002", "experts.layer-003"]
    started = {r["attempt"]: r["at"] for r in select(records, "start")}
    lost = select(records, "lost")
    assert sorted(r["unit"] for r in lost) == ["experts.layer-000"] * 3 + ["experts.layer-001"] * 3
    assert all(started[r["attempt"]] < r["at"] for r in lost)
    setting.resume_and_check(output)


@pytest.mark.long
def test_workers_that_die_before_a_unit_starts_are_reported(setting: Setting, cluster: Cluster, output: Path) -> None:
    """No attempt is on record: Dask gives the units up several times."""
    dying = {
        **setting.signal_environment(output, call=1, number=signal.SIGKILL),
        "KILLPOINT_ROOT": f"{output}.work/attempts/",
    }
    cluster.start("a", nanny=True, env=dying)
    result = setting.begin(output, cluster).result()
    conversion.check_refusal(result, 1, "experts.layer-00", "its workers ended repeatedly", "tcp://")
    setting.resume_and_check(output)


def test_a_full_disk_of_a_worker_is_reported_with_its_host(
    setting: Setting, cluster: Cluster, output: Path, tmp_path: Path
) -> None:
    full = shims.build(tmp_path, "full", Path(forks.__file__).with_name("full.c").read_text())
    env = {"FULL_ROOT": f"{output}.work/partial/", "FULL_N": "9", "LD_PRELOAD": str(full), "KTCONVERT_HOST": "tiny"}
    cluster.start("a", env=env)
    result = setting.begin(output, cluster).result()
    conversion.check_refusal(result, 4, "host tiny: ", "No space left on device", "run the command again")
    assert select(read_journal(output), "failed")[0]["host"] == "tiny"
    partial = output.with_name("out.work") / "partial"
    wait(lambda: conversion.names(partial) == [])  # the worker may have started another unit before it was cancelled
    setting.resume_and_check(output)


def test_a_run_without_workers_ends_after_the_timeout(setting: Setting, cluster: Cluster, output: Path) -> None:
    """One worker is killed during a unit; the other is frozen, which Dask only notices after minutes."""
    cluster.start("a", "b", env=setting.signal_environment(output))
    coordinator = setting.begin(output, cluster, "--executor-timeout", "8", "--json")
    cluster.wait_until_stopped("a")
    cluster.wait_until_stopped("b")
    cluster.send("a", signal.SIGKILL)
    result = coordinator.result()
    conversion.check_refusal(result, 1, "no worker has answered", "--executor-timeout", "run the same command again")
    [warning] = [
        e["text"]
        for e in select(conversion.parse_events(result.stderr), "warning")
        if "no worker has answered" in e["text"]
    ]
    assert "start one on each host: dask worker" in warning and "the command ends in 4.0 s" in warning
    cluster.send("b", signal.SIGKILL)
    setting.resume_and_check(output)


LEAVE_TASKS = """
import sys
from ktconvert.pipeline.engine import dask_executor
for _ in range(40):
    with dask_executor.connect(sys.argv[1], lambda warning: None) as executor:
        for _ in range(8):
            executor.submit(int, "3")
"""


def test_a_process_that_leaves_tasks_to_a_scheduler_ends(cluster: Cluster) -> None:
    """Dask cancels them while it closes the client, which may then never answer a thread that asks for their results."""
    command = [sys.executable, "-c", LEAVE_TASKS, cluster.address]
    subprocess.run(command, env={**os.environ, **cluster.env}, timeout=conversion.TIMEOUT, check=True)


def make_orphans(setting: Setting, cluster: Cluster, output: Path) -> set[str]:
    """Kill the coordinator of two workers, let each finish its unit, and kill the workers.

    Return the names of the finished attempts.
    """
    cluster.start("a", "b", env=setting.signal_environment(output))
    command = [*conversion.KTCONVERT, "cpu", "-i", str(setting.source), "-o", str(output), *executor_option(cluster)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    cluster.wait_until_stopped("a")
    cluster.wait_until_stopped("b")
    process.kill()
    process.wait()
    for name in ("a", "b"):
        cluster.send(name, signal.SIGCONT)

    def finished_attempts() -> set[str]:
        records = output.with_name("out.work").glob("attempts/experts*.json")
        return {path.stem for path in records if b'"result": null' not in path.read_bytes()}

    wait(lambda: len(finished_attempts()) >= 2)
    for name in ("a", "b"):
        cluster.send(name, signal.SIGKILL)
        cluster.wait_for_end(name)
    return finished_attempts()


def test_resume_on_a_different_host_adopts_finished_units(setting: Setting, cluster: Cluster, output: Path) -> None:
    """Resuming with an executor and with threads adopts the units that workers finished."""
    finished = make_orphans(setting, cluster, output)
    other = output.parent.parent / "p" / "out"
    other.parent.mkdir()
    shutil.copytree(output.with_name("out.work"), other.with_name("out.work"))
    cluster.start("c")
    resumed = [
        setting.pool.submit(
            setting.run, "resume", output, *executor_option(cluster), "--json", env={"KTCONVERT_HOST": "elsewhere"}
        ),
        setting.pool.submit(setting.run, "resume", other, "--json", env={"KTCONVERT_HOST": "elsewhere"}),
    ]
    for result, folder in zip([future.result() for future in resumed], (output, other), strict=True):
        setting.check_finished(result, folder)
        events = conversion.parse_events(result.stderr)
        assert {event.get("attempt") for event in select(events, "done")} >= finished
        assert len(select(events, "start")) == UNITS - len(finished)
        [note] = [event for event in select(events, "note") if "was stopped" in event["text"]]
        assert f"{len(finished)} of {UNITS} units finished" in note["text"]


def test_a_killed_scheduler_is_reported_and_the_run_can_be_resumed(
    setting: Setting, output: Path, tmp_path: Path
) -> None:
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.start("a", env=setting.signal_environment(output))
        coordinator = setting.begin(output, cluster)
        cluster.wait_until_stopped("a")
        cluster.send("scheduler", signal.SIGKILL)
        cluster.send("a", signal.SIGCONT)
        conversion.check_refusal(coordinator.result(), 1, "scheduler", "run the same command again")
    setting.resume_and_check(output)


@pytest.mark.parametrize(("times", "workers"), [(1, 2), (2, 1)])
def test_ctrl_c_finishes_started_units_and_twice_stops_at_once(
    setting: Setting, output: Path, tmp_path: Path, times: int, workers: int
) -> None:
    """A terminal sends Ctrl-C to all processes started in it. No unit ends before the others are cancelled."""
    gate, address, preload = tmp_path / "gate", tmp_path / "address", tmp_path / "preload.py"
    preload.write_text(f"def dask_setup(scheduler):\n    open({str(address)!r}, 'w').write(scheduler.address)\n")
    env = {**os.environ, "DASK_DISTRIBUTED__SCHEDULER__PRELOAD": str([str(preload)])}
    env["LD_PRELOAD"] = str(shims.build_waiting(tmp_path, gate))
    arguments = ["-i", str(setting.source), "-o", str(output), "--executor", f"dask:local:{workers}"]
    command = [*conversion.KTCONVERT, "cpu", *arguments]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    work = output.with_name("out.work")
    wait(lambda: len(list(work.glob("partial/experts.*"))) == workers)
    assert process.stderr is not None
    messages = ""
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        for line in process.stderr:
            messages += line
            if "finishing" in line:
                break
    if times == 1:
        wait(lambda: count_tasks_of_workers(address.read_text()) == [1, 1])
    else:
        process.wait(conversion.TIMEOUT)
    gate.touch()
    stderr = messages + process.communicate(timeout=conversion.TIMEOUT)[1]
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert ("stopped at once" in stderr) == (times == 2), stderr
    wait(lambda: not processes_of_session(process.pid))
    units = len(select(read_journal(output), "done"))
    assert units == (workers if times == 1 else 0), stderr
    setting.resume_and_check(output)


def test_verify_can_be_interrupted_while_it_waits_for_workers(
    setting: Setting, cluster: Cluster, tmp_path: Path
) -> None:
    from distributed import Client

    command = [*conversion.KTCONVERT, "verify", setting.source.with_name("expected"), *executor_option(cluster)]
    process = subprocess.Popen(command, env={**os.environ, **cluster.env}, stderr=subprocess.PIPE, text=True)
    with Client(cluster.address, timeout=conversion.TIMEOUT) as client:  # there is no worker to run its tasks
        wait(lambda: client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) > 0)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=conversion.TIMEOUT)
    assert process.returncode == 130, stderr
    assert "lost by the executor" not in stderr


def count_tasks_of_workers(scheduler: str) -> list[int]:
    """Return the number of tasks of each worker, including tasks that it has not started; [] if Dask does not answer."""
    from distributed import Client

    try:
        with Client(scheduler, timeout=conversion.TIMEOUT) as client:
            return sorted(client.run(lambda dask_worker: len(dask_worker.state.tasks)).values())
    except AssertionError:  # its client expects that a busy scheduler sends one message at a time
        return []


def processes_of_session(session: int) -> list[int]:
    """Return the numbers of the processes of a session, without zombies."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, process_session, *_ = path.read_text().rpartition(")")[2].split()
            processes += [int(path.parent.name)] if int(process_session) == session and state != "Z" else []
    return processes
