"""Equalizing: factors that are powers of two, for the rows of up and the columns of down (numerics.md, section 10).

The factors make the columns of down similar in size, while the expert computes the same.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.arrays import F64, I8, U16
from ktconvert.quantizers.reference import bf16_to_f32

VERSION = 1
THRESHOLD = 0.5  # spread of the columns above which an expert is equalized
# Range of BF16 exponent fields: sums of squares of such values are normal float32 numbers.
LEAST_FIELD = 64
MOST_FIELD = 190
ROWS = 64  # number of rows to compute at a time; they fit the cache

Exponents = I8


def column_levels(down: U16) -> F64:
    """Return log2 of the norm of each column of BF16 bits [n, k], interpolated between powers of two: float64 [k].

    It computes no logarithm, because libraries differ in the last bit. The result is NaN or infinite for a column of
    zeros, or with a value that is not finite.
    """
    squares = np.zeros(down.shape[1])
    for first in range(0, len(down), ROWS):
        values = bf16_to_f32(down[first : first + ROWS]).astype(np.float64)
        squares += np.square(values, out=values).sum(axis=0)
    mantissa, exponent = np.frexp(squares)
    return np.where(squares > 0, exponent + 2 * mantissa, np.nan) / 2


def center_and_spread(levels: F64) -> tuple[float, float]:
    """Return the median of the finite levels, and the root mean square distance from it; zeros if there are none."""
    finite = levels[np.isfinite(levels)]
    if not finite.size:
        return 0.0, 0.0
    center = float(np.median(finite))
    # fsum makes the result independent of the order of columns.
    return center, math.sqrt(math.fsum(np.square(finite - center)) / finite.size)


def choose_exponents(up: U16, down: U16) -> Exponents | None:
    """Return the exponents [I] of an expert with up [I, H] and down [H, I], BF16 bits; None if it is not equalized."""
    levels = column_levels(down)
    center, spread = center_and_spread(levels)
    if spread <= THRESHOLD:
        return None
    nearest = np.rint(np.where(np.isfinite(levels), levels - center, 0))
    up_least, up_most = _exponent_field_range(up, 1)
    down_least, down_most = _exponent_field_range(down, 0)
    low = np.maximum(LEAST_FIELD - up_least, down_most - MOST_FIELD)
    high = np.minimum(MOST_FIELD - up_most, down_least - LEAST_FIELD)
    exponents = np.where((low <= 0) & (high >= 0), np.clip(nearest, low, high), 0).astype(np.int8)
    return exponents if exponents.any() else None


def _exponent_field_range(bits: U16, axis: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the smallest and largest exponent field along an axis, without the fields of zeros."""
    sizes = bits & np.uint16(0x7FFF)
    most = sizes.max(axis).astype(np.intp) >> 7
    sizes -= np.uint16(1)  # a zero becomes the largest
    return (sizes.min(axis).astype(np.intp) + 1) >> 7, most


def multiply_by_powers(bits: U16, exponents: I8) -> None:
    """Multiply BF16 bits in place by 2^exponents, which must keep normal numbers normal; zeros stay."""
    increments = np.broadcast_to((exponents.astype(np.int16) << 7).view(np.uint16), bits.shape)
    for first in range(0, len(bits), ROWS):
        rows = bits[first : first + ROWS]
        rows += np.where(rows & 0x7FFF, increments[first : first + ROWS], np.uint16(0))
