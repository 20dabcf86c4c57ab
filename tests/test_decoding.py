"""Decoding of codes with group scales, packed integers, FP4, FP8 and blocks of ggml.

Every kernel equals the definition, and the definition equals the packed codes or the values of gguf-py, for every
layout of codes and every slice of a linear.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import BF16, FP4_E2M1, FP8_E4M3, GGML, INTEGERS, Matrix
from ktconvert.quantizers import packed
from rig import isas, reference
from rig.gguf import SCALES, blocks

KINDS = {kind.name: kind for kind in (*INTEGERS, FP4_E2M1, FP8_E4M3)}
BITS = {**packed.BITS, "fp4_e2m1": 4, "fp8_e4m3": 8}
PLAIN = ("int4", "int8", "fp4_e2m1", "fp8_e4m3")  # rows of bytes
every_block = pytest.mark.parametrize("name", GGML)


def linear(
    kind: str, n: int, k: int, group: int, seed: int = 0, scales: Any = None, zeros: bool = False, order: bool = False
) -> Matrix:
    """Return a linear with random codes, and scales of every size and sign.

    order: the columns of a group are not neighbours.
    """
    if kind in GGML:
        return Matrix(blocks(kind, n, k, seed), GGML[kind])
    rng = np.random.default_rng(seed)
    words = {"int4_words": (k // 8, n), "int8_words": (k // 4, n), "int4_awq": (k, n // 8)}
    if kind in words:
        codes = rng.integers(0, 1 << 32, words[kind], np.uint32).T
    else:
        codes = rng.integers(0, 256, (n, k * BITS[kind] // 8)).astype(np.uint8)
    if kind == "fp8_e4m3":
        codes[1:][codes[1:] & 0x7F == 0x7F] = 0x40  # NaN in the first row only
    zeros, order = zeros and kind in packed.BITS, order and kind in packed.BITS
    shape = n, -(-k // group)
    if scales is None:
        scales = np.exp(rng.uniform(-95, 80, shape)) * rng.choice([-1, 1], shape)
        scales[0] = 0
    return Matrix(
        codes,
        KINDS[kind],
        np.asarray(scales, np.float32),
        (1, group),
        zeros=rng.integers(0, 1 << BITS[kind], shape).astype(np.float32) if zeros else None,
        column_groups=rng.permutation(np.arange(k, dtype=np.int32) // group) if order else None,
    )


def assert_decodes_to(matrix: Matrix, expected: Any = None) -> None:
    """Require that the kernel decodes to the same BF16 bits as the definition, and to the expected ones."""
    definition = reference.decode(matrix)
    assert (kernels.decode(matrix) == definition).all()
    assert expected is None or (definition == expected).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("order", [False, True], ids=["neighbours", "order"])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_zero_points_and_column_orders_decode(kind: str, zeros: bool, order: bool) -> None:
    """Kernels decode 1024 columns of 4 bits or 512 of 8 at a time; panels have 32 rows, AWQ's words 8."""
    for n, k, group in ((8, 8, 8), (32, 64, 32), (40, 1104, 16), (72, 2056, 128), (16, 24, 7)):
        assert_decodes_to(linear(kind, n, k, group, zeros=zeros, order=order))
    for group in (1, 3, 16, 32, 40, 128, 1000) if kind in PLAIN and not zeros and not order else ():
        for n, k in ((1, 2), (3, 64), (33, 66), (5, 254), (40, 640)):
            assert_decodes_to(linear(kind, n, k, group))


