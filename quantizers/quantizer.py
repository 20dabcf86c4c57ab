"""Quantizers: ways to choose codes and scales (numerics.md). QUANTIZERS is their table; encodings pack the codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ktconvert.native_quant.arrays import F32, I8, U16, Array
from ktconvert.native_quant.scale_search import SEARCHED_GROUPS, search_groups, search_scales
from ktconvert.quantizers import MOE_GRIDS, ROW_GRIDS, Grid

# BF16 bits [n, k], each row contiguous, at any address; the grid; and how important each column is (float32 [k],
# finite, none negative; or second moments, float32 [k, k]; None: all alike) -> codes int8 [n, k] within its range, and
# scales [n, k / group] (float32, or BF16 bits). Rows do not depend on each other. Raises kernels.NonFinite for values
# that are infinite or NaN.
Choose = Callable[[U16, Grid, F32 | None], tuple[I8, Array]]


@dataclass(frozen=True)
class Quantizer:
    """One way to choose codes.

    version     raised whenever codes or scales change; in every unit's fingerprint, except for the default
    choose      the function; None: the encoding's own kernel, which scales by the largest value, rounds and packs
    grids       names of the grids that it supports; None: all of them
    importance  whether it requires an importance matrix
    moments     whether it searches in the metric of second moments, if there are any
    calibrated  whether codes come from a run of the model, which compensates rounding errors; `choose`: scales
    """

    name: str
    version: int
    choose: Choose | None
    grids: tuple[str, ...] | None = (*ROW_GRIDS, *MOE_GRIDS)
    importance: bool = False
    moments: bool = False
    calibrated: bool = False

    def supports(self, grid: Grid) -> bool:
        return self.grids is None or grid.name in self.grids

    def select_for(self, grid: Grid) -> Quantizer:
        """Return this quantizer if it supports the grid, else absmax: for mixed formats."""
        return self if self.supports(grid) else ABSMAX


def least_squares(bf16: U16, grid: Grid, importance: F32 | None) -> tuple[I8, Array]:
    """Choose the scale of least squared error for each row or group (numerics.md, sections 2b, 2d and 2e)."""
    if not grid.per_row:
        return search_groups(grid.name, bf16, importance)
    codes, scales = search_scales(grid.bits, bf16, importance)
    return codes, scales[:, None]


SEARCHED = (*ROW_GRIDS, *MOE_GRIDS, *SEARCHED_GROUPS)  # the grids of least_squares
ABSMAX = Quantizer("absmax", 1, None, grids=None)
MSE = Quantizer("mse", 1, least_squares, SEARCHED, moments=True)
IMATRIX = Quantizer("imatrix", 1, least_squares, SEARCHED, importance=True)
GPTQ = Quantizer("gptq", 1, least_squares, SEARCHED, calibrated=True)
QUANTIZERS = {quantizer.name: quantizer for quantizer in (ABSMAX, MSE, IMATRIX, GPTQ)}
