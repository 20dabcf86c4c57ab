"""Codes with a scale for each group of columns, packed integers, FP4 and FP8: every kernel equals the definition,
however the linear is sliced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import BF16, INT4, INT8, KINDS, Matrix
from ktconvert.quantizers import groups, reference

BITS = {"int4": 4, "int8": 8, "fp4_e2m1": 4, "fp8_e4m3": 8}
INTEGERS = ("int4", "int8")


def linear(kind: str, n: int, k: int, group: int, seed: int = 0, scales: Any = None) -> Matrix:
    """Random codes; scales of every size and either sign."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k * BITS[kind] // 8)).astype(np.uint8)
    if kind == "fp8_e4m3":
        codes[1:][codes[1:] & 0x7F == 0x7F] = 0x40  # NaN in the first row only
    if scales is None:
        scales = np.exp(rng.uniform(-95, 80, (n, -(-k // group)))) * rng.choice([-1, 1], (n, -(-k // group)))
        scales[0] = 0
    return Matrix(codes, KINDS[kind], np.asarray(scales, np.float32), (1, group))


def both(matrix: Matrix) -> tuple[Any, Any]:
    return kernels.decode(matrix), reference.decode(matrix)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("group", [1, 3, 16, 32, 40, 128, 1000])
def test_kernels_are_the_definition(kind: str, group: int) -> None:
    for n, k in ((1, 2), (3, 64), (33, 66), (5, 254), (40, 640)):
        ours, expected = both(linear(kind, n, k, group))
        assert (ours == expected).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", BITS)
def test_every_code_times_scales_of_every_size(kind: str) -> None:
    """Scales that are no numbers too: what comes is the definition's."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (16, 1))
    scales = [1, 0.3, 1e-4, -2.5, 1e-38, 1e-36, 1e-41, 3e38, -1e36, 0, -0.0, np.inf, -np.inf, np.nan, 2**-149, 2**127]
    with np.errstate(all="ignore"):
        column = np.array(scales, np.float32)[:, None]
    ours, expected = both(Matrix(codes, KINDS[kind], column, (1, 10**6)))
    assert (ours == expected).all()


def test_the_definition_is_that_of_our_own_output() -> None:
    """What `ktconvert gpu` packs is the code times the scale, and BF16 scales make that exact in float32."""
    for kind in INTEGERS:
        bits, matrix = BITS[kind], linear(kind, 4, 256, 128)
        assert matrix.scales is not None
        scales = reference.f32_to_bf16(matrix.scales)
        exact = groups.dequantize_groups(bits, matrix.values.view("<i4"), scales)
        rounded = Matrix(matrix.values, matrix.kind, reference.bf16_to_f32(scales), (1, 128))
        assert (kernels.decode(rounded) == reference.f32_to_bf16(exact)).all()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(tuple(BITS)),
    group=st.integers(1, 200),
    k=st.integers(1, 150).map(lambda pairs: 2 * pairs),
    n=st.integers(1, 40),
    data=st.data(),
)
def test_any_slice_finds_its_codes_and_scales(kind: str, group: int, k: int, n: int, data: st.DataObject) -> None:
    whole = linear(kind, n, k, group, seed=k)
    expected = reference.decode(whole)
    first, top = data.draw(st.integers(0, k - 1)), data.draw(st.integers(0, n - 1))
    stop, bottom = data.draw(st.integers(first + 1, k)), data.draw(st.integers(top + 1, n))
    inner = data.draw(st.integers(0, stop - first - 1))
    before = kernels.isa()
    for name in kernels.available_isas():
        kernels.set_isa(name)
        part = whole.columns(first, stop).rows(top, bottom)
        assert part.shape == (bottom - top, stop - first) and part.origin == (top, first)
        assert (kernels.decode(part) == expected[top:bottom, first:stop]).all()
        assert (kernels.decode(part.T) == expected[top:bottom, first:stop].T).all()
        assert (part.T.kind is BF16) == (kind != "fp8_e4m3") and part.T.origin == (first, top)
        again = part.columns(inner, stop - first)
        assert (kernels.decode(again) == expected[top:bottom, first + inner : stop]).all()
        assert (reference.decode(again) == expected[top:bottom, first + inner : stop]).all()
        alternate = whole.every_other(n > 1)
        assert (kernels.decode(alternate) == expected[n > 1 :: 2]).all()
    kernels.set_isa(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_result_of_special_values(kind: str, bits: int) -> None:
    """Quantized and packed as the BF16 values are, also for a slice that begins inside a group."""
    scales = np.exp(np.random.default_rng(1).uniform(-9, -3, (256, 12))).astype(np.float32)
    whole = linear(kind, 256, 384, 32, scales=scales)
    part = whole.columns(128, 384).rows(128, 256)
    bf16 = reference.decode(part)
    n, k = part.shape
    weight, scale = np.empty(n * k * bits // 8, np.uint8), np.empty(n, np.float32)
    kernels.quantize_pack(bits, part, weight, scale)
    expected = reference.quantize_pack(bits, bf16)
    assert (weight == expected[0]).all() and (scale == expected[1]).all()
    assert kernels.error_sums(bits, part, weight, scale) == kernels.error_sums(bits, Matrix(bf16, BF16), weight, scale)
    packed, group_scales = np.empty((n, k * bits // 32), np.int32), np.empty((n, k // 128), np.uint16)
    kernels.quantize_groups(bits, part, packed, group_scales)
    codes, wanted = groups.quantize_groups(bits, 128, bf16)
    assert (packed == groups.pack_words(bits, codes)).all() and (group_scales == wanted).all()


def test_a_value_that_overflows_is_refused_with_its_place() -> None:
    matrix = linear("int4", 128, 128, 32, scales=np.full((128, 4), 1e-3, np.float32))
    assert matrix.scales is not None
    matrix.scales[40, 2] = 3e38
    matrix.values[40, 33] = 0x08  # -8 times 3e38 in column 67, 0 in column 66
    matrix.values[40, 32] = 0x98  # 0 and 1 times 3e38: finite
    with pytest.raises(kernels.NonFinite) as caught:
        kernels.quantize_pack(4, matrix, np.empty(128 * 64, np.uint8), np.empty(128, np.float32))
    assert (caught.value.row, caught.value.column) == (40, 67)


@pytest.mark.parametrize(
    "matrix",
    [
        Matrix(np.zeros((4, 8), np.uint8), INT4, np.ones((4, 1), np.float32), (1, 16), skip=1, width=16),
        Matrix(np.zeros((4, 8), np.uint8), INT4, np.ones((4, 1), np.float32), (1, 16), skip=-1, width=8),
        Matrix(np.zeros((4, 8), np.uint8), INT4, np.ones((4, 1), np.float32), (1, 15)),
        Matrix(np.zeros((4, 8), np.uint8), INT4),
        Matrix(np.zeros((4, 8), np.int8), INT8, np.ones((4, 1), np.float32), (1, 8)),
        Matrix(np.zeros((4, 16), np.uint8)[:, ::2], INT8, np.ones((4, 1), np.float32), (1, 8)),
        Matrix(np.zeros((8, 4), np.uint8).T, INT8, np.ones((4, 1), np.float32), (1, 8)),
    ],
    ids=["too few", "before the first", "scales too few", "no scales", "dtype", "gaps", "columns apart"],
)
def test_what_makes_no_sense_is_refused(matrix: Matrix) -> None:
    with pytest.raises(ValueError):
        kernels.decode(matrix)
