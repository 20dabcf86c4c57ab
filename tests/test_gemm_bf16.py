"""BF16 products equal the definition in section 5b of numerics.md, for any number of tokens, rows and columns."""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from rig import floats
from rig.floats import Weight
from rig.gemm import gemm_bf16

FORMATS = ("MXFP4", "FP8", "BF16")
# These equal section 5b exactly; with vdpbf16ps, rounding depends on the processor.
BY_DEFINITION = ("scalar", "avx2", "avxvnni", "avx512", "avx512vnni", "amx")
NEAR = 2.0**-8  # bound of the relative L2 distance between instruction sets
# Numbers of tokens around every block size of a kernel.
TOKENS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 15, 16, 17, 24, 25, 31, 32, 33, 40, 96, 97)
ALL = 200
# Rows and columns: one block, several panels, full and partial panels of 256 columns.
SHAPES = {
    "MXFP4": ((64, 64), (128, 320), (64, 512), (64, 1088)),
    "FP8": ((128, 128), (256, 384), (128, 1024)),
    "BF16": ((32, 32), (64, 96), (96, 288), (64, 1024)),
    "FP8_PERCHANNEL": ((64, 96), (96, 352)),
    "MXFP8": ((64, 96), (96, 352)),
    "NVFP4": ((64, 64), (128, 320)),
    "RAWINT4": ((32, 32), (96, 352), (64, 1088)),
    "GPTQ_INT4": ((128, 128), (128, 384)),
    "GPTQ_INT4_64": ((64, 64), (128, 448)),
    "GPTQ_INT4_32": ((32, 32), (64, 352)),
    "F16": ((32, 128), (64, 640)),
}
INTEGERS = ("MXFP4", *floats.INTEGERS)
SCALE_COLUMNS = {"MXFP4": 32, "MXFP8": 32, **floats.INTEGERS}  # a sum in tiles ends after this number of columns
CASES = [(name, n, k) for name, shapes in SHAPES.items() for n, k in shapes]

pytestmark = pytest.mark.usefixtures("isa")


def flush_subnormals(x: Any) -> Any:
    """Return float32 values as the processor does, with subnormal numbers as 0."""
    x = x.astype(np.float32)
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x).astype(np.float64)


def sum_in_order(a: Any, weights: Any, columns: Iterable[int]) -> Any:
    """Sum the products of these columns, one after the other."""
    total = np.zeros((len(a), len(weights)))
    for column in columns:
        total = flush_subnormals(a[:, column, None] * weights[:, column] + total)
    return total


def multiplication_form(isa: str, name: str) -> str:
    """Return how an instruction set multiplies a format by default: BF16 in pairs or in tiles, or integers."""
    if name in INTEGERS and not (isa == "amx" and SCALE_COLUMNS[name] > 32):
        return "integers"
    return "tiles" if isa == "amx" else "pairs"


def round_to_int8(a: Any) -> tuple[Any, Any]:
    """Return integers of 8 bits for each row and 32 activations, [m, k], and their units, [m, k/32]."""
    a = flush_subnormals(a).astype(np.float32)
    units = np.abs(a).reshape(len(a), -1, 32).max(axis=2) * np.float32(1 / 127)
    units = np.where(units < 2.0**-126, 0, units)
    reciprocals = np.divide(np.float32(1), units, where=units > 0, out=np.zeros_like(units))
    return np.rint(a * np.repeat(reciprocals, 32, axis=1)).astype(np.float64), units.astype(np.float64)


def integer_units(a: Any) -> Any:
    """Return the unit of the integers of each row and 32 activations, [m, k/32]; NaN if one is NaN or 2^118 or more."""
    largest = np.abs(a).reshape(len(a), -1, 32).max(axis=2)
    exponent = np.frexp(largest)[1] - 1.0
    return np.where(largest < 2.0**118, 2.0 ** (np.where(largest, np.maximum(exponent, -113), -113) - 13), np.nan)


