"""How an output's experts lie in its files: the names of their tensors, whether they are cut into NUMA parts, and what
else an output holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ktconvert.layouts.encodings.encoding import Encoding
from ktconvert.layouts.outputs.parts import Place

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel


class Names(Protocol):
    """The names of an output's tensors. Two namings that give the same names compare equal."""

    def key(self, place: Place, suffix: str) -> str:
        """The name of a tensor."""

    def find(self, name: str) -> tuple[Place, str] | None:
        """(place, suffix) of a tensor; None if it is no part of a routed expert."""

    def stray(self, name: str) -> str | None:
        """Why a tensor that is no part of a routed expert does not belong here; None where it may."""

    def describe(self, place: Place, suffix: str) -> str:
        """Which tensor of which expert, for messages."""


@dataclass(frozen=True)
class Arrangement:
    """One way to arrange the experts of an output.

    name         in reports ("merged"), unless they lie in loose files
    command      the command that writes it, as manifests have it
    layout       the value of that command's --layout that chooses it; "" where it has no such option
    names        (name of the format, its encoding, facts of the manifest, source) -> the names of tensors. facts: {}
                 without a manifest; source: the model while an output of it is written, else None
    is_trusted   whether the manifest's facts that are needed have the right types
    parted       whether linears are cut into NUMA parts
    whole        whether the output is a whole model, which loaders of checkpoints open
    shard_bytes  default size of a shard; None: one shard for each layer
    """

    name: str
    command: str
    layout: str
    names: Callable[[str, Encoding, Mapping[str, Any], MoeModel | None], Names]
    is_trusted: Callable[[Mapping[str, Any]], bool]
    parted: bool = False
    whole: bool = False
    shard_bytes: int | None = None


def has_numa_count(facts: Mapping[str, Any]) -> bool:
    """Whether the facts name a number of NUMA parts."""
    return isinstance(facts.get("numa"), int)
