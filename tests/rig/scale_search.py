"""Scales of least squared error for rows: the NumPy definition, which the C kernels must equal bit for bit.

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
# The candidates by bits: the step that gives the largest value the largest code, divided by each of these.
RATIOS: dict[int, F32] = {
    4: np.array([8, 9, 10, 11, 12, 13, 14, 16, 18, 20, 22, 24, 28, 32, 40, 48], np.float32) / np.float32(8),
    8: np.arange(32, 48, dtype=np.float32) / np.float32(32),
}
COMPARED = 3  # number of candidates that are compared in the metric of second moments
STEP = {4: np.float32(16), 8: np.float32(1)}  # distance of codes, in scales


def search(bits: int, bf16: U16, importance: F32 | None = None) -> tuple[I8, F32]:
    """Return codes int8 [n, k] (-7..7 or -127..127) and scales float32 [n], with the meaning of reference.quantize.

    importance: weight of squared errors in each column, float32 [k], finite, not negative; or second moments, float32
    [k, k], finite, symmetric; None: all equal. Raise ValueError if a value is not finite.
    """
    moments = importance if importance is not None and importance.ndim == 2 else None
    importance = importance if moments is None else np.diagonal(moments)
    absmax, largest = row_scales(bits, bf16), np.float32((1 << bits - 1) - 1)
    reciprocal: F32 = np.divide(np.float32(1), absmax, out=np.zeros_like(absmax), where=absmax != 0)
    reciprocal /= STEP[bits]
    x: F32 = np.where(bf16 & 0x7F80, np.abs(bf16_to_f32(bf16)), np.float32(0))  # subnormal values count as 0
    with np.errstate(under="ignore"):
        units: F32 = x * reciprocal[:, None]
        factors, scores = measure_candidates(bits, units, normalize(importance))
        without_importance = scores.max(axis=1) == 0  # the columns with codes have no importance
        factors[without_importance], scores[without_importance] = measure_candidates(
            bits, units[without_importance], None
        )
        ranking = np.argsort(-scores, axis=1, kind="stable")  # of equals, the first comes first
        best, factor = ranking[:, 0], np.take_along_axis(factors, ranking, 1)[:, 0]
        if moments is not None:
            refined_best, refined = choose_in_metric(bits, bf16, units, ranking[:, :COMPARED], moments)
            is_refined = ~without_importance & (np.minimum(absmax * refined, scale_limit(bits)) >= SMALLEST_NORMAL)
            best, factor = np.where(is_refined, refined_best, best), np.where(is_refined, refined, factor)
        scale: F32 = np.minimum(absmax * factor, scale_limit(bits))
    is_normal = scale >= SMALLEST_NORMAL
    codes = np.where(is_normal[:, None], nearest(units, RATIOS[bits][best, None], largest), np.float32(0))
    return np.where(bf16 & 0x8000, -codes, codes).astype(np.int8), np.where(is_normal, scale, np.float32(0))


def normalize(importance: F32 | None) -> F32 | None:
    """Divide importance by its largest value; return None if there is none above 0."""
    if importance is None or not importance.any():
        return None
    weights: F32 = importance / importance.max()
    return weights


def measure_candidates(bits: int, units: F32, weights: F32 | None) -> tuple[F32, F32]:
    """Return the least-squares factor and the squares that it explains, for each row and ratio, float32 [n, 16].

    units: float32 [n, k]
    """
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


def choose_in_metric(
    bits: int, bf16: U16, units: F32, compared: npt.NDArray[np.int64], moments: F32
) -> tuple[Any, F32]:
    """Return, for each row, the candidate that explains most in the metric of second moments [k, k], and its factor.

    compared: the candidates to compare, [n, COMPARED]. The factor is 0 if no candidate explains anything.
    """
    largest = np.float32((1 << bits - 1) - 1)
    sign = np.where(bf16 & 0x8000, np.float32(-1), np.float32(1))[:, None]
    u, q = sign * units[:, None], sign * nearest(units[:, None], RATIOS[bits][compared][..., None], largest)
    y = times(np.concatenate([u, q], axis=1), upper(moments * unit_of(moments)))
    products, squares = np.zeros((2, *compared.shape, LANES), np.float32)
    for first in range(0, units.shape[1], LANES):
        c = slice(first, first + LANES)
        products += q[..., c] * y[:, :1, c] + u[..., c] * y[:, 1:, c]
        squares += q[..., c] * y[:, 1:, c]
    p, s = np.float32(0.5) * add_lanes(products), add_lanes(squares)
    factors = np.divide(p, s, out=np.zeros_like(p), where=s > 0)
    scores = np.where(p > 0, p * factors, np.float32(0))
    best = scores.argmax(axis=1)[:, None]
    factor: F32 = np.where(scores.max(axis=1) > 0, np.take_along_axis(factors, best, 1)[:, 0], np.float32(0))
    return np.take_along_axis(compared, best, 1)[:, 0], factor


def unit_of(moments: F32) -> np.float32:
    """Return the power of two that scales the largest entry of the diagonal to 1..2; 0 if that entry is 0."""
    largest = np.diagonal(moments).max()
    exponent = int(np.clip(largest.view(np.uint32) >> 23, 1, 253))
    return np.ldexp(np.float32(1), 127 - exponent) if largest else np.float32(0)


def upper(moments: F32) -> F32:
    """Return a triangle with the same x M xT: the diagonal, and twice the entries above it."""
    return np.triu(moments) + np.triu(moments, 1)


def times(vectors: F32, matrix: F32) -> F32:
    """Multiply vectors [..., k] by a matrix [k, m]: each sum adds row after row of the matrix, from 0."""
    total = np.zeros((*vectors.shape[:-1], matrix.shape[1]), np.float32)
    for i, row in enumerate(matrix):
        total = fma(vectors[..., i, None], row, total)
    return total


def nearest(units: F32, ratio: F32, largest: np.float32) -> F32:
    """Return the code of least error without its sign, rounded once to nearest even (exact in float64 before)."""
    return np.minimum(np.rint(units.astype(np.float64) * ratio), largest).astype(np.float32)


def add_lanes(lanes: F32) -> F32:
    """Return the sum of 16 lanes: add the upper half to the lower half until one lane remains."""
    while (half := lanes.shape[-1] // 2) > 0:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def fma(a: F32, b: F32, c: F32) -> F32:
    """Return a * b + c, rounded once.

    The product is exact in float64. An inexact sum is made odd, so that rounding it to float32 meets no tie.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    rest = (product - (total - back)) + (addend - back)
    odd = total.view(np.int64) & 1 == 1
    total = np.where((rest != 0) & ~odd, np.nextafter(total, np.copysign(np.inf, rest)), total)
    return total.astype(np.float32)


def scale_limit(bits: int) -> np.float32:
    """Return the largest scale: that of the largest BF16 value, so that no code means infinity."""
    return np.float32(row_scales(bits, np.array([[0x7F7F]], np.uint16))[0])
