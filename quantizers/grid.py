"""The grid of codes and scales."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Symmetric integers: the value of a code is step * code * scale.

    low..high  the codes
    group      columns of a row that share a scale; None: all of them
    scales     safetensors dtype of the scales; "" where there are none
    version    of the rounding to nearest by the largest value; to be raised with any change of its bytes, since it is
               part of
               every unit's fingerprint
    """

    name: str
    bits: int
    low: int
    high: int
    group: int | None
    scales: str
    version: int
    step: int = 1

    @property
    def per_row(self) -> bool:
        """Whether a row has one scale."""
        return self.group is None and bool(self.scales)
