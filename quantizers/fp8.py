"""FP8 E4M3 with a scale for each block of 128 x 128, in NumPy. Equations: numerics.md, section 9."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.matrix import FP8_E4M3, Matrix
from ktconvert.quantizers import differences
from ktconvert.quantizers.reference import F32, SMALLEST_NORMAL, U8, U16, bf16_to_f32
from ktconvert.quantizers.scales import E4M3

BLOCK = 128
SMALLEST = np.float32(2.0**-6)  # of the exponent field 1, whose spacing subnormal codes share
LARGE_SCALE = np.float32(7e35)  # from a little above it on, 448 times the scale is infinite
NAN, LARGEST = 0x7F, 0x7E  # codes, without their sign; the largest stands for 448


def block_scales(bf16: U16) -> F32:
    """amax / 448 of each block, not below 2^-126, and 1 for a block of zeros: float32 [n/128, k/128]."""
    n, k = bf16.shape
    blocks = bf16.reshape(n // BLOCK, BLOCK, k // BLOCK, BLOCK) & 0x7FFF
    amax = bf16_to_f32(blocks.max(axis=(1, 3)))
    scales = np.maximum(amax / np.float32(448), SMALLEST_NORMAL)
    return np.where(amax == 0, np.float32(1), scales)


def each(scales: npt.NDArray[np.float32]) -> F32:
    """The scale of every element: float32 [n, k]."""
    return scales.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)


def codes_of(x: F32) -> U8:
    """The nearest E4M3 to each finite x, ties to even, at most 448 in magnitude; the sign is kept, of zeros too."""
    magnitude = np.abs(x)
    power = np.frexp(np.maximum(magnitude, SMALLEST))[1] - 1
    units = np.rint(np.ldexp(magnitude, 3 - power)).astype(np.int64)  # 8 .. 16, or less if subnormal
    codes = np.minimum(8 * (power + 6) + units, LARGEST)
    signed: U8 = (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)
    return signed


def quantize(bf16: U16) -> tuple[U8, F32]:
    """Codes uint8 [n, k] and scales float32 [n/128, k/128] of finite BF16 values."""
    scales = block_scales(bf16)
    with np.errstate(under="ignore"):
        return codes_of(bf16_to_f32(bf16) / each(scales)), scales


def values(codes: U8, scales: npt.NDArray[np.float32]) -> F32:
    """What codes [n, k] stand for, with the scales [n, k/128] of their rows: float32, rounded once."""
    with np.errstate(all="ignore"):  # of a damaged output
        numbers: F32 = E4M3[codes] * scales.repeat(BLOCK, axis=1)
    return numbers


def is_kept(matrix: Matrix) -> bool:
    """Whether a linear (or some rows of it) is FP8 in just such blocks, with which NUMA parts begin, too: its codes and
    scales stay.
    """
    return matrix.kind == FP8_E4M3 and matrix.block == (BLOCK, BLOCK)


def with_positive_scales(matrix: Matrix) -> Matrix:
    """The same numbers of a linear that is_kept: scales' signs go to the codes; zeros of a scale 0 get the scale 1."""
    assert matrix.scales is not None
    codes = matrix.values.copy()
    first_row, first_column = (at // BLOCK for at in matrix.origin)
    for row in range(0, codes.shape[0], BLOCK):
        for column in range(0, codes.shape[1], BLOCK):
            scale = matrix.scales[first_row + row // BLOCK, first_column + column // BLOCK]
            block = codes[row : row + BLOCK, column : column + BLOCK]
            if scale == 0:
                block[(block & 0x7F) != NAN] &= 0x80
            if np.signbit(scale):
                block ^= 0x80
    return replace(matrix, values=codes, scales=np.where(matrix.scales == 0, np.float32(1), np.abs(matrix.scales)))


def source_values(matrix: Matrix) -> F32:
    """A linear as float32 [n, k]: in BF16, unless its codes are kept."""
    if not is_kept(matrix):
        return differences.source_values(matrix)
    with np.errstate(all="ignore"):
        numbers: F32 = E4M3[matrix.values] * matrix.each_scale()
    return numbers
