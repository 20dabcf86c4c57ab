"""Routed experts with LoRA as numerics.md (section 5c) defines them, in float64, differentiated by torch.

Also the base weights of kt-kernel's golden files (tests/golden/sft).
"""

from typing import Any

import numpy as np
import torch

from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.training import Gradients, Lora
from ktconvert.quantizers.reference import f32_to_bf16

Linears = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def compute(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    linears: Linears,
    lora: Lora | None = None,
    scaling: float = 1.0,
) -> torch.Tensor:
    """Return the output [T, H]. linears: gate, up [E, I, H] and down [E, H, I]. Ids of no expert add nothing."""
    gate, up, down = linears
    out = torch.zeros_like(hidden)
    for expert in range(len(gate)):
        token, place = (ids == expert).nonzero(as_tuple=True)
        x = hidden[token]

        def product(x: torch.Tensor, w: torch.Tensor, factors: Any, expert: int = expert) -> torch.Tensor:
            y = x @ w[expert].T
            return y if lora is None else y + scaling * (x @ factors[0][expert].T @ factors[1][expert].T)

        pairs = [None] * 3 if lora is None else [lora[:2], lora[2:4], lora[4:]]
        h = torch.nn.functional.silu(product(x, gate, pairs[0])) * product(x, up, pairs[1])
        out = out.index_add(0, token, weights[token, place][:, None] * product(h, down, pairs[2]))
    return out


def differentiate(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    linears: Linears,
    lora: Lora | None,
    scaling: float,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, Gradients]:
    """Return the output and its gradients, all in float64."""
    inputs = [tensor.double().requires_grad_() for tensor in (hidden, weights, *(lora or ()))]
    factors = None if lora is None else Lora(*inputs[2:])
    out = compute(inputs[0], ids, inputs[1], linears, factors, scaling)
    gradients = torch.autograd.grad(out, inputs, gradient.double())
    return out.detach(), Gradients(gradients[0], gradients[1], None if lora is None else Lora(*gradients[2:]))


def decode(experts: Experts) -> Linears:
    """Return the weights that experts compute with, in float64."""
    linears = [list(experts.packed.linears(expert)) for expert in range(experts.num_experts)]
    dims = (0, 0, 1)
    stacked = (
        torch.stack(
            [torch.cat([torch.from_numpy(numa_slice[i]) for numa_slice in slices], dims[i]) for slices in linears]
        ).double()
        for i in range(3)
    )
    gate, up, down = stacked
    return gate, up, down


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 distance."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def golden_weights(e: int, h: int, i: int) -> list[Any]:
    """Return BF16 bits of gate, up [E, I, H] and down [E, H, I]: uniform numbers from a counter."""
    return [_uniform(tag, shape) for tag, shape in ((1, (e, i, h)), (2, (e, i, h)), (3, (e, h, i)))]


def _uniform(tag: int, shape: tuple[int, int, int]) -> Any:
    with np.errstate(over="ignore"):
        z = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(tag << 40) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    u = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
    return f32_to_bf16((u * np.float32(np.sqrt(12.0 / shape[-1]))).reshape(shape))
