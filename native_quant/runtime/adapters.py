"""LoRA adapters of routed experts: where PEFT puts them, and the six tensors that a layer computes with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ktconvert.native_quant.runtime.training import CPU, Lora

NAMES = ("gate_proj", "up_proj", "down_proj")
# What checkpoints call an expert's projections, in the conversions of transformers: "mlp.experts.*.w1.weight".
OF_EXPERT = re.compile(r"experts\.\*\.(\w+)\.weight\$?$")


Part = tuple[torch.Tensor, torch.Tensor, int, float, float]  # A, B, rank, scaling and dropout of one active adapter


class Projection(torch.nn.Module):
    """One projection of all experts of a layer: no weights, but a place with a name that PEFT finds and wraps.

    experts, in_features, out_features   as of E matrices [out, in]
    """

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = torch.empty(0, dtype=torch.bfloat16, device=CPU)  # tells PEFT where its tensors belong

    def extra_repr(self) -> str:
        return f"{self.experts} x [{self.out_features}, {self.in_features}]"


class Active(NamedTuple):
    """What an adapter adds to each projection of an expert's input x: scaling * B A dropout(x)."""

    lora: Lora
    scaling: float
    dropout: float


def names_of(model: Any) -> tuple[str, str, str]:
    """What a model's checkpoints, vLLM and SGLang call gate, up and down projections of an expert."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = {}
    for conversion in get_model_conversion_mapping(model):
        match [OF_EXPERT.search(pattern) for pattern in conversion.source_patterns]:
            case [re.Match() as gate, re.Match() as up]:
                found["gate"], found["up"] = gate[1], up[1]
            case [re.Match() as down]:
                found["down"] = down[1]
    return (found["gate"], found["up"], found["down"]) if len(found) == 3 else NAMES


def add_projections(module: Any, names: Sequence[str], sizes: tuple[int, int, int]) -> None:
    """Give RoutedExperts a Projection each by these names; sizes: E, H, I."""
    module.projections = tuple(names)
    experts, hidden, intermediate = sizes
    gate, up, down = names
    for name in (gate, up):
        module.add_module(name, Projection(experts, hidden, intermediate))
    module.add_module(down, Projection(experts, intermediate, hidden))


def active(module: torch.nn.Module) -> Active | None:
    """A layer's active adapters as one. Unless there is one with the same rank and scaling for all three projections,
    ranks are filled up with zeros, and B includes the scaling; a projection without an adapter gets zeros.
    """
    children: list[Any] = [getattr(module, name) for name in module.projections]  # type: ignore[union-attr]
    parts: list[Sequence[Part]] = [child.parts() if hasattr(child, "parts") else () for child in children]
    every = [part for each in parts for part in each]
    if not every:
        return None
    if all(len(each) == 1 for each in parts) and len({part[2:] for part in every}) == 1:
        scaling, dropout = every[0][3:]
        return Active(Lora(*(tensor.to(CPU) for (each,) in parts for tensor in each[:2])), scaling, dropout)
    if torch.is_grad_enabled():
        return _join(children, parts)
    # Zeros and scaled copies take longer to make than a token takes to compute.
    known: dict[Any, tuple[Any, Active]] = module.__dict__.setdefault("_joined", {})
    key = tuple((id(a), id(b), scaling) for a, b, _, scaling, _ in every)
    versions = tuple((a._version, b._version, len(each)) for each in parts for a, b, *_ in each)
    if key not in known or known[key][0] != versions:
        known[key] = versions, _join(children, parts)
    return known[key][1]


def _join(children: Sequence[Any], parts: Sequence[Sequence[Part]]) -> Active:
    """Active adapters of each projection, one beside the other; rank: the largest sum of their ranks."""
    every = [part for each in parts for part in each]
    rank = max(sum(part[2] for part in each) for each in parts)
    tensors: list[torch.Tensor] = []
    for child, each in zip(children, parts, strict=True):
        base = getattr(child, "base_layer", child)
        a = [part[0] for part in each]
        b = [part[1] * part[3] for part in each]
        if missing := rank - sum(part[2] for part in each):
            like: dict[str, Any] = {"dtype": every[0][0].dtype, "device": every[0][0].device}
            a.append(torch.zeros(base.experts, missing, base.in_features, **like))
            b.append(torch.zeros(base.experts, base.out_features, missing, **like))
        tensors += (torch.cat(a, 1).to(CPU), torch.cat(b, 2).to(CPU))
    return Active(Lora(*tensors), 1.0, max(part[-1] for part in every))
