"""Rows of a linear rounded in turn, so that the model's predictions change least: what errors of outputs cost, and how
an error of some rows is made up for by those that are left. Plain functions over torch tensors; equations: numerics.md,
section 7c.

GPTQ and the descent weigh an error by the inputs it meets, and take all outputs for equally important. They are not: F,
the Fisher information of the predictions about what a layer gives, has a few large directions and many small ones. With
both metrics an error E costs tr(F E H E^T), as in YAQA (Tseng, Sun, De Sa, 2025, arXiv 2505.22988)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ktconvert.quantizers import gptq
from ktconvert.quantizers.descent import Chosen

if TYPE_CHECKING:
    import torch

VERSION = 1
ROWS = 32  # rows that are rounded together, each as if it were alone: fewer are better, and take longer
DAMPENING = 0.1  # fraction of the mean of F's diagonal that is added to it: F is an estimate
FOLLOWING = 0.05  # the same, for each layer that follows


def information(gradients: torch.Tensor, following: int = 0) -> torch.Tensor:
    """F up to a factor, float32 [n, n], of gradients [T, n] of the log-probability of tokens drawn from predictions.

    following  layers that the gradients leave out: the more, the rougher is F, and the more its diagonal is dampened
    """
    gradients = gradients.float()
    return _dampened(gradients.T @ gradients, following * FOLLOWING)


def _dampened(information: torch.Tensor, fraction: float = DAMPENING) -> torch.Tensor:
    dampened = information.clone()
    dampened.diagonal().add_(fraction * information.diagonal().mean())
    return dampened


def of_middle(information: torch.Tensor, down: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """F of what an expert's gate and up give, float32 [2 I, 2 I].

    information  F of what down gives, [H, H]
    down         [H, I]
    slopes       sum of s s^T over the expert's tokens, [2 I, 2 I]: s are the derivatives of what down reads with
                 respect to gate and up, times the routing weight
    """
    weight = down.float()
    return (weight.T @ _dampened(information) @ weight).repeat(2, 2) * slopes


def factorize(information: torch.Tensor) -> gptq.Factor:
    """The factor of F and the order of rows: the most important first. Raises gptq.NotFinite for one not finite."""
    return gptq.factorize(gptq.Hessian(information, 1), DAMPENING)


def in_turn(
    weight: torch.Tensor, factor: gptq.Factor, choose: Callable[[torch.Tensor, torch.Tensor], Chosen]
) -> Chosen:
    """Round a linear [n, k] some rows at a time, each time what is best after the errors of those before.

    choose  (rows, float32 [r, k], their numbers, int64 [r]) -> their codes and scales
    """
    import torch

    left = weight.float().index_select(0, factor.order)
    made = []
    for first in range(0, len(left), ROWS):
        own, after = slice(first, first + ROWS), slice(first + ROWS, None)
        made.append(choose(left[own], factor.order[own]))
        error = torch.linalg.solve_triangular(factor.upper[own, own].T, left[own] - made[-1].values, upper=False)
        left[after] -= factor.upper[own, after].T @ error
    back = torch.argsort(factor.order)
    return Chosen(*(torch.cat(whole).index_select(0, back) for whole in zip(*made, strict=True)))
