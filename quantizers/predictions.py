"""Rounding of a linear's rows in turn, so that the model's predictions change least.

The module computes the cost of output errors, and the corrections by which later rows compensate for errors of earlier
ones. Its functions are plain ones over torch tensors; equations: numerics.md, section 7c.

GPTQ and the descent weight an error by its inputs, and treat all outputs as equally important. But outputs differ: F,
the Fisher information of the predictions about a layer's outputs, has a few large directions and many small ones. With
both metrics an error E costs tr(F E H E^T), as in YAQA (Tseng, Sun, De Sa, 2025, arXiv 2505.22988).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ktconvert.quantizers import gptq
from ktconvert.quantizers.descent import CodesAndScales

if TYPE_CHECKING:
    import torch

VERSION = 2
ROWS = 32  # rows to round together, ignoring each other's errors; fewer rows give less error, and take longer
BLOCK = 256  # rows whose errors one product passes to the later rows
DAMPENING = 0.1  # fraction of the mean of F's diagonal to add to the diagonal, since F is an estimate
FOLLOWING_DAMPENING = 0.05  # additional fraction for each layer that the gradients omit


def fisher_information(gradients: torch.Tensor, following: int = 0) -> torch.Tensor:
    """Return F up to a factor, float32 [n, n].

    gradients  [T, n], gradients of the log-probability of tokens that are drawn from predictions
    following  number of following layers that the gradients omit; each makes F less exact, so that it is dampened more
    """
    gradients = gradients.float()
    return _dampen(gradients.T @ gradients, following * FOLLOWING_DAMPENING)


def _dampen(information: torch.Tensor, fraction: float = DAMPENING) -> torch.Tensor:
    dampened = information.clone()
    dampened.diagonal().add_(fraction * information.diagonal().mean())
    return dampened


def gate_up_information(information: torch.Tensor, down: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """Return F of the outputs of an expert's gate and up, float32 [2 I, 2 I]; without a gate [I, I].

    information  F of down's outputs, [H, H]
    down         weight of down, [H, I]
    slopes       sum of s s^T over the expert's tokens, of the result's shape, where s are the derivatives of down's
                 inputs by the outputs of gate and up, times the routing weight
    """
    weight = down.float()
    linears = len(slopes) // weight.shape[1]
    return (weight.T @ _dampen(information) @ weight).repeat(linears, linears) * slopes


class RowFactor(NamedTuple):
    """A root of F, the metric of a linear's rows.

    order  int64 [n], the rows in the order in which they are rounded: the most important first
    root   float32 [n, n], in that order: an upper triangular R with F = R R^T
    """

    order: torch.Tensor
    root: torch.Tensor


def factorize_information(information: torch.Tensor) -> RowFactor:
    """Return the order of rows and the root of F; the identity if F has no root, so that rows are independent.

    Raises gptq.NotFinite if F is not finite.
    """
    import torch

    diagonal = information.diagonal()
    if not bool(torch.isfinite(diagonal).all()):
        raise gptq.NotFinite("the Fisher information of its outputs is not finite")
    rising = torch.argsort(diagonal)
    metric = _dampen(information)[rising][:, rising]
    lower, info = torch.linalg.cholesky_ex(metric)
    root = torch.eye(len(lower), device=lower.device) if info.item() else lower.flip(0, 1)
    return RowFactor(rising.flip(0), root)


def round_rows(
    weight: torch.Tensor, factor: RowFactor, choose_codes: Callable[[torch.Tensor, torch.Tensor], CodesAndScales]
) -> CodesAndScales:
    """Round a linear [n, k] some rows at a time, each time optimally given the errors of the earlier rows.

    choose_codes  (rows, float32 [r, k], their numbers, int64 [r]) -> their codes and scales
    """
    import torch

    ordered = weight.float().index_select(0, factor.order)
    errors = torch.empty_like(ordered)
    accumulated_error = torch.zeros_like(ordered)
    chosen = []
    for first in range(0, len(ordered), ROWS):
        rows = slice(first, first + ROWS)
        block = first // BLOCK * BLOCK
        if first and first == block:
            earlier = slice(first - BLOCK, first)
            accumulated_error[first:] += factor.root[earlier, first:].T @ errors[earlier]
        earlier = slice(block, first)
        accumulated_error[rows] += factor.root[earlier, rows].T @ errors[earlier]
        correction = torch.linalg.solve_triangular(factor.root[rows, rows].T, accumulated_error[rows], upper=False)
        chosen.append(choose_codes(ordered[rows] + correction, factor.order[rows]))
        errors[rows] = ordered[rows] - chosen[-1].values
    inverse_order = torch.argsort(factor.order)
    return CodesAndScales(*(torch.cat(parts).index_select(0, inverse_order) for parts in zip(*chosen, strict=True)))
