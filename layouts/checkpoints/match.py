"""Assignment of a checkpoint's tensor names to the templates of the architecture table."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ktconvert.layouts import encodings
from ktconvert.layouts.checkpoints.archs import PREFIXES, Separate, Style
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.tensors import TensorInfo

# Scales of activations, which nothing here needs.
UNUSED_PATTERNS = (
    *("{s}.input_scale", "{s}_input_scale", "{s}.qscale_act"),
    *("{s}.activation_scale", "{s}.input_global_scale", "{s}_activation_scale"),
)
BIAS_PATTERNS = ("{s}.bias", "{s}_bias")
# Patterns as in the table of encodings -> the format that they belong to. Names that a row of that table reads take
# precedence.
FOREIGN = {"{s}.SCB": "bitsandbytes", "{t}.absmax": "bitsandbytes", "{s}.B": "marlin", "{s}.W_q": "HQQ"}
# Values that no row reads: by their own dtype, else by that of the scale beside them.
FORMAT_BY_VALUES = {"F8_E5M2": "FP8 E5M2", "F64": "float64", "NVFP4": "NVFP4 with a scale for the whole tensor"}
FORMAT_BY_SCALE = {"U8": "MXFP4", "F8_E8M0": "MXFP4", "F8_E4M3": "NVFP4"}
# Outside the experts: suffixes of names, and dtypes of weights.
SUFFIXES = {
    **dict.fromkeys((".weight_packed", ".weight_zero_point"), "packed by compressed-tensors"),
    **dict.fromkeys((".weight_scale_2", ".weight_global_scale"), "NVFP4"),
    **dict.fromkeys((".qweight", ".qzeros"), "packed like GPTQ or AWQ, but no weight of theirs by config.json"),
    ".Qidxs": "QuIP#",
    ".pre_quant_scale": "a scale of inputs (modelopt's AWQ), without which the weight beside it has other values",
}
# Among the experts: what else changes what they compute.
CHANGING_TENSORS = {
    r"[._]input\.weight": "a matrix that inputs are multiplied by, without which the weight beside it has other values",
    r"\.lora_\w+(\.\w+)*": "of a LoRA adapter that was not merged, without which the weight beside it has other values",
    r"\.\w*norm\w*(\.weight)?": "a norm, without which the experts compute something else",
}
FLOATS = ("F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
INDICES = "I64"
INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", INDICES)
DTYPES = dict.fromkeys(INTEGERS, "packed") | {"I8": "INT8", "F4": "FP4"}
DTYPES |= {name: f"FP{name[1:].replace('_', ' ')}" for name in FLOATS}


def describe_values(values: TensorInfo, scale: TensorInfo | None) -> str:
    problem = FORMAT_BY_SCALE.get(scale.dtype if scale else "", "packed or integer")
    return f"{FORMAT_BY_VALUES.get(values.dtype, problem)} ({values.dtype})"


def find_unread_formats(tensors: Mapping[str, TensorInfo], names: Iterable[str]) -> Iterator[tuple[TensorInfo, str]]:
    """Find tensors outside the experts that no loader of a BF16 output would understand, each with its format.

    Integers count as a weight if their name says so, and if a module has a matrix of them beside other numbers (its
    scales) and no matrix of other numbers as its weight. I64 never counts: it is torch's type of indices.
    """
    unclaimed: list[TensorInfo] = []
    for info in map(tensors.__getitem__, names):
        kind_by_name = next((kind for suffix, kind in SUFFIXES.items() if info.name.endswith(suffix)), None)
        if kind_by_name is None and (info.name.endswith(".weight") or (len(info.shape) == 3 and info.dtype != INDICES)):
            kind_by_name = DTYPES.get(info.dtype)
        if kind_by_name is not None:
            yield info, kind_by_name
        elif info.dtype in INTEGERS and info.dtype != INDICES and sum(n > 1 for n in info.shape) > 1:
            unclaimed.append(info)
    if unclaimed:
        floats = [info for info in tensors.values() if info.dtype not in (*INTEGERS, "BOOL")]
        with_floats = {info.name.rpartition(".")[0] for info in floats}
        with_weight = {
            i.name.removesuffix(".weight") for i in floats if i.name.endswith(".weight") and len(i.shape) > 1
        }
        for info in unclaimed:
            if info.name.rpartition(".")[0] in with_floats - with_weight:
                yield info, f"a matrix of integers ({info.dtype}) beside its scales"


def describe_stray(name: str) -> str:
    """Return what a tensor among the experts is that is not one of their weights; "" if that is unknown."""
    kind_by_name = next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), "")
    return kind_by_name or next(
        (kind for pattern, kind in CHANGING_TENSORS.items() if re.search(rf"{pattern}\Z", name)), ""
    )


def unread_format_error(name: str, problem: str) -> UnsupportedError:
    return UnsupportedError.from_tensor(
        name, f": {problem} is not an input yet; use the model's BF16 or FP8 (E4M3) release"
    )


# Roles of tensors that are no part of a weight.
BIAS = "bias"
UNUSED = "unused"

# In names, also in that of Switch Transformers' module expert_3.
_BEFORE = r"(?:(?<=\.)|(?<=\.expert_))"
NUMBER = re.compile(rf"{_BEFORE}(\d{{1,9}})(?=\.)")
SLOT = re.compile(rf"{_BEFORE}(?:\d{{1,9}}|\{{layer\}}|\{{expert\}})(?=\.)")
EXPERTS = "experts."
SMALL_NUMBERS = {str(number): number for number in range(1024)}  # as every program spells them
MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)")
LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
ROUTER = re.compile(
    r"\.(?:mlp|ffn|feed_forward|block_sparse_moe|moe|mixer)\.(?:gate|router)\.|\.router\.|\.ffn_gate_inp\."
)
ROUTER_BIAS = re.compile(r"\.e_score_correction_bias$")  # some families keep it among the experts
ROUTED = re.compile(r"(?:^|\.)experts\.")
SHARED = re.compile(r"\.shared?_(?:expert|mlp)|_shexp\.")


@dataclass
class StoredLayer:
    """Tensors of a layer's experts, all in one style: (matrix of the style, expert or -1 for all) -> role -> tensor.

    first_expert  what the names add to the numbers of its experts
    """

    style: Style
    tensors: dict[tuple[str, int], dict[str, TensorInfo]] = field(default_factory=dict)
    biases: dict[tuple[str, int], TensorInfo] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    first_expert: int = 0

    @property
    def names(self) -> list[str]:
        """Every tensor of the layer's experts, including unused ones."""
        weights = (info.name for tensors in self.tensors.values() for info in tensors.values())
        return [*weights, *(info.name for info in self.biases.values()), *self.unused]


