"""ktconvert status: what a work directory tells, while a conversion runs and after it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import OutputError
from ktconvert.pipeline.engine import journal, lock
from rig import conversion
from rig.bench import Bench


def status(bench: Bench, *options: str, code: int = 0) -> Any:
    done = bench.run("status", bench.output, "--json", *options)
    assert done.returncode == code, done.stderr
    return json.loads(done.stderr) if code == 0 else done.stderr  # the rig joins both streams


def test_nothing_was_begun(bench: Bench) -> None:
    assert "no conversion into it was begun" in status(bench, code=OutputError.exit_code)


def test_a_finished_output(bench: Bench) -> None:
    assert bench.cpu().returncode == 0
    assert status(bench) == {"output": str(bench.output), "state": "finished"}
    assert bench.run("status", bench.output, "--watch").stderr == f"{bench.output} is finished\n"


def test_a_conversion_that_was_killed(bench: Bench) -> None:
    bench.stop_after(2)
    found = status(bench)
    assert (found["state"], found["done"], found["units"], found["making"]) == ("stopped", 2, 3, [])
    assert [share["units"] for share in found["by"].values()] == [2]
    said = bench.run("status", bench.output).stderr
    assert "stopped: 2 of 3 units done" in said
    assert f"`ktconvert resume {bench.output}` goes on" in said
    assert bench.run("resume", bench.output).returncode == 0


def spoil(bench: Bench) -> None:
    """Let the last weight of layer 1 be infinite."""
    shard = bench.source / "model-00002-of-00004.safetensors"
    data = bytearray(shard.read_bytes())
    data[-2:] = b"\x80\x7f"
    shard.write_bytes(data)


def test_why_a_run_ended(bench: Bench) -> None:
    spoil(bench)
    assert bench.cpu().returncode == 5
    assert "layer 1" in status(bench)["ended"]


def test_parts(bench: Bench) -> None:
    assert bench.cpu("--part", "0/2").returncode == 0
    found = status(bench)
    assert (found["state"], found["done"], found["units"], found["failed"]) == ("stopped", 2, 3, [])
    (share,) = found["by"].values()
    assert share["units"] == 2
    assert share["bytes"] == found["bytes"] > 0


def test_a_part_that_failed(bench: Bench) -> None:
    spoil(bench)
    assert bench.cpu("--part", "1/3").returncode == 5
    assert bench.cpu("--part", "0/3").returncode == 0
    found = status(bench)
    (failed,) = found["failed"]
    assert (found["done"], failed["unit"]) == (1, "cpu_experts.layer-001")
    assert "layer 1" in failed["why"]


def test_a_part_between_two_units(bench: Bench) -> None:
    assert bench.cpu("--part", "0/2").returncode == 0
    held = lock.acquire(bench.work, bench.output, lock.Part(1, 2))
    assert status(bench)["state"] == "running"
    held.release()
    assert status(bench)["state"] == "stopped"


def test_files_that_hold_anything(bench: Bench) -> None:
    bench.stop_after(1)
    book = bench.work / "journal.jsonl"
    run = {"event": "run", "pid": 1, "process": "\ud800", "at": float("nan")}
    with book.open("a") as file:
        for record in (run, {"event": "start", "unit": "\x1b[2J\ud800", "at": 10**400}):
            file.write(json.dumps(record) + "\n")
    found = status(bench)
    assert found["state"] == "running"
    said = bench.run("status", bench.output)
    assert said.returncode == 0 and "\x1b" not in said.stderr


def stopped_within_a_unit(bench: Bench, source: Path) -> subprocess.Popen[bytes]:
    """A conversion that was told to stand still while it makes a unit."""
    line = [sys.executable, "-m", "ktconvert.pipeline.cli", "cpu", "-i", source, "-o", bench.output]
    for _ in range(50):
        running = subprocess.Popen([*line, "--cpuinfer-threads", "1", "-q", "--overwrite"])
        while running.poll() is None:
            time.sleep(0.001)
            if any(r.get("event") == "start" for r in journal.read(bench.work / "journal.jsonl")):
                break
        running.send_signal(signal.SIGSTOP)
        if journal.death(journal.read(bench.work / "journal.jsonl")) not in (None, {}) and status(bench)["making"]:
            return running
        running.kill()
        running.wait()
    raise AssertionError("every unit was finished before the process could be stopped")


def test_a_conversion_that_runs(bench: Bench) -> None:
    source = conversion.checkpoint(bench.base / "large", layers=4, experts=8, hidden=512, width=1024)
    running = stopped_within_a_unit(bench, source)
    try:
        found = status(bench)
        assert (found["state"], found["units"]) == ("running", 4)
        assert {unit["pid"] for unit in found["making"]} == {running.pid}
        assert {unit["host"] for unit in found["making"]} == {os.uname().nodename}
        assert all(unit["alive"] for unit in found["making"])
        assert "being made:" in bench.run("status", bench.output).stderr
        watching = [sys.executable, "-m", "ktconvert.pipeline.cli", "status", bench.output, "--watch"]
        with subprocess.Popen(watching, stdout=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None
            assert "cpu:" in watch.stdout.readline()
            running.send_signal(signal.SIGCONT)
            assert running.wait(60) == 0
            assert watch.stdout.read().endswith(f"{bench.output} is finished\n")
            assert watch.wait(60) == 0
    finally:
        running.kill()
        running.wait()
