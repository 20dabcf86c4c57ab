"""Compares two directories of safetensors tensor by tensor, regardless of their shards."""

from __future__ import annotations

import json
import mmap
from pathlib import Path


def same_tensors(peer: Path, ours: Path, name: str) -> str:
    """Return a sentence on the number of equal tensors; `name` is the peer's.

    Raises RuntimeError at the first difference.
    """
    left, right = _tensors(peer), _tensors(ours)
    if left.keys() != right.keys():
        raise RuntimeError(f"tensors differ from {name}'s: {sorted(left.keys() ^ right.keys())[:3]}")
    for key, values in left.items():
        if values != right[key]:
            raise RuntimeError(f"{key} differs from {name}'s")
    return f"{len(left)} tensors identical to {name}'s"


def _tensors(folder: Path) -> dict[str, tuple[str, memoryview]]:
    """Return dtype and bytes of every tensor, as views of the mapped files."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(bytes(data[8:start])).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = entry["dtype"], data[start + begin : start + end]
    return tensors
