"""Rounding of a linear's rows in turn, so that the model's predictions change least.

The module computes the cost of output errors, and how the remaining rows compensate for errors of the rounded ones.
Plain functions over torch tensors; equations: numerics.md, section 7c.

GPTQ and the descent weight an error by its inputs, and treat all outputs as equally important. They are not: F, the
Fisher information of the predictions about a layer's outputs, has a few large directions and many small ones. With both
metrics an error E costs tr(F E H E^T), as in YAQA (Tseng, Sun, De Sa, 2025, arXiv 2505.22988).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ktconvert.quantizers import gptq
from ktconvert.quantizers.descent import CodesAndScales

if TYPE_CHECKING:
    import torch

VERSION = 2
ROWS = 32  # rows to round together, ignoring each other: fewer rows give less error, and take longer
BLOCK = 256  # rows whose errors one product passes to the later rows
DAMPENING = 0.1  # fraction of the mean of F's diagonal that is added to it: F is an estimate
FOLLOWING = 0.05  # the same, for each layer that follows


def fisher_information(gradients: torch.Tensor, following: int = 0) -> torch.Tensor:
    """Return F up to a factor, float32 [n, n].

    gradients  [T, n], of the log-probability of tokens that are drawn from predictions
    following  number of layers that the gradients omit: the more, the rougher is F, and the more it is dampened
    """
    gradients = gradients.float()
    return _dampen(gradients.T @ gradients, following * FOLLOWING)


def _dampen(information: torch.Tensor, fraction: float = DAMPENING) -> torch.Tensor:
    dampened = information.clone()
    dampened.diagonal().add_(fraction * information.diagonal().mean())
    return dampened


def middle_information(information: torch.Tensor, down: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """Return F of the outputs of an expert's gate and up, float32 [2 I, 2 I].

    information  F of down's outputs, [H, H]
    down         [H, I]
    slopes       sum of s s^T over the expert's tokens, [2 I, 2 I]: s are the derivatives of down's inputs by gate and
                 up, times the routing weight
    """
    weight = down.float()
    return (weight.T @ _dampen(information) @ weight).repeat(2, 2) * slopes


class Rows(NamedTuple):
    """Order of rows, int64 [n], most important first, and in that order an upper root R, float32 [n, n]: F = R R^T."""

    order: torch.Tensor
    root: torch.Tensor


def factorize(information: torch.Tensor) -> Rows:
    """Return the order and the root of F; if it has no root, rows are independent of each other.

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
    return Rows(rising.flip(0), root)


def round_in_turn(
    weight: torch.Tensor, rows: Rows, choose: Callable[[torch.Tensor, torch.Tensor], CodesAndScales]
) -> CodesAndScales:
    """Round a linear [n, k] some rows at a time, each time optimally given the errors of the rows before.

    choose  (rows, float32 [r, k], their numbers, int64 [r]) -> their codes and scales
    """
    import torch

    left = weight.float().index_select(0, rows.order)
    errors, taken = torch.empty_like(left), torch.zeros_like(left)
    made = []
    for first in range(0, len(left), ROWS):
        own, block = slice(first, first + ROWS), first // BLOCK * BLOCK
        if first and first == block:
            before = slice(first - BLOCK, first)
            taken[first:] += rows.root[before, first:].T @ errors[before]
        before = slice(block, first)
        taken[own] += rows.root[before, own].T @ errors[before]
        answer = torch.linalg.solve_triangular(rows.root[own, own].T, taken[own], upper=False)
        made.append(choose(left[own] + answer, rows.order[own]))
        errors[own] = left[own] - made[-1].values
    back = torch.argsort(rows.order)
    return CodesAndScales(*(torch.cat(whole).index_select(0, back) for whole in zip(*made, strict=True)))
