"""Scales and codes of least error in the metric of the inputs: GPTQ, coordinate descent over codes, new scales.

Plain functions over torch tensors; equations: numerics.md, section 7b. With H the metric of a linear's inputs, an error
E = W - Q costs tr(E H E^T). Rows do not depend on each other. Each step needs only the gradient E H of an error; it
follows from what GPTQ compensated, and each step updates it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ktconvert.native_quant import compensation
from ktconvert.quantizers import Grid, gptq
from ktconvert.quantizers.gptq import Factor, Hessian

if TYPE_CHECKING:
    import torch

VERSION = 2
SWEEPS = 4  # sweeps over all codes; most codes that change do so in the first two
UNREACHED = 1e30  # replaces scales of 0: all codes become 0
DIRECTIONS = 64  # random directions to estimate the cost of new scales: the error is 18 %, which keeps 97 % of the gain


class CodesAndScales(NamedTuple):
    """A linear [n, k] as codes, int8 [n, k], times scales, float32 [n, groups]; 0 for a group of zeros."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """Values, float32 [n, k]."""
        return _values(self.codes.float(), self.scale)


class Metric(NamedTuple):
    """Cost of errors of a linear [n, k]: the metric of its inputs, and values derived from it.

    factor      of the dampened Hessian
    errors      float32 [k, k], that Hessian in the stored order of columns; 0 in rows and columns of inputs that were
                always 0
    directions  float32 [k, DIRECTIONS]: for a row e, the square of e @ directions is about e @ errors @ e
    slices      float32 [k / SLICE, k, SLICE], the factor in the layout of compensation.compensate; None if that cannot
                read it
    """

    factor: Factor
    errors: torch.Tensor
    directions: torch.Tensor
    slices: torch.Tensor | None


def make_metric(hessian: Hessian, factor: Factor, dampening: float) -> Metric:
    """Return the metric with the dampened Hessian of GPTQ's factor."""
    import torch

    errors = hessian.sum / hessian.batches
    diagonal = torch.diagonal(errors)
    diagonal.add_(torch.where(factor.dead, 0, dampening * torch.where(factor.dead, 1, diagonal).mean()))
    upper, slices = factor.upper, None
    signs = torch.randint(2, (len(upper), DIRECTIONS), generator=torch.Generator().manual_seed(0)) * 2 - 1
    signs = signs.to(upper) / DIRECTIONS**0.5
    directions = torch.empty_like(signs)
    directions[factor.order] = torch.linalg.solve_triangular(upper, signs, upper=True)
    if upper.device.type == "cpu" and len(upper) % compensation.SLICE == 0:
        both = (upper / torch.diagonal(upper)[:, None]).triu_(1).T + upper
        slices = both.reshape(len(upper), -1, compensation.SLICE).transpose(0, 1).contiguous()
    return Metric(factor, errors, directions, slices)


def choose(weight: torch.Tensor, metric: Metric, scale: torch.Tensor, grid: Grid) -> CodesAndScales:
    """Round a linear [n, k] by GPTQ, starting with these scales, float32 [n, groups], and refine the result.

    Raises gptq.NotFinite if its errors are not finite.
    """
    return refine(metric, *_round(weight, metric, scale, grid), grid)


def _round(
    weight: torch.Tensor, metric: Metric, scale: torch.Tensor, grid: Grid
) -> tuple[CodesAndScales, torch.Tensor]:
    """Return GPTQ's result, and the gradient of its remaining errors, float32 [n, k]."""
    import torch

    if metric.slices is None:
        values = gptq.compensate(weight, metric.factor, scale, grid.code_range)
        gradient = (weight.float() - values) @ metric.errors
    else:
        values, gradient = _compensate(weight, metric, scale, grid)
    if not bool(torch.isfinite(gradient.sum())):
        raise gptq.NotFinite("the remaining errors of GPTQ are not finite")
    return CodesAndScales(gptq.codes(values, scale, grid.code_range), scale), gradient


def _compensate(
    weight: torch.Tensor, metric: Metric, scale: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and gradient, float32 [n, k] each, computed by our kernel."""
    import torch

    assert metric.slices is not None
    order = metric.factor.order
    columns = weight.index_select(1, order).float()
    if bool(metric.factor.dead.any()):
        columns.masked_fill_(metric.factor.dead[order], 0)
    each = torch.where(scale == 0, UNREACHED, scale).index_select(1, order // (len(order) // scale.shape[1]))
    gradient = torch.empty_like(columns)
    arrays = (x.numpy() for x in (metric.slices, each, columns, gradient))
    compensation.compensate(grid.code_range, *arrays, threads=torch.get_num_threads())
    back = torch.argsort(order)
    return columns.index_select(1, back), gradient.index_select(1, back)


def refine(metric: Metric, chosen: CodesAndScales, gradient: torch.Tensor, grid: Grid) -> CodesAndScales:
    """Sweep over the codes, and fit scales. No sweep increases the error, except by float32's rounding.

    gradient  float32 [n, k], (weight - chosen.values) @ metric.errors; overwritten
    """
    import torch

    codes = chosen.codes.clone(memory_format=torch.contiguous_format)
    arrays = [x.contiguous().cpu().numpy() for x in (metric.errors, chosen.scale, codes, gradient)]
    for _ in range(SWEEPS):
        compensation.descend(grid.code_range, *arrays, threads=torch.get_num_threads())
    codes, gradient = (torch.from_numpy(x).to(gradient.device) for x in arrays[2:])
    return _fit(metric, CodesAndScales(codes, chosen.scale), gradient, grid)


def _fit(metric: Metric, chosen: CodesAndScales, gradient: torch.Tensor, grid: Grid) -> CodesAndScales:
    """Fit scales to these codes, for all groups of a row at once; powers of two stay, as no others fit better."""
    import torch

    if grid.scales == "U8":
        return chosen
    codes, scale = chosen.codes.float(), chosen.scale
    in_groups = (len(scale), scale.shape[1], -1)
    slope = (codes * gradient).reshape(in_groups).sum(2)
    alone = (codes.square() * torch.diagonal(metric.errors)).reshape(in_groups).sum(2)
    step = torch.where(alone > 0, slope / alone, 0)
    cost = (_values(codes, step) @ metric.directions).square().sum(1, keepdim=True)
    best = scale + torch.where(cost > 0, (slope * step).sum(1, keepdim=True) / cost, 0) * step
    if grid.scales == "BF16":
        best = best.bfloat16().float()
    return CodesAndScales(chosen.codes, torch.where((best * scale > 0) & torch.isfinite(best), best, scale))


def _values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    n, k = codes.shape
    return (codes.reshape(n, scale.shape[1], -1) * scale[:, :, None]).reshape(n, k)
