"""What the tensors of an output are called: the contract of naming, which forms may share."""

from __future__ import annotations

from typing import Protocol

from ktconvert.layouts.outputs.parts import Place


class Names(Protocol):
    """What the tensors of an output are called. Two that name alike are equal."""

    def key(self, place: Place, suffix: str) -> str:
        """The name of a tensor."""

    def find(self, name: str) -> tuple[Place, str] | None:
        """(place, suffix) of a tensor; None if it is no part of a routed expert."""

    def stray(self, name: str) -> str | None:
        """Why a tensor that is no part of a routed expert does not belong here; None where it may."""

    def describe(self, place: Place, suffix: str) -> str:
        """Which tensor of which expert, for people."""
