"""kt-kernel's command lines for convert_gpu_weights.py have the same meaning here; only program and paths are changed.

One of them runs, with a few rows of its data set in a hub cache that the test makes.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.pipeline.cli import group

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "python scripts/convert_gpu_weights.py"
MODEL, OUTPUT = "--model_id", "--output_dir"

# Copied from kt-kernel, with continued lines joined.
PATHS, MNT = "--model_id /path/to/model --output_dir /path/to/output", "/mnt/data/models"
QWEN, QWEN2 = f"{MNT}/Qwen3-Next-80B-A3B-Instruct", "/mnt/data2/models/Qwen3-Next-80B-A3B-Instruct"
SAMPLES = "--num_calibration_samples 512 --max_sequence_length 2048"
EXAMPLES = {
    # kt-kernel/scripts/README.md
    "gptq": f"{PROGRAM} {PATHS} --quant_method GPTQ --quant_type W4A16",
    "rtn": f"{PROGRAM} {PATHS} --quant_method RTN --quant_type W4A16",
    "calibration": f"{PROGRAM} {PATHS} --quant_method GPTQ --quant_type W4A16 {SAMPLES} "
    "--dataset HuggingFaceH4/ultrachat_200k --dataset_split train_sft",
    "memory": f'{PROGRAM} {PATHS} --quant_method GPTQ --quant_type W4A16 --max_gpu_memory "40GiB"',
    "example 1": f"{PROGRAM} --model_id {QWEN} --output_dir {QWEN}-GPTQ-W4A16 --quant_method GPTQ --quant_type W4A16 "
    f'{SAMPLES} --max_gpu_memory "40GiB" --trust_remote_code',
    "example 2": f"{PROGRAM} --model_id {MNT}/DeepSeek-R1-0528-BF16 --output_dir {MNT}/DeepSeek-R1-0528-RTN-W4A16 "
    '--quant_method RTN --quant_type W4A16 --max_gpu_memory "70GiB" --trust_remote_code',
    "example 3": f"{PROGRAM} --model_id {MNT}/GLM-4.5-Air --output_dir {MNT}/GLM-4.5-Air-GPTQ-W8A16 --quant_method GPTQ "
    '--quant_type W8A16 --dataset "tatsu-lab/alpaca" --dataset_split "train" --num_calibration_samples 256 '
    '--max_gpu_memory "40GiB" --trust_remote_code',
    # the text of scripts/convert_gpu_weights.py itself
    "script gptq": f"python convert_gpu_weights.py --model_id {QWEN2} --output_dir {QWEN2}-GPU-weight "
    "--quant_method GPTQ --quant_type W4A16",
    "script rtn": f"python convert_gpu_weights.py --model_id {MNT}/GLM-4.5-Air "
    f"--output_dir {MNT}/GLM-4.5-Air-GPU-weights-rtn --quant_method RTN --quant_type W4A16",
    # kt-kernel/README.md, which relies on the default method
    "readme": f"{PROGRAM} {PATHS} --quant_type W4A16",
}
# Options of the script's parser with their defaults and spelling.
OPTIONS: dict[str, Any] = {"model_id": None, "output_dir": None, "quant_method": "GPTQ", "quant_type": "W8A16"}
OPTIONS |= {"num_calibration_samples": 512, "max_sequence_length": 2048, "dampening_frac": 0.1, "force_cpu": False}
OPTIONS |= {"dataset": "HuggingFaceH4/ultrachat_200k", "dataset_split": "train_sft", "torch_dtype": "bfloat16"}
OPTIONS |= {"ignore_patterns": (), "trust_remote_code": False, "random_seed": 42}  # usual patterns are always kept
OPTIONS |= {"max_gpu_memory": None, "max_cpu_memory": None}


def parse(*arguments: str) -> dict[str, Any]:
    """Return the options of `ktconvert gpu` for these arguments, without running it."""
    command = group.get_command(click.Context(group), "gpu")
    assert command is not None
    parent = click.Context(group, info_name="ktconvert", **group.context_settings)
    return command.make_context("gpu", list(arguments), parent=parent).params


def arguments_of(line: str, model: Path, output: Path) -> list[str]:
    """Return the arguments after the program's name, with our paths."""
    arguments = shlex.split(line)
    arguments = arguments[arguments.index(MODEL) :]
    arguments[arguments.index(MODEL) + 1] = str(model)
    arguments[arguments.index(OUTPUT) + 1] = str(output)
    return arguments


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment without a network; its hub cache has a few rows of a data set that kt-kernel uses."""
    home = tmp_path_factory.mktemp("hub")
    text = (ROOT / "examples" / "heldout.txt").read_text()
    chunks = [text[start : start + 800] for start in range(0, 9600, 800)]
    rows = [{"instruction": p[:80], "input": "", "output": p[80:], "text": p} for p in chunks]
    folder = home / "hub" / "datasets--tatsu-lab--alpaca"
    data = folder / "snapshots" / "0" / "data"
    data.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0")
    (data / "train-00000-of-00001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


RENAMED = {"model_id": "input", "output_dir": "output", "max_sequence_length": "sequence_length", "random_seed": "seed"}

# Runs on one CPU, even if the caller may use several.
ON_ONE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from ktconvert.pipeline.cli import main; main()"


def test_gptq_example_of_kt_kernel_runs(hub: dict[str, str], tmp_path: Path, example: Path) -> None:
    for package in ("llmcompressor", "datasets", "transformers"):
        pytest.importorskip(package)
    output = tmp_path / "out"
    command = [sys.executable, "-c", ON_ONE, "gpu", *arguments_of(EXAMPLES["example 3"], example, output)]
    env = {**os.environ, **hub, "KTCONVERT_GPU_VERBOSE": "0"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1700)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr[-4000:]
    assert "note: tatsu-lab/alpaca: 12 samples, fewer than the requested 256" in result.stderr
    quantization = json.loads((output / "config.json").read_text())["quantization_config"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["actorder"]) == (8, 128, None)
    names = [entry.name for path in output.glob("*.safetensors") for entry in read_header(path).entries]
    assert sum(name.endswith(".weight_packed") for name in names) == 2 * 8 * 3


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_mean_the_same_as_in_kt_kernel(name: str, tmp_path: Path) -> None:
    """Options of a line have its values, all others the script's defaults. Hyphens and underscores are equivalent."""
    arguments = arguments_of(EXAMPLES[name], tmp_path / "model", tmp_path / "out")
    options = parse(*arguments)
    assert parse(*(word.replace("_", "-") if word.startswith("--") else word for word in arguments)) == options
    expected = dict(OPTIONS)
    while arguments:
        option = arguments.pop(0).removeprefix("--")
        expected[option] = arguments.pop(0) if arguments and not arguments[0].startswith("--") else True
    for option, value in expected.items():
        if option == "max_gpu_memory" and value is not None:
            value = int(value.removesuffix("GiB")) << 30
        option = RENAMED.get(option, option)
        assert options[option] is None if value is None else str(options[option]) == str(value), option


def test_ignore_patterns_may_follow_one_flag_or_repeat_it() -> None:
    for arguments in (
        ["--ignore_patterns", "a", "re:b.*", "--quant_type", "W4A16"],
        ["--ignore-patterns", "a", "--ignore-patterns=re:b.*", "--quant-type", "W4A16"],
        ["--quant_type", "W4A16", "--ignore_patterns", "a", "re:b.*"],
        ["--Quant_Type", "w4a16", "--IGNORE-PATTERNS", "a", "re:b.*"],
    ):
        options = parse("-i", "m", "-o", "o", *arguments)
        assert (options["ignore_patterns"], options["quant_type"]) == (("a", "re:b.*"), "W4A16")
