"""Names of the tensors of an output: the contract, whose implementations forms may share."""

from __future__ import annotations

from typing import Protocol

from ktconvert.layouts.outputs.parts import Place


class Names(Protocol):
    """The naming of an output's tensors. Two namings that give the same names compare equal."""

    def key(self, place: Place, suffix: str) -> str:
        """The name of a tensor."""

    def find(self, name: str) -> tuple[Place, str] | None:
        """(place, suffix) of a tensor; None if it is no part of a routed expert."""

    def stray(self, name: str) -> str | None:
        """Why a tensor that is no part of a routed expert does not belong here; None where it may."""

    def describe(self, place: Place, suffix: str) -> str:
        """Which tensor of which expert, for messages."""
