"""Names of experts' linears: the names of the source or its family, and kt-kernel's native names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ktconvert.layouts.checkpoints.archs import Separate
from ktconvert.layouts.checkpoints.expert_function import read_functions
from ktconvert.layouts.checkpoints.moe_model import MoeModel, matrix_name
from ktconvert.layouts.encodings.encoding import BIAS, Encoding, tensor_suffixes
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs.format import Arrangement, has_numa_count
from ktconvert.layouts.outputs.kt_kernel import KtMethod
from ktconvert.layouts.outputs.slices import SliceId, slice_shape
from ktconvert.layouts.tensors import PROJECTIONS, list_projections

# Names of the linears of experts that the source stores together, if their family has no names for single experts.
USUAL_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
TEMPLATES: Final = "linear_names"  # the manifest's fact that holds one template for each projection


def linear_name(model: MoeModel, layer: int, expert: int, projection: str) -> str:
    """Return the name of an expert's linear in the output, without ".weight".

    It is the source's name, if the source has a tensor for each linear. For experts that are stored together it is the
    name that their family uses for single experts, in any block (transformers looks for w1, w3, w2 of Mixtral in all
    of them), else gate_proj, up_proj or down_proj.
    """
    moe = model.moe_layers[layer]
    if isinstance(moe.style, Separate):
        return model.weight_name(layer, expert, projection).removesuffix(".weight")
    template: str = getattr(moe.style, matrix_name(moe.style, projection)).removesuffix(".weight")
    block, has_experts, _ = template.rpartition("experts.")
    if not has_experts:
        block = f"{template.rpartition('.')[0]}."
    block = block.replace("{prefix}", moe.prefix).format(layer=moe.number)
    return f"{block}experts.{expert}.{projection_words(model)[projection]}"


def projection_words(model: MoeModel) -> dict[str, str]:
    """Return the names of an expert's linears in the model's family."""
    separate = next((style for style in model.arch.stored if isinstance(style, Separate)), None)
    if separate is None:
        return USUAL_NAMES
    return {p: getattr(separate, p).removesuffix(".weight").rpartition(".")[2] for p in separate.matrices}


def iterate_linears(
    model: MoeModel, layer: int, experts: Iterable[int] | None = None
) -> Iterator[tuple[int, str, str, int, int]]:
    """Yield (expert, projection, name, n, k) of a layer's linears in file order: by expert, then gate, up, down.

    experts  experts to include; None: all of them
    """
    count, hidden, width = model.shape(layer)
    for expert in range(count) if experts is None else experts:
        for projection in model.projections:
            n, k = slice_shape(projection, hidden, width, 1)
            yield expert, projection, linear_name(model, layer, expert, projection), n, k


def make_name_templates(model: MoeModel) -> dict[str, str]:
    """Map each projection to the name of its linears, with {layer} and {expert} in place of the numbers."""
    layer = model.layers[-1]
    expert = model.shape(layer)[0] - 1
    templates = {}
    for projection in model.projections:
        container, _, linear = linear_name(model, layer, expert, projection).rpartition(f".{expert}.")
        before_layer, _, after_layer = f".{container}.".partition(f".{layer}.")
        template = f"{before_layer}.{{layer}}.{after_layer}{{expert}}.{linear}"
        templates[projection] = template.removeprefix(".")
    return templates


def are_templates(recorded: Any) -> bool:
    return (
        isinstance(recorded, dict)
        and sorted(recorded) in [sorted(list_projections(gated)) for gated in (True, False)]
        and all(isinstance(t, str) and t.count("{") == t.count("}") == 2 for t in recorded.values())
        and all("{layer}" in t and "{expert}" in t for t in recorded.values())
    )


@dataclass(frozen=True)
class LinearNames:
    """Tensor names that are the names of the linears.

    suffixes   suffixes of the tensors of a linear, except that of its bias
    templates  (projection, "...layers.{layer}...experts.{expert}.gate_proj"), as in the manifest; () without a
               manifest, so that no tensor is recognized
    model      source of the names while an output is written; else None
    native     whether checkpoints may have these names, too, so that only a manifest distinguishes outputs
    """

    suffixes: tuple[str, ...]
    templates: tuple[tuple[str, str], ...] = ()
    model: MoeModel | None = None
    native: bool = False

    @cached_property
    def _patterns(self) -> Mapping[str, re.Pattern[str]]:
        ends = "|".join(map(re.escape, (*self.suffixes, BIAS)))
        patterns = {}
        for projection, template in self.templates:
            text = re.sub(r"\\\{(layer|expert)\\\}", r"(?P<\1>\\d+)", re.escape(template))
            patterns[projection] = re.compile(rf"{text}\.(?P<suffix>{ends})")
        return patterns

    def tensor_name(self, slice_id: SliceId, suffix: str) -> str:
        layer, expert, projection, _, _ = slice_id
        if self.model is not None:
            return f"{linear_name(self.model, layer, expert, projection)}.{suffix}"
        return f"{dict(self.templates)[projection].format(layer=layer, expert=expert)}.{suffix}"

    def parse(self, name: str) -> tuple[SliceId, str] | None:
        for projection, pattern in self._patterns.items():
            match = pattern.fullmatch(name)
            if match is not None:
                slice_id = SliceId(int(match["layer"]), int(match["expert"]), projection, False, 0)
                suffix = match["suffix"]
                return (slice_id, suffix) if self.tensor_name(slice_id, suffix) == name else None
        return None

    def explain_stray(self, name: str) -> str | None:
        is_stray = not self.native and name.endswith(f".{self.suffixes[0]}")
        return "quantized, but not part of a routed expert" if is_stray else None

    def describe(self, slice_id: SliceId, suffix: str) -> str:
        return f"layer {slice_id.layer}, expert {slice_id.expert}, {slice_id.projection}_proj: {suffix}"


WORDS = {"gate": "w1", "up": "w3", "down": "w2"}
DEEPSEEK_V4 = tuple((p, f"layers.{{layer}}.ffn.experts.{{expert}}.{WORDS[p]}") for p in PROJECTIONS)
DEEPSEEK = tuple((p, f"model.layers.{{layer}}.mlp.experts.{{expert}}.{p}_proj") for p in PROJECTIONS)
RAWINT4 = KtMethod("RAWINT4")
# Names that kt-kernel's RAWINT4 looks for, in order.
RAWINT4_NAMES = tuple(
    {p: f"{layers}.{{layer}}.mlp.experts.{{expert}}.{p}_proj" for p in PROJECTIONS}
    for layers in ("model.layers", "language_model.model.layers", "model.language_model.layers")
)


def is_rawint4(facts: OutputFacts) -> bool:
    """Return whether kt-kernel's RAWINT4 can compute experts with these facts, apart from their names."""
    return (facts.get("bits"), facts.get("group_size")) == (4, 32)


def explain_not_rawint4(facts: OutputFacts) -> str | None:
    """Explain why kt-kernel's RAWINT4 cannot compute the experts of an output on the CPU; return None if it can."""
    if not is_rawint4(facts):
        return "it reads 4 bits in groups of 32 columns"
    names = facts[TEMPLATES]
    if any(names.items() <= known.items() for known in RAWINT4_NAMES):
        functions = read_functions(facts.get("functions", {})).values()
        why = RAWINT4.explain_not_computed(functions)
        return why and f"it {why}"
    return f"it looks for {RAWINT4_NAMES[0]['up']}, but they are named {names['up']}"


# Encoding -> the names that kt-kernel's loaders look for, if they are not DEEPSEEK.
NATIVE_TEMPLATES = {"MXFP4": DEEPSEEK_V4}


def _make_names(method: str, encoding: Encoding, facts: OutputFacts, source: MoeModel | None) -> LinearNames:
    templates = NATIVE_TEMPLATES.get(encoding.name, DEEPSEEK)
    return LinearNames(tensor_suffixes(encoding), templates if facts.get("method") == method else (), native=True)


NATIVE = Arrangement("native", "cpu", "kt", _make_names, has_numa_count)
