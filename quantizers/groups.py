"""Codes in groups of columns: the definition in NumPy, which the C kernels must equal bit for bit. Equations:
numerics.md, sections 6 and 6b. BF16 values are their bits (uint16), as in reference.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.matrix import INT4, Matrix
from ktconvert.quantizers import differences
from ktconvert.quantizers.packed import fields
from ktconvert.quantizers.reference import F32, I8, U16, bf16_to_f32, f32_to_bf16

I32 = npt.NDArray[np.int32]

SIGNED_GROUP = 32  # columns, of RAWINT4
EMPTY_SCALE = np.uint16(0x3C00)  # 2^-7, of a group whose scale would be 0


def group_scales(bits: int, group: int, bf16: U16, rounding: str = "library") -> U16:
    """One scale per group of columns, BF16 [n, k/group]: amax / 7.5 or amax / 127.5, and 2^-7 where that is 0.

    rounding: as in quantize_groups. "signed": -x / 8, x being the value of largest magnitude with its sign, the
    negative one of two. ValueError: a value is not finite.
    """
    n, k = bf16.shape
    grouped = bf16.reshape(n, k // group, group)
    amax = bf16_to_f32((grouped & 0x7FFF).max(axis=2))
    if not np.isfinite(amax).all():
        row = int(np.argmin(np.isfinite(amax).all(axis=1)))
        raise ValueError(f"row {row} holds a value that is infinite or not a number")
    with np.errstate(under="ignore"):
        if rounding == "signed":
            negative = (bf16_to_f32(grouped) == -amax[:, :, None]).any(axis=2)
            scale = f32_to_bf16(np.divide(np.where(negative, amax, -amax), 8, dtype=np.float32))
        else:
            scale = f32_to_bf16(np.divide(amax, (1 << (bits - 1)) - 0.5, dtype=np.float32))
    return np.where(scale & 0x7FFF == 0, EMPTY_SCALE, scale)


def quantize_groups(bits: int, group: int, bf16: U16, rounding: str = "library") -> tuple[I8, U16]:
    """Codes int8 [n, k] (-8..7 or -128..127) and scales BF16 [n, k/group]. rounding: "library" rounds x / scale to BF16
    first, as llmcompressor does; "float32" does not, nor does "signed", which has other scales (4 bits alone).
    """
    scale = group_scales(bits, group, bf16, rounding)
    with np.errstate(under="ignore"):
        q: F32 = np.divide(bf16_to_f32(bf16), np.repeat(bf16_to_f32(scale), group, axis=1), dtype=np.float32)
    if rounding == "library":
        q = bf16_to_f32(f32_to_bf16(q))
    half = 1 << (bits - 1)
    return np.rint(np.clip(q, -half, half - 1)).astype(np.int8), scale


def pack_words(bits: int, codes: I8) -> I32:
    """Codes [n, k] as int32 [n, k*bits/32]: code + 2^(bits-1), unsigned, column after column, low bits first."""
    unsigned = (codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    if bits == 4:
        unsigned = unsigned[:, ::2] | np.left_shift(unsigned[:, 1::2], 4, dtype=np.uint8)
    return np.ascontiguousarray(unsigned).view("<i4")


def unpack_words(bits: int, packed: I32) -> I8:
    """The inverse of pack_words: codes int8 [n, k]."""
    data = np.ascontiguousarray(packed, "<i4").view(np.uint8)
    if bits == 4:
        data = np.stack([data & 15, data >> 4], axis=2).reshape(len(data), -1)
    return (data ^ 0x80).view(np.int8) if bits == 8 else data.view(np.int8) - np.int8(8)


def dequantize_groups(bits: int, packed: I32, scale: U16) -> F32:
    """float32 [n, k]: code * scale, exact (the product of 8 bits and 8 bits)."""
    codes = unpack_words(bits, packed)
    n, groups = scale.shape
    y: F32 = codes.reshape(n, groups, -1).astype(np.float32) * bf16_to_f32(scale)[:, :, None]
    return y.reshape(codes.shape)


def is_kept(matrix: Matrix) -> bool:
    """Whether a linear (or some rows of it) is symmetric INT4 in groups of 32 with BF16 scales, as RAWINT4 keeps it."""
    symmetric = matrix.kind is INT4 and matrix.zeros is None and matrix.group_of is None
    whole_groups = matrix.block == (1, SIGNED_GROUP) and matrix.skip == 0 and matrix.origin[1] % SIGNED_GROUP == 0
    if not (symmetric and whole_groups) or matrix.scales is None:
        return False
    return bool((bf16_to_f32(f32_to_bf16(matrix.scales)) == matrix.scales).all())


def source_values(matrix: Matrix) -> F32:
    """A linear as float32 [n, k]: in BF16, unless its codes are kept."""
    if not is_kept(matrix):
        return differences.source_values(matrix)
    codes = fields(4, np.ascontiguousarray(matrix.values[:, : matrix.shape[1] // 2]))
    numbers: F32 = (codes.astype(np.float32) - 8) * matrix.each_scale()
    return numbers
