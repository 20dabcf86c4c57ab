"""MXFP4: exponents and codes are those of the definition on every instruction set; what is MXFP4 already keeps both."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktconvert.layouts.outputs import FORMATS
from ktconvert.native_quant import kernels, kernels_panels
from ktconvert.native_quant.matrix import BF16, F32, FP4_E2M1, GGML_MXFP4, KINDS, Matrix
from ktconvert.quantizers import FLOAT_GRIDS, mxfp4, reference
from ktconvert.quantizers.scales import e8m0
from rig import gguf as ggml
from rig.safetensors import bits_of, read_file

GOLDEN = Path(__file__).parent / "golden"
FORM = FORMATS["MXFP4"].encoding
VALUES = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
Bits = Any


def pack(matrix: Matrix, isa: str | None = None) -> tuple[Bits, Bits]:
    """Codes [n, k] and exponents [n, k/32] that a kernel chooses."""
    n, k = matrix.shape
    codes, exponents = np.full((n // 32, 16 * k), 0xAA, np.uint8), np.full((n // 32, k), 0xAA, np.uint8)
    kernels.set_isa(isa)
    try:
        kernels_panels.pack_mxfp4(matrix, codes, exponents)
    finally:
        kernels.set_isa(None)
    return mxfp4.unlay_codes(codes), mxfp4.unlay_exponents(exponents)


def assert_same(ours: tuple[Bits, Bits], theirs: tuple[Bits, Bits]) -> None:
    assert (ours[1] == theirs[1]).all() and (ours[0] == theirs[0]).all()


# ---- the definition --------------------------------------------------------------------------------------------------


def by_hand(block: Bits) -> tuple[int, list[int]]:
    """Exponent and codes of 32 BF16 values, in fractions: NUMERICS.md, word by word."""
    x = [Fraction(float(v)) for v in reference.bf16_to_f32(block & 0x7FFF)]
    signs = [int(bits) >> 15 << 3 for bits in block]
    if not any(x):
        return 127, signs
    power = max(e for e in range(-140, 128) if Fraction(2) ** e <= max(x))
    best: tuple[Fraction, int, list[int]] | None = None
    for e in (min(max(power - 2 + 127, 1), 252), min(max(power - 1 + 127, 1), 252)):
        unit = Fraction(2) ** (e - 127)
        codes = [min(range(8), key=lambda c: (abs(v / unit - VALUES[c]), c % 2)) for v in x]
        error = sum((v - unit * VALUES[c]) ** 2 for v, c in zip(x, codes, strict=True))
        if best is None or error < best[0]:
            best = error, e, codes
    assert best is not None
    return best[1], [code | sign for code, sign in zip(best[2], signs, strict=True)]


EXPONENTS = st.integers(0, 254) | st.sampled_from((0, 1, 2, 3, 4, 15, 16, 17, 252, 253, 254))


@st.composite
def blocks(draw: st.DrawFn) -> Bits:
    """32 BF16 values within some powers of two of the largest, with many ties of E2M1; zeros and subnormal ones."""
    top, spread = draw(EXPONENTS), draw(st.integers(0, 8))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    fractions = rng.choice([0, 32, 64, 96], 32) if draw(st.booleans()) else rng.integers(0, 128, 32)
    magnitudes = np.maximum(top - rng.integers(0, spread + 1, 32), 0) << 7 | fractions
    magnitudes[rng.random(32) < draw(st.sampled_from((0, 0.1, 1)))] = 0
    return (magnitudes | rng.integers(0, 2, 32) << 15).astype(np.uint16)


@given(block=blocks())
def test_the_definition_is_the_rule(block: Bits) -> None:
    codes, exponents = mxfp4.quantize(block[None])
    assert (int(exponents[0, 0]), codes[0].tolist()) == by_hand(block)
    assert np.isfinite(mxfp4.dequantize(codes, exponents)).all()


@pytest.mark.parametrize(
    ("values", "exponent", "codes"),
    [
        ([6, 0.25, -0.25, 0.75, 1.25], 127, [7, 0, 8, 2, 2]),  # ties go to even codes, -0 stays
        ([6, 1.75, 2.5, 3.5, 5], 127, [7, 4, 4, 6, 6]),
        ([7, 0, 0, 0, 0], 127, [7, 0, 0, 0, 0]),  # as far from 6 as from 8: the smaller exponent
        ([-7.5, 0, 0, 0, 0], 128, [14, 0, 0, 0, 0]),
        ([0, -0.0, 0, 0, 0], 127, [0, 8, 0, 0, 0]),
        ([2.0**-129, 0, 0, 0, 0], 1, [0, 0, 0, 0, 0]),
    ],
)
def test_single_blocks(values: list[float], exponent: int, codes: list[int]) -> None:
    bits = np.zeros((1, 32), np.uint16)
    bits[0, :5] = reference.f32_to_bf16(np.array(values, np.float32))
    assert by_hand(bits[0]) == (exponent, [*codes, *[0] * 27])
    assert_same(mxfp4.quantize(bits), (np.array([[*codes, *[0] * 27]]), np.array([[exponent]])))


@pytest.mark.parametrize(("name", "limit"), [("normal", 0.112), ("t5", 0.123)])
def test_error(name: str, limit: float) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1024, 2048)) if name == "normal" else rng.standard_t(5, (1024, 2048))
    bits = reference.f32_to_bf16((x * 0.02).astype(np.float32))
    values = reference.bf16_to_f32(bits).astype(np.float64)
    error = values - mxfp4.dequantize(*mxfp4.quantize(bits))
    assert np.sqrt(np.square(error).sum() / np.square(values).sum()) < limit


def test_element_is_where_the_format_says() -> None:
    """FORMAT.md's formulas, element by element."""
    n, k = 64, 96
    rng = np.random.default_rng(0)
    codes, exponents = rng.integers(0, 16, (n, k), np.uint8), rng.integers(0, 255, (n, k // 32), np.uint8)
    laid, scales = mxfp4.lay_codes(codes).reshape(-1), mxfp4.lay_exponents(exponents).reshape(-1)
    for r in range(n):
        for c in range(k):
            s, h, i, b, j = r // 32, r % 32 // 16, r % 16, c // 32, c % 32
            at = 16 * s * k + 512 * b + 256 * h + 64 * (j // 8) + 4 * i + 2 * (j % 2) + j % 8 // 4
            assert laid[at] >> 4 * (j % 8 // 2 % 2) & 15 == codes[r, c]
            assert scales[s * k + 32 * b + r % 32] == exponents[r, b]
    assert (mxfp4.unlay_codes(laid.reshape(2, -1)) == codes).all()
    assert (mxfp4.unlay_exponents(scales.reshape(2, -1)) == exponents).all()


# ---- the kernels -----------------------------------------------------------------------------------------------------

SIZES = st.sampled_from((64, 128, 192))


@given(n=SIZES, k=SIZES, turned=st.booleans(), isa=st.sampled_from(kernels.available_isas()), data=st.data())
def test_every_kernel_is_the_definition(n: int, k: int, turned: bool, isa: str, data: st.DataObject) -> None:
    drawn = np.stack([data.draw(blocks()) for _ in range(6)])
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = drawn[rng.integers(0, 6, n * k // 32)].reshape(n, k)
    values = np.where(rng.random((n, 1)) < 0.5, values, values ^ rng.integers(0, 1 << 7, (n, k), np.uint16))
    matrix = Matrix(values.T.copy().T if turned else values, BF16)
    assert_same(pack(matrix, isa), mxfp4.quantize(values))


@pytest.mark.usefixtures("isa")
def test_golden_files() -> None:
    version = FLOAT_GRIDS["mxfp4"].version
    for kind in ("bf16", "fp16", "f32", "fp8_e4m3"):
        stored = bits_of(read_file(GOLDEN / f"mxfp4.v{version}.{kind}.safetensors"))
        values, options = stored["in.values"], {}
        if kind == "fp8_e4m3":
            options = {"scales": stored["in.scales"], "block": tuple(map(int, stored["in.block"]))}
        values = values.view(np.float32) if kind == "f32" else values
        codes, scales = np.empty_like(stored["out.codes"]), np.empty_like(stored["out.scales"])
        kernels_panels.pack_mxfp4(Matrix(values, KINDS[kind], **options), codes, scales)
        assert (codes == stored["out.codes"]).all() and (scales == stored["out.scales"]).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("row", [0, 15, 16, 63])
def test_numbers_that_are_not_finite_are_named(row: int) -> None:
    values = np.ones((64, 192), np.float32)
    values[row, 191] = np.nan
    values[63, 0] = np.inf
    with pytest.raises(kernels.NonFinite) as raised:
        pack(Matrix(values, F32), kernels.isa())
    assert (raised.value.row, raised.value.column) == (row, 0 if row == 63 else 191)


def test_wrong_sizes_are_refused() -> None:
    for n, k in ((16, 64), (64, 80)):
        with pytest.raises(ValueError, match="must be multiples of 32"):
            pack(Matrix(np.zeros((n, k), np.float32), F32))


# ---- what is MXFP4 already -------------------------------------------------------------------------------------------


def stored(kind: str, codes: Bits, exponents: Bits) -> Matrix:
    """Codes [n, k] and exponents [n, k/32] as safetensors or ggml store them."""
    n, k = codes.shape
    if kind == "fp4":
        return Matrix(codes[:, ::2] | codes[:, 1::2] << 4, FP4_E2M1, e8m0(exponents), (1, 32))
    split = codes.reshape(n, k // 32, 2, 16)
    return Matrix(
        np.concatenate([exponents[..., None], split[:, :, 0] | split[:, :, 1] << 4], 2).reshape(n, -1), GGML_MXFP4
    )


@given(
    kind=st.sampled_from(("fp4", "ggml")),
    seed=st.integers(0, 99),
    rows=st.sampled_from(((0, 128), (64, 128))),
    columns=st.sampled_from(((0, 320), (64, 256), (256, 320))),
    isa=st.sampled_from(kernels.available_isas()),
)
def test_codes_and_exponents_stay(
    kind: str, seed: int, rows: tuple[int, int], columns: tuple[int, int], isa: str
) -> None:
    rng = np.random.default_rng(seed)
    codes, exponents = rng.integers(0, 16, (128, 320), np.uint8), rng.integers(0, 255, (128, 10), np.uint8)
    exponents[7], exponents[9] = 0, 254
    limit = np.repeat(np.select([exponents < 253, exponents == 253], [7, 5], 3), 32, axis=1)
    codes = np.minimum(codes & 7, limit).astype(np.uint8) | codes & 8
    matrix = stored(kind, codes, exponents).rows(*rows).columns(*columns)
    wanted = codes[slice(*rows), slice(*columns)], exponents[slice(*rows), columns[0] // 32 : columns[1] // 32]
    assert_same(pack(matrix, isa), wanted)
    assert (reference.bf16_to_f32(kernels.decode(matrix)) == mxfp4.dequantize(*wanted)).all()


@pytest.mark.parametrize("kind", ["fp4", "ggml"])
@pytest.mark.parametrize(("code", "exponent"), [(6, 253), (15, 253), (4, 254), (12, 254)])
def test_what_is_infinite_as_bf16_is_refused(kind: str, code: int, exponent: int) -> None:
    codes, exponents = np.zeros((64, 64), np.uint8), np.full((64, 2), 120, np.uint8)
    codes[33, 40], exponents[33, 1] = code, exponent
    with pytest.raises(kernels.NonFinite) as raised:
        pack(stored(kind, codes, exponents))
    assert (raised.value.row, raised.value.column) == (33, 40)


@pytest.mark.parametrize(("group", "factor"), [(16, 1), (32, 3)])
def test_other_scales_are_rounded(group: int, factor: int) -> None:
    """NVFP4 has the codes, and scales that MXFP4 has not."""
    rng = np.random.default_rng(2)
    packed = rng.integers(0, 256, (64, 64), np.uint8)
    scales = (2.0 ** rng.integers(-9, -3, (64, 128 // group)) * factor).astype(np.float32)
    matrix = Matrix(packed, FP4_E2M1, scales, (1, group))
    assert_same(pack(matrix), mxfp4.quantize(reference.decode(matrix)))


def test_gguf_py_has_these_values() -> None:
    """ggml's blocks, by gguf-py, are what is unpacked."""
    blocks_of = ggml.blocks("MXFP4", 64, 128)
    packed = [np.empty(tensor.nbytes, np.uint8) for tensor in FORM.tensors(64, 128)]
    FORM.quantize(Matrix(blocks_of, GGML_MXFP4), packed)
    values = gguf.quants.dequantize(blocks_of, gguf.GGMLQuantizationType.MXFP4)
    assert (FORM.decode(packed, 64, 128) == values).all()
