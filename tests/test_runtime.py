"""The forward: kt-kernel's bits in exact mode, closer to the truth by default, and the same bits in all settings."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open

from ktconvert.layouts.errors import ArgumentError, StateError, UnsupportedError
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.slices import Slicing
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.methods import METHODS as ROWS
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.weights import LayerWeights
from rig import floats, isas
from rig.native import distance
from rig.pools import make_grouped_pool
from rig.safetensors import read_file

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.v1.*_t[12].safetensors"))
RUN = [path for path in GOLDEN if "backward" not in path.name]
METHODS = ("AMXINT4", "AMXINT8")


@dataclass(frozen=True)
class Golden:
    """Weights and results of kt-kernel."""

    packed: LayerWeights
    hidden: npt.NDArray[np.uint16]
    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    out: npt.NDArray[np.uint16]

    def experts(self, **options: Any) -> KTExperts:
        return KTExperts(self.packed, **options)

    def call(self, **options: Any) -> npt.NDArray[np.uint16]:
        return self.experts(**options).forward(self.hidden, self.ids, self.weights)


def read(path: Path) -> Golden:
    with safe_open(path, "np") as file:
        about = file.metadata()
    stored = read_file(path)
    grid = Slicing(0, int(about["hidden"]), int(about["inter"]), int(about["numa"]))
    experts = int(about["experts"])
    arrays = {}
    for part in grid.all_slices(range(experts)):
        key = f"blk.0.ffn_{part.projection}_exps.{part.expert}.numa.{part.node}"
        weight, scale = (np.frombuffer(stored[f"{key}.{name}"].data, np.uint8).copy() for name in ("weight", "scale"))
        arrays[part] = (weight, scale)
    inputs = (stored[name].bits for name in ("in.hidden", "in.topk_ids", "in.topk_weights", "out.hidden"))
    return Golden(LayerWeights(dict.fromkeys(PROJECTIONS, ROWS[about["method"]]), grid, experts, arrays), *inputs)


@pytest.fixture(scope="module", params=RUN, ids=lambda path: path.name.removesuffix(".safetensors"))
def golden(request: pytest.FixtureRequest) -> Golden:
    return read(request.param)


@pytest.fixture(scope="module")
def pools() -> list[Pool]:
    """Return pools with one thread, as many as CPUs, more than CPUs, and in groups for two NUMA nodes."""
    return [Pool(1), Pool(2), Pool(7), make_grouped_pool(2, 2), make_grouped_pool(5, 2)]


Make = Callable[..., tuple[KTExperts, npt.NDArray[np.uint16], npt.NDArray[np.int64], npt.NDArray[np.float32]]]


@pytest.fixture(scope="session")
def make(random_experts: Any) -> Make:
    """Draw experts and tokens for them: (experts, hidden, ids, weights)."""

    def construct(method="AMXINT8", experts=8, hidden=256, width=128, tokens=9, topk=3, **options: Any) -> Any:
        rng = np.random.default_rng(hidden + width + tokens)
        layer = random_experts(experts, hidden, width)
        layer["up"][:, 3] += 0x200  # 16 times as large: an outlier, so that some rows of h have a remainder
        x = floats.to_bits(rng.standard_normal((tokens, hidden)))
        ids = np.stack([rng.permutation(experts)[:topk] for _ in range(tokens)]).astype(np.int64)
        weights = rng.random((tokens, topk)).astype(np.float32)
        return KTExperts.from_bf16(**layer, method=method, **options), x, ids, weights

    return construct


def reference(packed: LayerWeights, x: Any, ids: Any, weights: Any) -> npt.NDArray[np.float64]:
    """Compute the layer in float64 from the dequantized weights, without rounding."""
    linears: dict[tuple[str, int], npt.NDArray[np.float64]] = {}
    for part in packed.arrays:
        dense = FORMATS[packed.method].encoding.decode(packed.arrays[part], part.n, part.k).astype(np.float64)
        key = (part.projection, part.expert)
        axis = 1 if part.projection == "down" else 0
        linears[key] = np.concatenate([linears[key], dense], axis) if key in linears else dense
    return floats.forward(lambda expert, projection: linears[projection, expert], x, ids, weights)


def test_exact_mode_gives_the_bits_of_kt_kernel(golden, isa, pools):
    for pool in pools:
        np.testing.assert_array_equal(golden.call(exact=True, pool=pool), golden.out)


def test_default_mode_is_closer_to_the_truth_than_kt_kernel(golden):
    truth = reference(golden.packed, golden.hidden, golden.ids, golden.weights)
    assert distance(golden.call(), truth) < distance(golden.out, truth)


LIMITS = [
    *(([1, 1], 144), ([-1, 1], 144), ([1, 4], 81), ([1, 0.25], 156), ([1, 1.125], 144 * 2 / (1 + 1.125**2))),
    *(([2.0**100, -(2.0**102)], 81), ([2.0**-96, 2.0**-100], 156)),
]


@pytest.mark.parametrize(("weights", "limit"), LIMITS)
def test_weights_determine_the_rows_with_remainder(weights, limit, random_experts):
    """limit: the mean square of a row's codes below which it has one; alone, 144."""
    tokens, hidden, width = 700, 128, 512
    layer = random_experts(2, hidden, width)
    layer["up"][:, ::64] += 0x180  # 8 times as large: outliers
    layer["down"][1] = 0  # the output is the first expert's
    experts = KTExperts.from_bf16(**layer, method="AMXINT8")
    x = np.random.default_rng(3).integers(-8, 9, (tokens, hidden))
    x[:, 0] = 127  # codes are the values themselves
    states = floats.to_bits(x)

    def output(*of: float) -> npt.NDArray[np.float64]:
        ids = np.tile(np.arange(len(of)), (tokens, 1))
        return floats.from_bits(experts.forward(states, ids, np.tile(np.float32(of), (tokens, 1)))) / of[0]

    gate, up = (
        x @ FORMATS[experts._packed.method].encoding.decode(array, width, hidden).T.astype(np.float64)
        for part, array in experts._packed.arrays.items()
        if part.expert == 0 and part.projection != "down"
    )
    h = gate / (1 + np.exp(-gate)) * up
    energy = (np.rint(h * (127 / np.abs(h).max(1, keepdims=True))) ** 2).mean(1)
    low, high = sorted((limit, 144))
    between = (low <= energy) & (energy < high)
    assert (between.any() or low == high) and (energy < 81).any()
    np.testing.assert_array_equal((output(*weights) != output(1)).any(1), between)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 241])
