"""Writes an importance matrix in llama.cpp's GGUF form: names, types and keys as its save_imatrix has them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ktconvert.layouts.checkpoints.containers import gguf
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.statistics.imatrix import COUNTS, F32, I64, SUMS, Shapes

VERSION = 3
ALIGNMENT = 32
UINT32 = 4  # a type of values
TYPE_F32 = 0  # a type of tensors


@dataclass(frozen=True)
class LayerSums:
    """What the experts of a layer read.

    counts  int64 [experts]: the tokens of each expert
    inputs  float32 [experts, H]: for each column, the sum of the squares of what gate and up read
    middle  float32 [experts, I]: of what down reads
    """

    counts: I64
    inputs: F32
    middle: F32


def write_imatrix(
    path: Path,
    shapes: Shapes,
    load: Callable[[int], LayerSums],
    *,
    datasets: Sequence[str],
    chunks: int,
    chunk_size: int,
) -> tuple[int, str]:
    """Write a new file, synced, for the caller to publish; returns its size in bytes and its sha256.

    shapes      of the layers, by their numbers
    load        gives one layer's sums; called once for each, and in no order that a caller should rely on
    datasets    names of the data
    chunks      sequences that went through the model, of chunk_size tokens
    Raises InputError for sums that are not finite, ResourceError when the disk is full.
    """
    layers = sorted(shapes, key=lambda layer: f"{layer}.")  # as llama.cpp: by name
    infos, offset = [], 0
    for layer in layers:
        experts, hidden, width = shapes[layer]
        for projection, columns in (("down", width), ("gate", hidden), ("up", hidden)):
            for ending, size in ((SUMS, columns), (COUNTS, 1)):
                infos.append(_info(f"blk.{layer}.ffn_{projection}_exps.weight{ending}", (size, experts), offset))
                offset += _padded(4 * size * experts)
    head = b"".join((*_preamble(len(infos), datasets, chunks, chunk_size), *infos))
    head = head.ljust(_padded(len(head)), b"\0")
    with DirectFile(path, len(head) + offset) as file:
        file.append(head)
        for layer in layers:
            sums = load(layer)
            for values in (sums.middle, sums.inputs, sums.inputs):
                if not np.isfinite(values).all():
                    raise InputError(f"the sums of squares of what layer {layer} reads are not finite")
                for tensor in (values, sums.counts):
                    data = np.ascontiguousarray(tensor, "<f4").tobytes()
                    file.append(data.ljust(_padded(len(data)), b"\0"))
        return file.size, file.close()


def _preamble(tensors: int, datasets: Sequence[str], chunks: int, chunk_size: int) -> Iterator[bytes]:
    """What comes before the tensors' entries: magic, version, counts and the keys."""
    yield gguf.MAGIC + struct.pack("<IQQ", VERSION, tensors, 4)
    yield _text("general.type") + struct.pack("<I", gguf.TEXT) + _text("imatrix")
    yield _text("imatrix.datasets") + struct.pack("<IIQ", gguf.ARRAY, gguf.TEXT, len(datasets))
    yield from map(_text, datasets)
    yield _text("imatrix.chunk_count") + struct.pack("<II", UINT32, chunks)
    yield _text("imatrix.chunk_size") + struct.pack("<II", UINT32, chunk_size)


def _info(name: str, dims: tuple[int, int], offset: int) -> bytes:
    """A tensor's entry. ggml leaves out trailing dimensions of 1."""
    rank = 2 if dims[1] > 1 else 1
    return _text(name) + struct.pack(f"<I{rank}QIQ", rank, *dims[:rank], TYPE_F32, offset)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
