"""Equalizing: powers of two between the rows of up and the columns of down (numerics.md, section 10).

They make the columns of down alike, while the expert computes the same.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.arrays import F64, I8, U16
from ktconvert.quantizers.reference import bf16_to_f32

VERSION = 1
THRESHOLD = 0.5  # spread of the columns above which an expert is equalized
LEAST, MOST = 64, 190  # range of BF16 exponent fields: sums of squares of such values are normal float32 numbers
ROWS = 64  # rows to compute at a time, which fit the cache

Exponents = I8


def levels(down: U16) -> F64:
    """Return log2 of the norm of each column of BF16 bits [n, k], linear between powers of two: float64 [k].

    Libraries differ in the last bit of logarithms, so none is computed. The result is NaN or infinite for a column of
    zeros, or with a value that is not finite.
    """
    squares = np.zeros(down.shape[1])
    for first in range(0, len(down), ROWS):
        values = bf16_to_f32(down[first : first + ROWS]).astype(np.float64)
        squares += np.square(values, out=values).sum(axis=0)
    mantissa, exponent = np.frexp(squares)
    return np.where(squares > 0, exponent + 2 * mantissa, np.nan) / 2


def center_and_spread(levels: F64) -> tuple[float, float]:
    """Return the median of the finite levels, and the root mean square distance from it; 0 if there are none."""
    finite = levels[np.isfinite(levels)]
    if not finite.size:
        return 0.0, 0.0
    center = float(np.median(finite))
    return center, math.sqrt(math.fsum(np.square(finite - center)) / finite.size)  # independent of the order


def exponents(up: U16, down: U16) -> Exponents | None:
    """Return e [I] of an expert with up [I, H] and down [H, I], BF16 bits; None if it is not equalized."""
    height = levels(down)
    center, spread = center_and_spread(height)
    if spread <= THRESHOLD:
        return None
    nearest = np.rint(np.where(np.isfinite(height), height - center, 0))
    (up_least, up_most), (down_least, down_most) = _fields(up, 1), _fields(down, 0)
    low, high = np.maximum(LEAST - up_least, down_most - MOST), np.minimum(MOST - up_most, down_least - LEAST)
    found = np.where((low <= 0) & (high >= 0), np.clip(nearest, low, high), 0).astype(np.int8)
    return found if found.any() else None


def _fields(bits: U16, axis: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the smallest and largest exponent field along an axis, without those of zeros."""
    sizes = bits & np.uint16(0x7FFF)
    most = sizes.max(axis).astype(np.intp) >> 7
    sizes -= np.uint16(1)  # a zero becomes the largest
    return (sizes.min(axis).astype(np.intp) + 1) >> 7, most


def scale(bits: U16, exponents: I8) -> None:
    """Multiply BF16 bits in place by 2^exponents, which must keep normal numbers normal; zeros stay."""
    each = np.broadcast_to((exponents.astype(np.int16) << 7).view(np.uint16), bits.shape)
    for first in range(0, len(bits), ROWS):
        rows = bits[first : first + ROWS]
        rows += np.where(rows & 0x7FFF, each[first : first + ROWS], np.uint16(0))
