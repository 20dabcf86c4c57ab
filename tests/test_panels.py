"""Experts in panels: the bytes are those of the NumPy definition, in any number of parts, and can be read back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.checkpoints.experts import recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.parts import PROJECTIONS, take_part
from ktconvert.native_quant import kernels, kernels_panels
from ktconvert.native_quant.matrix import BF16, F32, Matrix
from ktconvert.quantizers import panels
from ktconvert.quantizers.reference import decode
from rig import conversion, killpoint

SIZES = st.sampled_from((32, 64, 96, 160))


def bits(shape: tuple[int, int], seed: int) -> npt.NDArray[np.uint16]:
    """Any finite BF16 numbers, subnormal ones and -0 among them."""
    values = np.random.default_rng(seed).integers(0, 1 << 16, shape, np.uint16)
    values[(values & 0x7F80) == 0x7F80] = 0x8000
    return values


@given(n=SIZES, k=SIZES, seed=st.integers(0, 9), turned=st.booleans(), isa=st.sampled_from(kernels.available_isas()))
def test_bf16_panels_are_those_of_the_definition(n: int, k: int, seed: int, turned: bool, isa: str) -> None:
    values = bits((n, k), seed)
    matrix = Matrix(values.T.copy().T if turned else values, BF16)
    codes = np.empty((n // 32, 32 * k), np.uint16)
    kernels.set_isa(isa)
    try:
        kernels_panels.pack_bf16(matrix, codes)
    finally:
        kernels.set_isa(None)
    assert (codes == panels.lay(values)).all()
    assert (panels.unlay(codes) == values).all()


def test_element_is_where_the_format_says() -> None:
    """FORMAT.md's formula, element by element."""
    n, k = 64, 96
    values = np.arange(n * k, dtype=np.uint16).reshape(n, k)
    flat = panels.lay(values).reshape(-1).view(np.uint8)
    for r in range(n):
        for c in range(k):
            s, h, i, b, j = r // 32, r % 32 // 16, r % 16, c // 32, c % 32
            at = 64 * s * k + 2048 * b + 1024 * h + 64 * (j // 2) + 4 * i + 2 * (j % 2)
            assert flat[at : at + 2].view(np.uint16)[0] == values[r, c]


@pytest.mark.parametrize("row", [0, 31, 32, 63])
def test_numbers_that_are_not_finite_are_named(row: int) -> None:
    values = np.ones((64, 96), np.float32)
    values[row, 95] = np.inf
    with pytest.raises(kernels.NonFinite) as raised:
        kernels_panels.pack_bf16(Matrix(values, F32), np.empty((2, 32 * 96), np.uint16))
    assert (raised.value.row, raised.value.column) == (row, 95)


@pytest.fixture(scope="module", params=[1, 2])
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """(source, output, parts) of a small checkpoint converted by the command."""
    root = tmp_path_factory.mktemp("panels")
    source = conversion.checkpoint(root / "source", layers=2, hidden=96, width=64)
    done = ktconvert(
        "cpu", "-i", source, "-o", root / "out", "--quant-method", "bf16", "--threadpool-count", request.param
    )
    assert done.returncode == 0, done.stderr
    assert "the experts are BF16 already: every number stays what it is" in done.stderr
    return source, root / "out", request.param


def ktconvert(*arguments: object) -> subprocess.CompletedProcess[str]:
    return conversion.ktconvert(*map(str, arguments))


def test_output_holds_the_source(output: tuple[Path, Path, int]) -> None:
    source, out, parts = output
    model = recognise(open_checkpoint(source))
    stored = {entry.name: entry.shape for shard in out.glob("*.safetensors") for entry in read_header(shard).entries}
    form = FORMATS["BF16"].encoding
    assert len(stored) == 2 * model.shape(0)[0] * 3 * parts
    report = ktconvert("verify", out, "--against", source, "--full")
    assert report.returncode == 0 and "verified" in report.stdout
    linear = model.linear(1, 1, "down")
    part = take_part(linear, "down", parts - 1, parts)
    n, k = part.shape
    assert stored[f"blk.1.ffn_down_exps.1.numa.{parts - 1}.codes"] == (n // 32, 32 * k)
    packed = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(n, k)]
    form.quantize(part, packed)
    assert (packed[0].view(np.uint16) == panels.lay(decode(part)).reshape(-1)).all()
    assert (form.decode(packed, n, k, slice(5, 40))[:, 0] == form.decode(packed, n, k)[5:40, 0]).all()


def test_refusals(output: tuple[Path, Path, int], tmp_path: Path) -> None:
    source, _, _ = output
    for option, text in (
        ("--no-merge-safetensor", "BF16 has no loose files; leave out --no-merge-safetensor, or add"),
        ("--save-backward-weights", "in loose files only, without the experts; add --no-merge-safetensor"),
    ):
        done = ktconvert("cpu", "-i", source, "-o", tmp_path / "x", "--quant-method", "bf16", option)
        assert done.returncode == 2 and text in done.stderr
    done = ktconvert("cpu", "-i", source, "-o", tmp_path / "x", "--quant-method", "bf16", "--threadpool-count", 4)
    assert done.returncode == 3 and "is not a multiple of 32" in done.stderr


def test_killed_and_resumed_to_the_same_bytes(output: tuple[Path, Path, int], tmp_path: Path) -> None:
    source, out, parts = output
    shim, log = killpoint.build(tmp_path), tmp_path / "log"
    options = ("--quant-method", "bf16", "--threadpool-count", str(parts), "-q")
    command = [*conversion.KTCONVERT, "cpu", "-i", str(source), "-o", str(tmp_path / "out"), *options]
    assert killpoint.run(command, tmp_path / "out", 40, shim, log).returncode == killpoint.KILLED
    assert killpoint.run(command, tmp_path / "out", 0, shim, log).returncode == 0
    assert conversion.tree(tmp_path / "out") == conversion.tree(out)


def test_damage_is_found(output: tuple[Path, Path, int]) -> None:
    _, out, _ = output
    shard = next(out.glob("model-00001*"))
    before = shard.read_bytes()
    try:
        shard.write_bytes(before[:-2] + b"\x80\x7f")  # an infinity
        done = ktconvert("verify", out)
        assert done.returncode == 6 and "is infinite or not a number" in done.stdout + done.stderr
    finally:
        shard.write_bytes(before)


def test_projections_are_all_there(output: tuple[Path, Path, int]) -> None:
    _, out, parts = output
    names = json.loads((out / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert {name.split("_")[1] for name in names} == set(PROJECTIONS)
    assert {name.split(".numa.")[1].split(".")[0] for name in names} == {str(t) for t in range(parts)}
