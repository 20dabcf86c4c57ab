"""The routed experts of a layer, differentiable: LoRA beside frozen base weights (numerics.md, section 5c)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ktconvert.native_quant.runtime.experts import Experts


class Lora(NamedTuple):
    """LoRA of E experts of sizes H and I, rank r: the six tensors, all BF16 or all float32, on the CPU."""

    gate_a: torch.Tensor  # [E, r, H]
    gate_b: torch.Tensor  # [E, I, r]
    up_a: torch.Tensor  # [E, r, H]
    up_b: torch.Tensor  # [E, I, r]
    down_a: torch.Tensor  # [E, r, I]
    down_b: torch.Tensor  # [E, H, r]


def routed_experts_with_lora(
    experts: Experts,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    lora: Lora | None = None,
    scaling: float = 1.0,
    *,
    dropout: float = 0.0,
    training: bool = True,
    recompute: bool = False,
) -> torch.Tensor:
    """The weighted sum of each token's experts, BF16 [T, H], differentiable in hidden, weights and the six of lora.

    hidden [T, H] in any floating-point dtype, ids int64 [T, k], weights [T, k]. scaling: alpha / rank. dropout: of the
    inputs of LoRA, elementwise, while training. recompute: keep nothing but the inputs for backward.
    """
    out = torch.zeros(hidden.shape, dtype=torch.float32)
    rows = hidden.to("cpu", torch.float32)
    for expert in range(experts.num_experts):
        token, place = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        x = rows[token]
        gate, up, down = (
            torch.cat([torch.from_numpy(part) for part in parts], dim)
            for parts, dim in zip(zip(*experts.packed.linears(expert), strict=True), (0, 0, 1), strict=True)
        )
        g, u = x @ gate.T, x @ up.T
        if lora is not None:
            a, b, c, d, *_ = (one[expert].float() for one in lora)
            g, u = (
                g + scaling * (_drop(x, dropout, training) @ a.T @ b.T),
                u + scaling * (_drop(x, dropout, training) @ c.T @ d.T),
            )
        act = torch.nn.functional.silu(g) * u
        y = act @ down.T
        if lora is not None:
            y = y + scaling * (
                _drop(act, dropout, training) @ lora.down_a[expert].float().T @ lora.down_b[expert].float().T
            )
        out = out.index_add(0, token, weights[token, place].float()[:, None] * y)
    return out.to(torch.bfloat16)


def _drop(x: torch.Tensor, dropout: float, training: bool) -> torch.Tensor:
    return torch.nn.functional.dropout(x, dropout, training)
