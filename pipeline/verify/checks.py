"""Checks, and what they find: problems, errors measured, and of calibrated codes whether they are plausible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import Bytes, Encoding, scale_values
from ktconvert.native_quant import kernels
from ktconvert.pipeline.stages.quantize_experts import error_figures
from ktconvert.quantizers import Matrix
from ktconvert.quantizers.differences import sums_of
from ktconvert.quantizers.reference import bf16_to_f32

AGAIN = "convert it again with --overwrite"
CHUNK = 4 << 20  # bytes of a tensor compared, or of a file hashed, at a time
# GPTQ's error in the weights against that of rounding them: 1.0 to 1.3 times at the usual dampening, 1.8 at a
# thousandth of it. Another expert's codes are 13 (W4A16) to 200 (W8A16) times as far away.
WORST_RATIO = 3.0
ROWS = 64  # of a linear whose error is not measured as a whole: enough to tell a wrong one
MOST_UNUSED = 0.5  # share of columns that calibration may never have seen
NEXT_TO = 1.002  # what a value may be beyond that of the last code: less than half a code, more than its own rounding


@dataclass(frozen=True)
class Check:
    """What a check found: what holds if there are no problems, else the problems, one sentence each, and what to do."""

    name: str
    result: str
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    remedy: str = AGAIN


# Checks many items in one of the ways of item_checks.ITEM_CHECKS and reports the bytes of each as done: called with the
# kind, the items, and the bytes that are to be read for each, it yields (item, what was found) in order.
CheckItems = Callable[[str, Sequence[Any], Sequence[int]], Iterator[tuple[Any, Any]]]


class LinearError(NamedTuple):
    """How far one projection of one expert lies from its source in BF16: ||x-y||/||x||, and x.y/(||x|| ||y||)."""

    layer: int
    expert: int
    projection: str
    relative_error: float
    cosine: float


@dataclass
class ProjectionErrors:
    """The same over the measured experts of a layer: sums of x*x, y*y, x*y, (x-y)^2, and each expert's own figures."""

    layer: int
    projection: str
    sums: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    experts: list[LinearError] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        return error_figures(self.sums)

    @property
    def worst(self) -> LinearError:
        return max(self.experts, key=lambda e: e.relative_error)


def worst(errors: Iterable[ProjectionErrors], count: int = 5) -> list[LinearError]:
    """The experts with the largest relative errors, of all that were measured."""
    return sorted((e for layer in errors for e in layer.experts), key=lambda e: -e.relative_error)[:count]


# --- calibrated codes, compared with those of rounding --------------------------------------------


class Calibrated(NamedTuple):
    """The comparison of a linear whose codes were calibrated.

    ratio    its error over that of rounding to nearest
    rounded  whether its codes are those of rounding
    unused   whether it has columns that are all zeros: calibration never saw their inputs
    """

    ratio: float
    rounded: bool
    unused: bool


def judge(
    encoding: Encoding,
    matrix: Matrix,
    stored: Sequence[Bytes],
    rounded: Sequence[Bytes],
    *,
    whole: bool,
    measured: Encoding | None = None,
) -> tuple[npt.NDArray[np.float64], Calibrated, str]:
    """Sums as of error_sums over a linear (or some of its rows), what is reported of it, and what is wrong with its
    codes ("": nothing). stored and rounded: its tensors as they are, and as rounding to nearest makes them. measured:
    the encoding that the error is measured with, where that is another. Columns that are zero throughout, though
    rounding has codes there, were never seen in calibration: they are left out.
    """
    n, k = matrix.shape
    rows = np.arange(n) if whole else np.unique(np.linspace(0, n - 1, ROWS).astype(int))
    if outside := _out_of_range(encoding, stored, n, k):
        return np.zeros(4), Calibrated(np.inf, False, False), outside
    x = bf16_to_f32(kernels.decode(matrix)[rows])
    ours, theirs = ((measured or encoding).decode(tensors, n, k, rows) for tensors in (stored, rounded))
    unused = np.asarray(theirs.any(axis=0) & ~ours.any(axis=0))
    if unused.mean() > MOST_UNUSED:
        problem = f"has zeros in {int(unused.sum())} of {unused.size} columns: calibration saw hardly any input of it"
        return np.zeros(4), Calibrated(np.inf, False, True), problem
    same = bool(np.array_equal(ours, theirs))
    x[:, unused] = theirs[:, unused] = 0  # as ours: they count nowhere
    sums, rounding = sums_of(x, ours), sums_of(x, theirs)
    error, usual = (error_figures(figures)["relative_error"] for figures in (sums, rounding))
    ratio = error / usual if usual else 1.0 if error == 0 else np.inf
    comparison = Calibrated(ratio, same, bool(unused.any()))
    if ratio <= WORST_RATIO:
        return sums, comparison, ""
    far = f"{ratio:.1f} times as far as rounding to nearest ({usual:.4f}); at most {WORST_RATIO:g} times is plausible"
    return sums, comparison, f"is {error:.4f} away from its source, {far}"


def _out_of_range(encoding: Encoding, stored: Sequence[Bytes], n: int, k: int) -> str:
    """What is wrong with all scales and codes of a linear [n, k] by themselves; "" if nothing is."""
    grid = encoding.grid
    scales = scale_values(encoding, stored[-1], n, k)
    if not np.isfinite(scales).all():
        return "has a scale that is not finite"
    if grid.high - grid.low == (1 << grid.bits) - 1:
        return ""  # whatever the bits are, they are a code
    values = encoding.decode(stored, n, k, slice(None)).reshape(n, scales.shape[1], -1)
    each = scales[:, :, None] * np.float32(grid.step * NEXT_TO)
    if ((values < grid.low * each) | (values > grid.high * each)).any():
        return f"has a code outside {grid.low} to {grid.high}"
    return ""


def calibrated_summary(linears: Sequence[Calibrated], same_scales: bool = True) -> str:
    """What holds of them all. same_scales: whether their scales were compared, too."""
    worst = max((linear.ratio for linear in linears), default=0.0)
    rounded = sum(linear.rounded for linear in linears)
    scales = "have the scales of rounding to nearest, and" if same_scales else "have codes within their range, and"
    summary = f"{len(linears)} linears {scales} errors of at most {worst:.2f} times its own"
    return summary + (f"; {rounded} of them are rounded to nearest" if rounded else "")
