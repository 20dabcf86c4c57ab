"""compressed-tensors' pack-quantized integers as ktconvert writes them (bytes.md).

The encodings are W4A16 and W8A16, which SGLang and vLLM load, and RAWINT4. Codes are unsigned numbers in words, with
one scale per group of columns of a row (words.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ktconvert.layouts.encodings.encoding import (
    DefectCheck,
    Encoding,
    RowSelection,
    SourceExperts,
    TensorReader,
    has_encoding,
)
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.arrays import F32, F64, I8, Array, Bytes
from ktconvert.native_quant.matrix import INT4, Matrix
from ktconvert.quantizers import GROUP_GRIDS, GROUP_SIZES, SIGNED_GRIDS, Grid, differences, packed
from ktconvert.quantizers.reference import bf16_to_f32, f32_to_bf16

# Names in config.json.
METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
SUFFIXES = ("weight_packed", "weight_shape", "weight_scale")  # suffixes of tensors in the order of a shard
CHUNK = 1 << 14  # number of bytes of codes per read


def _tensors(grid: Grid, n: int, k: int) -> tuple[TensorInfo, ...]:
    packed, shape, scale = SUFFIXES
    assert grid.group is not None
    groups = k // grid.group
    words = TensorInfo(packed, "I32", (n, k * grid.bits // 32), n * k * grid.bits // 8)
    return words, TensorInfo(shape, "I64", (2,), 16), TensorInfo(scale, "BF16", (n, groups), 2 * n * groups)


def view_tensors(grid: Grid, stored: Sequence[Bytes], n: int, k: int) -> list[Array]:
    """Return views of the words, the shape, and the bits of BF16 scales of a matrix [n, k]."""
    described = zip(stored, ("<i4", "<i8", "<u2"), _tensors(grid, n, k), strict=True)
    return [data.view(dtype).reshape(tensor.shape) for data, dtype, tensor in described]


def make_encoding(grid: Grid, rounding: str) -> Encoding:
    """Return the encoding with this grid.

    rounding  name of a row of kernels.GROUP_RULES, which states how scales are chosen and numbers rounded
    """
    bits = grid.bits
    group = grid.group
    assert group is not None

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        words, shape, scale = view_tensors(grid, out, *matrix.shape)
        shape[:] = matrix.shape
        kernels.quantize_groups(bits, matrix, words, scale, group=group, rounding=rounding)

    def pack(codes: I8, scales: Array, out: Sequence[Bytes]) -> None:
        words, shape, scale = view_tensors(grid, out, *codes.shape)
        words[:] = packed.pack_words(bits, codes)
        shape[:] = codes.shape
        scale[:] = scales

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: RowSelection = slice(None)) -> F32:
        words, _, scale = view_tensors(grid, stored, n, k)
        return packed.dequantize_groups(bits, words[rows], scale[rows])

    return Encoding(
        grid.name,
        version=1,
        grid=grid,
        multiple=group,
        tensors=partial(_tensors, grid),
        quantize=quantize,
        decode=decode,
        defect_checks=(make_zero_check(bits), find_bad_shape, _find_bad_scale),
        pack=pack,
        unpack_scales=lambda scale_bytes, n, k: scale_bytes.view("<u2").reshape(n, -1),
    )


def make_zero_check(bits: int) -> DefectCheck:
    """Return the check that codes are not all zeros, since such an expert would compute nothing."""
    zero = 0x88 if bits == 4 else 0x80  # a byte whose codes are 0

    def find_zeros(read: TensorReader, n: int, k: int) -> str:
        """Allow codes of zeros if the scales show that the source has only zeros."""
        starts = range(0, n * k * bits // 8, CHUNK)
        if any((read(0, start, start + CHUNK) != zero).any() for start in starts):
            return ""
        is_empty = (read(2).view("<u2") == packed.EMPTY_SCALE).all()
        return "" if is_empty else "all codes are 0: the expert would compute nothing"

    return find_zeros


def find_bad_shape(read: TensorReader, n: int, k: int) -> str:
    stored = read(1).view("<i8").tolist()
    return "" if stored == [n, k] else f"weight_shape is {' x '.join(map(str, stored))}"


def _find_bad_scale(read: TensorReader, n: int, k: int) -> str:
    scales = read(2).view("<u2")
    is_bad = (scales >= 0x7F80) | (scales == 0)
    return f"scale {int(np.argmax(is_bad))} is not a positive number" if is_bad.any() else ""


SETTINGS = ("rounding", "group_size")
# Values of SETTINGS -> encoding; the first encoding is the default.
W4A16, W8A16 = (
    {
        (rounding, group): make_encoding(replace(GROUP_GRIDS[name], group=group), rounding)
        for rounding in kernels.ROUNDINGS
        for group in GROUP_SIZES
    }
    for name in ("W4A16", "W8A16")
)


# --- RAWINT4: 4 bits in groups of 32 with scales of either sign, as kt-kernel reads them (bytes.md) -----------------

GRID = SIGNED_GRIDS["rawint4"]
GROUP = 32
_PACKED = make_encoding(GRID, "signed")


def is_exact(model: SourceExperts) -> bool:
    """Return whether experts are symmetric INT4 in groups of 32 neighbours with BF16 scales, so that all are kept."""
    layers = model.moe_layers.values()
    return has_encoding(model, ("INT4",), (GRID.bits, GROUP)) and all(
        weight.tensors["scale"].dtype == "BF16" and not moe.input_major
        for moe in layers
        for weight in moe.weights.values()
    )


def keeps_codes(matrix: Matrix) -> bool:
    """Return whether a linear, or rows of it, is symmetric INT4 in groups of 32 with BF16 scales, which are kept."""
    symmetric = matrix.kind is INT4 and matrix.zeros is None and matrix.column_groups is None
    whole_groups = matrix.block == (1, GROUP) and matrix.skip == 0 and matrix.origin[1] % GROUP == 0
    if not (symmetric and whole_groups) or matrix.scales is None:
        return False
    return bool((bf16_to_f32(f32_to_bf16(matrix.scales)) == matrix.scales).all())


def source_values(matrix: Matrix) -> F32:
    """Return a linear as float32 [n, k]: rounded to BF16, unless its codes are kept."""
    if not keeps_codes(matrix):
        return differences.source_values(matrix)
    codes = packed.unpack_codes(4, np.ascontiguousarray(matrix.values[:, : matrix.shape[1] // 2]))
    numbers: F32 = (codes.astype(np.float32) - 8) * matrix.element_scales()
    return numbers


def _quantize_rawint4(matrix: Matrix, out: Sequence[Bytes]) -> None:
    if not keeps_codes(matrix):
        _PACKED.quantize(matrix, out)
        return
    assert matrix.scales is not None
    n, k = matrix.shape
    row, column = matrix.origin
    words, shape, scales = view_tensors(GRID, out, n, k)
    words.view(np.uint8)[:] = matrix.values[:, : k // 2]
    shape[:] = n, k
    source_scales = matrix.scales[row : row + n, column // GROUP :][:, : k // GROUP]
    scales[:] = f32_to_bf16(np.ascontiguousarray(source_scales))


def _sum_rawint4_errors(matrix: Matrix, stored: Sequence[Bytes]) -> F64:
    """Return error sums; if codes are kept, compare with the source's own numbers, which BF16 would round."""
    decode = partial(_PACKED.decode, stored, *matrix.shape)
    return differences.error_sums(matrix, decode, source_values)


def _find_bad_signed_scale(read: TensorReader, n: int, k: int) -> str:
    """Check that scales are finite; they may be negative or 0, as in the source."""
    is_bad = (read(2).view("<u2") & 0x7FFF) >= 0x7F80
    return f"scale {int(np.argmax(is_bad))} is infinite or not a number" if is_bad.any() else ""


RAWINT4 = replace(
    _PACKED,
    name="RAWINT4",
    quantize=_quantize_rawint4,
    is_exact=is_exact,
    error_sums=_sum_rawint4_errors,
    defect_checks=(make_zero_check(GRID.bits), find_bad_shape, _find_bad_signed_scale),
)
