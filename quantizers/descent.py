"""Scales and codes of least error in the metric of the inputs: GPTQ, coordinate descent over codes, new scales.

The functions are plain ones over torch tensors; equations: numerics.md, section 7b. With H the metric of a linear's
inputs, an error E = W - Q costs tr(E H E^T). Rows do not depend on each other. Each step needs only the gradient E H of
the error: GPTQ's compensation gives the first one, and each step updates it.
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
ZERO_SCALE = 1e30  # replaces scales of 0, so that all codes become 0
# Random directions that estimate the cost of new scales. The estimate is off by 18 %, which keeps 97 % of the gain.
DIRECTIONS = 64


class CodesAndScales(NamedTuple):
    """A linear [n, k] as codes, int8 [n, k], times scales, float32 [n, groups]; a group of zeros has the scale 0."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """Values, float32 [n, k]."""
        return _multiply_groups(self.codes.float(), self.scale)


class Metric(NamedTuple):
    """Cost of errors of a linear [n, k]: the metric of its inputs, and values derived from it.

    factor      factor of the dampened Hessian
    hessian     float32 [k, k], the dampened Hessian in the stored order of columns; its rows and columns of inputs that
                were always 0 are 0
    directions  float32 [k, DIRECTIONS]: for a row e of errors, the square of e @ directions is about e @ hessian @ e
    slices      float32 [k / SLICE, k, SLICE], the factor in the layout of compensation.compensate; None if the kernel
                does not support its size or device
    """

    factor: Factor
    hessian: torch.Tensor
    directions: torch.Tensor
    slices: torch.Tensor | None


def make_metric(hessian: Hessian, factor: Factor, dampening: float) -> Metric:
    """Return the metric with the dampened Hessian of GPTQ's factor."""
    import torch

    dampened = hessian.sum / hessian.batches
    diagonal = torch.diagonal(dampened)
    diagonal.add_(torch.where(factor.dead, 0, dampening * torch.where(factor.dead, 1, diagonal).mean()))
    upper = factor.upper
    signs = torch.randint(2, (len(upper), DIRECTIONS), generator=torch.Generator().manual_seed(0)) * 2 - 1
    signs = signs.to(upper) / DIRECTIONS**0.5
    directions = torch.empty_like(signs)
    directions[factor.order] = torch.linalg.solve_triangular(upper, signs, upper=True)
    slices = None
    if upper.device.type == "cpu" and len(upper) % compensation.SLICE == 0:
        # The lower triangle has the factor's rows divided by their diagonal elements, transposed.
        both_triangles = (upper / torch.diagonal(upper)[:, None]).triu_(1).T + upper
        slices = both_triangles.reshape(len(upper), -1, compensation.SLICE).transpose(0, 1).contiguous()
    return Metric(factor, dampened, directions, slices)


def choose_codes(weight: torch.Tensor, metric: Metric, scale: torch.Tensor, grid: Grid) -> CodesAndScales:
    """Round a linear [n, k] by GPTQ, starting with these scales, float32 [n, groups], and refine the result.

    Raises gptq.NotFinite if its errors are not finite.
    """
    return refine_codes(metric, *_round_by_gptq(weight, metric, scale, grid), grid)


def _round_by_gptq(
    weight: torch.Tensor, metric: Metric, scale: torch.Tensor, grid: Grid
) -> tuple[CodesAndScales, torch.Tensor]:
    """Return GPTQ's result, and the gradient of its remaining errors, float32 [n, k]."""
    import torch

    if metric.slices is None:
        values = gptq.round_columns(weight, metric.factor, scale, grid.code_range)
        gradient = (weight.float() - values) @ metric.hessian
    else:
        values, gradient = _round_by_kernel(weight, metric, scale, grid)
    if not bool(torch.isfinite(gradient.sum())):
        raise gptq.NotFinite("the remaining errors of GPTQ are not finite")
    return CodesAndScales(gptq.find_codes(values, scale, grid.code_range), scale), gradient


def _round_by_kernel(
    weight: torch.Tensor, metric: Metric, scale: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and the gradient, float32 [n, k] each, as our kernel computes them."""
    import torch

    assert metric.slices is not None
    order = metric.factor.order
    columns = weight.index_select(1, order).float()
    if bool(metric.factor.dead.any()):
        columns.masked_fill_(metric.factor.dead[order], 0)
    column_groups = order // (len(order) // scale.shape[1])
    column_scales = torch.where(scale == 0, ZERO_SCALE, scale).index_select(1, column_groups)
    gradient = torch.empty_like(columns)
    arrays = (x.numpy() for x in (metric.slices, column_scales, columns, gradient))
    compensation.compensate(grid.code_range, *arrays, threads=torch.get_num_threads())
    inverse_order = torch.argsort(order)
    return columns.index_select(1, inverse_order), gradient.index_select(1, inverse_order)


def refine_codes(metric: Metric, chosen: CodesAndScales, gradient: torch.Tensor, grid: Grid) -> CodesAndScales:
    """Sweep over the codes, and fit scales. No sweep increases the error, except by float32's rounding.

    gradient  float32 [n, k], (weight - chosen.values) @ metric.hessian; overwritten
    """
    import torch

    codes = chosen.codes.clone(memory_format=torch.contiguous_format)
    arrays = [x.contiguous().cpu().numpy() for x in (metric.hessian, chosen.scale, codes, gradient)]
    for _ in range(SWEEPS):
        compensation.descend(grid.code_range, *arrays, threads=torch.get_num_threads())
    codes, gradient = (torch.from_numpy(x).to(gradient.device) for x in arrays[2:])
    return _fit_scales(metric, CodesAndScales(codes, chosen.scale), gradient, grid)


def _fit_scales(metric: Metric, chosen: CodesAndScales, gradient: torch.Tensor, grid: Grid) -> CodesAndScales:
    """Fit scales to these codes, for all groups of a row at once.

    Scales that are powers of two stay unchanged, because no other power fits better.
    """
    import torch

    if grid.scale_dtype == "U8":
        return chosen
    codes = chosen.codes.float()
    scale = chosen.scale
    group_shape = (len(scale), scale.shape[1], -1)
    slope = (codes * gradient).reshape(group_shape).sum(2)
    curvature = (codes.square() * torch.diagonal(metric.hessian)).reshape(group_shape).sum(2)
    step = torch.where(curvature > 0, slope / curvature, 0)
    step_cost = (_multiply_groups(codes, step) @ metric.directions).square().sum(1, keepdim=True)
    length = torch.where(step_cost > 0, (slope * step).sum(1, keepdim=True) / step_cost, 0)
    best = scale + length * step
    if grid.scale_dtype == "BF16":
        best = best.bfloat16().float()
    return CodesAndScales(chosen.codes, torch.where((best * scale > 0) & torch.isfinite(best), best, scale))


def _multiply_groups(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes [n, k] times the scales [n, groups] of their groups."""
    n, k = codes.shape
    return (codes.reshape(n, scale.shape[1], -1) * scale[:, :, None]).reshape(n, k)
