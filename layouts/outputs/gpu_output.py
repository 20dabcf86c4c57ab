"""What a finished output for the GPU says of itself, and which of its tensors is which part of which expert."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs.compressed import SUFFIXES

COMMAND = "gpu"
DTYPES = {"weight_packed": "I32", "weight_shape": "I64", "weight_scale": "BF16"}


def is_gpu_output(path: Path) -> bool:
    """Whether a directory is what `ktconvert gpu` made: a whole model, which loaders of checkpoints can open."""
    try:
        made = manifest.read(path)
    except VerificationError:
        return False
    return made is not None and of_gpu(made)


def of_gpu(made: Mapping[str, Any] | None) -> bool:
    """The same, by its manifest."""
    return made is not None and made.get("command") == COMMAND


class Names:
    """The names of packed linears, by the manifest's templates ("...layers.{layer}...experts.{expert}.gate_proj")."""

    def __init__(self, templates: Mapping[str, str]) -> None:
        self.templates = dict(templates)
        self._patterns = {}
        for projection, template in self.templates.items():
            text = (
                re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
            )
            self._patterns[projection] = re.compile(rf"{text}\.(?P<what>{'|'.join(SUFFIXES)})")

    def name(self, layer: int, expert: int, projection: str) -> str:
        """What a linear is called, without ".weight"."""
        return self.templates[projection].format(layer=layer, expert=expert)

    def find(self, tensor: str) -> tuple[int, int, str, str] | None:
        """(layer, expert, projection, suffix) of a tensor; None if it is no part of a routed expert."""
        for projection, pattern in self._patterns.items():
            match = pattern.fullmatch(tensor)
            if match is not None:
                layer, expert, what = int(match["layer"]), int(match["expert"]), match["what"]
                return (
                    (layer, expert, projection, what)
                    if f"{self.name(layer, expert, projection)}.{what}" == tensor
                    else None
                )
        return None


def is_trusted(facts: Mapping[str, Any]) -> bool:
    """Whether what is asked of the manifest's facts has the types that it must have."""
    names = facts.get("linear_names")
    return (
        isinstance(names, dict)
        and sorted(names) == ["down", "gate", "up"]
        and all(
            isinstance(t, str) and t.count("{") == t.count("}") == 2 and "{layer}" in t and "{expert}" in t
            for t in names.values()
        )
        and isinstance(facts.get("method"), str)
        and all(type(facts.get(name)) is int for name in ("bits", "group_size", "packed_linears"))
    )


def shapes_of(found: Iterable[tuple[int, int, str, tuple[int, ...]]], group: int) -> dict[int, tuple[int, int, int]]:
    """layer -> (E, H, I), from (layer, expert, projection, shape) of all weight_scales, as most of them have it."""
    experts: dict[int, int] = {}
    rows: dict[tuple[int, bool], Counter[int]] = {}
    for layer, expert, projection, shape in found:
        experts[layer] = max(experts.get(layer, 0), expert + 1)
        if len(shape) == 2:
            seen = rows.setdefault((layer, projection == "down"), Counter())
            seen[shape[0]] += 1
            rows.setdefault((layer, projection != "down"), Counter())[shape[1] * group] += 1

    def usual(layer: int, is_down: bool) -> int:
        seen = rows.get((layer, is_down))
        return seen.most_common(1)[0][0] if seen else 0

    return {layer: (experts[layer], usual(layer, True), usual(layer, False)) for layer in sorted(experts)}