@dataclass
class NameScan:
    """Tensor names of a checkpoint, sorted.

    layers   expert tensors by prefix and layer number
    mtp      expert tensors of MTP blocks that have their own names
    foreign  one tensor of each unsupported format, by the format's name and layer
    strays   names among the experts that match no template
    others   names that look like routed experts of another part of the model
    routers  (prefix, layer) that have a router
    present  (prefix, layer) that have any tensor
    """

    layers: dict[tuple[str, int], StoredLayer] = field(default_factory=dict)
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
    matrix: str
    role: str  # in the table of encodings, BIAS or UNUSED; the format's name if it is foreign
    foreign: bool
    name: str  # to be formatted with layer and expert
    layer: int  # which of the name's numbers is the layer, which the expert (-1: none)
    expert: int

    def choose_numbers(self, numbers: Sequence[str]) -> tuple[int, int]:
        """Return layer and expert (-1: none) among the numbers in a name of this rule's shape."""
        return int(numbers[self.layer]), int(numbers[self.expert]) if self.expert >= 0 else -1


def scan_names(tensors: Mapping[str, TensorInfo], styles: Iterable[Style]) -> NameScan:
    """Sort the names in one pass. Raise InputError if a layer is stored in two ways."""
    rules, containers = _make_rules(tuple(styles), tuple(encodings.tensor_roles().items()))
    out = NameScan()
    known: dict[str, tuple[list[_Rule], str | None, str | None]] = {}
    ambiguous: list[tuple[list[_Rule], int, int, TensorInfo]] = []
    # Most names differ only in the number of an expert; text before and after it -> rule and layer.
    matched: dict[tuple[str, str], tuple[_Rule, int]] = {}
    for name, info in tensors.items():
        before, _, rest = name.partition(EXPERTS)
        number, _, after = rest.partition(".")
        expert = SMALL_NUMBERS.get(number, -1)
        if expert >= 0 and (found := matched.get((before, after))) is not None:
            _assign(out, *found, expert, info)
            continue
        texts = NUMBER.split(name)  # text and numbers alternate
        shape = "#".join(texts[::2])
        if shape not in known:
            inside = next((c for c in containers if shape.startswith(c)), None)
            base = next((p for p in reversed(PREFIXES) if shape.startswith(f"{p}layers.#.")), None)
            base = "" if shape.startswith("blk.#.") else base  # a GGUF's
            known[shape] = (rules.get(shape, []), inside, base)
            out.shared = out.shared or SHARED.search(shape) is not None
        candidates, inside, base = known[shape]
        if candidates:
            layer, expert = candidates[0].choose_numbers(texts[1::2])
            if name == candidates[0].name.format(layer=layer, expert=expert):
                out.present.add((candidates[0].prefix, layer))
                if len(candidates) > 1:
                    ambiguous.append((candidates, layer, expert, info))
                else:
                    _assign(out, candidates[0], layer, expert, info)
                    following = candidates[0].name.format(layer=layer, expert=expert + 1)
                    if number in SMALL_NUMBERS and following == f"{before}{EXPERTS}{expert + 1}.{after}":
                        matched[before, after] = candidates[0], layer
                continue
        if MTP.search(shape) and "expert" in shape:
            out.mtp.append(name)
        elif inside is not None and not ROUTER_BIAS.search(shape):
            out.strays.append(name)
        elif ROUTED.search(shape) and not ROUTER_BIAS.search(shape):
            out.others.append(name)
        if base is not None:
            key = base, int(texts[1])
            out.present.add(key)
            if ROUTER.search(shape):
                out.routers.add(key)
    for candidates, layer, expert, info in ambiguous:  # the layer's other tensors tell which style it is
        styles = [stored.style for rule in candidates if (stored := out.layers.get((rule.prefix, layer))) is not None]
        _assign(out, next((rule for rule in candidates if rule.style in styles), candidates[0]), layer, expert, info)
    return out


