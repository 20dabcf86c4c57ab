"""A layer's weights as C finds them: the table of the addresses of each expert's matrices."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error
from ktconvert.native_quant.runtime import weights
from ktconvert.native_quant.runtime.methods import METHODS

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class InUse:
    """What a forward reads: ktq_moe, the table that it points to, and the arrays that the table points to."""

    moe: Any
    table: Any
    packed: weights.LayerWeights


def table(packed: weights.LayerWeights, order: list[int]) -> Any:
    """ktq_expert [parts][E]: where each matrix lies. Raises ValueError where C would read past one."""
    number = METHODS[packed.method].number
    rows = ffi.new("ktq_expert[]", packed.grid.numa * packed.experts)
    at: dict[int, list[int]] = {expert: [] for expert in range(packed.experts)}
    for place, expert in enumerate(order):
        at[expert].append(place)
    for part, stored in packed.arrays.items():
        if (actual := sum(data.nbytes for data in stored)) != (needed := weight_bytes(number, part.n, part.k)):
            raise ValueError(f"a part [{part.n}, {part.k}] of {packed.method} has {needed} bytes, not {actual}")
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


@functools.cache
def weight_bytes(number: int, n: int, k: int) -> int:
    """Codes and scales of a weight [n, k] as C reads them, by the number of a method. Raises ValueError for other sizes
    than it can have."""
    codes, scales = ffi.new("int64_t *"), ffi.new("int64_t *")
    raise_error(lib.ktq_weight_bytes(number, n, k, codes, scales))
    return int(codes[0] + scales[0])
