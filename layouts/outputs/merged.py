"""Merged safetensors: the keys that kt-kernel's loader asks for (FORMAT.md, section "Merged")."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ktconvert.layouts.files.shards import Entry, ShardPlan, plan_shard
from ktconvert.layouts.outputs.layout import Layout
from ktconvert.layouts.outputs.parts import ExpertGrid, Part

KEY = re.compile(
    r"blk\.(?P<layer>\d+)\.ffn_(?P<projection>gate|up|down)_(?P<backward>bwd_)?exps"
    r"\.(?P<expert>\d+)\.numa\.(?P<numa>\d+)\.(?P<what>weight|scale)"
)


def key(part: Part, what: str) -> str:
    """The tensor's name; `what` is "weight" or "scale"."""
    backward = "_bwd" if part.backward else ""
    return f"blk.{part.layer}.ffn_{part.projection}{backward}_exps.{part.expert}.numa.{part.numa}.{what}"


def plan_experts(grid: ExpertGrid, experts: Iterable[int], layout: Layout, metadata: Mapping[str, str]) -> ShardPlan:
    """A shard of experts: all weights (each a multiple of 4096 bytes), then all scales."""
    parts = list(grid.all_parts(experts))
    weights = [
        Entry(key(p, "weight"), "I8", (layout.weight_bytes(p.n, p.k),), layout.weight_bytes(p.n, p.k)) for p in parts
    ]
    scales = [Entry(key(p, "scale"), "F32", (p.n,), layout.scale_bytes(p.n)) for p in parts]
    return plan_shard([*weights, *scales], metadata)


def rename_non_expert(name: str) -> str:
    """kt-kernel's name of a tensor that is no routed expert: `language_model.` goes, `model.layers.` becomes `blk.`, `model.` goes."""
    name = name.replace("language_model.", "")
    if name.startswith("model."):
        name = name.replace("model.layers.", "blk.").replace("model.", "")
    return name
