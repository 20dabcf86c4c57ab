"""Interrupted calibration runs: killed between or within layers and resumed, `calibrate` and GPTQ write the bytes of an
uninterrupted run. Also the folder of statistics beside GPTQ's output."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.statistics.folder import read_statistics
from ktconvert.layouts.statistics.imatrix import WEIGHT_NAMES
from ktconvert.pipeline.engine import journal
from rig import calibrated, conversion, forks, killpoint
from rig.safetensors import find_differences, read_folder

if any(find_spec(name) is None for name in ("llmcompressor", "transformers", "datasets", "accelerate")):
    pytest.skip("llmcompressor is not installed", allow_module_level=True)

UNITS = ("samples", "layer-000", "layer-001", "layer-002", "imatrix", "counts", "statistics")
OTHER_MACHINE = ("--cpuinfer-threads", "2")
SHAPES = dict.fromkeys(range(3), (4, 128, 128))
two_cores = pytest.mark.skipif(conversion.CORES < 2, reason="needs two cores: another number of threads")


def gpu(model: Path, output: Path, dataset: Path, *more: str) -> list[str]:
    statistics = ("--save-statistics", f"{output}.statistics")
    return calibrated.gpu_arguments(model, output, "W4A16", dataset, *statistics, *more)


def cpu(model: Path, output: Path, dataset: Path, *more: str) -> list[str]:
    options = ("--quant-method", "mxfp4", "--save-statistics", f"{output}.statistics", "--threadpool-count", "1")
    return calibrated.scale_gptq_arguments(model, output, dataset, *options, *more)


def calibrate(model: Path, output: Path, dataset: Path, *more: str) -> list[str]:
    return calibrated.calibrate_arguments(model, output, dataset, "--second-moments", *more)


class Attempts:
    """Conversions of one small model, each into its own folder, killed at a chosen point.

    arguments  (model, output, data set) -> the words of a conversion
    stage      of its chain, and the keys of its units
    calls      what an uninterrupted run calls, in order; paths without the output's folder
    wanted     what it makes, in the output and beside it
    """

    def __init__(
        self, base: Path, servers: Any, arguments: Callable[..., list[str]], stage: str, units: Sequence[str]
    ) -> None:
        self.base, self.servers, self.arguments = base, servers, arguments
        self.stage, self.units = stage, units
        self.model: Path = calibrated.write_small_model(base / "model")
        self.dataset, _ = calibrated.write_dataset(base, "texts", (60, 25, 12))
        self.before = conversion.identity(self.model)
        output = self.output("whole")
        assert self.run(output).returncode == 0
        self.wanted = conversion.tree(output.parent)
        self.made = conversion.tree(output)
        self.calls = self.calls_of(output)

    def output(self, name: str) -> Path:
        output = self.base / name / "out"
        output.parent.mkdir()
        return output

    def run(self, output: Path, *words: str, kill: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command, killed before its n-th call that changes a file (0: never); without words, a conversion."""
        log = output.parent.with_suffix(".log")
        env = killpoint.shim_settings(output, kill, log)
        arguments = list(words) or self.arguments(self.model, output, self.dataset)
        done: subprocess.CompletedProcess[str] = self.servers.run(arguments, log.with_suffix(".said"), env)
        return done

    def calls_of(self, output: Path) -> list[Any]:
        return killpoint.read_calls(output.parent.with_suffix(".log"), output.parent)

    def finish(self, output: Path, where: str, *words: str) -> None:
        done = self.run(output, *words)
        assert done.returncode == 0, f"{where}: {done.stderr}"
        assert conversion.find_differences(conversion.tree(output.parent), self.wanted) == [], where

    def killed(self, *points: int) -> None:
        """Kill the run before a call, then each resume; then resume to the end. What was finished is not made
        again.
        """
        output, where = self.output("-".join(map(str, points))), f"killed before {[self.calls[n - 1] for n in points]}"
        ended = [self.run(output, kill=n).returncode for n in points]
        assert ended[0] == killpoint.KILLED and {*ended} <= {0, killpoint.KILLED}, f"{where}: {ended}"
        begun = output.with_name("out.work").joinpath("plan.json").exists()
        assert begun or not output.exists() or conversion.find_differences(conversion.tree(output), self.made) == [], (
            where
        )
        finished = self.recorded(output)
        self.finish(output, where, *(("resume", str(output)) if begun and points[0] % 2 else ()))
        again = {call.second for call in self.calls_of(output) if call.name == "rename" and call.second}
        for unit in self.units if begun else ():
            assert any(f"store/{self.stage}.{unit}." in name for name in again) == (unit not in finished), (where, unit)
        shutil.rmtree(output.parent)

    def recorded_at(self, unit: str) -> int:
        """Return the number of the call by which a unit's record became durable."""
        name = f"/{self.stage}.{unit}."
        stored = next(n for n, c in enumerate(self.calls) if c.name == "rename" and name in str(c.second))
        book = ("fsync", "out.work/journal.jsonl")
        return next(n for n, call in enumerate(self.calls, 1) if n > stored and call[:2] == book)

    def recorded(self, output: Path) -> set[str]:
        book = output.with_name("out.work") / "journal.jsonl"
        done = journal.find_finished_units(journal.read(book)).values() if book.exists() else ()
        return {record.unit.removeprefix(f"{self.stage}.") for record in done}

    def within(self, unit: str) -> list[int]:
        """Return the numbers of the calls that write a unit's files before it is complete."""
        part = f"partial/{self.stage}.{unit}"
        return [n for n, call in enumerate(self.calls, 1) if part in call.path and "write" in call.name]


