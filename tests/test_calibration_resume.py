"""Interrupted calibration runs: killed between or within layers and resumed, `calibrate` and GPTQ write the same bytes.

Also tests of the folder of statistics that GPTQ writes beside its output.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.statistics import expert_counts
from ktconvert.layouts.statistics.expert_counts import read_counts_file
from ktconvert.layouts.statistics.folder import read_statistics
from ktconvert.layouts.statistics.imatrix import WEIGHT_NAMES
from ktconvert.pipeline.engine import journal
from rig import calibrated, conversion, killpoint
from rig.model_server import model_server
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


class Conversions:
    """Conversions of one small model, each with a folder of its own, killed at a chosen point.

    arguments   a function from (model, output, data set) to the arguments of a conversion
    stage       the name of its chain; `units` are the keys of the chain's units
    calls       the calls of an uninterrupted run, in order, with paths relative to the output's folder
    expected    the files of an uninterrupted run, in the output and beside it
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
        self.expected = conversion.tree(output.parent)
        self.expected_output = conversion.tree(output)
        self.calls = self.calls_of(output)

    def output(self, name: str) -> Path:
        output = self.base / name / "out"
        output.parent.mkdir()
        return output

    def run(self, output: Path, *command: str, kill: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command, or a conversion by default, and kill it before its n-th call that changes a file (0: never)."""
        log = output.parent.with_suffix(".log")
        env = killpoint.shim_settings(output, kill, log)
        arguments = list(command) or self.arguments(self.model, output, self.dataset)
        result: subprocess.CompletedProcess[str] = self.servers.run(arguments, log.with_suffix(".txt"), env)
        return result

    def calls_of(self, output: Path) -> list[Any]:
        return killpoint.read_calls(output.parent.with_suffix(".log"), output.parent)

    def finish(self, output: Path, where: str, *command: str) -> None:
        result = self.run(output, *command)
        assert result.returncode == 0, f"{where}: {result.stderr}"
        assert conversion.find_differences(conversion.tree(output.parent), self.expected) == [], where

    def kill_and_resume(self, *points: int) -> None:
        """Kill the run before a call, and then each resume; resume to the end. Finished units are not made again."""
        output, where = self.output("-".join(map(str, points))), f"killed before {[self.calls[n - 1] for n in points]}"
        return_codes = [self.run(output, kill=n).returncode for n in points]
        assert return_codes[0] == killpoint.KILLED, f"{where}: {return_codes}"
        assert {*return_codes} <= {0, killpoint.KILLED}, f"{where}: {return_codes}"
        has_plan = output.with_name("out.work").joinpath("plan.json").exists()
        if not has_plan and output.exists():  # the run had finished
            assert conversion.find_differences(conversion.tree(output), self.expected_output) == [], where
        finished = self.finished_units(output)
        self.finish(output, where, *(("resume", str(output)) if has_plan and points[0] % 2 else ()))
        renamed = {call.second for call in self.calls_of(output) if call.name == "rename" and call.second}
        for unit in self.units if has_plan else ():
            made_again = any(f"store/{self.stage}.{unit}." in name for name in renamed)
            assert made_again == (unit not in finished), (where, unit)
        shutil.rmtree(output.parent)

    def call_after_record(self, unit: str) -> int:
        """Return the number of the call that makes the record of a unit durable."""
        name = f"/{self.stage}.{unit}."
        stored = next(n for n, c in enumerate(self.calls) if c.name == "rename" and name in str(c.second))
        journal_sync = ("fsync", "out.work/journal.jsonl")
        return next(n for n, call in enumerate(self.calls, 1) if n > stored and call[:2] == journal_sync)

    def finished_units(self, output: Path) -> set[str]:
        journal_file = output.with_name("out.work") / "journal.jsonl"
        result = (
            journal.find_finished_units(journal.read_records(journal_file)).values() if journal_file.exists() else ()
        )
        return {record.unit.removeprefix(f"{self.stage}.") for record in result}

    def calls_within(self, unit: str) -> list[int]:
        """Return the numbers of the calls that write a unit's files before it is complete."""
        part = f"partial/{self.stage}.{unit}"
        return [n for n, call in enumerate(self.calls, 1) if part in call.path and "write" in call.name]


CHAINS = {"calibrate": (calibrate, "calibrate"), "gpu": (gpu, "gptq"), "cpu": (cpu, "gptq")}
only_gpu = pytest.mark.parametrize("conversions", ["gpu"], indirect=True)


@pytest.fixture(scope="module")
def servers() -> Any:
    return model_server()


@pytest.fixture(scope="module", params=CHAINS)
def conversions(
    request: pytest.FixtureRequest, servers: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    arguments, stage = CHAINS[request.param]
    with conversion.memory_folder(tmp_path_factory.mktemp("attempts")) as base:
        yield Conversions(base, servers, arguments, stage, UNITS)


def start(conversions: Conversions, name: str, unit: str = "layer-000") -> Path:
    """Return an output whose run was killed when this unit was recorded."""
    output = conversions.output(name)
    assert conversions.run(output, kill=conversions.call_after_record(unit) + 1).returncode == killpoint.KILLED
    return output


# By stage: units, each with whether the run is killed before (0) or after (1) its record; and units to kill within.
RECORDS: dict[str, tuple[list[tuple[int, int]], list[str]]] = {
    "calibrate": ([(0, 0), (1, 1), (2, 0), (4, 1), (6, 1)], ["layer-001", "imatrix"]),
    "gptq": ([(1, 1), (2, 0)], ["layer-001"]),
}


def test_resume_after_a_kill_between_or_within_layers(conversions):
    """Only `calibrate` is killed at all of these points: all chains share the same engine."""
    records, units = RECORDS[conversions.stage]
    boundaries = [conversions.call_after_record(UNITS[n]) + after for n, after in records]
    inside = [conversion.seeded_random().choice(conversions.calls_within(unit)) for unit in units]
    conversion.run_in_parallel(conversions.kill_and_resume, sorted({*boundaries, *inside}))
    assert conversion.identity(conversions.model) == conversions.before


@pytest.mark.long
def test_resume_after_a_kill_before_every_call(conversions):
    print(f"{len(conversions.calls)} kill points")
    conversion.run_in_parallel(conversions.kill_and_resume, range(1, len(conversions.calls) + 1))
    assert conversion.identity(conversions.model) == conversions.before


@only_gpu
@pytest.mark.parametrize("count", [1, pytest.param(50, marks=pytest.mark.long)])
def test_resume_after_a_kill_during_resume(count, conversions):
    calls = len(conversions.calls)
    pairs = conversion.draw_pairs(range(1 if count > 1 else 20, calls + 1), range(1, calls + 1), count)
    conversion.run_in_parallel(lambda pair: conversions.kill_and_resume(*pair), pairs)


MACHINE = {"threads": 1, "group_bytes": 1, "device_type": "cpu", "device": "a CPU", "torch": "2"}
DAMAGED: list[dict[str, Any]] = [{"group_bytes": "much"}, {"threads": 0}, {"device_type": None}]
OTHER_OPTIONS = {
    "calibrate": [(("--num-calibration-samples", "2"), "--num-calibration-samples was 128, is 2")],
    "gpu": [(("--calibrate", "routed"), "--calibrate was all, is routed")],
    "cpu": [(("--scale", "mse"), "--scale was gptq, is mse")],
}


@two_cores
def test_resume_requires_the_same_options_and_machine(conversions):
    """A different machine rounds sums in a different order. `resume` and the same command refuse both changes.

    The data set is read once, and may be missing afterwards.
    """
    output = start(conversions, "machine")
    work, command = output.with_name("out.work"), conversions.arguments(conversions.model, output, conversions.dataset)
    before, plan = conversion.tree(work), json.loads((work / "plan.json").read_bytes())
    for refused_command in (("resume", str(output), *OTHER_MACHINE), (*command, *OTHER_MACHINE)):
        conversion.check_refusal(
            conversions.run(output, *refused_command), 7, "threads was 1, is 2", "--allow-machine-change"
        )
    for option, message in OTHER_OPTIONS[command[0]]:
        conversion.check_refusal(conversions.run(output, *command, *option), 7, message)
    assert {*conversion.find_differences(conversion.tree(work), before)} <= {"lock"}
    for damage in DAMAGED if command[0] == "gpu" else ():
        settings = plan["settings"] | {"machine": MACHINE | damage}
        (work / "plan.json").write_text(json.dumps(plan | {"settings": settings}))
        for refused_command in (("resume", str(output)), command):
            conversion.check_refusal(
                conversions.run(output, *refused_command), 7, "machine: ", "start over with --overwrite"
            )
    (work / "plan.json").write_bytes(before["plan.json"])
    moved = conversions.dataset.rename(conversions.dataset.with_suffix(".moved"))
    try:
        conversions.finish(output, "without the data set", "resume", str(output), "--cpuinfer-threads", "1")
    finally:
        moved.rename(conversions.dataset)


@two_cores
@only_gpu
def test_allow_machine_change_keeps_finished_units(conversions):
    """With --overwrite, units are made again."""
    output = start(conversions, "allowed")
    assert conversions.run(output, "resume", str(output), *OTHER_MACHINE, "--allow-machine-change").returncode == 0
    ours, expected = read_folder(output), read_folder(conversions.base / "whole" / "out")
    assert not any(".layers.0." in name for name in find_differences(ours, expected))
    assert ours.keys() == expected.keys()
    output = start(conversions, "afresh")
    for threads, earlier in ((2, "unfinished"), (1, "finished")):
        command = gpu(conversions.model, output, conversions.dataset, "--overwrite", "--cpuinfer-threads", str(threads))
        result = conversions.run(output, *command)
        assert result.returncode == 0, f"over an {earlier} output: {result.stderr}"
        settings = json.loads((output / "manifest.json").read_text())["settings"]
        assert settings["machine"]["threads"] == threads
    assert conversion.find_differences(conversion.tree(output), conversions.expected_output) == []


@only_gpu
def test_unusable_data_set_leaves_nothing_behind(conversions):
    """Units that do not depend on the samples wait for them; the corrected command then starts over."""
    output = conversions.output("unusable")
    unusable = conversions.base / "unusable.jsonl"
    unusable.write_text('{"other": "column"}\n')
    failed = conversions.run(output, *gpu(conversions.model, output, unusable))
    assert failed.returncode == 5 and "has none of the columns" in failed.stderr, failed.stderr
    assert conversion.names(output.parent) == []
    conversions.finish(output, "corrected data set")


@only_gpu
def test_saving_statistics_does_not_change_weights(conversions, servers, tmp_path):
    """Statistics of the first layer equal those without GPTQ; later layers read outputs of quantized experts."""
    with_statistics, without_statistics = conversions.base / "whole", tmp_path / "alone"
    command = calibrated.gpu_arguments(conversions.model, without_statistics, "W4A16", conversions.dataset)
    assert servers.run(command, tmp_path / "log").returncode == 0
    assert not find_differences(read_folder(with_statistics / "out"), read_folder(without_statistics))
    calibration_run = calibrated.calibrate_arguments(conversions.model, tmp_path / "source", conversions.dataset)
    assert servers.run(calibration_run, tmp_path / "log").returncode == 0
    own, source = read_statistics(with_statistics / "out.statistics"), read_statistics(tmp_path / "source")
    for projection in WEIGHT_NAMES:
        ours, theirs = (each.open_imatrix("it", SHAPES).read(0, projection) for each in (own, source))
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(*(each.open_imatrix("it", SHAPES).read(2, "gate") for each in (own, source)))
    np.testing.assert_array_equal(own.counts.sum(1), source.counts.sum(1))
    for folder in (with_statistics / "out", without_statistics):  # the output has the counts in any case
        np.testing.assert_array_equal(read_counts_file(folder / expert_counts.NAME), own.counts)
        listed = json.loads((folder / "manifest.json").read_bytes())["files"]
        assert expert_counts.NAME in [file["name"] for file in listed]
        assert expert_counts.NAME in (folder / "README.md").read_text()
    assert own.document.settings["quant_type"] == "W4A16"
    assert conversion.names(with_statistics / "out.statistics") == [
        "counts.safetensors",
        "imatrix.gguf",
        "statistics.json",
    ]


@only_gpu
def test_resume_after_a_kill_while_statistics_are_written(conversions):
    """Killed within the statistics of a layer, and before and after the folder appears."""
    layer_statistics = next(
        n for n, c in enumerate(conversions.calls, 1) if c.path.endswith(".side") and "layer-001" in c.path
    )
    appears = next(n for n, c in enumerate(conversions.calls, 1) if c.second == "out.statistics")
    conversion.run_in_parallel(conversions.kill_and_resume, [layer_statistics + 1, appears, appears + 1])


@only_gpu
def test_flipped_bit_in_a_chain_file_is_detected(conversions):
    """The bit is in the samples, in statistics of a layer, or in hidden states of the last finished layer."""
    first = start(conversions, "flipped", "layer-001")
    files = [("gptq.samples.", ".safetensors"), ("gptq.layer-000.", ".side"), ("gptq.layer-001.", ".handed_on")]

    def check_resume(n: int) -> None:
        output = conversions.output(f"flipped{n}")
        work = shutil.copytree(first.with_name("out.work"), output.with_name("out.work"))
        plan = (work / "plan.json").read_text()
        (work / "plan.json").write_text(plan.replace(str(first.parent), str(output.parent)))
        begin, end = files[n]
        (victim,) = (work / "store").glob(f"{begin}*{end}")
        conversion.flip_bit(victim, -2 if end == ".handed_on" else 200, keep_time=True)
        result = conversions.run(output, "resume", str(output))
        assert f"is converted again: the SHA-256 of {victim} has changed" in result.stderr
        assert conversion.find_differences(conversion.tree(output.parent), conversions.expected) == []

    conversion.run_in_parallel(check_resume, range(len(files)))


@only_gpu
def test_statistics_folder_is_not_overwritten(conversions):
    output = conversions.output("taken")
    existing = output.with_name("out.statistics")
    existing.mkdir()
    (existing / "thesis.txt").write_text("mine")
    command = gpu(conversions.model, output, conversions.dataset)
    for options in ((), ("--dry-run",)):
        conversion.check_refusal(conversions.run(output, *command, *options), 7, "out.statistics exists already")
        result = conversions.run(output, *command, "--overwrite", *options)
        conversion.check_refusal(
            result, 7, f"{existing}: not an output of ktconvert", "delete 1 file", "thesis.txt", "--delete-others"
        )
    shutil.copy(conversions.dataset, existing)
    inside = gpu(conversions.model, output, existing / conversions.dataset.name, "--overwrite", "--delete-others")
    conversion.check_refusal(
        conversions.run(output, *inside), 2, str(existing / conversions.dataset.name), "is an input inside"
    )
    (existing / conversions.dataset.name).unlink()
    assert conversion.names(existing) == ["thesis.txt"]
    beside_model = calibrated.gpu_arguments(conversions.model, output, "W4A16", conversions.dataset)
    result = conversions.run(output, *beside_model, "--save-statistics", str(conversions.model / "statistics"))
    conversion.check_refusal(result, 2, "choose a different folder")


@only_gpu
def test_finished_output_restores_its_statistics_folder(conversions):
    output = conversions.output("gone")
    shutil.copytree(conversions.base / "whole" / "out", output)
    conversion.check_refusal(conversions.run(output), 7, "does not contain its statistics")