@pytest.mark.parametrize("method", METHODS)
def test_every_instruction_set_and_pool_gives_the_same_bits(method, tokens, exact, pools, make):
    """Tiles of the last tokens, and the remainders of each row, do not reach what other experts or groups have."""
    experts, *call = make(method, tokens=tokens, topk=2, experts=3, exact=exact, parts=2, hidden=384, width=256)
    with isas.use("scalar"):
        expected = experts.forward(*call)
    for name in isas.each():
        for pool in pools:
            other = KTExperts(experts._packed, exact=exact, pool=pool)
            np.testing.assert_array_equal(other.forward(*call), expected, err_msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_incomplete_token_blocks_compute(method, isa, random_experts):
    """So many tokens for one expert that a kernel gets them in several calls, and an outlier in each row of h."""
    layer = random_experts(2, 128, 128)
    for name in ("gate", "up"):
        layer[name][0, 77] += 4 << 7  # times 16: h gets one column that is 256 times as large
    rng = np.random.default_rng(3)
    tokens = 700
    x = floats.to_bits(rng.standard_normal((tokens, 128)))
    ids = np.where(np.arange(tokens) % 9, 0, 1)[:, None]  # 622 for the first
    weights = np.ones((tokens, 1), np.float32)
    with KTExperts.from_bf16(layer["gate"], layer["up"], layer["down"], method=method) as experts:
        together = experts.forward(x, ids, weights)
        for t in range(0, tokens, 50):
            few = slice(t, t + 50)
            np.testing.assert_array_equal(experts.forward(x[few], ids[few], weights[few]), together[few])
        rounded = KTExperts(experts._packed, exact=True).forward(x, ids, weights)
        truth = reference(experts._packed, x[:100], ids[:100], weights[:100])
    assert distance(together[:100], truth) < 0.8 * distance(rounded[:100], truth)  # remainders were added


def test_long_batches_are_split_into_passes_and_panels(make):
    experts, x, ids, weights = make(experts=4, hidden=512, width=64, tokens=200, topk=4)
    many = 500  # 400,000 rows of (token, expert): several passes; 128 columns of y at a time
    expected = np.tile(experts.forward(x, ids, weights), (many, 1))
    got = experts.forward(np.tile(x, (many, 1)), np.tile(ids, (many, 1)), np.tile(weights, (many, 1)))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
@pytest.mark.parametrize("exact", [False, True])
def test_inf_and_nan_affect_only_their_token(bad, exact, make, isa):
    experts, x, ids, weights = make(tokens=6, exact=exact)
    clean = experts.forward(x, ids, weights)
    x[2, 17] = bad
    out = experts.forward(x, ids, weights)
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(clean, 2, 0))
    assert np.isnan(floats.from_bits(out[2])).all()


