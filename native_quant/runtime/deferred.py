"""Deferred experts, as in kt-kernel 0.7.2: a token's least weighted experts are added to the next layer's output.

With max_deferred_experts_per_token = d, layer L computes the topk - d experts of largest weight at once (`select`); the
others begin right after, on the same inputs, and their sum, rounded to BF16, is added to the output of layer L + 1
before that is rounded. So layer L returns its own immediate experts plus the deferred ones of layer L - 1. An expert
that is immediate for one token of a batch is immediate for all of them. The last layer's deferred experts would never
be added: give it d = 0, as SGLang does.

Unlike kt-kernel we add deferred experts only once (kt-kernel adds them with every call of layer L), raise ValueError
where the next layer is called with another number of tokens (kt-kernel reads another buffer), and keep those of several
models apart (models.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ktconvert.native_quant.runtime.jobs import Job
from ktconvert.native_quant.runtime.pool import Pool

if TYPE_CHECKING:
    import torch


def select(
    ids: torch.Tensor, weights: torch.Tensor, immediate: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ids [T, k] as (now, later), each with -1 in place of the other's experts.

    now holds the `immediate` experts of largest weight of each token. later is None where nothing is deferred:
    immediate >= k. Ids that are not of experts stay in `now`.
    """
    import torch

    topk = ids.shape[-1]
    immediate = max(0, min(immediate, topk))
    if immediate == topk:
        return ids, None
    if immediate == 0:
        return torch.full_like(ids, -1), ids.clone()
    known = torch.where((ids >= 0) & (ids < experts), ids, experts)
    first = known.gather(-1, weights.topk(immediate, dim=-1, sorted=False).indices)
    is_now = torch.zeros(experts + 1, dtype=torch.bool, device=ids.device)
    is_now[experts] = True
    is_now.scatter_(0, first.reshape(-1), True)
    now = is_now[known]
    return ids.masked_fill(~now, -1), ids.masked_fill(now, -1)


@dataclass(frozen=True)
class Deferred:
    """The deferred experts of a layer: the job that computes their sum into `out` (BF16 [tokens, H]).

    device: that of the layer's input.
    """

    job: Job
    pool: Pool
    out: torch.Tensor
    device: torch.device
