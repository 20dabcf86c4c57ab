"""Experts in NUMA parts in merged safetensors: keys that kt-kernel's loader asks for (bytes.md, section "Merged"), or,
with other suffixes, keys that it does not find: it fails instead of computing with what it cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.encodings.encoding import Encoding, suffixes
from ktconvert.layouts.outputs.format import Arrangement, has_numa_count
from ktconvert.layouts.outputs.parts import Place

KEY = re.compile(
    r"blk\.(?P<layer>\d+)\.ffn_(?P<projection>gate|up|down)_(?P<backward>bwd_)?exps"
    r"\.(?P<expert>\d+)\.numa\.(?P<numa>\d+)\.(?P<suffix>\w+)"
)
SUFFIXES = (("weight", "scale"), ("codes", "scales"))  # kt-kernel's, and others


@dataclass(frozen=True)
class NumaNames:
    """Names of the parts of experts. layout: of the arrangement, since formats of several may have the same names."""

    suffixes: tuple[str, ...]
    layout: str = "numa"

    def key(self, place: Place, suffix: str) -> str:
        backward = "_bwd" if place.backward else ""
        return f"blk.{place.layer}.ffn_{place.projection}{backward}_exps.{place.expert}.numa.{place.numa}.{suffix}"

    def find(self, name: str) -> tuple[Place, str] | None:
        match = KEY.fullmatch(name)
        if match is None or match["suffix"] not in self.suffixes:
            return None
        layer, expert, node = (int(match[number]) for number in ("layer", "expert", "numa"))
        return Place(layer, expert, match["projection"], bool(match["backward"]), node), match["suffix"]

    def stray(self, name: str) -> str | None:
        return "not a name that kt-kernel reads" if "ffn_" in name and "_exps" in name else None

    def describe(self, place: Place, suffix: str) -> str:
        backward = "backward " if place.backward else ""
        where = f"layer {place.layer}, expert {place.expert}, {place.projection}_proj, NUMA part {place.numa}"
        return f"{where}, {backward}{suffix}"


def _arrangement(layout: str, is_trusted: Callable[[Mapping[str, Any]], bool], on_request: bool = False) -> Arrangement:
    def names(method: str, encoding: Encoding, facts: Mapping[str, Any], source: MoeModel | None) -> NumaNames:
        """Encodings without scales share names with those that have some: only sizes tell them apart."""
        own = suffixes(encoding)
        return NumaNames(next((shared for shared in SUFFIXES if own[0] == shared[0]), own), layout)

    return Arrangement("merged", "cpu", layout, names, is_trusted, parted=True, on_request=on_request)


NUMA = _arrangement("numa", has_numa_count)
# kt-kernel's MOE_INT4 and MOE_INT8 have the names of AMXINT4 and AMXINT8, and two orders of which only this one is
# known: a manifest has to name it.
PLAIN = _arrangement("plain", lambda facts: has_numa_count(facts) and facts.get("layout") == "plain", on_request=True)


def rename_non_expert(name: str) -> str:
    """kt-kernel's name of another tensor: without `language_model.` and `model.`, `model.layers.` becomes `blk.`."""
    name = name.replace("language_model.", "")
    if name.startswith("model."):
        name = name.replace("model.layers.", "blk.").replace("model.", "")
    return name