def test_a_duplicate_expert_counts_twice(make):
    experts, x, ids, weights = make(tokens=2, topk=2)
    twice = experts.forward(x, np.repeat(ids[:, :1], 2, 1), np.full_like(weights, 0.5))
    once = experts.forward(x, ids[:, :1].copy(), np.ones_like(weights[:, :1]))
    np.testing.assert_array_equal(twice, once)


def test_inconsistent_arrays_are_rejected(make):
    experts, x, ids, weights = make()
    shapes = (x[:, :-64], ids, weights), (x[:-1], ids, weights), (x, ids[:, :1], weights)
    dtypes = (x.view(np.int16), ids, weights), (x, ids.astype(np.int32), weights), (x, ids, weights.astype(np.float64))
    swapped = x.astype(x.dtype.newbyteorder())
    others = ([[1, 2]], ids, weights), (x, None, weights), (swapped, ids, weights), (x[0], ids, weights)
    strided = (x[:, ::-1], ids, weights), (x, np.asfortranarray(ids), weights)
    names = r"^(hidden|ids|weights) must be (a NumPy array of \w+ \[.*, not |contiguous)"
    for wrong in (*shapes, *dtypes, *others, *strided):
        with pytest.raises(ArgumentError, match=names):
            experts.forward(*wrong)
    read_only = np.empty_like(x)
    read_only.flags.writeable = False
    for name, value in (("skip", np.zeros(7, bool)), ("skip", np.zeros(8)), ("out", [0]), ("out", read_only)):
        with pytest.raises(ArgumentError, match=f"^{name} must be "):
            experts.forward(x, ids, weights, **{name: value})
    for order in (np.arange(7), list(range(8)), np.arange(8.0)):
        with pytest.raises(ArgumentError, match=r"^order .*must name each of 8 experts once"):
            KTExperts(experts._packed, order=order)
    with pytest.raises(ArgumentError, match=r"^use KTExperts\.load\(path, layer\), or KTExperts\.from_bf16"):
        KTExperts("model-int8", 0)  # type: ignore[arg-type]


def test_messages_about_tensors_of_torch_say_how_to_convert_them(make):
    experts, _, ids, weights = make()
    hidden = torch.zeros(ids.shape[0], experts.hidden, dtype=torch.bfloat16)
    with pytest.raises(
        ArgumentError, match=r"not Tensor torch\.bfloat16 .*; pass hidden\.view\(torch\.uint16\)\.numpy\(\)\.$"
    ):
        experts.forward(hidden, ids, weights)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"not Tensor torch\.int64 .*; pass ids\.numpy\(\)\.$"):
        experts.forward(hidden.view(torch.uint16).numpy(), torch.from_numpy(ids), weights)  # type: ignore[arg-type]
    stack = torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"; pass gate\.view\(torch\.uint16\)\.numpy\(\)\.$"):
        KTExperts.from_bf16(stack, stack, stack)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "change", "remedy"),
    [
        (
            "hidden",
            lambda x: np.zeros(x.shape, np.float32),
            r"torch\.from_numpy\(hidden\)\.bfloat16\(\)\.view\(torch\.uint16",
        ),
        ("hidden", lambda x: x.view(np.int16), r"hidden\.view\(np\.uint16\)"),
        ("hidden", lambda x: x[0], r"hidden\.reshape\(-1, 256\)"),
        ("hidden", lambda x: x[None], r"hidden\.reshape\(-1, 256\)"),
        ("ids", lambda ids: ids.astype(np.int32), r"ids\.astype\(np\.int64\)"),
        ("ids", lambda ids: ids.tolist(), r"np\.array\(ids, np\.int64\)"),
        ("ids", lambda ids: torch.from_numpy(ids).int(), r"ids\.long\(\)\.numpy\(\)"),
        ("ids", lambda ids: ids[None], r"ids\.reshape\(-1, 2\)"),
        ("weights", lambda weights: weights.astype(np.float64), r"weights\.astype\(np\.float32\)"),
        ("weights", lambda weights: torch.from_numpy(weights).bfloat16(), r"weights\.float\(\)\.numpy\(\)"),
        ("skip", lambda _: np.zeros(8, np.int64), r"skip\.astype\(bool\)"),
        ("skip", lambda _: [False] * 8, r"np\.array\(skip, bool\)"),
    ],
)
def test_messages_about_other_arrays_say_how_to_convert_them(
    name: str, change: Callable[[Any], Any], remedy: str, make: Any
) -> None:
    experts, hidden, ids, weights = make(tokens=3, topk=2)
    arrays = {"hidden": hidden, "ids": ids, "weights": weights}
    with pytest.raises(ArgumentError, match=rf"^{name} must be a NumPy array of .*; pass {remedy}"):
        experts.forward(**arrays | {name: change(arrays.get(name))})


