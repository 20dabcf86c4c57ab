"""An invented encoding, defined in this file and added to the table as one row: the command converts it.

This file is also that command: `python tests/test_toy_encoding.py cpu -i ...` is ktconvert with an extra row.
"""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktconvert.layouts import encodings
from ktconvert.layouts.encodings.checkpoint import CheckpointEncoding, read_aligned
from ktconvert.native_quant import matrix as of
from ktconvert.quantizers import reference
from rig.encodings import SHAPES, E, checkpoint
from rig.safetensors import edit_file, read_folder
from rig.toys import main


def decode(linear: of.Matrix) -> Any:
    """Return float32 [n, k]: half the square of a code, with its sign, times the scale. C does not know it."""
    codes = linear.values.astype(np.float32)
    return codes * np.abs(codes) / 2 * linear.element_scales()


def read_toy(source: Any, tensors: Any, quantization: Any, input_major: bool) -> of.Matrix:
    scales = read_aligned(source, tensors["toy_scale"]).view(np.float16).astype(np.float32)
    return of.Matrix(read_aligned(source, tensors["toy"]).view(np.int8), TOY, scales[:, None], (1, 1 << 30))


TOY = of.Kind("toy", np.dtype(np.int8), decode=decode)
ROW = CheckpointEncoding(
    name="TOY8",
    title="TOY8",
    tensor_names={"toy": ("{t}_q",), "toy_scale": ("{t}_qs",)},
    dtypes=("I8",),
    kind=TOY,
    make_matrix=read_toy,
    input_types=("toy",),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a toy checkpoint, and the same one in BF16."""
    rng = np.random.default_rng(0)
    stored: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for layer, expert, (projection, shape) in product(range(2), range(E), SHAPES.items()):
        name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
        codes = rng.integers(-128, 128, shape).astype(np.int8)
        scales = rng.uniform(1e-6, 1e-5, shape[0]).astype(np.float16)
        stored |= {f"{name}_q": ("I8", codes), f"{name}_qs": ("F16", scales.view(np.uint16))}
        x = codes.astype(np.float32) * np.abs(codes.astype(np.float32)) / 2
        plain[name] = ("BF16", reference.f32_to_bf16(x * scales.astype(np.float32)[:, None]))
    made = ((name, tmp_path_factory.mktemp(name) / "model") for name in ("toy", "plain"))
    return tuple(checkpoint(at, {"toy": stored, "plain": plain}[name], num_hidden_layers=2) for name, at in made)


@pytest.mark.parametrize("options", [(1,), (3, "--save-backward-weights")], ids=["whole", "parts"])
def test_outputs_equal_those_of_the_decoded_values(checkpoints, options, tmp_path, ktconvert):
    source, plain = checkpoints
    ktconvert("cpu", "-i", source, "-o", tmp_path / "out", "--input-type", "toy", "--threadpool-count", *options)
    ktconvert("cpu", "-i", plain, "-o", tmp_path / "plain", "--threadpool-count", *options)
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "plain")
    for arguments in ((), ("--against", source), ("--against", source, "--full")):
        ktconvert("verify", tmp_path / "out", *arguments)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["model"]["dtypes"] == ["TOY8"]


def test_gpu_and_inspect_read_the_encoding(checkpoints, tmp_path, ktconvert):
    source, plain = checkpoints
    gpu = "--quant-method", "RTN", "--quant-type", "W4A16"
    ktconvert("gpu", "-i", source, "-o", tmp_path / "out", *gpu)
    ktconvert("gpu", "-i", plain, "-o", tmp_path / "plain", *gpu)
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "plain")
    ktconvert("verify", tmp_path / "out", "--against", source)
    assert json.loads(ktconvert("inspect", source, "--json").stdout)["expert_dtypes"] == ["TOY8"]


def test_a_missing_tensor_is_named(checkpoints, tmp_path, ktconvert):
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    for lost, words in (("_qs", f"is TOY8 but {name}_qs is missing"), ("_q", f"weight '{name}_q' is missing")):
        model = shutil.copytree(checkpoints[0], tmp_path / lost)
        edit_file(model / "model.safetensors", lambda tensors, lost=lost: tensors.pop(f"{name}{lost}"))
        assert words in ktconvert("cpu", "-i", model, "-o", tmp_path / "out", code=5).stderr


def test_the_encoding_is_refused_without_its_row(checkpoints, tmp_path, cli):
    cli("cpu", "-i", checkpoints[0], "-o", tmp_path / "out", code=3)


def add() -> None:
    encodings.CHECKPOINT_ENCODINGS = (*encodings.CHECKPOINT_ENCODINGS, ROW)


if __name__ == "__main__":
    main(add)
