"""The ignore list of quantization_config: the modules that are not quantized, all but the experts.

A loader treats every Linear of the model as quantized unless a pattern names it, and fails on the missing tensors. A
pattern is a module's name, a class's, or "re:" and an expression that matches from the name's beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.archs import PREFIXES
from ktconvert.layouts.checkpoints.match import NUMBER, ROUTED, ROUTER
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.outputs.configs import CONFIG_KEYS
from ktconvert.layouts.outputs.linear_names import USUAL, linears
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.patterns import Pattern, compile_all

# Default patterns of kt-kernel's convert_gpu_weights.py.
USUAL_PATTERNS = (
    "lm_head",
    r"re:.*\.mlp\.gate$",
    r"re:.*\.self_attn\..*$",
    r"re:.*\.shared_expert\..*$",
    r"re:.*\.shared_experts\..*$",
    r"re:.*\.mlp\.shared_expert_gate$",
    r"re:.*\.linear_attn\..*$",
)
OPTION = "--ignore-patterns"
CLASSES = ("Linear", "Module")  # class names that match a quantized module


class IgnoreList:
    """Patterns that name Linears, as compressed-tensors reads them. Raises InputError for an invalid expression."""

    def __init__(self, texts: Iterable[str], path: Path | str) -> None:
        self._whole: set[str] = set()
        self._expressions: list[Pattern] = []
        self._path = path
        self.add(texts)

    def add(self, texts: Iterable[str]) -> None:
        listed = dict.fromkeys(texts)
        self._whole.update(text for text in listed if not text.startswith("re:"))
        self._expressions += compile_all((t.removeprefix("re:") for t in listed if t.startswith("re:")), self._path)

    def find(self, name: str) -> str | None:
        """Return a pattern that names this Linear, or None."""
        for text in (name, *CLASSES):
            if text in self._whole:
                return text
        return next((f"re:{pattern.text}" for pattern in self._expressions if pattern.match(name)), None)


def non_expert_linears(model: MoeModel) -> tuple[str, ...]:
    """Return the sorted non-expert modules whose weights have two or more dimensions, so may be linears."""
    routed = model.expert_tensor_names()
    names: set[str] = set()
    for name, info in model.source.tensors.items():
        module, _, last = name.rpartition(".")
        if name not in routed and len(info.shape) >= 2:
            names.add(module if module and last.startswith(("weight", "qweight")) else name)
    return tuple(sorted(names))


def ignore_list(model: MoeModel, patterns: Iterable[str] = USUAL_PATTERNS) -> tuple[str, ...]:
    """Return these patterns, one for each MTP layer, and one for each kind of remaining module.

    Raises UsageError if a pattern matches an expert.
    """
    kept = [*patterns, *(rf"re:(.*\.)?layers\.{layer}\..*" for layer in model.mtp_layers)]
    try:
        ignored = IgnoreList(kept, OPTION)
        for name in non_expert_linears(model):
            if ignored.find(name) is None:
                kept.append(_pattern(name))
                ignored.add(kept[-1:])
        check_ignore(model, ignored)
    except InputError as error:
        raise UsageError(str(error)) from None
    return tuple(dict.fromkeys(kept))


def check_ignore(model: MoeModel, ignored: IgnoreList) -> None:
    """Raise UsageError if a pattern matches a routed expert, or if none matches a router or another linear."""
    named = ((projection, name) for layer in model.layers for _, projection, name, _, _ in linears(model, layer))
    for name in _loader_names(named):
        if (pattern := ignored.find(name)) is not None:
            what = f"{pattern!r} would exclude the routed expert {name}, but loaders need all of them"
            raise UsageError(f"{OPTION}: {what}; remove it or make it narrower")
    missed = [n for n in non_expert_linears(model) if ignored.find(n) is None]
    if missed:
        shown = next((n for n in missed if ROUTER.search(f"{n}.")), missed[0])
        what = "the router" if ROUTER.search(f"{shown}.") else "the module"
        raise UsageError(f"the ignore list lacks {what} {shown}, so that loaders would treat it as quantized; add it")


def _loader_names(named: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield loaders' names for each (projection, name of a linear): its own, the usual one, and their containers."""
    containers: dict[str, None] = {}
    for projection, name in named:
        base = name.rpartition(".")[0]
        yield from dict.fromkeys((name, f"{base}.{USUAL[projection]}"))
        containers[base.rpartition(".")[0]] = None
    yield from containers


def check_config(output: Output, config_for: Callable[[Sequence[str]], dict[str, Any]]) -> Iterator[str]:
    """Yield the defects of config.json and its ignore list.

    config_for  returns the right quantization_config for an ignore list
    """
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
            yield from (f"config.json contains a {key} in {scope}" for key in CONFIG_KEYS if key in inner)
    try:
        yield from list(_find_wrong_patterns(output, IgnoreList(ignored, "the ignore list")))
    except InputError as error:
        yield str(error)
    for name, stored in output.others.items():
        if stored.dtype.startswith("F8") or name.endswith("_scale_inv"):
            yield f"{name} in {stored.file} is FP8 as in the source: loaders would ignore its scales"


def _find_wrong_patterns(output: Output, ignored: IgnoreList) -> Iterator[str]:
    linears = dict.fromkeys(
        (slice_id.projection, s.name.rpartition(".")[0]) for (slice_id, _), s in output.tensors.items()
    )
    hits = ((ignored.find(name), name) for name in _loader_names(linears))
    if (hit := next(((pattern, name) for pattern, name in hits if pattern is not None), None)) is not None:
        yield f"the ignore list's {hit[0]!r} matches {hit[1]}, which is quantized"
    for name, stored in output.others.items():
        module, _, last = name.rpartition(".")
        if last == "weight" and len(stored.shape) == 2 and ignored.find(module) is None:
            yield f"{module} is not quantized, but missing from the ignore list"


def _pattern(name: str) -> str:
    """Return one expression for this module in every layer, with any prefix; for other experts, for their container."""
    routed = ROUTED.search(name)
    whole = name[: routed.end() - 1] if routed else name
    start = max((p for p in PREFIXES if whole.startswith(p)), key=len)
    shape = r"\.".join(re.escape(word) for word in NUMBER.sub("#", f"{whole[len(start) :]}.").split(".")[:-1])
    return "re:(.*\\.)?" + shape.replace(re.escape("#"), r"\d+") + (r"(\..*)?$" if routed else "$")