@pytest.mark.parametrize(
    "changed", [{"layer": "0"}, {"layer": -1}, {"parts": 0}, {"threads": 0}, {"memory": "fast"}, {"hidden": 1.5}]
)
def test_wrong_arguments_of_load_are_named(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(changed))} must be "):
        KTExperts.load(**{"path": tmp_path, "layer": 0, **changed})
    with pytest.raises(ArgumentError, match=r"^path must be a path, not None"):
        KTExperts.load(None, 0)  # type: ignore[arg-type]


def test_printed_experts_show_method_and_sizes(make) -> None:
    experts, *_ = make()
    sizes = f"num_experts=8, hidden={experts.hidden}, intermediate={experts.intermediate}, parts={experts.parts}"
    assert repr(experts) == f"KTExperts(path=None, layer=0, method={experts.method!r}, {sizes})"
    experts.close()
    assert repr(experts).endswith(", closed)")


def test_closed_experts_raise_a_state_error(make) -> None:
    experts, *call = make()
    copied = copy.copy(experts)
    with experts:
        pass
    experts.close()  # again
    for use in (lambda: experts.forward(*call), lambda: experts.nbytes, lambda: experts._submit(*call, out=call[0])):
        with pytest.raises(StateError, match=r"^the experts of layer 0 were closed; load them again\.$"):
            use()
    assert copied.nbytes and copied.forward(*call).any()


def test_the_maximum_of_slices_and_experts_per_token_computes(make):
    rng = np.random.default_rng(3)

    def experts(parts: int, groups: int = 1) -> KTExperts:
        sizes = (1, 32 * parts, 32), (1, 32 * parts, 32), (1, 32, 32 * parts)
        weights = (rng.integers(0x3C00, 0x3D00, size).astype(np.uint16) for size in sizes)
        return KTExperts.from_bf16(*weights, method="BF16", parts=parts, pool=make_grouped_pool(2, groups))

    x, ids = np.full((3, 32), 0x3F80, np.uint16), np.zeros((3, 4096), np.int64)
    shares = np.full(ids.shape, 1 / 4096, np.float32)
    for groups in (1, 2):
        assert experts(64, groups).forward(x, ids, shares).any()
    with pytest.raises(UnsupportedError, match="layer 0 has 65 NUMA slices, and this runtime adds up 64 at most"):
        experts(65)
    one, x, ids, shares = make(tokens=1)
    with pytest.raises(ValueError, match="experts per token must be an int from 1 to 4096, not 4097"):
        one.forward(x, np.zeros((1, 4097), np.int64), np.zeros((1, 4097), np.float32))


def test_the_subnormal_mode_of_the_caller_stays(make):
    experts, x, ids, weights = make()
    experts.forward(x, ids, weights)
    tiny = np.array([1e-40], np.float32)
    assert (tiny * np.float32(1)).view(np.uint32)[0] == tiny.view(np.uint32)[0] != 0
