"""Scales of least squared error, one for each row: the definition in NumPy, which the C kernels must equal bit for bit.
Equations: numerics.md, sections 2b and 2e. BF16 values are their bits (uint16).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.arrays import F32, I8, U16
from ktconvert.quantizers.reference import bf16_to_f32
from rig.reference import SMALLEST_NORMAL, row_scales

F64 = npt.NDArray[np.float64]

LANES = 16
# The candidates, by bits: the step that gives the largest value the largest code, divided by each of these.
RATIOS: dict[int, F32] = {
    4: np.array([8, 9, 10, 11, 12, 13, 14, 16, 18, 20, 22, 24, 28, 32, 40, 48], np.float32) / np.float32(8),
    8: np.arange(32, 48, dtype=np.float32) / np.float32(32),
}
TRIED = 3  # candidates that are compared in the metric of second moments
STEP = {4: np.float32(16), 8: np.float32(1)}  # of codes, in scales


def search(bits: int, bf16: U16, importance: F32 | None = None) -> tuple[I8, F32]:
    """Codes int8 [n, k] (-7..7 or -127..127) and scales float32 [n], which mean what those of reference.quantize mean.

    importance: how much a squared error counts in each column, float32 [k], finite, none negative; or second moments,
    float32 [k, k], finite, symmetric; None: all alike. ValueError: a value is not finite.
    """
    moments = importance if importance is not None and importance.ndim == 2 else None
    importance = importance if moments is None else np.diagonal(moments)
    absmax, largest = row_scales(bits, bf16), np.float32((1 << bits - 1) - 1)
    reciprocal: F32 = np.divide(np.float32(1), absmax, out=np.zeros_like(absmax), where=absmax != 0)
    reciprocal /= STEP[bits]
    x: F32 = np.where(bf16 & 0x7F80, np.abs(bf16_to_f32(bf16)), np.float32(0))  # subnormal values count as 0
    with np.errstate(under="ignore"):
        units: F32 = x * reciprocal[:, None]
        factors, scores = candidates(bits, units, normalized(importance))
        alone = scores.max(axis=1) == 0  # what has codes has no importance
        factors[alone], scores[alone] = candidates(bits, units[alone], None)
        tried = np.argsort(-scores, axis=1, kind="stable")  # the first of the largest comes first
        best, factor = tried[:, 0], np.take_along_axis(factors, tried, 1)[:, 0]
        if moments is not None:
            again, refined = in_metric(bits, bf16, units, tried[:, :TRIED], moments)
            found = ~alone & (np.minimum(absmax * refined, limit(bits)) >= SMALLEST_NORMAL)
            best, factor = np.where(found, again, best), np.where(found, refined, factor)
        scale: F32 = np.minimum(absmax * factor, limit(bits))
    kept = scale >= SMALLEST_NORMAL
    codes = np.where(kept[:, None], nearest(units, RATIOS[bits][best, None], largest), np.float32(0))
    return np.where(bf16 & 0x8000, -codes, codes).astype(np.int8), np.where(kept, scale, np.float32(0))


def normalized(importance: F32 | None) -> F32 | None:
    """Divided by the largest; None where there is none above 0."""
    if importance is None or not importance.any():
        return None
    weights: F32 = importance / importance.max()
    return weights


def candidates(bits: int, units: F32, weights: F32 | None) -> tuple[F32, F32]:
    """For each row of `units` [n, k] and ratio, float32 [n, 16]: the least-squares factor, the squares it explains."""
    largest = np.float32((1 << bits - 1) - 1)
    n, k = units.shape
    products, squares = np.zeros((2, n, len(RATIOS[bits]), LANES), np.float32)
    for first in range(0, k, LANES):
        u = units[:, None, first : first + LANES]
        q = nearest(u, RATIOS[bits][:, None], largest)
        h = np.float32(1) if weights is None else weights[first : first + LANES]
        products = fma(h * u, q, products)
        squares = fma(h * q, q, squares)
    p, s = add_lanes(products), add_lanes(squares)
    factors = np.divide(p, s, out=np.zeros_like(p), where=s != 0)
    return factors, p * factors


def in_metric(bits: int, bf16: U16, units: F32, tried: npt.NDArray[np.int64], moments: F32) -> tuple[Any, F32]:
    """For each row, of the candidates `tried` [n, TRIED] the one that explains most in the metric of second moments
    [k, k], and its factor; 0 where none explains anything.
    """
    largest = np.float32((1 << bits - 1) - 1)
    sign = np.where(bf16 & 0x8000, np.float32(-1), np.float32(1))[:, None]
    u, q = sign * units[:, None], sign * nearest(units[:, None], RATIOS[bits][tried][..., None], largest)
    y = times(np.concatenate([u, q], axis=1), upper(moments * unit_of(moments)))
    products, squares = np.zeros((2, *tried.shape, LANES), np.float32)
    for first in range(0, units.shape[1], LANES):
        c = slice(first, first + LANES)
        products += q[..., c] * y[:, :1, c] + u[..., c] * y[:, 1:, c]
        squares += q[..., c] * y[:, 1:, c]
    p, s = np.float32(0.5) * add_lanes(products), add_lanes(squares)
    factors = np.divide(p, s, out=np.zeros_like(p), where=s > 0)
    scores = np.where(p > 0, p * factors, np.float32(0))
    best = scores.argmax(axis=1)[:, None]
    factor: F32 = np.where(scores.max(axis=1) > 0, np.take_along_axis(factors, best, 1)[:, 0], np.float32(0))
    return np.take_along_axis(tried, best, 1)[:, 0], factor


def unit_of(moments: F32) -> np.float32:
    """The power of two that brings the largest of the diagonal to 1..2; 0 where that is 0."""
    largest = np.diagonal(moments).max()
    exponent = int(np.clip(largest.view(np.uint32) >> 23, 1, 253))
    return np.ldexp(np.float32(1), 127 - exponent) if largest else np.float32(0)


def upper(moments: F32) -> F32:
    """A triangle with the same x M xT: twice what is above the diagonal, and the diagonal."""
    return np.triu(moments) + np.triu(moments, 1)


def times(vectors: F32, matrix: F32) -> F32:
    """vectors [..., k] times a matrix [k, m]: each sum row after row of the matrix, from 0."""
    total = np.zeros((*vectors.shape[:-1], matrix.shape[1]), np.float32)
    for i, row in enumerate(matrix):
        total = fma(vectors[..., i, None], row, total)
    return total


def nearest(units: F32, ratio: F32, largest: np.float32) -> F32:
    """The code of least error, without its sign: one rounding, to nearest even. The product is exact in float64."""
    return np.minimum(np.rint(units.astype(np.float64) * ratio), largest).astype(np.float32)


def add_lanes(lanes: F32) -> F32:
    """The sum of each 16 lanes: the upper half is added to the lower one until one is left."""
    while (half := lanes.shape[-1] // 2) > 0:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def fma(a: F32, b: F32, c: F32) -> F32:
    """a * b + c rounded once. The product is exact in float64; the sum is made odd where it is not exact, so that it is
    no tie when it is rounded to float32.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    rest = (product - (total - back)) + (addend - back)
    odd = total.view(np.int64) & 1 == 1
    total = np.where((rest != 0) & ~odd, np.nextafter(total, np.copysign(np.inf, rest)), total)
    return total.astype(np.float32)


def limit(bits: int) -> np.float32:
    """The largest scale: that of the largest BF16 value, so that no code means infinity."""
    return np.float32(row_scales(bits, np.array([[0x7F7F]], np.uint16))[0])
