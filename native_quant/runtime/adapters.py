"""LoRA adapters of routed experts: the modules that PEFT wraps, and the tensors that a layer computes with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ktconvert.native_quant.runtime.training import CPU, Lora

DEFAULT_NAMES = ("gate_proj", "up_proj", "down_proj")
# Checkpoints' names of an expert's projections, in the conversions of transformers: "mlp.experts.*.w1.weight".
EXPERT_WEIGHT = re.compile(r"experts\.\*\.(\w+)\.weight\$?$")


class ProjectionAdapter(NamedTuple):
    """One active adapter of one projection of all experts: A [E, r, in], B [E, out, r] and its settings."""

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scaling: float
    dropout: float


class Projection(torch.nn.Module):
    """One projection of all experts of a layer: a named module without weights that PEFT finds and wraps.

    experts, in_features, out_features   the sizes of E matrices [out, in]
    """

    def __init__(self, experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        # PEFT creates its tensors on this device, with this dtype
        self.weight = torch.empty(0, dtype=torch.bfloat16, device=CPU)

    def extra_repr(self) -> str:
        return f"{self.experts} x [{self.out_features}, {self.in_features}]"


class LayerAdapter(NamedTuple):
    """The active adapters of a layer as one. It adds scaling * B A dropout(x) to each projection of an input x."""

    lora: Lora
    scaling: float
    dropout: float


def projection_names(model: Any, gated: bool) -> tuple[str, ...]:
    """Return the names of an expert's projections in the model's checkpoints, vLLM and SGLang.

    They are gate, unless experts have none, up and down.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not gated:
        return DEFAULT_NAMES[1:]  # Nemotron-H
    names = {}
    for conversion in get_model_conversion_mapping(model):
        match [EXPERT_WEIGHT.search(pattern) for pattern in conversion.source_patterns]:
            case [re.Match() as gate, re.Match() as up]:
                names["gate"], names["up"] = gate[1], up[1]
            case [re.Match() as down]:
                names["down"] = down[1]
    return (names["gate"], names["up"], names["down"]) if len(names) == 3 else DEFAULT_NAMES


def add_projections(module: Any, names: Sequence[str], sizes: tuple[int, int, int]) -> None:
    """Give RoutedExperts a Projection for each name of projection_names. sizes: E, H, I."""
    module.projections = tuple(names)
    experts, hidden, intermediate = sizes
    *inner, down = names
    for name in inner:
        module.add_module(name, Projection(experts, hidden, intermediate))
    module.add_module(down, Projection(experts, intermediate, hidden))


def combine_active(module: torch.nn.Module) -> LayerAdapter | None:
    """Return the active adapters of RoutedExperts as one; None if there is none.

    Unless all projections have one adapter with the same rank and scaling, ranks are padded with zeros and B
    includes the scaling. A projection without an adapter gets zeros.
    """
    children: list[Any] = [getattr(module, name) for name in module.projections]  # type: ignore[union-attr]
    by_projection: list[Sequence[ProjectionAdapter]] = [
        child.active_projection_adapters() if hasattr(child, "active_projection_adapters") else () for child in children
    ]
    adapters = [adapter for projection_adapters in by_projection for adapter in projection_adapters]
    if not adapters:
        return None
    settings = {(adapter.rank, adapter.scaling, adapter.dropout) for adapter in adapters}
    if all(len(projection_adapters) == 1 for projection_adapters in by_projection) and len(settings) == 1:
        lora = Lora.from_tensors(tensor.to(CPU) for (adapter,) in by_projection for tensor in (adapter.a, adapter.b))
        return LayerAdapter(lora, adapters[0].scaling, adapters[0].dropout)
    if torch.is_grad_enabled():
        return _join(children, by_projection)
    # Making zeros and scaled copies takes longer than computing a token.
    cache: dict[Any, tuple[Any, LayerAdapter]] = module.__dict__.setdefault("_joined", {})
    key = tuple((id(adapter.a), id(adapter.b), adapter.scaling) for adapter in adapters)
    versions = tuple(
        (adapter.a._version, adapter.b._version, len(projection_adapters))
        for projection_adapters in by_projection
        for adapter in projection_adapters
    )
    if key not in cache or cache[key][0] != versions:
        cache[key] = versions, _join(children, by_projection)
    return cache[key][1]


def _join(children: Sequence[Any], by_projection: Sequence[Sequence[ProjectionAdapter]]) -> LayerAdapter:
    """Concatenate the active adapters of each projection along the rank, padded to the largest sum of ranks."""
    adapters = [adapter for projection_adapters in by_projection for adapter in projection_adapters]
    rank = max(sum(adapter.rank for adapter in projection_adapters) for projection_adapters in by_projection)
    tensors: list[torch.Tensor] = []
    for child, projection_adapters in zip(children, by_projection, strict=True):
        base = getattr(child, "base_layer", child)
        a = [adapter.a for adapter in projection_adapters]
        b = [adapter.b * adapter.scaling for adapter in projection_adapters]
        if padding := rank - sum(adapter.rank for adapter in projection_adapters):
            options: dict[str, Any] = {"dtype": adapters[0].a.dtype, "device": adapters[0].a.device}
            a.append(torch.zeros(base.experts, padding, base.in_features, **options))
            b.append(torch.zeros(base.experts, base.out_features, padding, **options))
        tensors += (torch.cat(a, 1).to(CPU), torch.cat(b, 2).to(CPU))
    return LayerAdapter(Lora.from_tensors(tensors), 1.0, max(adapter.dropout for adapter in adapters))
