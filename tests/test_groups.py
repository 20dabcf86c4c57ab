"""Groups for the GPU: kernels equal the NumPy definition, which equals llmcompressor's rounding to nearest."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import KINDS, Matrix
from ktconvert.quantizers import GROUP_GRIDS, packed
from rig import isas, reference

GOLDEN = Path(__file__).parent / "golden"
BITS = (4, 8)
RULES = [*((4, rule) for rule in kernels.GROUP_RULES), *((8, rounding) for rounding in kernels.ROUNDINGS)]


def difficult_rows(n: int, k: int, seed: int = 0) -> Any:
    """Return BF16 bits [n, k] of Gaussian rows, and of rows that once revealed faults."""
    rows = np.random.default_rng(seed).permutation(test_kernels.difficult_values(64, k, seed))
    return reference.f32_to_bf16(rows[np.arange(n) % 64])


def random_bits(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    """Return random finite BF16 numbers of any exponent up to a different limit for each row."""
    top = rng.integers(0, 0x7F80, (shape[0], 1))
    return (np.minimum(rng.integers(0, 0x7F80, shape), top) | rng.integers(0, 2, shape) << 15).astype(np.uint16)


def quantize_by_definition(bits: int, group: int, bf16: Any, rounding: str) -> tuple[Any, Any]:
    codes, scale = reference.quantize_groups(bits, group, bf16, rounding)
    return packed.pack_words(bits, codes), scale


def quantize_by_kernel(bits: int, values: Any, kind: str = "bf16", group: int = 128, **options: Any) -> tuple[Any, Any]:
    n, k = values.shape
    packed, scale = np.full((n, k * bits // 32), 0x55555555, np.int32), np.full((n, k // group), 0x5555, np.uint16)
    rounding = options.pop("rounding", "library")
    matrix = Matrix(values, KINDS[kind], **options)
    kernels.quantize_groups(bits, matrix, packed, scale, group=group, rounding=rounding)
    return packed, scale


def assert_same(a: tuple[Any, Any], b: tuple[Any, Any]) -> None:
    for name, x, y in zip(("packed", "scale"), a, b, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        different = np.argwhere(x != y)
        assert not len(different), f"{name}: {len(different)} words differ, first at {different[0]}"


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("bits", "rounding"), RULES)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(40, 384, 128), (33, 256, 32), (16, 128, 64), (20, 320, 160), (1, 128, 128)]
)
def test_kernels_equal_the_definition(bits: int, rounding: str, n: int, k: int, group: int) -> None:
    for bf16 in (difficult_rows(n, k), random_bits(np.random.default_rng(n), (n, k))):
        assert_same(
            quantize_by_kernel(bits, bf16, group=group, rounding=rounding),
            quantize_by_definition(bits, group, bf16, rounding),
        )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("bits", "rounding"), RULES)
def test_every_quotient_rounds_like_the_definition(bits: int, rounding: str) -> None:
    """All 32640 finite magnitudes are the largest of a group, with either sign, beside values around every tie."""
    top = np.arange(0x7F80, dtype=np.uint16)
    steps = np.linspace(-1, 1, 31, dtype=np.float32)
    with np.errstate(under="ignore"):
        rest = reference.f32_to_bf16(reference.bf16_to_f32(top)[:, None] * steps)
    rest[1::2, 0] = top[1::2]
    bf16 = np.concatenate([top[:, None], rest], axis=1)  # groups of 32 columns
    bf16[::4] ^= 0x8000
    assert_same(
        quantize_by_kernel(bits, bf16, group=32, rounding=rounding), quantize_by_definition(bits, 32, bf16, rounding)
    )


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 70),
    count=st.integers(1, 5),
    group=st.sampled_from([32, 64, 128, 192]),
    rule=st.sampled_from(RULES),
    kind=st.sampled_from(("bf16", "fp16", "f32", "fp8_e4m3")),
    transposed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_kernels_accept_any_shape_encoding_and_orientation(
    n: int, count: int, group: int, rule: tuple[int, str], kind: str, transposed: bool, seed: int
) -> None:
    bits, rounding = rule
    rng = np.random.default_rng(seed)
    k = count * group
    options: dict[str, Any] = {}
    if kind == "bf16":
        values = random_bits(rng, (n, k))
    elif kind == "fp8_e4m3":
        values = rng.integers(0, 256, (n, k)).astype(np.uint8)
        values[values & 0x7F == 0x7F] = 0
        block = int(rng.integers(1, 200)), int(rng.integers(1, 200))
        scales = np.exp(rng.uniform(-90, 20, (-(-(n + 3) // block[0]), -(-(k + 5) // block[1])))).astype(np.float32)
        options = {"scales": scales, "block": block, "origin": (3, 5)}
    else:
        x = rng.standard_normal((n, k)).astype(np.float32)
        values = x if kind == "f32" else x.astype(np.float16).view(np.uint16)
    bf16 = reference.decode(Matrix(values, KINDS[kind], **options))
    if transposed:
        values = np.asfortranarray(values)
    for _ in isas.each():
        actual = quantize_by_kernel(bits, values, kind, group, rounding=rounding, **options)
        assert_same(actual, quantize_by_definition(bits, group, bf16, rounding))


@pytest.mark.usefixtures("isa")
def test_slices_of_fused_tensors_quantize_like_the_definition() -> None:
    """Slices are gate and up of a fused expert stored input-major [H, 2I], and rows, at any address."""
    fused = difficult_rows(256, 263, seed=5)
    for offset in (0, 1, 16, 63):
        storage = np.zeros(fused.nbytes + 64, np.uint8)
        unaligned = storage[offset : offset + fused.nbytes].view(np.uint16).reshape(fused.shape)
        unaligned[:] = fused
        for bits, view in itertools.product(BITS, (unaligned[:, :48].T, unaligned[:, 48:96].T, unaligned[:40, 7:])):
            assert_same(
                quantize_by_kernel(bits, view), quantize_by_definition(bits, 128, np.ascontiguousarray(view), "library")
            )


@pytest.mark.parametrize("bits", BITS)
def test_packed_words_unpack_to_the_same_codes(bits: int) -> None:
    half = 2 ** (bits - 1)
    codes = np.random.default_rng(0).integers(-half, half, (5, 256)).astype(np.int8)
    words = packed.pack_words(bits, codes)
    assert words.dtype == np.int32 and words.shape == (5, 256 * bits // 32)
    assert (packed.unpack_words(bits, words) == codes).all()
    word = int(words[0, 0]) & 0xFFFFFFFF
    assert [(word >> bits * j & 2 * half - 1) - half for j in range(32 // bits)] == codes[0, : 32 // bits].tolist()
    scale = np.full((5, 2), 0x3F80, np.uint16)
    scale[:, 1] = 0x4000
    assert (packed.dequantize_groups(bits, words, scale) == codes * np.repeat([[1.0, 2.0]], 128, axis=1)).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_non_finite_values_are_rejected_with_their_position(bits: int, transposed: bool) -> None:
    for value in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF):
        for row, column in ((0, 0), (31, 255), (32, 128), (39, 17)):
            bf16 = random_bits(np.random.default_rng(3), (40, 256))
            bf16[row, column] = bf16[39, 255] = value
            with pytest.raises(kernels.NonFinite) as caught:
                quantize_by_kernel(bits, np.asfortranarray(bf16) if transposed else bf16)
            assert (caught.value.row, caught.value.column) == (row, column)
            with pytest.raises(ValueError, match=f"row {row} "):
                reference.quantize_groups(bits, 128, bf16)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", GROUP_GRIDS)
def test_results_equal_golden_bytes_of_llmcompressor(name: str) -> None:
    quantizer = GROUP_GRIDS[name]
    tensors = load_file(GOLDEN / f"gpu_{name.lower()}.v{quantizer.version}.rtn.safetensors")
    bf16, stored = tensors["in.weight"], (tensors["weight_packed"], tensors["weight_scale"])
    assert_same(quantize_by_kernel(quantizer.bits, bf16), stored)
    assert_same(quantize_by_definition(quantizer.bits, quantizer.group, bf16, "library"), stored)
    assert tensors["weight_shape"].tolist() == list(bf16.shape)