def _assign(out: NameScan, rule: _Rule, layer: int, expert: int, info: TensorInfo) -> None:
    name = info.name
    if rule.foreign:
        out.foreign.setdefault((rule.role, layer), name)
        return
    stored = out.layers.get((rule.prefix, layer))
    if stored is None:
        stored = out.layers[rule.prefix, layer] = StoredLayer(rule.style)
    if stored.style is not rule.style and stored.style != rule.style:
        other = next(iter(stored.names), "")
        problem = f": layer {layer} is stored in two ways, also as {other!r}"
        raise InputError.from_tensor(name, problem, "use a release that stores it once")
    if rule.role == UNUSED:
        stored.unused.append(name)
        return
    if rule.role == BIAS:
        stored.biases[rule.matrix, expert] = info
        return
    tensors = stored.tensors.setdefault((rule.matrix, expert), {})
    if rule.role in tensors:
        other = tensors[rule.role].name
        raise InputError(f"tensors {other!r} and {name!r} both claim to be the {rule.role} of one weight", tensor=other)
    tensors[rule.role] = info


@functools.lru_cache(maxsize=16)
def _make_rules(
    styles: tuple[Style, ...], roles: tuple[tuple[str, str], ...]
) -> tuple[Mapping[str, list[_Rule]], frozenset[str]]:
    """Return the rules of each name with "#" for its numbers, and the prefixes of all names among experts."""
    rules: dict[str, list[_Rule]] = {}
    containers: set[str] = set()
    for style in styles:
        for matrix in style.matrices:
            template: str = getattr(style, matrix)
            for prefix in PREFIXES if "{prefix}" in template else ("",):
                name = template.replace("{prefix}", prefix)
                slots = SLOT.findall(name)
                layer = slots.index("{layer}")
                expert = slots.index("{expert}") if isinstance(style, Separate) else -1
                for suffixed, (role, unread) in _tensor_roles(name, roles).items():
                    same = rules.setdefault(SLOT.sub("#", suffixed), [])
                    same.append(_Rule(style, prefix, matrix, role, unread, suffixed, layer, expert))
                shape = SLOT.sub("#", name)
                if EXPERTS in shape:
                    containers.add(shape[: shape.rindex(EXPERTS) + len(EXPERTS)])
    return rules, frozenset(containers)


def _tensor_roles(template: str, roles: Iterable[tuple[str, str]]) -> dict[str, tuple[str, bool]]:
    """Map the name of every tensor that can belong to this template's weight to its role, and whether it is foreign."""
    known = [(pattern, role, False) for pattern, role in roles]
    known += [(pattern, BIAS, False) for pattern in BIAS_PATTERNS]
    known += [(pattern, UNUSED, False) for pattern in UNUSED_PATTERNS]
    known += [(pattern, problem, True) for pattern, problem in FOREIGN.items()]
    names: dict[str, tuple[str, bool]] = {}
    for pattern, role, unread in known:
        names.setdefault(encodings.expand_pattern(pattern, template), (role, unread))
    return names


def is_mtp_tensor(name: str, layers: int | None) -> bool:
    """Return whether a tensor is of an MTP layer: of a block called mtp, or of a layer beyond the number of layers."""
    if MTP.search(name):
        return True
    layer = LAYER.search(name)
    return layer is not None and layers is not None and int(layer[1]) >= layers


def expand_template(style: Style, prefix: str, matrix: str, layer: int, expert: int) -> str:
    template: str = getattr(style, matrix)
    return template.replace("{prefix}", prefix).format(layer=layer, expert=expert)
