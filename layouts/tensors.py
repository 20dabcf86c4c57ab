"""Names of an expert's linears, the record of a stored tensor, and numbers of layers and experts as text."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

PROJECTIONS = ("gate", "up", "down")  # the linears of an expert


def list_projections(gated: bool) -> tuple[str, ...]:
    """Return the linears of an expert with or without a gate."""
    return PROJECTIONS if gated else PROJECTIONS[1:]


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """One tensor, or the share of one expert in it; a Struct, as models have hundreds of thousands.

    name   as in its file; for a tensor that an encoding describes, the end of that name
    dtype  as safetensors spells it: "BF16", "F8_E4M3", …; as ggml does in a GGUF: "Q4_K", …
    file   relative to the directory of the checkpoint or output; "" if it is in no file
    start  its first byte, counted from the start of the file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str = ""
    start: int = 0


def format_ranges(numbers: Iterable[int]) -> str:
    """Return 1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def name_layers(ranges: str) -> str:
    """Return a text of format_ranges with its noun: layer 0, layers 1-3."""
    return f"{'layer' if ranges.isdigit() else 'layers'} {ranges}"
