"""What surrounds the dot products of a forward gives the same bits with every instruction set, whatever the numbers are."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ktconvert.native_quant import kernels
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.methods import METHODS
from ktconvert.quantizers import reference
from rig import isas

# Each instruction set above scalar, which it is compared with.
above_scalar = pytest.mark.parametrize("isa", kernels.ISAS[1:], indirect=True)

# bits, hidden, intermediate size of a part, parts, tokens, experts per token. What they are chosen for: blocks of
# columns and what is left over of them, one and several column blocks, one and several parts, more than one row block
# of tokens.
SHAPES = [
    (8, 64, 64, 1, 40, 2),
    (8, 320, 192, 2, 40, 3),
    (8, 3648, 64, 2, 13, 1),
    (4, 7296, 128, 1, 13, 1),
    (4, 384, 256, 3, 40, 2),
    (4, 128, 3712, 1, 16, 4),
]
EXPERTS = 4


def make_pool(threads: list[int]) -> Any:
    pointer = ffi.new("ktq_pool **")
    assert lib.ktq_pool_new(len(threads), threads, ffi.NULL, pointer) == lib.KTQ_OK
    return pointer[0]


@pytest.fixture(params=[[2], [1, 1]], ids=["one group", "two groups"])
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two threads; as two groups they add up their parts in memory of their own."""
    pool = make_pool(request.param)
    yield pool
    lib.ktq_pool_free(pool)


class Layer:
    """Experts with random codes, and a scale of every size that a row can have."""

    def __init__(self, bits: int, hidden: int, width: int, parts: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.hidden = hidden
        self.table = ffi.new("ktq_expert[]", parts * EXPERTS)
        self.keep: list[Any] = []
        for number, expert in enumerate(self.table):
            for name, n, k in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
                codes = rng.integers(0, 256, n * k * bits // 8, np.uint8)
                # gate * scale from 0.0001 to 1000 and more: both ends of exp, and all between.
                scale = (10.0 ** rng.uniform(-6, 1, n) / np.sqrt(k)).astype(np.float32)
                if name == "down" or number % EXPERTS == 0:  # one such row of gate or up spoils all of down
                    scale[rng.integers(0, n, 8)] = [0, -0.0, 1e30, 1e-38, 1e-42, np.inf, np.nan, -0.1]
                self.keep += [codes, scale]
                setattr(expert, name, ffi.cast("void *", codes.ctypes.data))
                setattr(expert, name + "_scale", ffi.cast("float *", scale.ctypes.data))
        sizes = {"experts": EXPERTS, "parts": parts, "hidden": hidden, "width": [width] * parts}
        formats = dict.fromkeys(("gate_format", "up_format", "down_format"), METHODS[f"AMXINT{bits}"].number)
        self.moe = ffi.new("ktq_moe *", {**formats, **sizes, "expert": self.table})

    def forward(self, pool: Any, x: Any, ids: Any, weights: Any, exact: int) -> Any:
        """BF16 bits [tokens, hidden]."""
        out = np.full(x.shape, 0x1234, np.uint16)
        call = {"exact": exact, "tokens": len(x), "topk": ids.shape[1], "skip": ffi.NULL}
        arrays = {
            "hidden": ("uint16_t", x),
            "ids": ("int64_t", ids),
            "weights": ("float", weights),
            "out": ("uint16_t", out),
        }
        call |= {name: ffi.cast(f"{kind} *", array.ctypes.data) for name, (kind, array) in arrays.items()}
        assert lib.ktq_forward(pool, self.moe, ffi.new("ktq_call *", call)) == lib.KTQ_OK
        return out


def rows(tokens: int, hidden: int, seed: int) -> Any:
    """BF16 bits [tokens, hidden]: Gaussian rows, and one of each thing that needs care."""
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
    """Experts (some twice, some none) and weights of each token."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, EXPERTS, (tokens, topk)).astype(np.int64)
    weights = rng.uniform(0, 1, (tokens, topk)).astype(np.float32)
    ids[0], weights[12] = -1, np.linspace(-1, 1, topk)
    weights[tokens - 1] = [0, np.inf, 1e-42, -1, 1e38, np.nan, 1, 2, 3][:topk]
    return ids, weights


@functools.cache
def case(shape: tuple[int, ...], exact: int) -> tuple[Layer, tuple[Any, ...], Any]:
    """A layer, the arguments of its forward, and what the scalar kernels make of them."""
    bits, hidden, width, parts, tokens, topk = shape
    layer = Layer(bits, hidden, width, parts)
    arguments = (rows(tokens, hidden, 1), *routes(tokens, topk, 2), exact)
    with isas.using("scalar"):
        pool = make_pool([2])
        expected = layer.forward(pool, *arguments)
        lib.ktq_pool_free(pool)
    return layer, arguments, expected


@above_scalar
@pytest.mark.parametrize("exact", [0, 1], ids=["default", "exact"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_every_instruction_set_gives_the_bits_of_the_scalar_kernels(
    isa: str, pool: Any, shape: tuple[int, ...], exact: int
) -> None:
    layer, arguments, expected = case(shape, exact)
    kernels.set_isa(isa)
    np.testing.assert_array_equal(layer.forward(pool, *arguments), expected)
    assert len(np.unique(expected)) > 100  # numbers, not only NaN and 0
