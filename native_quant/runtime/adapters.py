"""LoRA adapters of routed experts: where PEFT puts them, and the six tensors that a layer computes with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.runtime.training import CPU, Lora

NAMES = ("gate_proj", "up_proj", "down_proj")
# What checkpoints call an expert's projections, in the conversions of transformers: "mlp.experts.*.w1.weight".
OF_EXPERT = re.compile(r"experts\.\*\.(\w+)\.weight\$?$")


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
    """A layer's active adapters as one, scalings of several in B. UnsupportedError: projections' differ."""
    children: list[Any] = [child for child in module.children() if hasattr(child, "parts")]
    parts = [child.parts() for child in children]
    if not any(parts):
        return None
    if len(parts) < 3 or len({tuple(part[2:] for part in each) for each in parts}) > 1:
        raise UnsupportedError(
            "an adapter has experts' gate, up and down projections with one rank, alpha and dropout, or none of the "
            "three; name `experts` among its target_modules, and none of them in rank_pattern or alpha_pattern"
        )
    if len(parts[0]) == 1:
        scaling, dropout = parts[0][0][3:]
        return Active(Lora(*(tensor.to(CPU) for (each,) in parts for tensor in each[:2])), scaling, dropout)
    tensors: list[torch.Tensor] = []
    for each in parts:
        tensors.append(torch.cat([a for a, *_ in each], 1).to(CPU))
        tensors.append(torch.cat([b * scaling for _, b, _, scaling, _ in each], 2).to(CPU))
    return Active(Lora(*tensors), 1.0, max(part[-1] for part in parts[0]))
