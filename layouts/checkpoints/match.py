"""Sorts a checkpoint's tensor names by the templates of the architecture table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ktconvert.layouts.checkpoints.archs import PREFIXES, Separate, Style
from ktconvert.layouts.checkpoints.source import TensorInfo
from ktconvert.layouts.errors import InputError

# What may hang on a weight's name, and what it means. {t} is the template, {s} the template without ".weight".
SCALE, BIAS, ASIDE = "scale", "bias", "aside"
COMPANIONS = {
    "{t}_scale_inv": SCALE,
    "{t}_scale": SCALE,
    "{s}.scale": SCALE,
    "{s}.qscale_weight": SCALE,
    "{s}.bias": BIAS,
    "{s}_bias": BIAS,
    "{s}.input_scale": ASIDE,  # scales of activations: kt-kernel makes its own
    "{s}_input_scale": ASIDE,
    "{s}.qscale_act": ASIDE,
    "{s}.activation_scale": ASIDE,
    "{s}_activation_scale": ASIDE,
    "{t}_packed": "compressed-tensors packed 4-bit",
    "{t}_blocks": "MXFP4",
    "{t}_scales": "MXFP4",
    "{t}_shape": "compressed-tensors packed 4-bit",
    "{t}_zero_point": "compressed-tensors integer",
    "{t}_scale_2": "NVFP4",
    "{t}_global_scale": "NVFP4",
    "{s}.input_global_scale": "NVFP4",
    "{s}.qweight": "GPTQ or AWQ 4-bit",
    "{s}.qzeros": "GPTQ or AWQ 4-bit",
    "{s}.scales": "GPTQ or AWQ 4-bit",
    "{s}.g_idx": "GPTQ or AWQ 4-bit",
    "{t}_g_idx": "GPTQ or AWQ 4-bit",
}

NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")
SLOT = re.compile(r"(?<=\.)(?:\d{1,9}|\{layer\}|\{expert\})(?=\.)")
MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)")
ROUTER = re.compile(r"\.(?:mlp|ffn|feed_forward|block_sparse_moe|moe|mixer)\.(?:gate|router)\.|\.router\.")
ROUTED = re.compile(r"(?:^|\.)experts\.")
SHARED = re.compile(r"\.shared?_(?:expert|mlp)")


@dataclass
class Layer:
    """The expert tensors of one layer, all stored in one style. Keys: (part of the style, expert), expert -1 if 3-D."""

    style: Style
    weights: dict[tuple[str, int], TensorInfo] = field(default_factory=dict)
    scales: dict[tuple[str, int], TensorInfo] = field(default_factory=dict)
    aside: list[str] = field(default_factory=list)


@dataclass
class Scan:
    """What the templates found.

    layers   expert tensors by prefix and layer number.
    mtp      expert tensors of multi-token-prediction blocks that have names of their own.
    foreign  a tensor of each kind that no input can be made of, by kind and layer.
    strays   names that stand among experts but match nothing.
    others   names that look like routed experts of another part of the model.
    routers  (prefix, layer) that have a router.
    present  (prefix, layer) that have any tensor.
    """

    layers: dict[tuple[str, int], Layer] = field(default_factory=dict)
    mtp: list[str] = field(default_factory=list)
    foreign: dict[tuple[str, int], str] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    routers: set[tuple[str, int]] = field(default_factory=set)
    present: set[tuple[str, int]] = field(default_factory=set)
    shared: bool = False


@dataclass(frozen=True)
class _Rule:
    style: Style
    prefix: str
    part: str
    role: str
    name: str  # to be formatted with layer and expert
    layer: int  # which of the name's numbers is the layer, which the expert (-1: none)
    expert: int


def scan(tensors: Mapping[str, TensorInfo], styles: Iterable[Style]) -> Scan:
    """Goes through the names once. Raises InputError where one layer is stored in two ways."""
    rules, containers = _rules(styles)
    out = Scan()
    known: dict[str, tuple[_Rule | None, str | None, str | None]] = {}
    for name, info in tensors.items():
        shape = NUMBER.sub("#", name)
        if shape not in known:
            inside = next((c for c in containers if shape.startswith(c)), None)
            base = next((p for p in reversed(PREFIXES) if shape.startswith(f"{p}layers.#.")), None)
            known[shape] = (rules.get(shape), inside, base)
            out.shared = out.shared or SHARED.search(shape) is not None
        rule, inside, base = known[shape]
        if rule is not None:
            numbers = NUMBER.findall(name)
            layer = int(numbers[rule.layer])
            expert = int(numbers[rule.expert]) if rule.expert >= 0 else -1
            if name == rule.name.format(layer=layer, expert=expert):
                _sort(out, rule, layer, expert, name, info)
                out.present.add((rule.prefix, layer))
                continue
        if MTP.search(shape) and "expert" in shape:
            out.mtp.append(name)
        elif inside is not None:
            out.strays.append(name)
        elif ROUTED.search(shape):
            out.others.append(name)
        if base is not None:
            key = base, int(NUMBER.findall(name)[0])
            out.present.add(key)
            if ROUTER.search(shape):
                out.routers.add(key)
    return out


def _sort(out: Scan, rule: _Rule, layer: int, expert: int, name: str, info: TensorInfo) -> None:
    if rule.role not in ("weight", SCALE, ASIDE):
        out.foreign.setdefault((rule.role, layer), name)
        return
    found = out.layers.setdefault((rule.prefix, layer), Layer(rule.style))
    if found.style != rule.style:
        raise InputError(f"tensor {name!r}: layer {layer} is stored in two ways; remove the one that does not belong")
    key = rule.part, expert
    if rule.role == "weight":
        found.weights[key] = info
    elif rule.role == ASIDE:
        found.aside.append(name)
    elif key in found.scales:
        raise InputError(f"tensors {found.scales[key].name!r} and {name!r} both claim to be the scale of one weight")
    else:
        found.scales[key] = info


def _rules(styles: Iterable[Style]) -> tuple[dict[str, _Rule], set[str]]:
    rules: dict[str, _Rule] = {}
    containers: set[str] = set()
    for style in styles:
        for part in style.parts:
            for prefix, name in _prefixed(getattr(style, part)):
                slots = SLOT.findall(name)
                layer = slots.index("{layer}")
                expert = slots.index("{expert}") if isinstance(style, Separate) else -1
                for suffixed, role in _companions(name):
                    rules.setdefault(_shape(suffixed), _Rule(style, prefix, part, role, suffixed, layer, expert))
                shape = _shape(name)
                if "experts." in shape:
                    containers.add(shape[: shape.rindex("experts.") + len("experts.")])
    return rules, containers


def _prefixed(template: str) -> Iterator[tuple[str, str]]:
    if "{prefix}" not in template:
        yield "", template
    else:
        yield from ((p, template.replace("{prefix}", p)) for p in PREFIXES)


def _companions(name: str) -> Iterator[tuple[str, str]]:
    yield name, "weight"
    stem = name.removesuffix(".weight")
    for pattern, role in COMPANIONS.items():
        made = pattern.replace("{t}", name).replace("{s}", stem)
        if made != name:
            yield made, role


def _shape(template: str) -> str:
    return SLOT.sub("#", template)


def name_of(style: Style, prefix: str, part: str, layer: int, expert: int) -> str:
    """The name a tensor of this style must have."""
    template: str = getattr(style, part)
    return template.replace("{prefix}", prefix).format(layer=layer, expert=expert)
