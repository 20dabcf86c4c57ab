"""All steps of a forward except dot products give the same bits with every instruction set, for any numbers."""

from typing import Any

import numpy as np
import pytest

from ktconvert.layouts.outputs.slices import Slicing
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant import kernels
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.methods import METHODS
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.weights import LayerWeights
from ktconvert.quantizers import reference
from rig import isas
from rig.pools import make_grouped_pool

# bits, hidden size, intermediate size of a NUMA slice, slices, tokens, experts per token. They cover full and partial
# blocks of columns, one and several column blocks, one and several slices, and more than one row block of tokens.
SHAPES = [
    (8, 64, 64, 1, 40, 2),
    (8, 320, 192, 2, 40, 3),
    (8, 3648, 64, 2, 13, 1),
    (4, 7296, 128, 1, 13, 1),
    (4, 384, 256, 3, 40, 2),
    (4, 128, 3712, 1, 16, 4),
]
EXPERTS = 4


def layer(bits: int, hidden: int, width: int, parts: int) -> LayerWeights:
    """Return experts with random codes, and scales of every size that a row can have."""
    rng = np.random.default_rng(0)
    grid, arrays = Slicing(0, hidden, width * parts, parts), {}
    for part in grid.all_slices(range(EXPERTS)):
        codes = rng.integers(0, 256, part.n * part.k * bits // 8, np.uint8)
        # gate * scale is between 0.0001 and more than 1000, so that exp is tested in its whole range.
        scale = (10.0 ** rng.uniform(-6, 1, part.n) / np.sqrt(part.k)).astype(np.float32)
        if part.projection == "down" or part.expert == 0:  # one such row of gate or up makes all results of down NaN
            scale[rng.integers(0, part.n, 8)] = [0, -0.0, 1e30, 1e-38, 1e-42, np.inf, np.nan, -0.1]
        arrays[part] = (codes, scale.view(np.uint8))
    return LayerWeights(dict.fromkeys(PROJECTIONS, METHODS[f"AMXINT{bits}"]), grid, EXPERTS, arrays)


def rows(tokens: int, hidden: int, seed: int) -> Any:
    """Return BF16 bits [tokens, hidden]: Gaussian rows, and one row for each special case."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    x[1] = 0
    x[2] = -0.0
    x[3, hidden // 3] = np.nan
    x[4, hidden - 1] = -np.inf
    x[5] *= 8e37
    x[6] *= 1e-37
    x[7] *= 1e-40  # subnormal: 0 in a forward
    x[8] = rng.integers(-127, 128, hidden) + 0.5  # ties
    x[8, 0] = 127
    x[9, 1:] *= 1e-30
    x[10] = 3.38e38
    x[11, 0] = np.inf
    x[11, 1] = -np.nan
    return reference.f32_to_bf16(x)


def routes(tokens: int, topk: int, seed: int) -> tuple[Any, Any]:
    """Return experts (some twice, some none) and weights of each token."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, EXPERTS, (tokens, topk)).astype(np.int64)
    weights = rng.uniform(0, 1, (tokens, topk)).astype(np.float32)
    ids[0], weights[12] = -1, np.linspace(-1, 1, topk)
    weights[tokens - 1] = [0, np.inf, 1e-42, -1, 1e38, np.nan, 1, 2, 3][:topk]
    return ids, weights


@pytest.fixture(scope="module")
def pools() -> list[Pool]:
    """Two pools of two threads; the second has two groups, which accumulate in separate memory."""
    return [Pool(2), make_grouped_pool(2, 2)]


@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_instruction_sets_give_the_same_bits_as_scalar_kernels(
    pools: list[Pool], shape: tuple[int, ...], exact: bool
) -> None:
    *sizes, tokens, topk = shape
    call = rows(tokens, sizes[1], 1), *routes(tokens, topk, 2)
    layers = [KTExperts(layer(*sizes), exact=exact, pool=pool) for pool in pools]
    with isas.use("scalar"):
        expected = layers[0].forward(*call)
    for isa in kernels.available_isas()[1:]:
        with isas.use(isa):
            for experts in layers:
                np.testing.assert_array_equal(experts.forward(*call), expected, err_msg=isa)
    assert len(np.unique(expected)) > 100  # numbers, not only NaN and 0