def multiply_by_definition(name: str, activations: Any, weight: Weight, form: str = "pairs") -> Any:
    """Compute section 5b for numbers whose products and sums are exact in float64."""
    a, scale = floats.from_bits(activations), weight.scale
    weights = weight.numbers / np.repeat(scale, 32, axis=1)
    if name == "F16":  # 128 columns of the first terms alternate with 128 of the second, with the same activations
        upper = floats.from_bits(floats.to_bits(weights))
        weights, a = (interleave(x, y) for x, y in ((upper, weights - upper), (a, a)))
        scale = np.tile(scale, 2)
    k, in_tiles = a.shape[1], form == "tiles"
    step = min(128, SCALE_COLUMNS.get(name, 128)) if in_tiles else 32
    unit = integer_units(a)
    if form == "int8":
        a, unit = round_to_int8(a)
    elif form == "integers":
        a = np.rint(flush_subnormals(a) / np.repeat(unit, 32, axis=1))
    total = np.zeros((len(a), len(weights)))
    for first in range(0, k, step):
        last, group = min(first + step, k), np.zeros(total.shape)
        if in_tiles:
            for b in range(first, last, 32):
                sums = (sum_in_order(a, weights, range(b + i, b + 32, 2)) for i in range(2))
                group = flush_subnormals(group + flush_subnormals(sum(sums)))
        elif form in ("integers", "int8"):
            sums = a[:, first:last] @ weights[:, first:last].T
            group = flush_subnormals(flush_subnormals(sums) * unit[:, first // 32, None])
        else:
            group = sum_in_order(a, weights, (column for j in range(first, last, 2) for column in (j + 1, j)))
        total = flush_subnormals(scale[:, first // 32] * group + total)
    return total.astype(np.float32)


def interleave(x: Any, y: Any) -> Any:
    """Interleave 128 columns of each array."""
    return np.stack([z.reshape(len(z), -1, 128) for z in (x, y)], axis=2).reshape(len(x), -1)


def multiply(name: str, activations: Any, weight: Weight, int8: bool = False) -> Any:
    return gemm_bf16(name, activations, weight.codes, weight.scales, len(weight.numbers), int8)


def distance(x: Any, y: Any) -> float:
    x, y = x.astype(np.float64), y.astype(np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def check(isa: str, name: str, activations: Any, weight: Weight, expected: Any = None) -> None:
    if expected is None:
        expected = multiply_by_definition(name, activations, weight, multiplication_form(isa, name))
    out = multiply(name, activations, weight)
    if isa in BY_DEFINITION:
        np.testing.assert_array_equal(out, expected)
    else:
        assert distance(out, expected) <= NEAR


@functools.cache
def case(name: str, n: int, k: int, form: str = "pairs") -> tuple[Weight, Any, Any]:
    weight, activations = floats.random(name, n, k), floats.activations(ALL, k)
    return weight, activations, multiply_by_definition(name, activations, weight, form)


@pytest.mark.parametrize(("name", "n", "k"), CASES)
def test_sums_equal_the_definition(isa: str, name: str, n: int, k: int) -> None:
    form = multiplication_form(isa, name)
    near = 3e-5 if form == "integers" else 1e-6
    weight, activations, expected = case(name, n, k, form)
    assert distance(expected, floats.from_bits(activations) @ weight.numbers.T) < near
    assert distance(expected, case(name, n, k)[2]) < near
    all_tokens = multiply(name, activations, weight)
    if isa in BY_DEFINITION:
        np.testing.assert_array_equal(all_tokens, expected)
    assert distance(all_tokens, expected) <= NEAR
    for m in TOKENS if isa != "scalar" else (1, 13):
        np.testing.assert_array_equal(multiply(name, activations[:m], weight), all_tokens[:m])
        np.testing.assert_array_equal(multiply(name, activations[-m:], weight), all_tokens[-m:])


@pytest.mark.parametrize(("name", "n", "k"), [case for case in CASES if case[0] in INTEGERS])
def test_sums_with_activations_of_8_bits_equal_the_definition(isa: str, name: str, n: int, k: int) -> None:
    """All instruction sets, with AMX too, give the same bits."""
    weight, activations, expected = case(name, n, k, "int8")
    assert 1e-4 < distance(expected, floats.from_bits(activations) @ weight.numbers.T) < 1e-2
    for m in TOKENS if isa != "scalar" else (1, 13):
        np.testing.assert_array_equal(multiply(name, activations[:m], weight, int8=True), expected[:m])
    zeros = np.zeros_like(activations[:3])
    zeros[1, 5] = 0x7F80
    out = multiply(name, zeros, weight, int8=True)
    assert not np.isfinite(out[1]).any() and not out[[0, 2]].any()


@pytest.mark.parametrize("m", [1, 16, 19, 40])
def test_subnormal_numbers_count_as_zero(isa: str, m: int) -> None:
    """This holds for activations, BF16 weights and sums."""
    rng = np.random.default_rng(m)
    n, k = 64, 160

    def numbers(rows: int, exponents: Any) -> Any:
        return floats.to_bits(rng.choice([-1.5, 1, 1.25], (rows, k)) * 2.0 ** rng.choice(exponents, (rows, k)))

    def flush(bits: Any) -> Any:
        return np.where(bits & 0x7F80, bits, np.uint16(0))

    a, weights = numbers(m, (-130, 0, 2)), numbers(n, (-131, -64, 1))
    out = multiply("BF16", a, floats.bf16(weights))
    assert np.any(out)
    np.testing.assert_array_equal(out, multiply("BF16", flush(a), floats.bf16(flush(weights))))
    check(isa, "BF16", flush(a), floats.bf16(flush(weights)))
    np.testing.assert_array_equal(multiply("BF16", numbers(m, (-65,)), floats.bf16(numbers(n, (-66,)))), 0)


@pytest.mark.parametrize("m", [7, 14])
def test_integer_weights_accept_activations_of_any_size(isa: str, m: int) -> None:
    """Rows have the largest and the smallest numbers, and outliers. 2^118, Inf or NaN affects only its token."""
    weight, rng = floats.random("RAWINT4", 64, 352), np.random.default_rng(m)
    sizes = np.resize([0, -149, -126, -112, -20, 20, 112], (m, 1))
    numbers = rng.standard_normal((m, 352)) * 2.0 ** (sizes + rng.choice([0, 0, -6, -9, -14], (m, 352)))
    activations = floats.to_bits(numbers)
    check(isa, "RAWINT4", activations, weight)
    for too_large in (0x7F80, 0x7FC0, 0x7A80):
        bad = activations.copy()
        bad[0, 40] = too_large
        out = multiply("RAWINT4", bad, weight)
        assert np.isnan(out[0]).all()
        np.testing.assert_array_equal(out[1:], multiply("RAWINT4", activations, weight)[1:])


@pytest.mark.parametrize("name", FORMATS)
def test_weights_may_have_any_alignment(isa: str, name: str) -> None:
    """Codes and E8M0 scales start at odd addresses, float32 scales at multiples of 4."""
    weight, activations = floats.random(name, 128, 256), floats.activations(3, 256)
    moved = [np.concatenate([np.zeros(n, np.uint8), x])[n:] for n, x in ((1, weight.codes), (4, weight.scales))]
    np.testing.assert_array_equal(gemm_bf16(name, activations, *moved, 128), multiply(name, activations, weight))


@pytest.mark.parametrize("m", [1, 6, 20])
def test_smallest_and_largest_e8m0_scales_are_accurate(isa: str, m: int) -> None:
    """2^-127 is subnormal in float32 and 2^127 the largest power of two; results are exact if they are normal.

    MXFP4 takes half of each scale, so that its smallest one is 2^-125.
    """
    n, k = 64, 128
    rng = np.random.default_rng(m)
    e2m1, e4m3 = rng.integers(0, 16, (n, k), np.uint8), rng.integers(0, 0x7F, (n, k), np.uint8)
    for small, activation in (((0, 1, 2), 2.0**100), ((254, 253, 252), 2.0**-30), ((0, 127, 254), 2.0**-20)):
        scales = rng.choice(np.array(small, np.uint8), (n, k // 32))
        activations = floats.to_bits(rng.choice([-1.5, 1, 1.25], (m, k)) * activation)
        numbers = floats.from_bits(activations)
        eighths = np.maximum(scales, 9) - 9  # so that E4M3's largest, 448, times the scale is finite
        for name, weight in (
            ("MXFP4", floats.mxfp4(e2m1, np.maximum(scales, 2))),
            ("MXFP8", floats.mxfp8(e4m3, eighths)),
        ):
            error = np.abs(multiply(name, activations, weight) - numbers @ weight.numbers.T)
            assert (error <= 1e-6 * np.abs(numbers) @ np.abs(weight.numbers.T) + 2.0**-126).all()


@pytest.mark.parametrize("m", [1, 20])
def test_the_two_smallest_scales_of_mxfp4_count_as_zero(isa: str, m: int) -> None:
    codes, activations = np.full((64, 128), 2, np.uint8), floats.to_bits(np.full((m, 128), 2.0**100))
    for scale in (0, 1, 2):
        out = multiply("MXFP4", activations, floats.mxfp4(codes, np.full((64, 4), scale, np.uint8)))
        assert (out == (0 if scale < 2 else 2.0 ** (100 + 7 - 125))).all()


@pytest.mark.parametrize("m", [1, 20])
def test_a_subnormal_fp8_scale_counts_as_zero(isa: str, m: int) -> None:
    """Tested are 2^-126, the smallest normal scale, and the largest subnormal one."""
    codes, activations = np.full((128, 128), 0x38, np.uint8), floats.to_bits(np.full((m, 128), 2.0**40))
    for smallest in (2.0**-126, np.nextafter(np.float32(2.0**-126), np.float32(0))):
        for name, encode, shape in (("FP8", floats.fp8, (1, 1)), ("FP8_PERCHANNEL", floats.fp8_perchannel, (128,))):
            out = multiply(name, activations, encode(codes, np.full(shape, smallest, np.float32)))
            assert (out == (0 if smallest < 2.0**-126 else 2.0 ** (40 + 7 - 126))).all(), name


@pytest.mark.parametrize("m", [1, 6, 20])
@pytest.mark.parametrize("column", [36, 37])
def test_each_fp8_code_gives_its_value(isa: str, m: int, column: int) -> None:
    """Also subnormals and NaN. Up to 6 tokens, vector kernels decode in registers."""
    codes, numbers = np.zeros((256, 128), np.uint8), np.zeros((m, 128))
    codes[:, column], numbers[:, column] = np.arange(256), 1
    weight = floats.fp8(codes, np.ones((2, 1), np.float32))
    out = multiply("FP8", floats.to_bits(numbers), weight)
    np.testing.assert_array_equal(out, np.tile(weight.numbers[:, column], (m, 1)))


def test_nan_codes_give_nan(isa: str) -> None:
    """Conversions write none, but a damaged file must not give plausible numbers."""
    codes = np.full((128, 128), 0x38, np.uint8)
    codes[9, 70], codes[20, 3] = 0x7F, 0xFF
    out = multiply("FP8", floats.activations(2, 128), floats.fp8(codes, np.ones((1, 1), np.float32)))
    assert set(np.flatnonzero(~np.isfinite(out).all(axis=0))) == {9, 20}
    scales = np.full((64, 2), 127, np.uint8)
    scales[5, 1] = 255
    weight = floats.mxfp4(np.full((64, 64), 2, np.uint8), np.minimum(scales, 254))
    ordered = np.where(weight.scales == 254, np.uint8(255), weight.scales)
    out = gemm_bf16("MXFP4", floats.activations(2, 64), weight.codes, ordered, 64)
    assert set(np.flatnonzero(~np.isfinite(out).all(axis=0))) == {5}
