"""Scales of least squared error, one for each group of columns: the definition in NumPy, which the C kernels must equal
bit for bit.

Equations: NUMERICS.md, section 2d. BF16 values are their bits (uint16), as in reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.kernels import SEARCHED_GROUP, CodeRange
from ktconvert.quantizers import Grid, mxfp4
from ktconvert.quantizers.reference import F32, I8, U16, bf16_to_f32
from ktconvert.quantizers.scale_search import LANES, add_lanes, fma


class Candidates(NamedTuple):
    """The scales that are tried for groups of any shape [...].

    unit    float32 [...], what values are multiplied by before they are compared
    scales  float32 [..., c], of values in these units, times the grid's step
    stored  [..., c], the same as the grid stores them
    zeros   as it stores that of a group of zeros
    """

    unit: F32
    scales: F32
    stored: npt.NDArray[Any]
    zeros: int


def powers(amax: U16) -> Candidates:
    """Of E2M1: the power of two that covers the largest value, the next one, and two that cut values."""
    covers = np.clip((amax >> 7).astype(np.int64) - 2, mxfp4.LEAST, mxfp4.MOST)
    exponents = np.clip(covers[..., None] + (0, 1, -1, -2), mxfp4.LEAST, mxfp4.MOST)
    unit = np.ldexp(np.float32(1), (127 - covers).astype(np.int32))
    scales = np.ldexp(np.float32(0.5), (exponents - covers[..., None]).astype(np.int32))
    return Candidates(unit, scales, exponents.astype(np.uint8), mxfp4.OF_ZEROS)


CANDIDATES: dict[str, Callable[[U16], Candidates]] = {"mxfp4": powers}


def search(grid: Grid, bf16: U16, importance: F32 | None = None) -> tuple[I8, npt.NDArray[Any]]:
    """Codes int8 [n, k] and scales [n, k/32], as the grid stores them.

    importance: how much a squared error counts in each column, float32 [k], finite, none negative; None: all alike.
    ValueError: a value is not finite.
    """
    n, k = bf16.shape
    groups = bf16.reshape(n, k // SEARCHED_GROUP, SEARCHED_GROUP)
    amax = (groups & 0x7FFF).max(axis=2)
    if (amax >= 0x7F80).any():
        raise ValueError(f"row {int(np.argmax((amax >= 0x7F80).any(axis=1)))} holds a value that is not finite")
    tried = CANDIDATES[grid.name](amax)
    with np.errstate(under="ignore"):
        values = (bf16_to_f32(groups) * tried.unit[:, :, None])[:, :, None]
        scales = tried.scales[..., None]
        codes = nearest(values * (np.float32(1) / scales), grid.code_range)
        errors = values - codes * scales
        weighted = weights(k, importance)[:, None] * errors
        sums = np.zeros((*errors.shape[:-1], LANES), np.float32)
        for first in range(0, SEARCHED_GROUP, LANES):
            columns = slice(first, first + LANES)
            sums = fma(weighted[..., columns], errors[..., columns], sums)
        best = add_lanes(sums).argmin(axis=2)[:, :, None]  # the first of the least
    chosen = np.take_along_axis(codes, best[..., None], axis=2).astype(np.int8).reshape(n, k)
    return chosen, np.where(
        amax == 0, tried.stored.dtype.type(tried.zeros), np.take_along_axis(tried.stored, best, 2)[..., 0]
    )


def weights(k: int, importance: F32 | None) -> F32:
    """float32 [k/32, 32]: importance divided by the largest of its group, 1 in groups where all is 0."""
    each = np.ones(k, np.float32) if importance is None else importance
    each = each.reshape(-1, SEARCHED_GROUP)
    largest = each.max(axis=1, keepdims=True)
    divided: F32 = np.divide(each, largest, out=np.ones_like(each), where=largest != 0)
    return divided


def nearest(quotients: F32, codes: CodeRange) -> F32:
    """The code of least error; of two, the one with even significant bits."""
    clipped = np.clip(quotients, codes.least, codes.most)
    power = np.maximum(np.frexp(clipped)[1] - codes.precision, 0) if codes.precision else 0
    step = np.ldexp(np.float32(1), power)
    rounded: F32 = np.rint(clipped / step) * step
    return rounded
