"""Quantizers: ways to choose codes and scales (numerics.md). QUANTIZERS is their table; encodings pack the codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ktconvert.native_quant.arrays import F32, I8, U16, Array
from ktconvert.native_quant.scale_search import SEARCHED_GROUPS, search_groups, search_scales
from ktconvert.quantizers import MOE_GRIDS, ROW_GRIDS, Grid


class ChooseCodes(Protocol):
    """Function that chooses the codes and scales of a linear. Rows do not depend on each other."""

    def __call__(self, bf16: U16, grid: Grid, importance: F32 | None, /) -> tuple[I8, Array]:
        """Return codes, int8 [n, k], and scales, float32 or BF16 bits [n, k / group].

        bf16        BF16 bits [n, k]; each row is contiguous, at any address
        grid        range of the codes, and number of columns that share a scale
        importance  weight of each column, float32 [k], finite and not negative; or second moments, float32 [k, k];
                    None: all columns count the same

        Raises kernels.NonFinite for values that are infinite or NaN.
        """


@dataclass(frozen=True)
class Quantizer:
    """One way to choose codes.

    version              version of the codes and scales, in every unit's fingerprint except for the default quantizer;
                         raised whenever they change
    choose_codes         the function; None for the encoding's own kernel, which scales by the largest value, rounds
                         and packs
    grids                names of the supported grids; None: all of them
    requires_importance  whether it requires an importance matrix
    uses_moments         whether it searches in the metric of second moments, if they are available
    calibrated           whether the codes come from a run of the model, which compensates rounding errors; then
                         `choose_codes` chooses only the scales
    """

    name: str
    version: int
    choose_codes: ChooseCodes | None
    grids: tuple[str, ...] | None = (*ROW_GRIDS, *MOE_GRIDS)
    requires_importance: bool = False
    uses_moments: bool = False
    calibrated: bool = False

    def supports(self, grid: Grid) -> bool:
        return self.grids is None or grid.name in self.grids

    def select_for(self, grid: Grid) -> Quantizer:
        """Return this quantizer if it supports the grid, else absmax; mixed formats need the latter."""
        return self if self.supports(grid) else ABSMAX


def minimize_squares(bf16: U16, grid: Grid, importance: F32 | None) -> tuple[I8, Array]:
    """Choose the scale of least squared error for each row or group (numerics.md, sections 2b, 2d and 2e)."""
    if not grid.has_row_scales:
        return search_groups(grid.name, bf16, importance)
    codes, scales = search_scales(grid.bits, bf16, importance)
    return codes, scales[:, None]


SEARCHED = (*ROW_GRIDS, *MOE_GRIDS, *SEARCHED_GROUPS)  # the grids that minimize_squares supports
ABSMAX = Quantizer("absmax", 1, None, grids=None)
MSE = Quantizer("mse", 1, minimize_squares, SEARCHED, uses_moments=True)
IMATRIX = Quantizer("imatrix", 1, minimize_squares, SEARCHED, requires_importance=True)
GPTQ = Quantizer("gptq", 1, minimize_squares, SEARCHED, calibrated=True)
QUANTIZERS = {quantizer.name: quantizer for quantizer in (ABSMAX, MSE, IMATRIX, GPTQ)}