def test_unpacked_codes_equal_the_packed_ones() -> None:
    """Tests the definition with known codes that are packed one by one."""
    rng = np.random.default_rng(3)
    for bits, kind in ((4, "int4_words"), (8, "int8_words"), (4, "int4_awq")):
        codes = rng.integers(0, 1 << bits, (16, 24)).astype(np.uint64)
        per_word = 32 // bits
        words = np.zeros((24 * bits // 32, 16) if kind != "int4_awq" else (24, 2), np.uint64)
        for (row, column), code in np.ndenumerate(codes):
            if kind == "int4_awq":
                words[column, row // 8] |= code << np.uint64(4 * [0, 4, 1, 5, 2, 6, 3, 7][row % 8])
            else:
                words[column // per_word, row] |= code << np.uint64(bits * (column % per_word))
        matrix = Matrix(words.astype(np.uint32).T, KINDS[kind], np.ones((16, 1), np.float32), (1, 24))
        assert (packed.read_codes(matrix) == codes).all()
        assert (packed.read_signed_codes(matrix) == codes.astype(int) - (1 << bits - 1)).all()


def test_adjacent_zero_points_borrow() -> None:
    """GPTQ's first format subtracts 0x11111111, or 0x01010101, from each word of zero points as a whole."""
    for bits, one in ((4, 0x11111111), (8, 0x01010101)):
        points = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64)).astype(np.uint8)
        points[:, ::5] = 0
        words = packed.pack_words(bits, (points.astype(np.int16) - (1 << bits - 1)).astype(np.int8)).view(np.uint32)
        assert (packed.unpack_gptq_zeros(bits, words - np.uint32(one), less_one=True) == points).all()
        assert (packed.unpack_gptq_zeros(bits, words, less_one=False) == points).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("order", [False, True], ids=["neighbours", "order"])
@pytest.mark.parametrize("kind", ["int4", "int8", "int8_signed", "fp4_e2m1", "fp8_e4m3"])
def test_every_code_decodes_with_scales_of_every_size(kind: str, order: bool) -> None:
    """Scales include Inf and NaN."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (16, 1))
    scales = [1, 0.3, 1e-4, -2.5, 1e-38, 1e-36, 1e-41, 3e38, -1e36, 0, -0.0, np.inf, -np.inf, np.nan, 2**-149, 2**127]
    with np.errstate(all="ignore"):
        column = np.array(scales, np.float32)[:, None]
    matrix = Matrix(codes, KINDS[kind], column, (1, 10**6))
    column_groups = np.zeros(matrix.shape[1], np.int32) if order and kind in packed.BITS else None
    for zeros in (None, np.full_like(column, 3))[: 2 if kind in packed.BITS else 1]:
        assert_decodes_to(replace(matrix, zeros=zeros, column_groups=column_groups))


def rejected_position(matrix: Matrix) -> tuple[int, int]:
    """Return row and column of the value for which packing a linear of 128 rows is refused."""
    with pytest.raises(kernels.NonFinite) as caught:
        n, k = matrix.shape
        kernels.quantize_pack(4, matrix, np.empty(n * k // 2, np.uint8), np.empty(n, np.float32))
    return caught.value.row, caught.value.column


def test_an_overflowing_value_is_rejected_with_its_position() -> None:
    matrix = linear("int4", 128, 128, 32, scales=np.full((128, 4), 1e-3, np.float32))
    assert matrix.scales is not None
    matrix.scales[40, 2] = 3e38
    matrix.values[40, 33] = 0x08  # -8 times 3e38 in column 67, 0 in column 66
    matrix.values[40, 32] = 0x98  # 0 and 1 times 3e38: finite
    assert rejected_position(matrix) == (40, 67)


FP16 = [0, -0.0, 1, -1, 6e-8, -6e-8, 6e-5, 65504, -65504, np.inf, -np.inf, np.nan]


def blocks_with_special_scales(name: str, rows: int, columns: int, seed: int = 0) -> Any:
    """Return random blocks; every third has scales of any size, including Inf and NaN."""
    kind = GGML[name]
    data = blocks(name, rows, columns, seed).reshape(-1, kind.items)
    rng = np.random.default_rng(seed)
    for at in SCALES.get(name, ()):
        values = rng.choice(np.array(FP16, np.float16), len(data[::3]))
        data[::3, at : at + 2] = values[:, None].view(np.uint8)
    if name == "MXFP4":
        data[::3, 0] = rng.choice([0, 1, 2, 127, 253, 254, 255], len(data[::3]))
    return data.reshape(rows, -1)


@pytest.mark.usefixtures("isa")
@every_block
def test_blocks_equal_those_of_gguf_py(name: str) -> None:
    """The bytes include every combination of a code with a packed scale of a K-quant."""
    for rows, columns in ((1, 256), (3, 512), (40, 1280)):
        assert_decodes_to(Matrix(blocks_with_special_scales(name, rows, columns, rows), GGML[name]))
    stored = np.random.default_rng(3).integers(0, 256, (64, 16 * GGML[name].items)).astype(np.uint8)
    assert_decodes_to(Matrix(stored, GGML[name]))


@every_block
def test_a_nan_scale_is_rejected_with_its_position(name: str) -> None:
    kind = GGML[name]
    stored = blocks(name, 128, 512)
    block = stored[40].reshape(-1, kind.items)[256 // kind.columns]
    if name == "MXFP4":
        block[0] = 255
    else:
        at = SCALES[name][0]
        block[at : at + 2] = 0, 0x7E
    assert rejected_position(Matrix(stored, kind)) == (40, 256)


@settings(max_examples=100)
@given(
    kind=st.sampled_from((*KINDS, *GGML)), group=st.integers(1, 200), k=st.integers(1, 150), n=st.integers(1, 40),
    zeros=st.booleans(), order=st.booleans(), data=st.data(),
)  # fmt: skip
def test_any_slice_decodes_with_its_own_codes_and_scales(
    kind: str, group: int, k: int, n: int, zeros: bool, order: bool, data: st.DataObject
) -> None:
    k *= {"int4": 2, "fp4_e2m1": 2, "int4_words": 8, "int8_words": 4}.get(kind, 1)
    k = 256 * (1 + k % 4) if kind in GGML else k
    n *= KINDS[kind].rows if kind in KINDS else 1
    matrix = linear(kind, n, k, group, seed=k + n, zeros=zeros, order=order)
    expected = reference.decode(matrix)
    first, top = data.draw(st.integers(0, k - 1)), data.draw(st.integers(0, n - 1))
    stop, bottom = data.draw(st.integers(first + 1, k)), data.draw(st.integers(top + 1, n))
    inner_first, inner_top = data.draw(st.integers(0, stop - first - 1)), data.draw(st.integers(0, bottom - top - 1))
    for _ in isas.each():
        sliced = matrix.columns(first, stop).rows(top, bottom)
        assert sliced.shape == (bottom - top, stop - first)
        assert kind in GGML or sliced.origin == (top, first)
        assert_decodes_to(sliced, expected[top:bottom, first:stop])
        assert (kernels.decode(sliced.T) == expected[top:bottom, first:stop].T).all()
        assert (sliced.T.kind is BF16) == (kind != "fp8_e4m3")
        assert kind in GGML or sliced.T.origin == (first, top)
        assert_decodes_to(sliced.columns(inner_first, stop - first), expected[top:bottom, first + inner_first : stop])
        assert (
            kernels.decode(sliced.rows(inner_top, bottom - top)) == expected[top + inner_top : bottom, first:stop]
        ).all()
        assert (kernels.decode(matrix.alternate_rows(n > 1)) == expected[n > 1 :: 2]).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", [*KINDS, *GGML])
@pytest.mark.parametrize("bits", [4, 8])
def test_stored_weights_quantize_like_their_decoded_values(kind: str, bits: int) -> None:
    """Rows and groups are quantized and packed in one pass, from a slice that begins inside a block or group."""
    scales = np.exp(np.random.default_rng(1).uniform(-9, -3, (256, 16))).astype(np.float32)
    stored = linear(kind, 256, 512, 32, scales=scales, zeros=kind != "int4", order=bits == 4)
    matrix = stored.columns(64, 448).rows(128, 256)
    bf16, (n, k) = reference.decode(matrix), matrix.shape
    weight, scale = np.empty(n * k * bits // 8, np.uint8), np.empty(n, np.float32)
    kernels.quantize_pack(bits, matrix, weight, scale)
    expected = reference.quantize_pack(bits, bf16)
    assert (weight == expected[0]).all() and (scale == expected[1]).all()
    assert kernels.error_sums(bits, matrix, weight, scale) == kernels.error_sums(
        bits, Matrix(bf16, BF16), weight, scale
    )
    words, group_scales = np.empty((n, k * bits // 32), np.int32), np.empty((n, k // 128), np.uint16)
    kernels.quantize_groups(bits, matrix, words, group_scales)
    codes, chosen = reference.quantize_groups(bits, 128, bf16)
    assert (words == packed.pack_words(bits, codes)).all() and (group_scales == chosen).all()
