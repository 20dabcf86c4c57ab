"""Names of an expert's linears, and the record of a stored tensor: name, type, size and place."""

from __future__ import annotations

from dataclasses import dataclass

PROJECTIONS = ("gate", "up", "down")  # the linears of an expert


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor, or the share of one expert in it.

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
