"""Whole linears under the names of a checkpoint, as kt-kernel's native methods read them (FORMAT.md, section
"Native").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ktconvert.layouts.encodings.encoding import Encoding, suffixes
from ktconvert.layouts.outputs.arrangement import Arrangement, has_numa_count
from ktconvert.layouts.outputs.linear_names import LinearNames
from ktconvert.layouts.outputs.parts import PROJECTIONS

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel

WORDS = {"gate": "w1", "up": "w3", "down": "w2"}
DEEPSEEK_V4 = tuple((p, f"layers.{{layer}}.ffn.experts.{{expert}}.{WORDS[p]}") for p in PROJECTIONS)
DEEPSEEK = tuple((p, f"model.layers.{{layer}}.mlp.experts.{{expert}}.{p}_proj") for p in PROJECTIONS)
TEMPLATES = {"MXFP4": DEEPSEEK_V4}  # by encoding: what kt-kernel's loaders look for; all others: DEEPSEEK


@dataclass(frozen=True)
class NativeNames(LinearNames):
    """Names that a checkpoint may have, too: only a manifest tells them apart."""

    def stray(self, name: str) -> None:
        """Other tensors may have any name."""


def _names(method: str, encoding: Encoding, facts: Mapping[str, Any], source: MoeModel | None) -> NativeNames:
    templates = TEMPLATES.get(encoding.name, DEEPSEEK)
    return NativeNames(suffixes(encoding), templates if facts.get("method") == method else ())


NATIVE = Arrangement("native", "cpu", "kt", _names, has_numa_count)
