"""The definition (quantizers/reference.py) does what numerics.md promises."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import KINDS, Matrix
from rig import reference

STEP = {8: 1, 4: 16}  # what one unit of a code is worth, in scales
TOP = {8: 127, 4: 7}  # the largest code

bits_drawn = st.sampled_from([4, 8])
exponents = st.integers(-90, 100)
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=40, deadline=None)


def rows(seed: int, bits: int, exponent: int, columns: int = 0) -> Any:
    """BF16 bits of one row block: Gaussian rows around 2^exponent, with zeros, ties and an outlier in some."""
    rng = np.random.default_rng(seed)
    n, k = kernels.GEOMETRIES[bits]
    k = columns or k * int(rng.integers(1, 4))
    x = rng.standard_normal((n, k)) * 2.0 ** (exponent + rng.integers(-3, 4, (n, 1)))
    x[rng.integers(n)] = 0
    x[rng.integers(n), rng.integers(k)] *= 1000
    x[rng.integers(n)] = np.round(x[rng.integers(n)] * 2.0**-exponent * 4) * 2.0 ** (exponent - 3)
    return reference.f32_to_bf16(x.astype(np.float32))


def quantize_c(bits: int, bf16: Any) -> tuple[Any, Any]:
    n, k = bf16.shape
    weight, scale = np.empty(n * k * bits // 8, np.uint8), np.empty(n, np.float32)
    kernels.quantize_pack(bits, Matrix(bf16, KINDS["bf16"]), weight, scale)
    return weight, scale


@quick
@given(bits_drawn, seeds, exponents)
def test_error_is_at_most_half_a_step(bits, seed, exponent):
    """INT8: half a scale. INT4: half a step of 16 scales and the half scale of the first rounding.
    And what float32 itself loses."""
    bf16 = rows(seed, bits, exponent)
    codes, scale = reference.quantize(bits, bf16)
    x, d = reference.bf16_to_f32(bf16).astype(np.float64), scale.astype(np.float64)[:, None]
    bound = d * (0.5 if bits == 8 else 8.5) + np.abs(x) * 2.0**-22
    assert (np.abs(x - codes * STEP[bits] * d) <= bound).all()
    assert np.abs(codes.astype(int)).max() <= TOP[bits]
    largest = np.abs(codes.astype(int)).max(axis=1)
    assert (largest[scale != 0] == TOP[bits]).all()  # the whole range is used
    assert np.isfinite(scale).all()


def offset_of(bits: int, r: int, c: int, n: int, k: int) -> tuple[int, int]:
    """Where the specification (docs/reference/bytes.md) puts element (r, c): byte, and shift within it."""
    block_rows, tile_columns = (64, 64) if bits == 8 else (128, 128)
    nb, kb = r // block_rows * block_rows, c // 3584 * 3584
    nbs, kbs = min(block_rows, n - nb), min(3584, k - kb)
    rt, i = (r - nb) // 32 * 32, (r - nb) % 32
    ct, j = (c - kb) // tile_columns * tile_columns, (c - kb) % tile_columns
    element = nb * k + kb * nbs + rt * kbs + ct * 32
    byte = i // 16 * 1024 + j % 64 // 4 * 64 + i % 16 * 4 + j % 4
    return element * bits // 8 + byte, 4 if bits == 4 and j >= 64 else 0


@quick
@given(bits_drawn, seeds)
def test_pack_puts_each_code_where_the_format_says(bits, seed):
    rng = np.random.default_rng(seed)
    n, k = kernels.GEOMETRIES[bits].block_rows * int(rng.integers(1, 3)), 128 * int(rng.choice([1, 3, 28, 29]))
    codes = np.zeros((n, k), np.int8)
    r, c = int(rng.integers(n)), int(rng.integers(k))
    codes[r, c] = 5
    weight = reference.pack(bits, codes)
    byte, shift = offset_of(bits, r, c, n, k)
    assert weight[byte] == 5 << shift and np.count_nonzero(weight) == 1


def test_every_amax_gives_the_specified_scale():
    """All positive BF16: INT8 multiplies by fl(1/127) and is not amax / 127; INT4 is also the
    float32 division by 112."""
    amax = np.arange(0x7F80, dtype=np.uint16)
    x = reference.bf16_to_f32(amax)
    normal = np.float32(2.0**-126)
    int8, int4 = (reference.row_scales(bits, amax[:, None]) for bits in (8, 4))
    product = (x.astype(np.float64) * float(np.float32(1 / 127))).astype(np.float32)
    assert np.float32(1 / 127).view(np.uint32) == 0x3C010204
    assert (int8 == np.where(product < normal, 0, product)).all()
    assert np.count_nonzero(product != x / np.float32(127)) == 1488
    assert (int4 == np.where(x / np.float32(112) < normal, 0, x / np.float32(112))).all()
    for bits, expected in ((8, int8), (4, int4)):
        values = np.zeros((32640 // 128 * 128 + 128, 128), np.uint16)
        values[: amax.size, 7] = amax
        assert (quantize_c(bits, values)[1][: amax.size] == expected).all()
