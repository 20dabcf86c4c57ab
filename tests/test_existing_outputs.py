"""Tests of the guard of existing outputs: foreign files, inputs, and work that another command began."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.errors import OutputError, UsageError
from ktconvert.pipeline.cli import COMMANDS, CONVERSIONS
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.engine.plan import PLAN_VERSION, SavedPlan, tool_version
from ktconvert.pipeline.engine.units import FinishedUnit, Result, Unit, Written
from ktconvert.pipeline.engine.workdir import WorkDir, save_plan
from ktconvert.pipeline.options.declare import option_fields
from ktconvert.pipeline.options.types import OutputPath
from rig import conversion
from rig.conversion import tree
from rig.forks import Forks
from rig.model_server import model_server
from rig.safetensors import write_file

pytest.importorskip("peft")

# Commands that only read their argument `output`, or never replace a file of another program.
READS = {"status", "verify", "inspect", "bench", "experts", "convert-adapter", "resume", "up"}
RTN = ("--quant-method", "RTN", "--quant-type", "W4A16")
SHORT = ("--num-calibration-samples", 1, "--sequence-length", 16)
# Arguments of each command, with the names of inputs (in `inputs_folder`) and OUT.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cpu": ("-i", "model", "-o", "OUT", "--quant-method", "int8"),
    "gpu": ("-i", "model", "-o", "OUT", *RTN),
    "calibrate": ("model", "-o", "OUT", "--dataset", "text.txt", *SHORT),
    "dequantize": ("model", "OUT"),
    "fetch": ("model", "OUT"),
    "merge": ("-i", "loose", "-o", "OUT"),
    "merge-adapter": ("model", "--adapter", "adapter", "-o", "OUT"),
    "resplit": ("packed", "OUT", "--threadpool-count", 2),
    "train": ("model", "--cpu-weights", "packed", "--dataset", "text.txt", "-o", "OUT", "--max-steps", 1),
}


@pytest.fixture(scope="module")
def servers() -> Forks:
    return model_server()


@pytest.fixture(scope="module")
def inputs_folder(example: Path, packed_example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every input."""
    folder = tmp_path_factory.mktemp("inputs_folder")
    shutil.copytree(example, folder / "model")
    for name, more in (("packed", ()), ("loose", ("--no-merge-safetensor",))):
        shutil.copytree(packed_example("int8", 1, *more), folder / name)
    (folder / "text.txt").write_text("import os\n" * 100)
    (folder / "adapter").mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    matrices = {
        name.format(letter): ("F32", np.zeros((4, 256)[:: 1 if letter == "A" else -1], np.uint32)) for letter in "AB"
    }
    write_file(folder / "adapter" / "adapter_model.safetensors", matrices)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return folder


def make_arguments(command: str, inputs_folder: Path, output: Path) -> list[Any]:
    """Return the arguments of a command, with these inputs and this output."""
    inputs = {path.name: path for path in inputs_folder.iterdir()}
    return [
        command,
        *(output if argument == "OUT" else inputs.get(argument, argument) for argument in ARGUMENTS[command]),
    ]


def test_all_commands_that_write_an_output_are_listed():
    writing = set()
    for name in {*COMMANDS} - READS:
        module = importlib.import_module(f"ktconvert.pipeline.cli.{'conversion' if name in CONVERSIONS else name}")
        for option_field in option_fields(getattr(module, name.replace("-", "_")).settings):
            if isinstance(option_field.click_type, OutputPath) and option_field.name == "output":
                writing.add(name)
    assert writing == {*ARGUMENTS}


@pytest.mark.parametrize("command", ARGUMENTS)
def test_foreign_files_inputs_and_begun_work_are_kept(command, servers, inputs_folder, tmp_path):
    """With --overwrite, foreign files and inputs are kept; without it, the work of another command."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    result = servers.run([*make_arguments(command, inputs_folder, output), "--overwrite"], tmp_path / "log")
    assert result.returncode == OutputError.exit_code and "would delete 1 file" in result.stderr, result.stderr
    assert tree(tmp_path).keys() == {"out", "out/thesis.txt", "log"}

    before = conversion.identity(inputs_folder)
    result = servers.run(
        [*make_arguments(command, inputs_folder, inputs_folder), "--overwrite", "--delete-others"], tmp_path / "log"
    )
    assert result.returncode == UsageError.exit_code and "is an input inside" in result.stderr, result.stderr
    assert conversion.identity(inputs_folder) == before and not locate(inputs_folder).root.exists()

    begun = tmp_path / "begun"
    other = "train" if command != "train" else "cpu"
    plan_fields = {
        "version": PLAN_VERSION,
        "tool_version": tool_version(),
        "command": other,
        "input": "model",
        "units": 2,
    }
    with WorkDir(locate(begun)) as work:
        save_plan(work.paths, SavedPlan(settings={}, tuning={}, source=(), **plan_fields))
        unit = Unit("checkpoint", "2", (1,), 0, None, folder=True)
        (work.paths.store / unit.stored_name).mkdir()
        (work.paths.store / unit.stored_name / "file").write_text("hours of work")
        work.record_finished(unit, FinishedUnit(begun, Result((Written("file", 13, "0" * 64),), 0), 1.0))
    before_run = tree(work.paths.root)
    result = servers.run(make_arguments(command, inputs_folder, begun), tmp_path / "log")
    assert result.returncode == OutputError.exit_code, result.stderr
    assert f"is an unfinished output of `ktconvert {other}`; choose a different --output" in result.stderr
    assert tree(work.paths.root).keys() == before_run.keys() and not begun.exists()
    assert (work.paths.store / unit.stored_name / "file").read_text() == "hours of work"


@pytest.mark.parametrize("inside", ["text.txt", "packed"])
def test_train_rejects_an_output_that_contains_an_input(inside, servers, inputs_folder, tmp_path):
    """Even if --overwrite could replace the output."""
    (tmp_path / "out").mkdir()
    (shutil.copytree if inside == "packed" else shutil.copy)(inputs_folder / inside, tmp_path / "out" / inside)
    arguments = make_arguments("train", inputs_folder, tmp_path / "out")
    arguments[arguments.index(inputs_folder / inside)] = tmp_path / "out" / inside
    result = servers.run([*arguments, "--overwrite", "--delete-others"], tmp_path / "log")
    assert result.returncode == UsageError.exit_code and (tmp_path / "out" / inside).exists(), result.stderr


def test_train_rejects_a_broken_link_as_output(servers, inputs_folder, tmp_path):
    (tmp_path / "out").symlink_to("nowhere")
    result = servers.run(make_arguments("train", inputs_folder, tmp_path / "out"), tmp_path / "log")
    assert result.returncode == OutputError.exit_code and "is a file or a broken link" in result.stderr
