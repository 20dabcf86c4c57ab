"""Scales and codes of least error in the metric of the inputs, from those that GPTQ gives: scales are fitted again, and
codes are moved by coordinate descent. Plain functions over torch tensors; equations: numerics.md, section 7b.

With H the metric of a linear's inputs, an error E = W - Q costs tr(E H E^T). Rows do not depend on each other. Of an
error, the gradient E H is all that a step needs, and each step keeps it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ktconvert.native_quant import compensation
from ktconvert.quantizers import Grid, gptq, mxfp4
from ktconvert.quantizers.gptq import Factor, Hessian

if TYPE_CHECKING:
    import torch

VERSION = 1


class Chosen(NamedTuple):
    """A linear [n, k] as codes, int8 [n, k], times scales, float32 [n, groups]; 0 where a group holds only zeros."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """float32 [n, k]."""
        return _values(self.codes.float(), self.scale)


class Metric(NamedTuple):
    """What errors of a linear [n, k] cost: the metric of its inputs, and what follows from it.

    factor  of the dampened Hessian
    errors  float32 [k, k], that Hessian in the order of columns that are stored; 0 in rows and columns of inputs that
            were never other than 0
    strips  float32 [k / STRIP, k, STRIP], the factor as compensation.compensate reads it; None on other devices
    """

    factor: Factor
    errors: torch.Tensor
    strips: torch.Tensor | None


def metric_of(hessian: Hessian, factor: Factor, dampening: float) -> Metric:
    """The dampened Hessian of GPTQ's factor."""
    import torch

    errors = hessian.sum / hessian.batches
    diagonal = torch.diagonal(errors)
    diagonal.add_(torch.where(factor.dead, 0, dampening * torch.where(factor.dead, 1, diagonal).mean()))
    upper, strips = factor.upper, None
    if upper.device.type == "cpu":
        both = upper + (upper / torch.diagonal(upper)[:, None]).triu(1).T
        strips = both.reshape(len(upper), -1, compensation.STRIP).transpose(0, 1).contiguous()
    return Metric(factor, errors, strips)


def choose(weight: torch.Tensor, metric: Metric, scale: torch.Tensor, grid: Grid) -> Chosen:
    """Round a linear [n, k] by GPTQ, beginning with these scales, float32 [n, groups], and refine what it chose. Raises
    gptq.NotFinite where its errors are not finite."""
    return refine(metric.errors, *_rounded(weight, metric, scale, grid), grid)


def _rounded(weight: torch.Tensor, metric: Metric, scale: torch.Tensor, grid: Grid) -> tuple[Chosen, torch.Tensor]:
    """What GPTQ chooses, and the gradient of the errors that it leaves, float32 [n, k]."""
    import torch

    if metric.strips is None:
        values = gptq.compensate(weight, metric.factor, scale, grid.code_range).values
        return Chosen(gptq.codes(values, scale, grid.code_range), scale), (weight.float() - values) @ metric.errors
    order = metric.factor.order
    columns = weight.index_select(1, order).float().masked_fill_(metric.factor.dead[order], 0)
    each = gptq.usable(scale, len(order)).index_select(1, order // (len(order) // scale.shape[1]))
    gradient = torch.empty_like(columns)
    arrays = (x.numpy() for x in (metric.strips, each, columns, gradient))
    compensation.compensate(grid.code_range, *arrays, threads=torch.get_num_threads())
    if not bool(torch.isfinite(gradient).all()):
        raise gptq.NotFinite("what GPTQ leaves of its errors is not finite")
    values, gradient = (x.index_select(1, torch.argsort(order)) for x in (columns, gradient))
    return Chosen(gptq.codes(values, scale, grid.code_range), scale), gradient


def refine(errors: torch.Tensor, chosen: Chosen, gradient: torch.Tensor, grid: Grid) -> Chosen:
    """Sweep over the codes twice, and fit scales.

    errors    float32 [k, k], finite, symmetric and positive semidefinite
    gradient  float32 [n, k], (weight - chosen.values) @ errors, which is used up
    The error in this metric is never larger than before, but for float32's rounding.
    """
    import torch

    codes = chosen.codes.clone(memory_format=torch.contiguous_format)
    arrays = [x.contiguous().cpu().numpy() for x in (errors, chosen.scale, codes, gradient)]
    for _ in range(SWEEPS):
        compensation.descend(grid.code_range, *arrays, threads=torch.get_num_threads())
    codes, gradient = (torch.from_numpy(x).to(errors.device) for x in arrays[2:])
    return _fit(errors, Chosen(codes, chosen.scale), gradient, grid)


SWEEPS = 2


def _fit(metric: torch.Tensor, chosen: Chosen, gradient: torch.Tensor, grid: Grid) -> Chosen:
    """New scales for these codes, group after group; the gradient is kept up.

    Of a group, q its codes and d its scale: an error changes by (d' - d)^2 a - 2 (d' - d) b with a = q H q^T and b = q
    (gradient)^T, so that d' = d + b / a is best. Where none that can be stored is better, d stays.
    """
    import torch

    codes, scale = chosen.codes.float(), chosen.scale.clone()
    width = codes.shape[1] // scale.shape[1]
    for group in range(scale.shape[1]):
        columns = slice(group * width, (group + 1) * width)
        q, d = codes[:, columns], scale[:, group]
        product = q @ metric[columns]
        curvature = (product[:, columns] * q).sum(1)
        slope = (gradient[:, columns] * q).sum(1)
        best, gain = d.clone(), torch.zeros_like(d)
        step = torch.where(curvature > 0, slope / curvature, 0)
        for tried in STORABLE[grid.scales](d, d + step):
            change = tried - d
            gained = 2 * change * slope - change.square() * curvature
            better = (gained > gain) & (tried * d > 0) & torch.isfinite(tried)
            best, gain = torch.where(better, tried, best), torch.where(better, gained, gain)
        gradient -= (best - d)[:, None] * product
        scale[:, group] = best
    return Chosen(chosen.codes, scale)


def _powers(d: torch.Tensor, best: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The power of two below and above, within what is chosen for MXFP4. best: not used, since codes hold it back."""
    import torch

    least, most = (np.ldexp(np.float32(0.5), e - 127) for e in (mxfp4.LEAST, mxfp4.MOST))
    return tuple(torch.where((x >= float(least)) & (x <= float(most)), x, d) for x in (d / 2, d * 2))


# dtype of a grid's scales -> (scales, best ones in float32) -> what can be stored in their place
STORABLE: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "F32": lambda _, best: (best,),
    "BF16": lambda _, best: (best.bfloat16().float(),),
    "U8": _powers,
}


def _values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    n, k = codes.shape
    return (codes.reshape(n, scale.shape[1], -1) * scale[:, :, None]).reshape(n, k)
