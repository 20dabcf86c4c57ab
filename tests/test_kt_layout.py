"""`cpu --layout kt`: whole linears under the names that kt-kernel's native methods look for, and the real kt-kernel
computes with them where it is installed.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.checkpoints.experts import recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.encodings import mxfp4 as encodings_of_mxfp4
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs import FORMATS, PROJECTIONS
from ktconvert.layouts.outputs.measuring import measure
from ktconvert.layouts.outputs.opening import is_output, open_output
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.quantizers import fp8, mxfp4, reference
from rig import conversion, floats, killpoint
from rig.files import rewrite
from rig.safetensors import bits_of, data_start, edit_header, header_of, read_file

V4 = {"gate": "w1", "up": "w3", "down": "w2"}  # the names of DeepSeek-V4
METHODS = ("mxfp4", "fp8", "bf16")


def tensors_of(folder: Path) -> dict[str, Any]:
    """All tensors of a directory, as bits."""
    return {name: bits for shard in folder.glob("*.safetensors") for name, bits in bits_of(read_file(shard)).items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("kt") / "source", layers=2, hidden=256, width=128)


def converted(cli: Any, source: Path, out: Path, method: str, *more: str) -> Any:
    return cli("cpu", "-i", source, "-o", out, "--quant-method", method, "--layout", "kt", *more)


@pytest.mark.parametrize("method", METHODS)
def test_linears_are_whole_and_in_order(method: str, source: Path, tmp_path: Path, cli: Any) -> None:
    out = tmp_path / "out"
    done = converted(cli, source, out, method, "--threadpool-count", "2")
    assert "note: --threadpool-count changes nothing with --layout kt" in done.stderr and "NUMA part" not in done.stderr
    tensors, model = tensors_of(out), recognise(open_checkpoint(source))
    for layer in model.layers:
        for expert in range(model.shape(layer)[0]):
            for projection in PROJECTIONS:
                bits = reference.decode(model.linear(layer, expert, projection))
                if method == "mxfp4":
                    codes, exponents = mxfp4.quantize(bits)
                    name = f"layers.{layer}.ffn.experts.{expert}.{V4[projection]}"
                    stored = tensors.pop(f"{name}.weight").view(np.uint8)
                    assert (stored == codes[:, ::2] | codes[:, 1::2] << 4).all()
                    assert (tensors.pop(f"{name}.scale") == exponents).all()
                    continue
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                stored = tensors.pop(name)
                if method == "bf16":
                    assert (stored == bits).all()
                    continue
                codes, scales = fp8.quantize(bits)
                assert (stored == codes).all() and (tensors.pop(f"{name}_scale_inv") == scales).all()
    assert not tensors
    report = json.loads(cli("verify", out, "--against", source, "--full", "--json").stdout)
    assert report["method"] == f"KT_{method.upper()}"
    assert f"--kt-method {method.upper()} " in (out / "README.md").read_text()
    cli("verify", out, "--quant-method", f"kt_{method}", "--numa", 1)
    assert "KT_" in cli("inspect", out).stdout
    opened = measure(open_output(out))
    assert opened.shapes == {0: (2, 256, 128), 1: (2, 256, 128)} and opened.fmt == FORMATS[f"KT_{method.upper()}"]


def test_without_its_manifest_it_is_a_checkpoint(source: Path, tmp_path: Path, cli: Any) -> None:
    """Nothing else tells it from one."""
    converted(cli, source, tmp_path / "out", "bf16")
    assert is_output(tmp_path / "out") and not is_output(source)
    (tmp_path / "out" / "manifest.json").unlink()
    assert not is_output(tmp_path / "out")


def test_fp8_in_blocks_keeps_its_tensors(tmp_path: Path, cli: Any, source: Path) -> None:
    """What was written once is the source of the next conversion."""
    first, second = tmp_path / "first", tmp_path / "second"
    converted(cli, source, first, "fp8")
    (first / "manifest.json").unlink()
    config = json.loads((first / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    del config["transformers_weights"]
    (first / "config.json").write_text(json.dumps(config))
    done = converted(cli, first, second, "fp8")
    assert "the experts are FP8 already: every number stays what it is" in done.stderr
    before, after = tensors_of(first), tensors_of(second)
    assert before.keys() == after.keys()
    assert all((after[name] == before[name]).all() for name in before)


def test_refusals(source: Path, tmp_path: Path, cli: Any) -> None:
    for code, text, *options in (
        (2, "--layout kt is for mxfp4, fp8 and bf16; AMXINT4 is for NUMA parts", "--quant-method", "int4"),
        (2, "--layout kt holds experts alone", "--quant-method", "fp8", "--non-experts", "keep"),
        (2, "has no loose files", "--quant-method", "fp8", "--no-merge-safetensor"),
        (2, "has no matrices for fine-tuning", "--quant-method", "bf16", "--save-backward-weights"),
    ):
        done = cli("cpu", "-i", source, "-o", tmp_path / "x", "--layout", "kt", *options, code=code)
        assert text in done.stderr
    narrow = conversion.checkpoint(tmp_path / "narrow", layers=1, hidden=256, width=64)
    done = cli("cpu", "-i", narrow, "-o", tmp_path / "x", "--layout", "kt", "--quant-method", "fp8", code=3)
    assert "is not a multiple of 128" in done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_the_runtime_computes_with_it(method: str, source: Path, tmp_path: Path, cli: Any) -> None:
    """The same bits as with these experts packed on the spot."""
    converted(cli, source, tmp_path / "out", method)
    model = recognise(open_checkpoint(source))
    stacks = (
        np.stack([reference.decode(model.linear(1, e, p)) for e in range(model.shape(1)[0])]) for p in PROJECTIONS
    )
    expected, ours = Experts.from_bf16(*stacks, method=method.upper()), Experts.load(tmp_path / "out", 1, parts=1)
    assert ours.method == method.upper()
    call = floats.activations(3, 256), np.tile(np.arange(2), (3, 1)), np.full((3, 2), 0.5, np.float32)
    np.testing.assert_array_equal(ours.forward(*call), expected.forward(*call))
    about = json.loads((tmp_path / "out" / "manifest.json").read_text())
    about["model"]["activation"] = "swiglu_limit"
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(about))
    with pytest.raises(UnsupportedError, match="manifest says activation swiglu_limit, these settings say silu; give"):
        Experts.load(tmp_path / "out", 1, parts=1)


@pytest.mark.parametrize("method", METHODS)
def test_the_runtime_refuses_what_contradicts_itself_or_is_damaged(
    method: str, source: Path, tmp_path: Path, cli: Any
) -> None:
    out = tmp_path / "out"
    converted(cli, source, out, method)
    shard, about = min(out.glob("model-*.safetensors")), (out / "manifest.json").read_text()
    others = [f"KT_{other.upper()}" for other in METHODS if other != method]
    for name, value in (*(("method", other) for other in others), ("numa", 2)):
        document = json.loads(about)
        document["model"][name] = value
        rewrite(out / "manifest.json", json.dumps(document))
        with pytest.raises(
            UnsupportedError, match=rf"manifest.json: says {name} {value}, the weights .*; convert it ag"
        ):
            Experts.load(out, 0)
    rewrite(out / "manifest.json", about)
    assert Experts.load(out, 0).method == method.upper()
    before = shard.read_bytes()
    for name, value in (("method", others[0]), ("num_experts", "9"), ("hidden_size", "64")):
        edit_header(shard, lambda header, entry={name: value}: header["__metadata__"].update(entry))
        with pytest.raises(
            UnsupportedError, match=rf"{shard.name}: its header says {name} {value}, .*; convert it again"
        ):
            Experts.load(out, 0)
        rewrite(shard, before)
    for harmed in (before[:-64], before[:100]):
        rewrite(shard, harmed)
        with pytest.raises(InputError, match=rf"{shard.name}: .*; convert it again"):
            Experts.load(out, 0)
    key, bad = {
        "mxfp4": ("layers.0.ffn.experts.1.w1.scale", b"\xff"),
        "fp8": ("model.layers.0.mlp.experts.1.gate_proj.weight_scale_inv", b"\0\0\xc0\x7f"),
        "bf16": ("model.layers.0.mlp.experts.1.gate_proj.weight", b"\xc0\x7f"),
    }[method]
    rewrite(shard, before)
    at = data_start(shard) + header_of(shard)[key]["data_offsets"][0]
    rewrite(shard, before[:at] + bad + before[at + len(bad) :])
    with pytest.raises(InputError, match=rf"{shard.name}: tensor '{key}': .*; convert it again"):
        Experts.load(out, 0)
    shard.unlink()
    with pytest.raises(InputError, match=rf"names {shard.name}, which is missing; convert it again"):
        Experts.load(out, 0)


def test_memory_of_mxfp4_is_that_of_some_rows() -> None:
    """What is in panels meanwhile does not grow with the linear, and a number that is not finite is named by its row."""
    n, k = 4096, 256
    values = np.full((n, k), 0x3F80, np.uint16)
    out = [np.empty(tensor.nbytes, np.uint8) for tensor in encodings_of_mxfp4.ROWS.tensors(n, k)]
    encodings_of_mxfp4.ROWS.quantize(Matrix(values, BF16), out)
    tracemalloc.start()
    try:
        encodings_of_mxfp4.ROWS.quantize(Matrix(values, BF16), out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * encodings_of_mxfp4.ROWS_AT_A_TIME * k
    values[300, 7] = 0x7FC0
    with pytest.raises(kernels.NonFinite, match="row 300, column 7"):
        encodings_of_mxfp4.ROWS.quantize(Matrix(values, BF16), out)


@pytest.mark.parametrize("method", METHODS)
def test_planned_killed_resumed_and_damaged(method: str, source: Path, tmp_path: Path, cli: Any) -> None:
    shim, log = killpoint.build(tmp_path), tmp_path / "log"
    options = ("--quant-method", method, "--layout", "kt")
    planned = cli("cpu", "-i", source, "-o", tmp_path / "x", *options, "--dry-run", "--json").stdout.splitlines()
    assert len(json.loads(planned[-1])["units"]) == 2

    def run(out: str, n: int) -> int:
        command = [*conversion.KTCONVERT, "cpu", "-i", source, "-o", tmp_path / out, *options]
        return killpoint.run(command, tmp_path / out, n, shim, log).returncode

    assert run("whole", 0) == 0
    calls = killpoint.count(log)
    assert run("killed", calls // 2) == killpoint.KILLED
    cli("resume", tmp_path / "killed")
    assert conversion.tree(tmp_path / "killed") == conversion.tree(tmp_path / "whole")
    shard = next((tmp_path / "whole").glob("model-00001*"))
    data = bytearray(shard.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    if method == "mxfp4":
        data[-1] = 255  # a scale that is not a number
    else:
        data[header : header + 2] = b"\xff\x7f"  # NaN in either format
    shard.write_bytes(data)
    assert "not a number" in cli("verify", tmp_path / "whole", code=6).stdout
    shard.unlink()
    cli("verify", tmp_path / "whole", code=6)
