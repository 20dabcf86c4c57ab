"""Routed experts with LoRA as numerics.md (section 5c) defines them, in float64, differentiated by torch.

Also the base weights of kt-kernel's golden files (tests/golden/sft).
"""

from typing import Any

import numpy as np
import torch

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.hot_experts import compute_activation
from ktconvert.native_quant.runtime.training import Gradients, Lora
from ktconvert.quantizers.reference import f32_to_bf16

Linears = tuple[torch.Tensor, ...]  # gate, unless there is none, and up [E, I, H], down [E, H, I]
Biases = tuple[torch.Tensor, ...]  # of the same linears, [E, I] and [E, H]; () if there are none


def compute(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    linears: Linears,
    lora: Lora | None = None,
    scaling: float = 1.0,
    function: ExpertFunction = PLAIN,
    biases: Biases = (),
) -> torch.Tensor:
    """Return the output [T, H]. Ids of no expert add nothing."""
    factors = lora.tensors if lora else []
    out = torch.zeros_like(hidden)
    for expert in range(len(linears[0])):
        token, place = (ids == expert).nonzero(as_tuple=True)

        def product(x: torch.Tensor, linear: int, expert: int = expert) -> torch.Tensor:
            y = x @ linears[linear][expert].T
            y = y + biases[linear][expert] if biases else y
            a_and_b = factors[2 * linear : 2 * linear + 2]
            return y + scaling * (x @ a_and_b[0][expert].T @ a_and_b[1][expert].T) if a_and_b else y

        *inner, down = range(len(linears))
        first, *second = (product(hidden[token], linear) for linear in inner)
        h = compute_activation(function, first, second[0] if second else None)
        out = out.index_add(0, token, weights[token, place][:, None] * product(h, down))
    return out


def differentiate(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    linears: Linears,
    lora: Lora | None,
    scaling: float,
    gradient: torch.Tensor,
    function: ExpertFunction = PLAIN,
    biases: Biases = (),
) -> tuple[torch.Tensor, Gradients]:
    """Return the output and its gradients, all in float64."""
    inputs = [tensor.double().requires_grad_() for tensor in (hidden, weights, *(lora.tensors if lora else ()))]
    factors = Lora.from_tensors(inputs[2:]) if lora else None
    out = compute(inputs[0], ids, inputs[1], linears, factors, scaling, function, biases)
    gradients = torch.autograd.grad(out, inputs, gradient.double())
    return out.detach(), Gradients(gradients[0], gradients[1], Lora.from_tensors(gradients[2:]) if lora else None)


def decode(experts: KTExperts) -> Linears:
    """Return the weights that experts compute with, in float64."""
    linears = [list(experts._packed.linears(expert)) for expert in range(experts.num_experts)]
    dims = [int(projection == "down") for projection in experts._packed.slicing.projections]
    return tuple(
        torch.stack(
            [torch.cat([torch.from_numpy(numa_slice[i]) for numa_slice in slices], dim) for slices in linears]
        ).double()
        for i, dim in enumerate(dims)
    )


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
