"""The forward of all formats except AMXINT4 and AMXINT8: the same bits for any threads and batches, and refusals.

test_from_checkpoint.py compares it with float64.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs.slices import Slicing
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.methods import METHODS as ROWS
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.weights import LayerWeights
from rig import floats
from rig.native import distance
from rig.pools import make_grouped_pool
from rig.safetensors import data_start, edit_header, header_of

FORMATS = ("MXFP4", "FP8", "BF16")

Numbers = dict[tuple[str, int, int], npt.NDArray[np.float64]]  # by projection, expert, NUMA slice


class Case:
    """A layer with random experts, tokens for them, and the outputs in float64."""

    def __init__(
        self, name: str, hidden: int, width: int, experts: int = 3, parts: int = 1, tokens: int = 9, topk: int = 2
    ) -> None:
        grid = Slicing(0, hidden, width, parts)
        arrays, numbers = {}, {}
        for i, part in enumerate(grid.all_slices(range(experts))):
            weight = floats.random(name, part.n, part.k, seed=i, size=0.5 / np.sqrt(part.k))
            arrays[part] = (weight.codes, weight.scales)[: 1 if name == "BF16" else 2]
            numbers[part.projection, part.expert, part.node] = weight.numbers
        self.layer_weights = LayerWeights(dict.fromkeys(PROJECTIONS, ROWS[name]), grid, experts, arrays)
        rng = np.random.default_rng(tokens)
        self.hidden = floats.activations(tokens, hidden)
        self.ids = np.stack([rng.permutation(experts)[:topk] for _ in range(tokens)]).astype(np.int64)
        self.weights = rng.random((tokens, topk)).astype(np.float32)
        self.numbers: Numbers = numbers

    def expected_output(self) -> npt.NDArray[np.float64]:
        def linear(expert: int, projection: str) -> Any:
            parts = [self.numbers[projection, expert, part] for part in range(self.layer_weights.slicing.numa)]
            return np.concatenate(parts, axis=1 if projection == "down" else 0)

        return floats.forward(linear, self.hidden, self.ids, self.weights)

    def run(self, rows: Any = slice(None), **options: Any) -> npt.NDArray[np.uint16]:
        call = (np.ascontiguousarray(x[rows]) for x in (self.hidden, self.ids, self.weights))
        return KTExperts(self.layer_weights, **options).forward(*call)


@pytest.fixture(scope="module")
def pools() -> list[Pool]:
    return [Pool(1), Pool(7), make_grouped_pool(5, 2)]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("activations", ["bf16", "int8"], ids=["14bits", "8bits"])
@pytest.mark.parametrize("name", (*FORMATS, "FP8_PERCHANNEL", "MXFP8", "NVFP4", "RAWINT4", "GPTQ_INT4"))
def test_neither_threads_nor_the_batch_change_a_bit(name: str, activations: str, pools: list[Pool]) -> None:
    """Each expert has more than 32 tokens. Tokens are also computed alone and in a different order."""
    case = Case(name, hidden=256, width=256, experts=2, parts=2, tokens=41)
    expected, order = case.run(pool=pools[0], activations=activations), np.random.default_rng(1).permutation(41)
    for pool in pools[1:]:
        np.testing.assert_array_equal(case.run(pool=pool, activations=activations), expected)
    for rows in (order, [0], [1], [40]):
        np.testing.assert_array_equal(case.run(rows, activations=activations), expected[rows])


@pytest.mark.parametrize("name", FORMATS)
def test_batches_larger_than_a_kernel_call_give_the_same_bits(name: str) -> None:
    """An expert's tokens are computed in blocks of 256, and outputs in panels of columns."""
    case = Case(name, hidden=512, width=128, experts=2, tokens=150)
    expected = np.tile(case.run(), (20, 1))
    case.hidden, case.ids, case.weights = (np.tile(x, (20, 1)) for x in (case.hidden, case.ids, case.weights))
    np.testing.assert_array_equal(case.run(), expected)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", FORMATS)
def test_inf_and_nan_affect_only_their_token(name: str) -> None:
    case = Case(name, hidden=128, width=128, experts=2, tokens=14)
    clean = case.run()
    for bad in (0x7F80, 0xFF80, 0x7FC0):
        case.hidden[5, 17] = bad
        out = case.run()
        np.testing.assert_array_equal(np.delete(out, 5, 0), np.delete(clean, 5, 0))
        assert np.isnan(floats.from_bits(out[5])).all()


def test_large_values_of_a_token_affect_no_other_token() -> None:
    """`exact` has no meaning for BF16 activations."""
    case = Case("BF16", hidden=128, width=128, tokens=4)
    case.hidden[1, 5] = floats.to_bits(np.array([3000.0]))[0]
    out = case.run()
    for t in range(4):
        assert distance(out[t], case.expected_output()[t]) < 6e-3
    np.testing.assert_array_equal(case.run(exact=True), out)


@pytest.fixture(scope="module", params=FORMATS)
def output(request: pytest.FixtureRequest, packed_example: Any) -> Path:
    path: Path = packed_example(request.param.lower(), 2)
    return path


def test_saving_as_loose_files_is_refused(random_experts: Any, tmp_path: Path) -> None:
    for name in FORMATS:
        experts = KTExperts.from_bf16(**random_experts(2, 256, 128), method=name)
        with pytest.raises(UnsupportedError, match=f"{name} has no loose files"):
            experts._save(tmp_path / "layers")
    assert not list(tmp_path.iterdir())


def test_wrong_metadata_of_an_output_is_rejected(output: Path, tmp_path: Path) -> None:
    """Wrong dtypes and shapes are rejected, even if the number of bytes is right."""
    key = "blk.0.ffn_gate_exps.2.numa.1.codes"
    other = {"BF16": "F16", "F8_E4M3": "U8", "U8": "I8"}

    def change_dtype(header: dict[str, Any]) -> None:
        header[key]["dtype"] = other[header[key]["dtype"]]

    def change_shape(header: dict[str, Any]) -> None:
        rows, columns = header[key]["shape"]
        header[key]["shape"] = [2 * rows, columns // 2]

    for change in (change_dtype, change_shape):
        copy = shutil.copytree(output, tmp_path / change.__name__)
        edit_header(min(copy.glob("*.safetensors")), change)
        with pytest.raises(InputError, match=r"expert 2, gate_proj, NUMA slice 1, codes is .*, must be "):
            KTExperts.load(copy, 0)


BAD_SCALES = [
    ("MXFP4", b"\xff", "scale 0, 255, is not a number"),
    ("FP8", b"\xff\xff\x7f\x7f", r"scale 0, 3.4.*e\+38, makes a number infinite"),
]


@pytest.mark.parametrize(("name", "bad", "problem"), BAD_SCALES)
def test_invalid_scales_are_rejected(name: str, bad: bytes, problem: str, tmp_path: Path, packed_example: Any) -> None:
    shutil.copytree(packed_example(name.lower()), tmp_path / "out")
    shard = min((tmp_path / "out").glob("*.safetensors"))
    start = data_start(shard) + header_of(shard)["blk.0.ffn_down_exps.5.numa.0.scales"]["data_offsets"][0]
    with shard.open("r+b") as file:
        file.seek(start)
        file.write(bad)
    for memory in ("map", "copy"):
        with pytest.raises(InputError, match=f"expert 5, down_proj, NUMA slice 0, scales: {problem};"):
            KTExperts.load(tmp_path / "out", 0, memory=memory)
    KTExperts.load(tmp_path / "out", 1)
