"""How often each expert was routed to: counts.safetensors, with one tensor `counts`, int64 [decoder layers, experts].

Row n is layer n of the model; the row of a layer without experts is zero.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.statistics.imatrix import I64

FILE, KEY = "counts.safetensors", "counts"
FORM = f"a tensor {KEY!r}, int64 [decoder layers, experts], is needed, as `ktconvert calibrate` writes it"


def read_counts(path: Path) -> I64:
    """int64 [decoder layers, experts]. Raises InputError where the file is damaged, or holds something else."""
    entries = {entry.name: entry for entry in read_header(path).entries}
    entry = entries.get(KEY)
    if entry is None:
        raise InputError(f"{path}: holds {', '.join(map(repr, sorted(entries)[:3])) or 'no tensor'}; {FORM}")
    if entry.dtype != "I64" or len(entry.shape) != 2:
        raise InputError(f"{path}: {KEY!r} is {entry.dtype} of shape {list(entry.shape)}; {FORM}")
    counts = np.fromfile(path, "<i8", entry.nbytes // 8, offset=entry.start)
    if 8 * counts.size != entry.nbytes or (counts < 0).any() or not counts.any():
        raise InputError(f"{path}: {KEY!r} holds {'a number below 0' if (counts < 0).any() else 'zeros only'}; {FORM}")
    return counts.reshape(entry.shape)
