"""The ignore list of quantization_config: patterns of the modules that are not quantized, all except the experts.

A loader treats every Linear of the model as quantized unless a pattern names it, and fails on the missing tensors. A
pattern is the name of a module or of a class, or "re:" and an expression that matches from the beginning of a name.
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
from ktconvert.layouts.outputs.linear_names import USUAL_NAMES, iterate_linears
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
    """Return the names of non-expert modules that may be linears, sorted: their weights have two or more dimensions."""
    routed = model.expert_tensor_names()
    names: set[str] = set()
    for name, info in model.source.tensors.items():
        module, _, suffix = name.rpartition(".")
        if name not in routed and len(info.shape) >= 2:
            names.add(module if module and suffix.startswith(("weight", "qweight")) else name)
    return tuple(sorted(names))


def make_ignore_list(model: MoeModel, patterns: Iterable[str] = USUAL_PATTERNS) -> tuple[str, ...]:
    """Return these patterns, one for each MTP layer, one for a renamed router, and one for each other kind of module.

    Raises UsageError if a pattern matches an expert.
    """
    listed = [*patterns, *(rf"re:(.*\.)?layers\.{layer}\..*" for layer in model.mtp_layers)]
    if model.arch.router:
        listed.append(rf"re:.*\.{re.escape(model.arch.router)}$")
    try:
        ignored = IgnoreList(listed, OPTION)
        for name in non_expert_linears(model):
            if ignored.find(name) is None:
                listed.append(_make_pattern(name))
                ignored.add(listed[-1:])
        check_ignore_list(model, ignored)
    except InputError as error:
        raise UsageError(str(error)) from None
    return tuple(dict.fromkeys(listed))


def check_ignore_list(model: MoeModel, ignored: IgnoreList) -> None:
    """Raise UsageError if a pattern matches a routed expert, or if none matches a router or another linear."""
    linears = (
        (projection, name) for layer in model.layers for _, projection, name, _, _ in iterate_linears(model, layer)
    )
    for name in _list_loader_names(linears):
        if (pattern := ignored.find(name)) is not None:
            problem = f"{pattern!r} would exclude the routed expert {name}, but loaders need all of them"
            raise UsageError(f"{OPTION}: {problem}; remove it or make it narrower")
    missing = [name for name in non_expert_linears(model) if ignored.find(name) is None]
    if missing:
        shown = next((name for name in missing if ROUTER.search(f"{name}.")), missing[0])
        problem = "the router" if ROUTER.search(f"{shown}.") else "the module"
        raise UsageError(
            f"the ignore list lacks {problem} {shown}, so that loaders would treat it as quantized; add it"
        )


def _list_loader_names(linears: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the names that loaders may use for each (projection, name of a linear), and then the experts' containers.

    Loaders may use the name itself, or the usual name of its projection.
    """
    containers: dict[str, None] = {}
    for projection, name in linears:
        base = name.rpartition(".")[0]
        yield from dict.fromkeys((name, f"{base}.{USUAL_NAMES[projection]}"))
        containers[base.rpartition(".")[0]] = None
    yield from containers


def check_config(output: Output, make_config: Callable[[Sequence[str]], dict[str, Any]]) -> Iterator[str]:
    """Yield the defects of config.json and its ignore list.

    make_config  (ignore list) -> the right quantization_config
    """
    quantization = output.config.get("quantization_config")
    if not isinstance(quantization, dict) or not isinstance(quantization.get("ignore"), list):
        yield "config.json has no quantization_config with an ignore list"
        return
    ignored = [str(pattern) for pattern in quantization["ignore"]]
    expected = make_config(ignored)
    for key in sorted(expected.keys() | quantization.keys()):
        if quantization.get(key) != expected.get(key):
            yield f"quantization_config: {key} is {quantization.get(key)}, must be {expected.get(key)}"
    for scope, inner in output.config.items():
        if isinstance(inner, dict):
            yield from (f"config.json contains a {key} in {scope}" for key in CONFIG_KEYS if key in inner)
    try:
        yield from list(_find_wrong_patterns(output, IgnoreList(ignored, "the ignore list")))
    except InputError as error:
        yield error.text
    for name, stored in output.non_expert_tensors.items():
        if stored.dtype.startswith("F8") or name.endswith("_scale_inv"):
            yield f"{name} in {stored.file} is FP8 as in the source: loaders would ignore its scales"


def _find_wrong_patterns(output: Output, ignored: IgnoreList) -> Iterator[str]:
    linears = dict.fromkeys(
        (slice_id.projection, s.name.rpartition(".")[0]) for (slice_id, _), s in output.tensors.items()
    )
    matches = ((ignored.find(name), name) for name in _list_loader_names(linears))
    if (match := next(((pattern, name) for pattern, name in matches if pattern is not None), None)) is not None:
        yield f"the ignore list's {match[0]!r} matches {match[1]}, which is quantized"
    for name, stored in output.non_expert_tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and len(stored.shape) == 2 and ignored.find(module) is None:
            yield f"{module} is not quantized, but missing from the ignore list"


def _make_pattern(name: str) -> str:
    """Return one expression for this module in every layer, with any prefix.

    If the module belongs to an expert that is not a routed one, the expression matches the experts' container.
    """
    routed = ROUTED.search(name)
    module = name[: routed.end() - 1] if routed else name
    prefix = max((p for p in PREFIXES if module.startswith(p)), key=len)
    words = NUMBER.sub("#", f"{module[len(prefix) :]}.").split(".")[:-1]
    expression = r"\.".join(map(re.escape, words)).replace(re.escape("#"), r"\d+")
    return "re:(.*\\.)?" + expression + (r"(\..*)?$" if routed else "$")
