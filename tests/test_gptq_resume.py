"""GPTQ that is cut off: killed between layers and within, and resumed, it makes the bytes of a run
that was never cut off."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rig import calibrated, conversion, forks, killpoint
from rig.safetensors import differing, read_folder

if any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")):
    pytest.skip("llmcompressor is not installed", allow_module_level=True)


UNITS = ("samples", "layer-000", "layer-001", "layer-002")
OTHER_MACHINE = ("--cpuinfer-threads", "2")


class Attempts:
    """Conversions of one small model, each into a folder of its own, killed where a test wants it.

    calls   what an uninterrupted run calls, in order; paths without the output's folder
    wanted  what it makes
    """

    def __init__(self, base: Path, servers: Any) -> None:
        self.base, self.servers = base, servers
        self.model: Path = calibrated.small(base / "model")
        self.dataset, _ = calibrated.data(base, "texts", (60, 25, 12))
        self.before = conversion.identity(self.model)
        output = self.output("whole")
        assert self.run(output).returncode == 0
        self.wanted = conversion.tree(output)
        self.calls = self.calls_of(output)

    def output(self, name: str) -> Path:
        output = self.base / name / "out"
        output.parent.mkdir()
        return output

    def run(self, output: Path, *words: str, kill: int = 0) -> subprocess.CompletedProcess[str]:
        """Killed before its n-th call that changes something; 0 lets it finish. Without words, the
        conversion from its beginning."""
        log = output.parent.with_suffix(".log")
        log.unlink(missing_ok=True)
        env = {"KILLPOINT_ROOT": str(output), "KILLPOINT_N": str(kill), "KILLPOINT_LOG": str(log)}
        arguments = list(words) or calibrated.arguments(self.model, output, "W4A16", self.dataset)
        done: subprocess.CompletedProcess[str] = self.servers.run(arguments, log.with_suffix(".said"), env)
        return done

    def calls_of(self, output: Path) -> list[Any]:
        """The calls of the last run."""
        base = f"{output.parent}/"
        return [
            call._replace(path=call.path.removeprefix(base), second=call.second and call.second.removeprefix(base))
            for call in killpoint.calls(output.parent.with_suffix(".log"))
        ]

    def finish(self, output: Path, where: str, *words: str) -> None:
        """Resume, and compare."""
        done = self.run(output, *words)
        assert done.returncode == 0, f"{where}: {done.stderr}"
        assert conversion.differing(conversion.tree(output), self.wanted) == [], where
        assert conversion.names(output.parent) == ["out"], where

    def killed(self, n: int) -> None:
        """Killed before call n, then resumed, by name or by the same command."""
        output = self.output(f"n{n}")
        where = f"killed before call {n} of {len(self.calls)}: {self.calls[n - 1]}"
        done = self.run(output, kill=n)
        assert done.returncode == killpoint.KILLED, f"{where}: {done.stderr}"
        begun = output.with_name("out.work").joinpath("plan.json").exists()
        assert begun or not output.exists() or conversion.differing(conversion.tree(output), self.wanted) == [], where
        finished = recorded(output)
        self.finish(output, where, *(("resume", str(output)) if begun and n % 2 else ()))
        again = {call.second for call in self.calls_of(output) if call.name == "rename" and call.second}
        for unit in UNITS if begun else ():
            assert any(f"store/gptq.{unit}." in name for name in again) == (unit not in finished), (where, unit)
        shutil.rmtree(output.parent)

    def killed_twice(self, n: int, m: int) -> None:
        """Killed before call n, the resume before its call m, then resumed again."""
        output = self.output(f"n{n}-{m}")
        assert self.run(output, kill=n).returncode == killpoint.KILLED
        where = f"killed before call {n}, {self.calls[n - 1]}, and resumed, before its call {m}"
        assert self.run(output, kill=m).returncode in (0, killpoint.KILLED), where
        self.finish(output, where)
        shutil.rmtree(output.parent)

    def recorded_at(self, unit: str) -> int:
        """The number of the call by which a unit's record became durable."""
        stored = next(n for n, c in enumerate(self.calls) if c.name == "rename" and f"/gptq.{unit}." in str(c.second))
        book = ("fsync", "out.work/journal.jsonl")
        return next(n for n, call in enumerate(self.calls, 1) if n > stored and call[:2] == book)


def recorded(output: Path) -> set[str]:
    """The units that the journal says are done."""
    book = output.with_name("out.work") / "journal.jsonl"
    lines = book.read_text().splitlines() if book.exists() else []
    units = set()
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # torn
            continue
        if record.get("event") == "done":
            units.add(record["unit"].removeprefix("gptq."))
    return units


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempts]:
    shim = killpoint.build(tmp_path_factory.mktemp("shim"))
    with (
        conversion.in_memory(tmp_path_factory.mktemp("attempts")) as base,
        forks.Forks([shim], conversion.CORES, modules=calibrated.MODULES) as servers,
    ):
        yield Attempts(base, servers)


def within(attempts: Attempts, unit: str) -> list[int]:
    """The numbers of the calls that write what belongs to a unit before it is whole."""
    return [
        n for n, call in enumerate(attempts.calls, 1) if f"partial/gptq.{unit}" in call.path and "write" in call.name
    ]


