"""ktconvert status: the state of a work directory during and after a conversion."""

import json
import os
import re
import shutil
import signal
import subprocess
from typing import Any

import pytest

from ktconvert.layouts.errors import InputError
from ktconvert.pipeline.cli.status import read_status
from ktconvert.pipeline.engine import attempts, journal, lock
from rig import conversion, killpoint
from rig.bench import SHARD, Bench


def status(bench: Bench, *options: str, code: int = 0) -> Any:
    result = bench.run("status", bench.output, "--json", *options)
    assert result.returncode == code, result.stderr
    return json.loads(result.stderr) if code == 0 else result.stderr  # the rig joins both streams


def test_output_that_was_not_begun_is_refused(bench):
    assert "does not exist" in status(bench, code=InputError.exit_code)
    bench.output.mkdir()
    assert "has no conversion" in status(bench, code=InputError.exit_code)


def test_finished_output_is_reported(bench):
    assert bench.cpu().returncode == 0
    assert status(bench) == {"output": str(bench.output), "state": "finished"}
    assert bench.run("status", bench.output, "--watch").stderr == f"{bench.output} is finished\n"
    shard = next(bench.output.glob("*.safetensors"))
    shard.rename(shard.with_suffix(".gone"))
    for command in ("status", "resume"):
        result = bench.run(command, bench.output)
        assert result.returncode == 6 and f"{shard.name} is missing or has a different size" in result.stderr


def test_killed_conversion_is_stopped(bench):
    bench.stop_after(2)
    found = status(bench)
    assert (found["state"], found["done"], found["units"], found["making"]) == ("stopped", 2, 3, [])
    assert [share["units"] for share in found["by"].values()] == [2]
    said = bench.run("status", bench.output).stderr
    assert re.search(rf"stopped: 2 of 3 units done.*\ndone, by host:\n  {os.uname().nodename} +2 units", said), said
    assert f"run `ktconvert resume {bench.output}` to continue" in said
    for command in ("status", "resume"):
        result = bench.run(command, bench.work)
        assert result.returncode == InputError.exit_code and f"give its output, {bench.output}." in result.stderr
    assert bench.run("resume", bench.output).returncode == 0


def test_job_share_between_two_units_is_running(bench):
    assert bench.cpu("--part", "0/2").returncode == 0
    held = lock.acquire(bench.work, bench.output, lock.JobShare(1, 2))
    assert status(bench)["state"] == "running"
    held.release()
    assert status(bench)["state"] == "stopped"


def test_any_file_content_is_printed_safely(bench):
    bench.stop_after(1)
    book = bench.work / "journal.jsonl"
    process = {"pid": 1, "host": "\x1b[2J", "boot": "", "start": 1, "namespace": ""}
    run = {"event": "run", "process": process, "at": 1e12}
    with book.open("a") as file:
        for record in (run, {"event": "start", "unit": "\x1b[2J"}, {"event": "start", "unit": "x", "at": 10**400}):
            file.write(json.dumps(record) + "\n")
    found = status(bench)
    assert found["state"] == "running"
    said = bench.run("status", bench.output)
    assert said.returncode == 0 and "\x1b" not in said.stderr


@pytest.mark.parametrize(
    ("module", "name"), [(journal, "read_records"), (attempts, "read_attempts"), (lock, "has_active_shares")]
)
def test_conversion_may_end_while_status_reads_it(bench, monkeypatch, module, name):
    """Between the first file that is read and the next ones, which are gone then."""
    bench.stop_after(2)
    read = getattr(module, name)

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        assert bench.run("resume", bench.output).returncode == 0
        return read(*arguments)

    monkeypatch.setattr(module, name, late)
    assert read_status(bench.output) == {"output": str(bench.output), "state": "finished"}


@pytest.mark.parametrize("then", ["it goes on", "it is killed"])
def test_running_conversion_is_reported(bench, then):
    """The conversion is stopped while it makes a unit."""
    line = [*conversion.KTCONVERT, "cpu", "-i", bench.source, "-o", bench.output, "--cpuinfer-threads", "1", "-q"]
    stop = killpoint.signal_environment(killpoint.build(bench.base), bench.work / "partial" / "experts", 2)
    running = subprocess.Popen(line, env={**os.environ, **stop})
    try:
        conversion.wait_until_stopped(running)
        found = status(bench)
        assert (found["state"], found["units"]) == ("running", 3)
        assert {unit["pid"] for unit in found["making"]} == {running.pid}
        assert {unit["host"] for unit in found["making"]} == {os.uname().nodename}
        assert all(unit["alive"] for unit in found["making"])
        assert "running:" in bench.run("status", bench.output).stderr
        if then == "it is killed":
            running.kill()
            running.wait()
            found = status(bench)
            assert (found["state"], found["making"]) == ("stopped", [])
            return
        watching = [*conversion.KTCONVERT, "status", bench.output, "--watch"]
        with subprocess.Popen(watching, stdout=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None and "cpu:" in watch.stdout.readline()
            running.send_signal(signal.SIGCONT)
            assert running.wait(conversion.TIMEOUT) == 0
            assert watch.stdout.read().endswith(f"{bench.output} is finished\n")
            assert watch.wait(conversion.TIMEOUT) == 0
    finally:
        running.kill()
        running.wait()


def test_reasons_of_failed_runs_and_job_shares_are_reported(bench):
    shard = bench.source / SHARD
    shard.write_bytes(shard.read_bytes()[:-2] + b"\x80\x7f")  # the last weight of layer 1 is infinite
    assert bench.cpu().returncode == 5 and "layer 1" in status(bench)["ended"]
    shutil.rmtree(bench.work)
    assert [bench.cpu("--part", part).returncode for part in ("1/3", "0/3")] == [5, 0]
    found = status(bench)
    [failed], [share] = found["failed"], found["by"].values()
    assert (found["state"], found["done"], found["units"], share["units"]) == ("stopped", 1, 3, 1)
    assert failed["unit"] == "experts.layer-001" and "layer 1" in failed["why"]
    assert share["bytes"] == found["bytes"] > 0
