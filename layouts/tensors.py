"""The record of a stored tensor: its name, type and size, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass

PROJECTIONS = ("gate", "up", "down")  # the linears of an expert


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor, or one expert's part of it.

    name   as its file has it; of a tensor that an encoding describes the end of that name
    dtype  as safetensors spells it: "BF16", "F8_E4M3", …; of a GGUF as ggml does: "Q4_K", …
    file   relative to the directory of the checkpoint or output; "" where it lies in none
    start  its first byte, counted from the start of the file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str = ""
    start: int = 0