CHAINS = {"calibrate": (calibrate, "calibrate"), "gpu": (gpu, "gptq"), "cpu": (cpu, "gptq")}
only_gpu = pytest.mark.parametrize("attempts", ["gpu"], indirect=True)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    shim = killpoint.build(tmp_path_factory.mktemp("shim"))
    with forks.Forks([shim], 1, modules=calibrated.MODULES) as running:
        yield running


@pytest.fixture(scope="module", params=CHAINS)
def attempts(request: pytest.FixtureRequest, servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    arguments, stage = CHAINS[request.param]
    with conversion.memory_folder(tmp_path_factory.mktemp("attempts")) as base:
        yield Attempts(base, servers, arguments, stage, UNITS)


def begun(attempts: Attempts, name: str, unit: str = "layer-000") -> Path:
    """Return an output whose run was killed when this unit was recorded."""
    output = attempts.output(name)
    assert attempts.run(output, kill=attempts.recorded_at(unit) + 1).returncode == killpoint.KILLED
    return output


# By the stage: the numbers of units and whether it is killed before or after their records; and units within which.
RECORDS: dict[str, tuple[list[tuple[int, int]], list[str]]] = {
    "calibrate": ([(0, 0), (1, 1), (2, 0), (4, 1), (6, 1)], ["layer-001", "imatrix"]),
    "gptq": ([(1, 1), (2, 0)], ["layer-001"]),
}


def test_resume_after_a_kill_between_or_within_layers(attempts):
    """Right before or after some units' records, and at some moment of the making of others; finished layers are not made
    again. The chains have one engine: only `calibrate` is killed at them all.
    """
    records, units = RECORDS[attempts.stage]
    boundaries = [attempts.recorded_at(UNITS[n]) + late for n, late in records]
    inside = [conversion.seeded_random().choice(attempts.within(unit)) for unit in units]
    conversion.run_in_parallel(attempts.killed, sorted({*boundaries, *inside}))
    assert conversion.identity(attempts.model) == attempts.before


@pytest.mark.long
def test_resume_after_a_kill_before_every_call(attempts):
    print(f"{len(attempts.calls)} kill points")
    conversion.run_in_parallel(attempts.killed, range(1, len(attempts.calls) + 1))
    assert conversion.identity(attempts.model) == attempts.before


@only_gpu
@pytest.mark.parametrize("count", [1, pytest.param(50, marks=pytest.mark.long)])
def test_resume_after_a_kill_during_resume(count, attempts):
    calls = len(attempts.calls)
    pairs = conversion.draw_pairs(range(1 if count > 1 else 20, calls + 1), range(1, calls + 1), count)
    conversion.run_in_parallel(lambda pair: attempts.killed(*pair), pairs)


MACHINE = {"threads": 1, "group_bytes": 1, "device_type": "cpu", "device": "a CPU", "torch": "2"}
DAMAGED: list[dict[str, Any]] = [{"group_bytes": "much"}, {"threads": 0}, {"device_type": None}]
OTHER_OPTIONS = {
    "calibrate": [(("--num-calibration-samples", "2"), "--num-calibration-samples was 128, is 2")],
    "gpu": [(("--calibrate", "routed"), "--calibrate was all, is routed")],
    "cpu": [(("--scale", "mse"), "--scale was gptq, is mse")],
}


@two_cores
def test_resume_requires_the_same_options_and_machine(attempts):
    """With other options or on another machine, where sums are rounded in another order, it is refused by `resume` and by
    the same command; the data set is read once, and may be gone.
    """
    output = begun(attempts, "machine")
    work, same = output.with_name("out.work"), attempts.arguments(attempts.model, output, attempts.dataset)
    before, plan = conversion.tree(work), json.loads((work / "plan.json").read_bytes())
    for words in (("resume", str(output), *OTHER_MACHINE), (*same, *OTHER_MACHINE)):
        conversion.check_refusal(attempts.run(output, *words), 7, "threads was 1, is 2", "--allow-machine-change")
    for change, shown in OTHER_OPTIONS[same[0]]:
        conversion.check_refusal(attempts.run(output, *same, *change), 7, shown)
    assert {*conversion.find_differences(conversion.tree(work), before)} <= {"lock"}
    for damage in DAMAGED if same[0] == "gpu" else ():
        settings = plan["settings"] | {"machine": MACHINE | damage}
        (work / "plan.json").write_text(json.dumps(plan | {"settings": settings}))
        for words in (("resume", str(output)), same):
            conversion.check_refusal(attempts.run(output, *words), 7, "machine: ", "start over with --overwrite")
    (work / "plan.json").write_bytes(before["plan.json"])
    moved = attempts.dataset.rename(attempts.dataset.with_suffix(".moved"))
    try:
        attempts.finish(output, "without the data set", "resume", str(output), "--cpuinfer-threads", "1")
    finally:
        moved.rename(attempts.dataset)


@two_cores
@only_gpu
def test_allow_machine_change_keeps_finished_units(attempts):
    """With --overwrite they are made again."""
    output = begun(attempts, "allowed")
    assert attempts.run(output, "resume", str(output), *OTHER_MACHINE, "--allow-machine-change").returncode == 0
    ours, wanted = read_folder(output), read_folder(attempts.base / "whole" / "out")
    assert not any(".layers.0." in name for name in find_differences(ours, wanted))
    assert ours.keys() == wanted.keys()
    output = begun(attempts, "afresh")
    for threads, what in ((2, "unfinished"), (1, "finished")):
        words = gpu(attempts.model, output, attempts.dataset, "--overwrite", "--cpuinfer-threads", str(threads))
        done = attempts.run(output, *words)
        assert done.returncode == 0, f"over the {what} one: {done.stderr}"
        settings = json.loads((output / "manifest.json").read_text())["settings"]
        assert settings["machine"]["threads"] == threads
    assert conversion.find_differences(conversion.tree(output), attempts.made) == []


@only_gpu
def test_saving_statistics_does_not_change_weights(attempts, servers, tmp_path):
    """The statistics of the first layer are those without GPTQ; later layers get inputs from quantized experts."""
    made, alone = attempts.base / "whole", tmp_path / "alone"
    plain = calibrated.gpu_arguments(attempts.model, alone, "W4A16", attempts.dataset)
    assert servers.run(plain, tmp_path / "said").returncode == 0
    assert not find_differences(read_folder(made / "out"), read_folder(alone))
    walk = calibrated.calibrate_arguments(attempts.model, tmp_path / "source", attempts.dataset)
    assert servers.run(walk, tmp_path / "said").returncode == 0
    own, source = read_statistics(made / "out.statistics"), read_statistics(tmp_path / "source")
    for projection in WEIGHT_NAMES:
        ours, theirs = (each.open_imatrix("it", SHAPES).read(0, projection) for each in (own, source))
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(*(each.open_imatrix("it", SHAPES).read(2, "gate") for each in (own, source)))
    np.testing.assert_array_equal(own.counts.sum(1), source.counts.sum(1))
    assert own.document.settings["quant_type"] == "W4A16"
    assert conversion.names(made / "out.statistics") == ["counts.safetensors", "imatrix.gguf", "statistics.json"]


@only_gpu
def test_resume_after_a_kill_while_statistics_are_written(attempts):
    """Statistics of a layer, and before and after their folder appears."""
    side = next(n for n, c in enumerate(attempts.calls, 1) if c.path.endswith(".side") and "layer-001" in c.path)
    appears = next(n for n, c in enumerate(attempts.calls, 1) if c.second == "out.statistics")
    conversion.run_in_parallel(attempts.killed, [side + 1, appears, appears + 1])


@only_gpu
def test_flipped_bit_in_a_chain_file_is_detected(attempts):
    """In the samples, in a layer's statistics, and in the hidden states of the last finished layer."""
    first = begun(attempts, "flipped", "layer-001")
    found = [("gptq.samples.", ".safetensors"), ("gptq.layer-000.", ".side"), ("gptq.layer-001.", ".handed_on")]

    def resumed(n: int) -> None:
        output = attempts.output(f"flipped{n}")
        work = shutil.copytree(first.with_name("out.work"), output.with_name("out.work"))
        plan = (work / "plan.json").read_text()
        (work / "plan.json").write_text(plan.replace(str(first.parent), str(output.parent)))
        begin, end = found[n]
        (victim,) = (work / "store").glob(f"{begin}*{end}")
        conversion.flip_bit(victim, -2 if end == ".handed_on" else 200, keep_time=True)
        done = attempts.run(output, "resume", str(output))
        assert f"is made again: {victim} is not what was written" in done.stderr
        assert conversion.find_differences(conversion.tree(output.parent), attempts.wanted) == []

    conversion.run_in_parallel(resumed, range(len(found)))


@only_gpu
def test_statistics_folder_is_not_overwritten(attempts):
    output = attempts.output("taken")
    taken = output.with_name("out.statistics")
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    whole = gpu(attempts.model, output, attempts.dataset)
    for more in ((), ("--dry-run",)):
        conversion.check_refusal(attempts.run(output, *whole, *more), 7, "out.statistics exists already")
        done = attempts.run(output, *whole, "--overwrite", *more)
        conversion.check_refusal(done, 7, f"{taken}: --overwrite would delete 1 file", "thesis.txt", "--delete-others")
    shutil.copy(attempts.dataset, taken)
    inside = gpu(attempts.model, output, taken / attempts.dataset.name, "--overwrite", "--delete-others")
    conversion.check_refusal(attempts.run(output, *inside), 2, str(taken / attempts.dataset.name), "is read")
    (taken / attempts.dataset.name).unlink()
    assert conversion.names(taken) == ["thesis.txt"]
    words = calibrated.gpu_arguments(attempts.model, output, "W4A16", attempts.dataset)
    done = attempts.run(output, *words, "--save-statistics", str(attempts.model / "statistics"))
    conversion.check_refusal(done, 2, "choose another folder")


@only_gpu
def test_finished_output_restores_its_statistics_folder(attempts):
    output = attempts.output("gone")
    shutil.copytree(attempts.base / "whole" / "out", output)
    conversion.check_refusal(attempts.run(output), 7, "does not have what was gathered with it")
