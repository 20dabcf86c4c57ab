"""Scales of least squared error for groups of columns: the NumPy definition, which C kernels must equal bit for bit.

Equations: numerics.md, sections 2d and 2e. BF16 values are their bits (uint16).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.arrays import F32, I8, U16
from ktconvert.native_quant.compensation import CodeRange
from ktconvert.native_quant.scale_search import SEARCHED_GROUP
from ktconvert.quantizers import MXFP4_EXPONENTS, Grid
from ktconvert.quantizers.packed import EMPTY_SCALE
from ktconvert.quantizers.reference import bf16_to_f32, f32_to_bf16
from rig.reference import ZEROS_EXPONENT
from rig.scale_search import LANES, add_lanes, fma, times, unit_of, upper


class Candidates(NamedTuple):
    """The candidate scales for groups of any shape [...]."""

    unit: F32  # [...], factor of values before the comparison
    scales: F32  # [..., c], of values in these units, times the grid's step
    stored: npt.NDArray[Any]  # [..., c], the scales as the grid stores them
    zeros: int  # stored scale of a group of zeros


def power_candidates(largest: U16) -> Candidates:
    """Return the candidates of E2M1: the power of two that covers the largest value, its double, and two that clip."""
    covers = np.clip(((largest & 0x7FFF) >> 7).astype(np.int64) - 2, *MXFP4_EXPONENTS)
    exponents = np.clip(covers[..., None] + (0, 1, -1, -2), *MXFP4_EXPONENTS)
    unit = np.ldexp(np.float32(1), (127 - covers).astype(np.int32))
    scales = np.ldexp(np.float32(0.5), (exponents - covers[..., None]).astype(np.int32))
    return Candidates(unit, scales, exponents.astype(np.uint8), ZEROS_EXPONENT)


# RAWINT4: codes of the largest value before it is clipped to -8..7; the first is that of absmax.
CODES_OF_LARGEST = np.array(
    [-8, -7.75, -7.5, -7, -6.5, -8.25, -8.5, -9, -9.5, -10.5, -12, 7.25, 7.75, 6.75, 8.5, 10], np.float32
)


def signed_candidates(largest: U16) -> Candidates:
    """Return the candidates of RAWINT4: scales of either sign that give the largest value each of CODES_OF_LARGEST."""
    exponent = np.clip(((largest & 0x7FFF) >> 7).astype(np.int32), 1, 253)
    unit = np.ldexp(np.float32(1), 127 - exponent)
    with np.errstate(under="ignore"):
        stored = f32_to_bf16(np.divide(bf16_to_f32(largest)[..., None], CODES_OF_LARGEST, dtype=np.float32))
    stored = np.where(stored & 0x7FFF == 0, EMPTY_SCALE, stored)
    return Candidates(unit, bf16_to_f32(stored) * unit[..., None], stored, int(EMPTY_SCALE))


# Functions of the value of largest magnitude of each group (the negative one of two).
CANDIDATES: dict[str, Callable[[U16], Candidates]] = {"mxfp4": power_candidates, "rawint4": signed_candidates}


def search(grid: Grid, bf16: U16, importance: F32 | None = None) -> tuple[I8, npt.NDArray[Any]]:
    """Return codes int8 [n, k] and scales [n, k/32], as the grid stores them.

    importance: as in scale_search.search. Raise ValueError if a value is not finite.
    """
    moments = importance if importance is not None and importance.ndim == 2 else None
    importance = importance if moments is None else np.diagonal(moments)
    n, k = bf16.shape
    groups = bf16.reshape(n, k // SEARCHED_GROUP, SEARCHED_GROUP)
    amax = (groups & 0x7FFF).max(axis=2)
    if (amax >= 0x7F80).any():
        raise ValueError(f"row {int(np.argmax((amax >= 0x7F80).any(axis=1)))} holds a value that is not finite")
    negative = (groups == (amax | 0x8000)[..., None]).any(axis=2)
    candidates = CANDIDATES[grid.name](np.where(negative, amax | np.uint16(0x8000), amax).astype(np.uint16))
    with np.errstate(under="ignore"):
        values = (bf16_to_f32(groups) * candidates.unit[:, :, None])[:, :, None]
        scales = candidates.scales[..., None]
        codes = nearest_codes(values * (np.float32(1) / scales), grid.code_range)
        errors = values - codes * scales
        weighted = weights(k, importance)[:, None] * errors
        best = sum_of_products(weighted, errors).argmin(axis=2)[:, :, None]  # the first of equals
        if moments is not None:
            best = choose_in_metric(best, errors, np.where(amax == 0, np.float32(0), candidates.unit), moments)
    chosen = np.take_along_axis(codes, best[..., None], axis=2).astype(np.int8).reshape(n, k)
    stored, zeros_scale = (
        np.take_along_axis(candidates.stored, best, 2)[..., 0],
        candidates.stored.dtype.type(candidates.zeros),
    )
    return chosen, np.where(amax == 0, zeros_scale, stored)


def choose_in_metric(best: npt.NDArray[Any], errors: F32, units: F32, moments: F32) -> npt.NDArray[Any]:
    """Choose again for each group [n, groups, 1], in order, in the metric of second moments [k, k].

    The errors of the other groups stay fixed meanwhile.

    errors: of each candidate, in its group's unit, float32 [n, groups, c, 32]; units: 0 for groups of zeros
    """
    smallest_unit = np.where(units == 0, np.float32(np.inf), units).min(axis=1, keepdims=True)
    ratios = np.maximum(
        np.divide(smallest_unit, units, out=np.zeros_like(units), where=units != 0), np.float32(2.0**-60)
    )
    ratios = np.where(units == 0, np.float32(0), ratios)[..., None]
    scaled = moments * unit_of(moments)
    best = best.copy()
    residuals = np.take_along_axis(errors, best[..., None], axis=2)[:, :, 0] * ratios
    for g in range(residuals.shape[1]):
        columns = slice(g * SEARCHED_GROUP, (g + 1) * SEARCHED_GROUP)
        if not np.diagonal(scaled)[columns].any():
            continue
        others = scaled[:, columns].copy()
        others[columns] = 0
        twice = np.divide(np.float32(2), ratios[:, g], out=np.zeros_like(ratios[:, g]), where=ratios[:, g] != 0)
        y = (times(residuals.reshape(len(residuals), -1), others) * twice)[:, None]
        for i, row in enumerate(upper(scaled[columns, columns])):
            y = fma(errors[:, g, :, i, None], row, y)
        best[:, g] = sum_of_products(errors[:, g], y).argmin(axis=1)[:, None]
        residuals[:, g] = np.take_along_axis(errors[:, g], best[:, g, :, None], axis=1)[:, 0] * ratios[:, g]
    return best


def sum_of_products(a: F32, b: F32) -> F32:
    """Return the sum of products over the last axis, the columns of a group."""
    sums = np.zeros((*a.shape[:-1], LANES), np.float32)
    for first in range(0, SEARCHED_GROUP, LANES):
        columns = slice(first, first + LANES)
        sums = fma(a[..., columns], b[..., columns], sums)
    return add_lanes(sums)


def weights(k: int, importance: F32 | None) -> F32:
    """Return importance divided by the largest of its group, float32 [k/32, 32]; 1 in groups where all is 0."""
    each = np.ones(k, np.float32) if importance is None else importance
    each = each.reshape(-1, SEARCHED_GROUP)
    largest = each.max(axis=1, keepdims=True)
    divided: F32 = np.divide(each, largest, out=np.ones_like(each), where=largest != 0)
    return divided


def nearest_codes(quotients: F32, codes: CodeRange) -> F32:
    """Return the code of least error; in a tie, the one with even significant bits."""
    clipped = np.clip(quotients, codes.least, codes.most)
    power = np.maximum(np.frexp(clipped)[1] - codes.precision, 0) if codes.precision else 0
    step = np.ldexp(np.float32(1), power)
    rounded: F32 = np.rint(clipped / step) * step
    return rounded
