"""expert_counts.json of an output: how many tokens were routed to each expert.

The file is JSON, because loaders read every safetensors file of a folder as weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ktconvert.layouts.errors import InputError, unreadable_file
from ktconvert.layouts.files import documents
from ktconvert.native_quant.arrays import I64

NAME = "expert_counts.json"
VERSION = 1
MOST_BYTES = 64 << 20
REMEDY = "use the file of an output of `ktconvert cpu` or `gpu`"

Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]  # sums of such numbers fit into int64


class _Header(msgspec.Struct):
    name: Literal["ktconvert-expert-counts"] = "ktconvert-expert-counts"
    version: documents.Number = VERSION


class _Document(msgspec.Struct):
    format: _Header
    counts: tuple[tuple[Tokens, ...], ...]


def arrange_counts(decoder_layers: int, rows: Mapping[int, npt.ArrayLike]) -> I64:
    """Return int64 [decoder layers, experts]: `rows` by layer, and zeros for experts that a layer does not have."""
    counts = np.zeros((decoder_layers, max(np.size(row) for row in rows.values())), np.int64)
    for layer, row in rows.items():
        counts[layer, : np.size(row)] = row
    return counts


def require_tokens(path: Path | str, counts: I64, remedy: str) -> None:
    """Raise InputError, with this remedy, for counts without experts, with negative numbers, or with only zeros."""
    if not counts.size:
        raise InputError(f"{path}: has no experts; {remedy}")
    if (counts < 0).any() or not counts.any():
        raise InputError(f"{path}: has {'negative numbers' if (counts < 0).any() else 'only zeros'}; {remedy}")


def encode_counts(counts: I64) -> bytes:
    """Return the file for counts [decoder layers, experts], one layer per line."""
    header = f'{{"format": {msgspec.json.encode(_Header()).decode()}, "counts": [\n'
    return (header + ",\n".join(str(row) for row in counts.tolist()) + "\n]}\n").encode()


def read_counts_file(path: Path) -> I64:
    """Read the counts of a file, int64 [decoder layers, experts]. Raises InputError for a damaged or different file."""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise InputError(f"{path}: has {size} bytes, more than the counts of any model; {REMEDY}")
        document = documents.decode_document(path.read_bytes(), _Document)
    except OSError as error:
        raise unreadable_file(path, error) from error
    except ValueError as error:
        raise InputError(f"{path}: not a file with counts of experts ({error}); {REMEDY}") from error
    if len({len(row) for row in document.counts}) > 1:
        raise InputError(f"{path}: its layers have different numbers of experts; {REMEDY}")
    counts: I64 = np.array(document.counts, np.int64)
    require_tokens(path, counts, REMEDY)
    return counts