def test_killed_between_layers_and_within(attempts: Attempts) -> None:
    """Right before and after each layer's record, and at some moment of its making; finished layers
    are not made again."""
    print(f"seed {conversion.SEED}")
    chance = random.Random(conversion.SEED)
    boundaries = [attempts.recorded_at(unit) + late for unit in UNITS for late in (0, 1)]
    inside = [chance.choice(within(attempts, unit)) for unit in UNITS]
    conversion.in_parallel(attempts.killed, sorted({*boundaries, *inside}))
    assert conversion.identity(attempts.model) == attempts.before


def test_killed_while_resuming(attempts: Attempts) -> None:
    print(f"seed {conversion.SEED}")
    chance = random.Random(conversion.SEED)
    pairs = [(chance.randint(20, len(attempts.calls)), chance.randint(1, len(attempts.calls))) for _ in range(2)]
    conversion.in_parallel(lambda n: attempts.killed_twice(*pairs[n]), range(len(pairs)))


@pytest.mark.long
def test_killed_before_every_call(attempts: Attempts) -> None:
    print(f"{len(attempts.calls)} kill points")
    conversion.in_parallel(attempts.killed, range(1, len(attempts.calls) + 1))
    assert conversion.identity(attempts.model) == attempts.before


@pytest.mark.long
def test_killed_while_resuming_many_times(attempts: Attempts) -> None:
    print(f"seed {conversion.SEED}")
    chance = random.Random(conversion.SEED)
    pairs = [(chance.randint(1, len(attempts.calls)), chance.randint(1, len(attempts.calls))) for _ in range(50)]
    conversion.in_parallel(lambda n: attempts.killed_twice(*pairs[n]), range(len(pairs)))


def test_the_data_set_is_read_once(attempts: Attempts) -> None:
    """Its samples are the first thing that is stored: the file may change or go while layers are made."""
    output = attempts.output("data")
    moved = attempts.dataset.with_suffix(".moved")
    assert attempts.run(output, kill=attempts.recorded_at("layer-000") + 1).returncode == killpoint.KILLED
    attempts.dataset.rename(moved)
    try:
        attempts.finish(output, "without the data set", "resume", str(output))
    finally:
        moved.rename(attempts.dataset)


@pytest.mark.skipif(conversion.CORES < 2, reason="needs two cores, to compute with another number of threads")
def test_another_machine(attempts: Attempts) -> None:
    """Sums are rounded in another order there: refused, and what is finished is kept when it is allowed."""
    output = attempts.output("machine")
    assert attempts.run(output, kill=attempts.recorded_at("layer-000") + 1).returncode == killpoint.KILLED
    same = calibrated.arguments(attempts.model, output, "W4A16", attempts.dataset)
    begun = conversion.tree(output.with_name("out.work"))
    for words in (("resume", str(output), *OTHER_MACHINE), (*same, *OTHER_MACHINE)):
        done = attempts.run(output, *words)
        assert done.returncode == 7, done.stderr
        assert "threads was 1, is 2" in done.stderr and "--allow-machine-change" in done.stderr
        assert "Traceback" not in done.stderr
        assert conversion.differing(conversion.tree(output.with_name("out.work")), begun) == []
    assert attempts.run(output, "resume", str(output), *OTHER_MACHINE, "--allow-machine-change").returncode == 0
    ours, wanted = read_folder(output), read_folder(attempts.base / "whole" / "out")
    assert not any(".layers.0." in name for name in differing(ours, wanted))
    assert ours.keys() == wanted.keys()
    assert len(conversion.names(output.parent)) == 1


@pytest.mark.skipif(conversion.CORES < 2, reason="needs two cores, to compute with another number of threads")
def test_overwrite_starts_over_on_another_machine(attempts: Attempts) -> None:
    output = attempts.output("afresh")
    assert attempts.run(output, kill=attempts.recorded_at("layer-000") + 1).returncode == killpoint.KILLED
    words = (*calibrated.arguments(attempts.model, output, "W4A16", attempts.dataset), "--overwrite")
    for threads, what in ((2, "unfinished"), (1, "finished")):
        done = attempts.run(output, *words, "--cpuinfer-threads", str(threads))
        assert done.returncode == 0, f"over the {what} one: {done.stderr}"
        settings = json.loads((output / "manifest.json").read_text())["settings"]
        assert settings["machine"]["threads"] == threads
    assert conversion.differing(conversion.tree(output), attempts.wanted) == []


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (("--dampening-frac", "0.01"), "--dampening-frac was 0.1, is 0.01"),
        (("--calibrate", "routed"), "--calibrate was all, is routed"),
        (("--num-calibration-samples", "2"), "--num-calibration-samples was 512, is 2"),
        (("--random-seed", "1"), "--random-seed was 42, is 1"),
    ],
)
def test_other_options_are_refused(change: tuple[str, ...], shown: str, attempts: Attempts) -> None:
    output = attempts.output(f"options {change[0]}")
    assert attempts.run(output, kill=attempts.recorded_at("samples") + 1).returncode == killpoint.KILLED
    words = calibrated.arguments(attempts.model, output, "W4A16", attempts.dataset, *change)
    done = attempts.run(output, *words)
    assert done.returncode == 7, done.stderr
    assert shown in done.stderr
    assert "Traceback" not in done.stderr
