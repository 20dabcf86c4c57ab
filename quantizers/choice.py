"""Ways to choose codes: QUANTIZERS is their table. They choose numbers (NUMERICS.md); forms pack them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ktconvert.quantizers.grid import Grid
from ktconvert.quantizers.reference import I8, U16

# BF16 bits [n, k], all finite, and the grid -> codes int8 [n, k] within its range, and scales [n, k / group] (float32,
# or BF16 bits).
Choose = Callable[[U16, Grid], tuple[I8, npt.NDArray[Any]]]


@dataclass(frozen=True)
class Choice:
    """One way to choose codes.

    version  raised whenever codes or scales change; part of every unit's fingerprint, except for the default
    choose   the function; None: the form's own kernel, which scales by the largest value, rounds and packs in one pass
    """

    name: str
    version: int
    choose: Choose | None


ABSMAX = Choice("absmax", 1, None)
QUANTIZERS = {choice.name: choice for choice in (ABSMAX,)}
