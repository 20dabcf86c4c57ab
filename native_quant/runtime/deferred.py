"""Deferred experts, as kt-kernel 0.7.2 defines them: a layer leaves a token's least weighted experts to the next layer's output.

With max_deferred_experts_per_token = d, layer L computes the topk - d experts of largest weight at once (`select`); the others begin
right after, on the same inputs, and their sum, rounded to BF16, is added to the output of layer L + 1 before that is rounded. What
layer L returns is thus its own immediate experts plus what layer L - 1 left. An expert that is immediate for one token of a batch is
immediate for all of them. What the last layer leaves reaches nobody: give it d = 0, as SGLang does.

Other than kt-kernel we add what was left once (kt-kernel again with every call of layer L), raise ValueError where the next layer is
called with another number of tokens (kt-kernel reads another buffer), and tell the models of a process apart by their weight_path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ktconvert.native_quant.runtime.experts import Job
from ktconvert.native_quant.runtime.pool import Pool

if TYPE_CHECKING:
    import torch


def select(
    ids: torch.Tensor, weights: torch.Tensor, immediate: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ids [T, k] as (now, later), with -1 where an expert is in the other one; `immediate` per token by largest weight.

    later is None where nothing can be: immediate >= k. Ids that are no experts stay in `now`.
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
class Left:
    """What a layer left for the next: the job that computes it, into `out` (BF16 [tokens, H]); device: that of the layer's input."""

    job: Job
    pool: Pool
    out: torch.Tensor
    device: torch.device

    waiting: ClassVar[dict[tuple[str, int], Left]] = {}

    @classmethod
    def take(cls, model: str, layer: int, tokens: int, device: torch.device) -> Left | None:
        """What the layer before `layer` left, if anything; it is given once."""
        left = cls.waiting.pop((model, layer - 1), None)
        if left is not None and (len(left.out) != tokens or left.device != device):
            raise ValueError(
                f"layer {layer} was called with {tokens} tokens on {device}, but layer {layer - 1} deferred experts of {len(left.out)} "
                f"tokens on {left.device} to it; call the layers one after the other with the same tokens"
            )
        return left
