"""A layer's weights as C finds them: the table of the addresses of each expert's matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi
from ktconvert.native_quant.runtime import weights

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class InUse:
    """What a forward reads: ktq_moe, the table that it points to, and the arrays that the table points to."""

    moe: Any
    table: Any
    packed: weights.LayerWeights


def table(packed: weights.LayerWeights, order: list[int]) -> Any:
    """ktq_expert [parts][E]: where each matrix lies."""
    rows = ffi.new("ktq_expert[]", packed.grid.numa * packed.experts)
    at: dict[int, list[int]] = {expert: [] for expert in range(packed.experts)}
    for place, expert in enumerate(order):
        at[expert].append(place)
    for part, stored in packed.arrays.items():
        addresses = [ffi.cast("void *", data.__array_interface__["data"][0]) for data in stored]
        for place in at[part.expert]:
            row = rows[part.numa * packed.experts + place]
            for name, address in zip((part.projection, f"{part.projection}_scale"), addresses, strict=False):
                setattr(row, name, address)  # a format without scales has one tensor
    return rows


def checked_order(order: I64 | None, experts: int) -> list[int]:
    """The file's expert for each place; None: the file's order. Raises ValueError for what is no such list."""
    if order is None:
        return list(range(experts))
    numbers = [int(number) for number in order]
    if len(numbers) != experts or min(numbers) < 0 or max(numbers) >= experts:
        raise ValueError(f"order must name one of {experts} experts for each of {experts} places")
    return numbers
