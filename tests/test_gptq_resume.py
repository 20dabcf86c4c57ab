"""GPTQ that is cut off: killed between layers and within, and resumed, it makes the bytes of a run
that was never cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rig import calibrated, conversion, forks, killpoint
from rig.attempts import Attempts
from rig.safetensors import differing, read_folder

if any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")):
    pytest.skip("llmcompressor is not installed", allow_module_level=True)


UNITS = ("samples", "layer-000", "layer-001", "layer-002")
OTHER_MACHINE = ("--cpuinfer-threads", "2")


def arguments(model: Path, output: Path, dataset: Path) -> list[str]:
    return calibrated.arguments(model, output, "W4A16", dataset)


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempts]:
    shim = killpoint.build(tmp_path_factory.mktemp("shim"))
    with (
        conversion.in_memory(tmp_path_factory.mktemp("attempts")) as base,
        forks.Forks([shim], conversion.CORES, modules=calibrated.MODULES) as servers,
    ):
        yield Attempts(base, servers, arguments, "gptq", UNITS)


def test_killed_between_layers_and_within(attempts: Attempts) -> None:
    """Right before or after each layer's record, and at some moment of the making of two; finished layers
    are not made again."""
    chance = conversion.chance()
    boundaries = [attempts.recorded_at(unit) + late for unit, late in zip(UNITS, (0, 1, 0, 1), strict=True)]
    inside = [chance.choice(attempts.within(unit)) for unit in UNITS[:2]]
    conversion.in_parallel(attempts.killed, sorted({*boundaries, *inside}))
    assert conversion.identity(attempts.model) == attempts.before


def test_killed_while_resuming(attempts: Attempts) -> None:
    calls = len(attempts.calls)
    pairs = conversion.pairs(range(20, calls + 1), range(1, calls + 1), 2)
    conversion.in_parallel(lambda n: attempts.killed_twice(*pairs[n]), range(len(pairs)))


@pytest.mark.long
def test_killed_before_every_call(attempts: Attempts) -> None:
    print(f"{len(attempts.calls)} kill points")
    conversion.in_parallel(attempts.killed, range(1, len(attempts.calls) + 1))
    assert conversion.identity(attempts.model) == attempts.before


@pytest.mark.long
def test_killed_while_resuming_many_times(attempts: Attempts) -> None:
    calls = range(1, len(attempts.calls) + 1)
    pairs = conversion.pairs(calls, calls, 50)
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
    ours, expected = read_folder(output), read_folder(attempts.base / "whole" / "out")
    assert not any(".layers.0." in name for name in differing(ours, expected))
    assert ours.keys() == expected.keys()
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
    assert conversion.differing(conversion.tree(output), attempts.made) == []


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
