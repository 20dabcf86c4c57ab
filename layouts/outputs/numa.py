"""Experts in NUMA slices in merged safetensors (bytes.md, section "Merged").

The names are the ones that kt-kernel's loader looks for. Formats that it cannot read have other suffixes, so that it
finds no tensors and fails, instead of computing wrong results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.encodings.encoding import BIAS, Encoding, tensor_suffixes
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs.format import Arrangement, has_numa_count
from ktconvert.layouts.outputs.slices import SliceId

KEY = re.compile(
    r"blk\.(?P<layer>\d+)\.ffn_(?P<projection>gate|up|down)_(?P<backward>bwd_)?exps"
    r"\.(?P<expert>\d+)\.numa\.(?P<numa>\d+)\.(?P<suffix>\w+)"
)
SUFFIXES = (("weight", "scale"), ("codes", "scales"))  # kt-kernel's suffixes, and the suffixes of all other formats


@dataclass(frozen=True)
class NumaNames:
    """Names of the tensors of NUMA slices.

    suffixes  suffixes of the tensors of a slice, except that of its biases
    layout    layout of the arrangement, since formats of several arrangements may have the same names
    """

    suffixes: tuple[str, ...]
    layout: str = "numa"

    def tensor_name(self, slice_id: SliceId, suffix: str) -> str:
        matrix = slice_id.projection + ("_bwd" if slice_id.backward else "")
        return f"blk.{slice_id.layer}.ffn_{matrix}_exps.{slice_id.expert}.numa.{slice_id.node}.{suffix}"

    def parse(self, name: str) -> tuple[SliceId, str] | None:
        match = KEY.fullmatch(name)
        if match is None or match["suffix"] not in (*self.suffixes, BIAS):
            return None
        layer, expert, node = (int(match[group]) for group in ("layer", "expert", "numa"))
        return SliceId(layer, expert, match["projection"], bool(match["backward"]), node), match["suffix"]

    def explain_stray(self, name: str) -> str | None:
        return "kt-kernel does not read this name" if "ffn_" in name and "_exps" in name else None

    def describe(self, slice_id: SliceId, suffix: str) -> str:
        backward = "backward " if slice_id.backward else ""
        where = (
            f"layer {slice_id.layer}, expert {slice_id.expert}, {slice_id.projection}_proj, NUMA slice {slice_id.node}"
        )
        return f"{where}, {backward}{suffix}"


def _make_arrangement(layout: str, is_trusted: Callable[[OutputFacts], bool], on_request: bool = False) -> Arrangement:
    def make_names(method: str, encoding: Encoding, facts: OutputFacts, source: MoeModel | None) -> NumaNames:
        """Return the names; encodings with and without scales share some of them, and only sizes distinguish them."""
        suffixes = tensor_suffixes(encoding)
        shared = (known for known in SUFFIXES if known[0] == suffixes[0])
        return NumaNames(next(shared, suffixes), layout)

    return Arrangement("merged", "cpu", layout, make_names, is_trusted, sliced=True, on_request=on_request)


NUMA = _make_arrangement("numa", has_numa_count)
# kt-kernel's MOE_INT4 and MOE_INT8 have the names of AMXINT4 and AMXINT8, in one of two orders. Only the plain order
# is known, and only a manifest shows which order an output has.
PLAIN = _make_arrangement(
    "plain", lambda facts: has_numa_count(facts) and facts.get("layout") == "plain", on_request=True
)


def rename_non_expert(name: str) -> str:
    """Return kt-kernel's name of a non-expert tensor: `blk.` replaces `model.layers.`; other prefixes are dropped."""
    name = name.replace("language_model.", "")
    if name.startswith("model."):
        name = name.replace("model.layers.", "blk.").replace("model.", "")
    return name
