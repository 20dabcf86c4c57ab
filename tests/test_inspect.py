"""`ktconvert inspect`: descriptions of checkpoints, outputs and unfinished conversions, and of possible conversions."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ktconvert.layouts.errors import KTConvertError
from ktconvert.layouts.outputs import formats_by_option
from ktconvert.pipeline.cli.conversion import cpu
from ktconvert.pipeline.cli.inspect import inspect
from rig.conversion import run_in_process
from rig.safetensors import write_file

BF16_NAN = 0x7FC0


def run_inspect(*arguments: object) -> tuple[Result, dict[str, Any]]:
    """Run inspect in this process; return its result and the JSON object."""
    result = CliRunner().invoke(inspect, [*map(str, arguments), "--json"])
    if isinstance(result.exception, Exception) and not hasattr(result.exception, "exit_code"):
        raise result.exception
    return result, json.loads(result.stdout) if result.stdout else {}


def inspect_json(*arguments: object) -> dict[str, Any]:
    """Run inspect, require success, and return the JSON object."""
    result, report = run_inspect(*arguments)
    assert result.exit_code == 0, result.output
    return report


def convert(source: Path, output: Path, *options: object) -> Result:
    """Run the conversion in this process."""
    return CliRunner().invoke(cpu, ["-i", str(source), "-o", str(output), "-q", *map(str, options)])


def test_checkpoint_is_described(example, cli):
    report = inspect_json(example)
    assert report["kind"] == "checkpoint"
    assert report["architecture"].startswith("Qwen3-MoE")
    assert (report["experts"], report["hidden"], report["intermediate"]) == ([8], [256], [256])
    assert report["moe_layers"] == [0, 1]
    assert report["dense_layers"] == []
    assert report["mtp_layers"] == []
    assert report["expert_dtypes"] == ["BF16"]
    assert report["functions"] == {"0-1": {"activation": "silu"}}
    assert report["routed_bytes"] == 2 * 8 * 3 * 256 * 256 * 2
    assert not report["shared_experts"]
    assert report["total_bytes"] == report["routed_bytes"] + report["rest_bytes"] == sum(report["dtypes"].values())
    int4, int8 = (method for method in report["methods"] if method["method"] in ("AMXINT4", "AMXINT8"))
    assert int4["legal"] == [1, 2]
    assert set(int4["illegal"]) == {"4", "8"}
    assert int8["legal"] == [1, 2, 4]
    assert "256/8 = 32, is not a multiple of 64" in int8["illegal"]["8"]
    stdout = cli("inspect", example).stdout
    assert "NUMA slices 1, 2; 1.5 MiB" in stdout
    assert "not 4: the intermediate size per slice" in stdout
    assert "does not exist; check the path" in cli("inspect", example / "nothing", code=5).stderr


def test_printed_command_makes_the_predicted_output(example, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [line for line in cli("inspect", example).stdout.splitlines() if line.startswith("ktconvert cpu ")]
    assert lines == inspect_json(example)["convert"]
    assert len(lines) == len(formats_by_option("cpu"))
    for line in lines:
        cli(*line.split()[1:])
    expected_names = {f"qwen3-moe-small-{form.name}" for form in formats_by_option("cpu").values()}
    assert {p.name for p in tmp_path.iterdir()} == expected_names
    sizes = {(m["method"], int(t)): n for m in inspect_json(example)["methods"] for t, n in m["bytes"].items()}
    reports = [inspect_json(path) for path in tmp_path.iterdir()]
    assert all(sizes[report["method"], report["numa"]] == report["expert_bytes"] for report in reports)


def test_dense_layers_mtp_and_shared_experts_are_reported(tmp_path, write_qwen, random_experts):
    folder = write_qwen(
        tmp_path / "model", {n: random_experts(2, 192, 192, n) for n in (1, 2)}, num_hidden_layers=2, n_shared_experts=1
    )
    report = inspect_json(folder)
    assert report["dense_layers"] == [0]
    assert report["moe_layers"] == [1]
    assert report["mtp_layers"] == [2]
    assert report["mtp_bytes"] == report["routed_bytes"] == 2 * 3 * 192 * 192 * 2
    assert any("MTP" in note for note in report["notes"])
    int4, int8 = (method for method in report["methods"] if method["method"] in ("AMXINT4", "AMXINT8"))
    assert int4["legal"] == []
    assert "hidden size 192 is not a multiple of 128" in int4["illegal"]["1"]
    assert int8["legal"] == [1, 3]
    assert "--quant-method int8" in report["convert"][0]
    output = CliRunner().invoke(inspect, [str(folder)]).output
    assert "int4 (AMXINT4)" in output
    assert "not possible" in output
    assert "layers 2: 6 expert tensors, left out" in output


def test_dense_model_is_refused_with_a_reason(tmp_path, write_safetensors, cli):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 1}')
    stored = {"model.layers.0.mlp.gate_proj.weight": ("BF16", np.zeros((8, 8), np.uint16))}
    write_safetensors(tmp_path / "model.safetensors", stored)
    result = cli("inspect", tmp_path, code=3)
    assert "qwen3" in result.stdout
    assert "BF16 128 B" in result.stdout
    assert "a dense model" in result.stderr
    # Exactly one object: loads() rejects a second line
    report = json.loads(cli("inspect", tmp_path, "--json", code=3).stdout)
    assert "a dense model" in report["refused"]
    assert report["model_type"] == ["qwen3"]


@pytest.mark.parametrize("options", [[], ["--no-merge-safetensor", "--quant-method", "int8"]])
def test_output_is_described(options, tmp_path, example, cli):
    output = tmp_path / "out"
    assert convert(example, output, *options).exit_code == 0
    report = inspect_json(output)
    assert report["kind"] == "output"
    assert report["complete"]
    assert report["made_by"].startswith("ktconvert ")
    assert (report["method"], report["arrangement"]) == (("AMXINT8", "loose") if options else ("AMXINT4", "merged"))
    assert (report["numa"], report["experts"], report["hidden"], report["intermediate"]) == (2, 8, 256, 256)
    assert report["layers"] == [0, 1]
    assert report["settings"]["numa"] == 2
    assert "yes, by names and sizes" in cli("inspect", output).stdout
    (output / "manifest.json").unlink()
    assert "not ktconvert" in cli("inspect", output).stdout
    min(output.rglob("*.kt" if options else "*.safetensors")).unlink()
    report = inspect_json(output)
    assert not report["complete"]
    assert report["problems"]
    assert "no: " in cli("inspect", output).stdout


def test_unfinished_conversion_is_described(tmp_path, write_qwen, random_experts, cli):
    """Layer 1 has a NaN, so the conversion stops after layer 0."""
    layers = {n: random_experts(2, 128, 128, n) for n in (0, 1)}
    layers[1]["down"][1, 5, 6] = BF16_NAN
    source, output = write_qwen(tmp_path / "model", layers), tmp_path / "out"
    result = convert(source, output, "--cpuinfer-threads", 1, "--threadpool-count", 1)
    assert getattr(result.exception, "exit_code", None) == 5
    for path in (output, tmp_path / "out.work"):
        report = inspect_json(path)
        assert (report["kind"], report["units_done"], report["units"]) == ("unfinished", 1, 2)
        assert report["resume"] == f"ktconvert resume {output}"
        assert report["settings"]["quant_method"] == "int4"
        assert report["units_left"] == ["experts.layer-001"]
        assert report["bytes_left"] == 2 * 3 * 128 * 128 * 2
    text = cli("inspect", output).stdout
    assert "1 of 2 finished" in text
    assert f"ktconvert resume {output}" in text
    assert f"ktconvert resume {output}" in cli("verify", output, code=6).stderr
    shutil.rmtree(source)
    report = inspect_json(output)
    assert report["units"] is None
    assert report["units_done"] == 1
    assert str(source) in report["source_problem"]
    assert "1 finished" in cli("inspect", output).stdout


BF16 = ("BF16", np.zeros((64, 64), np.uint16))
BYTES = ("I8", np.zeros(8, np.int8))
# Names of tensors, loose files and split files that imply more layers, experts or files than fit into memory.
HUGE = {
    "blk.0.ffn_up_exps.65535.numa.1023.weight": "imply 67108864 slices of experts; most of them are missing, or a name",
    "blk.0.ffn_up_exps.0.numa.99999999999.weight": "no model has a layer, expert or NUMA slice with this number",
    "blk.0.ffn_up_exps.99999999999.numa.0.weight": "no model has a layer, expert or NUMA slice with this number",
    "blk.99999999999.ffn_up_exps.0.numa.0.weight": "no model has a layer, expert or NUMA slice with this number",
    "_layer_0/_numa_1023/INT4_down_65535_8Byte_quant_.kt": "imply 67108864 slices of experts",
    "_layer_99999999999/_numa_99999999999/INT4_down_0_8Byte_quant_.kt": "no model has a layer, expert or",
    "model.layers.999999998.mlp.experts.0.gate_proj.weight": "is of layer 999999998, and no model has more than 10000",
    "m-{:05d}-of-99999.gguf": "m-00100-of-99999.gguf: missing, one of 99999 files",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["verify", "--run"]], ids=" ".join)
def test_sizes_that_names_imply_are_bounded(command, name, tmp_path):
    """Names in a file of a few bytes must not cost much time or memory."""
    if name.endswith(".gguf"):
        for number in range(1, 100):
            (tmp_path / name.format(number)).write_bytes(b"GGUF")
    elif name.endswith(".kt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(8))
    elif name.startswith("blk"):
        tensors = {name: BYTES, "blk.0.ffn_up_exps.0.numa.0.scale": ("F32", np.zeros(2, np.float32))}
        write_file(tmp_path / "model.safetensors", tensors)
    else:
        tensors = {name.replace("gate", projection): BF16 for projection in ("gate", "up", "down")}
        write_file(tmp_path / "model.safetensors", tensors)
        (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_hidden_layers": 999999999}')
    result = run_in_process(*command, tmp_path, "--json")
    assert isinstance(result.exception, SystemExit | KTConvertError | None), result.exception
    output = f"{result.output}{result.exception}"
    accepted = [HUGE[name]]
    if name.startswith("m") and command == ["verify"]:  # a checkpoint, whose sizes `verify` does not read
        accepted += ["is a checkpoint, not an output", "has no .safetensors file"]
    assert any(text in output for text in accepted), output
