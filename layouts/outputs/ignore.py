"""The ignore list of quantization_config: the modules that a loader must not take for quantized, all but experts.

A loader makes every Linear of the model a quantized one unless a pattern names it, and fails on a tensor that then is
not there. A pattern is a module's name, a class's, or "re:" and an expression that matches from the name's beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ktconvert.layouts.checkpoints.archs import PREFIXES
from ktconvert.layouts.checkpoints.match import NUMBER, ROUTED, ROUTER
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import UsageError
from ktconvert.layouts.outputs.card import CONFIG_KEYS
from ktconvert.layouts.outputs.linear_names import USUAL, linears
from ktconvert.layouts.outputs.output import Output

# What kt-kernel's convert_gpu_weights.py names by default.
USUAL_PATTERNS = (
    "lm_head",
    r"re:.*\.mlp\.gate$",
    r"re:.*\.self_attn\..*$",
    r"re:.*\.shared_expert\..*$",
    r"re:.*\.shared_experts\..*$",
    r"re:.*\.mlp\.shared_expert_gate$",
    r"re:.*\.linear_attn\..*$",
)
CLASSES = ("Linear", "Module")  # what a quantized module is, besides its name


def is_match(name: str, pattern: str) -> bool:
    """Whether a pattern names this Linear, as compressed-tensors understands it. UsageError: no regular expression."""
    if not pattern.startswith("re:"):
        return pattern == name or pattern in CLASSES
    try:
        return re.match(pattern.removeprefix("re:"), name) is not None
    except re.error as e:
        raise UsageError(f"--ignore-patterns: {pattern!r} is no regular expression: {e}") from None


def other_linears(model: MoeModel) -> tuple[str, ...]:
    """The modules besides the routed experts whose weights have two dimensions or more, so may be linears; sorted."""
    routed = model.expert_tensor_names()
    names: set[str] = set()
    for name, info in model.source.tensors.items():
        module, _, last = name.rpartition(".")
        if name not in routed and len(info.shape) >= 2:
            names.add(module if module and last.startswith(("weight", "qweight")) else name)
    return tuple(sorted(names))


def ignore_list(model: MoeModel, patterns: Iterable[str] = USUAL_PATTERNS) -> tuple[str, ...]:
    """These patterns, one for each MTP layer, and one for each kind of module left. UsageError if experts are hit."""
    kept = [*patterns, *(rf"re:(.*\.)?layers\.{layer}\..*" for layer in model.mtp_layers)]
    for name in other_linears(model):
        if not any(is_match(name, pattern) for pattern in kept):
            kept.append(_pattern(name))
    complete = tuple(dict.fromkeys(kept))
    check_ignore(model, complete)
    return complete


def check_ignore(model: MoeModel, patterns: Sequence[str]) -> None:
    """Raises UsageError where a pattern would hit a routed expert, or none of them a router or another linear."""
    named = ((projection, name) for layer in model.layers for _, projection, name, _, _ in linears(model, layer))
    for name in _loader_names(named):
        for pattern in patterns:
            if is_match(name, pattern):
                what = f"{pattern!r} would leave out the routed expert {name}, and loaders need all of them"
                raise UsageError(f"--ignore-patterns: {what}; remove it or make it narrower")
    missed = [n for n in other_linears(model) if not any(is_match(n, pattern) for pattern in patterns)]
    if missed:
        shown = next((n for n in missed if ROUTER.search(f"{n}.")), missed[0])
        what = "the router" if ROUTER.search(f"{shown}.") else "the module"
        raise UsageError(f"the ignore list leaves out {what} {shown}, which a loader would take for quantized; add it")


def _loader_names(named: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Of (projection, name of a linear): each linear by its own name and by the usual one, and their containers."""
    containers: dict[str, None] = {}
    for projection, name in named:
        base = name.rpartition(".")[0]
        yield from dict.fromkeys((name, f"{base}.{USUAL[projection]}"))
        containers[base.rpartition(".")[0]] = None
    yield from containers


def check_config(output: Output, config_for: Callable[[Sequence[str]], dict[str, Any]]) -> Iterator[str]:
    """The defects of config.json and its ignore list, for which config_for gives the right quantization_config."""
    about = output.config.get("quantization_config")
    if not isinstance(about, dict) or not isinstance(about.get("ignore"), list):
        yield "config.json has no quantization_config with an ignore list"
        return
    ignored = [str(pattern) for pattern in about["ignore"]]
    expected = config_for(ignored)
    for key in sorted(expected.keys() | about.keys()):
        if about.get(key) != expected.get(key):
            yield f"quantization_config: {key} is {about.get(key)}, must be {expected.get(key)}"
    for scope, inner in output.config.items():
        if isinstance(inner, dict):
            yield from (f"config.json holds a {key} in {scope}" for key in CONFIG_KEYS if key in inner)
    try:
        yield from list(_ignored_wrongly(output, ignored))
    except UsageError:
        yield "the ignore list holds an expression that cannot be read"
    for name, stored in output.others.items():
        if stored.dtype.startswith("F8") or name.endswith("_scale_inv"):
            yield f"{name} in {stored.file} is FP8 as in the source: loaders would take it without its scales"


def _ignored_wrongly(output: Output, ignored: Sequence[str]) -> Iterator[str]:
    linears = dict.fromkeys((place.projection, s.name.rpartition(".")[0]) for (place, _), s in output.tensors.items())
    names = _loader_names(linears)
    hit = next(((name, pattern) for name in names for pattern in ignored if is_match(name, pattern)), None)
    if hit is not None:
        yield f"the ignore list's {hit[1]!r} hits {hit[0]}, which is quantized"
    for name, stored in output.others.items():
        module, _, last = name.rpartition(".")
        if last == "weight" and len(stored.shape) == 2 and not any(is_match(module, pattern) for pattern in ignored):
            yield f"{module} is not quantized, and not named in the ignore list"


def _pattern(name: str) -> str:
    """One expression for this module in every layer, with any prefix; for other experts, of their container."""
    routed = ROUTED.search(name)
    whole = name[: routed.end() - 1] if routed else name
    start = max((p for p in PREFIXES if whole.startswith(p)), key=len)
    shape = r"\.".join(re.escape(word) for word in NUMBER.sub("#", f"{whole[len(start) :]}.").split(".")[:-1])
    return "re:(.*\\.)?" + shape.replace(re.escape("#"), r"\d+") + (r"(\..*)?$" if routed else "$")
