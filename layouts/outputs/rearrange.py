"""The NUMA parts of a linear, rearranged for another number of parts (bytes.md, section "Another number of parts")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ktconvert.layouts.encodings.encoding import Encoding
from ktconvert.layouts.outputs.parts import Part
from ktconvert.native_quant.arrays import F32, F64, I8, Bytes
from ktconvert.quantizers.differences import sums_of

Stored = tuple[Part, Sequence[Bytes]]  # a part with its tensors


def is_cut_by_rows(part: Part) -> bool:
    """Whether the parts of this linear are rows of it; else they are columns, and a row has a scale in each part."""
    return (part.projection == "down") == part.backward


def rounds_again(encoding: Encoding, old: int, new: int) -> bool:
    """Whether going from `old` parts to `new` ones makes columns share a scale that had several."""
    return encoding.grid.per_row and new % old != 0


def rearrange(encoding: Encoding, old: Sequence[Stored], new: Sequence[Stored]) -> None:
    """Fill the parts `new` of a linear (or its transpose) from its parts `old`, in order. ValueError: a bad code."""
    if not encoding.grid.per_row or is_cut_by_rows(new[0][0]):
        _cut_tensors(encoding, old, new)
        return
    assert encoding.pack is not None
    width = old[0][0].k
    for rows in _row_blocks(encoding, new[0][0].n):
        held = [_codes_and_scales(encoding, part, stored, rows) for part, stored in old]
        for number, (part, stored) in enumerate(new):
            start, stop = number * part.k, (number + 1) * part.k  # columns of the whole linear
            shared = range(start // width, -(-stop // width))
            codes = [held[t][0][:, max(start - t * width, 0) : stop - t * width] for t in shared]
            one, scales = to_one_scale(codes, [held[t][1] for t in shared])
            encoding.pack(one, scales, _of_rows(part, stored, rows))


def change_sums(encoding: Encoding, old: Sequence[Stored], new: Sequence[Stored]) -> F64:
    """What rearranging by columns changed: sums of x*x, y*y, x*y and (x-y)^2, x the old numbers and y the new ones."""
    sums = np.zeros(4)
    for rows in _row_blocks(encoding, new[0][0].n):
        x, y = (
            np.concatenate([encoding.decode(stored, part.n, part.k, rows) for part, stored in side], axis=1)
            for side in (old, new)
        )
        sums += sums_of(x, y)
    return sums


def _row_blocks(encoding: Encoding, n: int) -> Iterator[slice]:
    """The blocks of rows of a part of n rows: each is packed as a part of its own would be."""
    return (slice(first, first + encoding.multiple) for first in range(0, n, encoding.multiple))


def _of_rows(part: Part, stored: Sequence[Bytes], rows: slice) -> list[Bytes]:
    return [each[each.size * rows.start // part.n : each.size * rows.stop // part.n] for each in stored]


def _cut_tensors(encoding: Encoding, old: Sequence[Stored], new: Sequence[Stored]) -> None:
    """A part's tensor is a matrix of whole blocks, cut as the linear is; a flat one holds whole blocks of rows."""
    axis = 0 if is_cut_by_rows(new[0][0]) else 1
    for number, tensor in enumerate(encoding.tensors(old[0][0].n, old[0][0].k)):
        rows = tensor.shape[0]
        whole = np.concatenate([stored[number].reshape(rows, -1) for _, stored in old], axis)
        for (_, stored), part in zip(new, np.split(whole, len(new), axis), strict=True):
            stored[number].reshape(part.shape)[:] = part


def _codes_and_scales(encoding: Encoding, part: Part, stored: Sequence[Bytes], rows: slice) -> tuple[I8, F32]:
    """Of a block of rows: codes int8 [rows, k], and scales float32 [rows]."""
    weight, scale = _of_rows(part, stored, rows)
    ones = np.full(rows.stop - rows.start, 1 / encoding.grid.step, np.float32)
    codes = encoding.decode([weight, ones.view(np.uint8)], len(ones), part.k, slice(None))
    return codes.astype(np.int8), scale.view(np.float32)


def to_one_scale(codes: Sequence[I8], scales: Sequence[F32]) -> tuple[I8, F32]:
    """Side by side: codes int8 [n, k_0], [n, k_1], ..., each with a scale per row, float32 [n], finite, none negative.

    Returns codes int8 [n, k_0 + k_1 + ...] and scales float32 [n] (numerics.md, section 8). The largest scale stays;
    codes of smaller ones are rounded again. A row whose scales are equal, or 0, stays as it is.
    """
    if len(codes) == 1:
        return codes[0], scales[0]
    largest = np.maximum.reduce(list(scales))
    out = np.empty((len(largest), sum(c.shape[1] for c in codes)), np.int8)
    at = 0
    for own, scale in zip(codes, scales, strict=True):
        ratio = np.divide(scale, largest, out=np.zeros_like(scale), where=largest != 0)
        out[:, at : at + own.shape[1]] = np.rint(own * ratio[:, None])
        at += own.shape[1]
    return out, largest
