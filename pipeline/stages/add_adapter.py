"""Adding an adapter's matrices to the weights of a checkpoint, while these are copied or decoded."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.adapter import Delta, by_tail, tail
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.pipeline.stages.copy_tensors import OtherTensor
from ktconvert.quantizers.reference import bf16_to_f32, f32_to_bf16

Bytes = npt.NDArray[np.uint8]
OF_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)")
# The place of an expert's projection in the stacked tensors of newer checkpoints: [E, 2 I, H], and [E, H, I].
STACKED = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}


@dataclass(frozen=True)
class Added:
    """What is added to the rows of a BF16 tensor [rows, columns]: (first row, delta) of each block; rounded once."""

    columns: int
    blocks: tuple[tuple[int, Delta], ...]
    identity: str

    def to(self, data: Bytes, start: int) -> Bytes:
        """data: bytes of the tensor from `start` on. Raises InputError for sums that are not finite."""
        bits = data.view(np.uint16)
        first, last = start // 2, start // 2 + bits.size
        out = bits.copy()
        for row, delta in self.blocks:
            rows, columns = delta.shape
            begin, end = max(first, row * columns), min(last, (row + rows) * columns)
            if begin >= end:
                continue
            a, b = delta.matrices()
            top, bottom = begin // columns - row, -(-end // columns) - row
            added = (b[top:bottom] @ a).reshape(-1)[begin - (row + top) * columns :][: end - begin]
            with np.errstate(over="ignore", invalid="ignore"):
                total = bf16_to_f32(bits[begin - first : end - first]) + added
            if not np.isfinite(total).all():
                raise InputError(f"{delta.a.name}: with it a weight is not finite; train again")
            out[begin - first : end - first] = f32_to_bf16(total)
        return out.view(np.uint8)


def merged(tensors: Collection[OtherTensor], deltas: dict[str, Delta], identity: str) -> tuple[list[OtherTensor], int]:
    """The tensors, with what is added to them, and to how many. Raises InputError where the checkpoint lacks a weight
    of that size, UnsupportedError for one that is not stored as a BF16 matrix.
    """
    left = by_tail(deltas)
    blocks: dict[str, list[tuple[int, Delta]]] = {}
    shapes = {tail(tensor.key): tensor.entry.shape for tensor in tensors}
    for module, delta in left.items():
        name, row = f"{module}.weight", 0
        if name not in shapes and (match := OF_EXPERT.fullmatch(module)) and match["name"] in STACKED:
            stacked, half = STACKED[match["name"]]
            name = f"{match['experts']}.{stacked}"
            row = (int(match["expert"]) * (2 if stacked == "gate_up_proj" else 1) + half) * delta.shape[0]
        shape = shapes.get(name)
        rows = 0 if shape is None or len(shape) < 2 else math.prod(shape[:-1])
        if (
            shape is None
            or shape[-1] != delta.shape[1]
            or row + delta.shape[0] > rows
            or (len(shape) == 2 and rows != delta.shape[0])
        ):
            has = "lacks it" if shape is None else f"has {list(shape)}"
            raise InputError(
                f"the adapter changes {module}, [{', '.join(map(str, delta.shape))}], and the checkpoint {has}"
            )
        blocks.setdefault(name, []).append((row, delta))
    made = []
    for tensor in tensors:
        mine = blocks.get(tail(tensor.key))
        if mine is not None:
            if tensor.entry.dtype != "BF16" or (isinstance(tensor.stored, Weight) and len(tensor.entry.shape) > 2):
                raise UnsupportedError(
                    f"{tensor.key} is {tensor.entry.dtype} {list(tensor.entry.shape)}, and an adapter is added "
                    "to BF16 matrices: give what `ktconvert dequantize` writes"
                )
            tensor = replace(tensor, added=Added(tensor.entry.shape[-1], tuple(mine), identity))
        made.append(tensor)
    return made, len(blocks)
