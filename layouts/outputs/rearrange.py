"""Rearrangement of a linear for a different number of NUMA slices (bytes.md, "A different number of slices")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ktconvert.layouts.encodings.encoding import Encoding
from ktconvert.layouts.outputs.slices import NumaSlice
from ktconvert.native_quant.arrays import F32, F64, I8, Bytes
from ktconvert.quantizers.differences import sum_products

Stored = tuple[NumaSlice, Sequence[Bytes]]  # a slice with its tensors


def is_cut_by_rows(numa_slice: NumaSlice) -> bool:
    """Return whether slices of this linear are rows; else they are columns, and a row has a scale in each slice."""
    return (numa_slice.projection == "down") == numa_slice.backward


def requires_rounding(encoding: Encoding, old: int, new: int) -> bool:
    """Return whether a change from `old` to `new` slices gives one scale to columns that had several."""
    return encoding.grid.has_row_scales and new % old != 0


def rearrange_linear(encoding: Encoding, old: Sequence[Stored], new: Sequence[Stored]) -> None:
    """Fill the slices `new` of a linear (or its transpose) from its slices `old`. Raises ValueError for a bad code."""
    if encoding.without_bias is not None:
        _rearrange_biases(old, new)
        old, new = ([(numa_slice, stored[:-1]) for numa_slice, stored in side] for side in (old, new))
        rearrange_linear(encoding.without_bias, old, new)
        return
    if not encoding.grid.has_row_scales or is_cut_by_rows(new[0][0]):
        _cut_tensors(encoding, old, new)
        return
    assert encoding.pack is not None
    width = old[0][0].k
    for rows in _row_blocks(encoding, new[0][0].n):
        old_codes_and_scales = [
            _read_codes_and_scales(encoding, numa_slice, stored, rows) for numa_slice, stored in old
        ]
        for number, (numa_slice, stored) in enumerate(new):
            start = number * numa_slice.k  # columns start..stop-1 of the whole linear
            stop = start + numa_slice.k
            codes = []
            scales = []
            for index in range(start // width, -(-stop // width)):  # old slices with some of these columns
                old_codes, old_scales = old_codes_and_scales[index]
                codes.append(old_codes[:, max(start - index * width, 0) : stop - index * width])
                scales.append(old_scales)
            encoding.pack(*merge_scales(codes, scales), _select_rows(numa_slice, stored, rows))


def _rearrange_biases(old: Sequence[Stored], new: Sequence[Stored]) -> None:
    parts = [stored[-1].view(np.float32) for _, stored in old]
    whole = np.sum(parts, axis=0) if old[0][0].projection == "down" else np.concatenate(parts)
    for numa_slice, stored in new:
        stored[-1].view(np.float32)[:] = numa_slice.cut_bias(whole)


def change_sums(encoding: Encoding, old: Sequence[Stored], new: Sequence[Stored]) -> F64:
    """Return sums of x*x, y*y, x*y and (x-y)^2, with x the numbers before rearranging by columns and y those after."""
    sums = np.zeros(4)
    for rows in _row_blocks(encoding, new[0][0].n):
        x, y = (
            np.concatenate(
                [encoding.decode(stored, numa_slice.n, numa_slice.k, rows) for numa_slice, stored in side], axis=1
            )
            for side in (old, new)
        )
        sums += sum_products(x, y)
    return sums


def _row_blocks(encoding: Encoding, n: int) -> Iterator[slice]:
    """Yield the blocks of rows of a slice of n rows; each block is packed as if it were a slice."""
    return (slice(first, first + encoding.multiple) for first in range(0, n, encoding.multiple))


def _select_rows(numa_slice: NumaSlice, stored: Sequence[Bytes], rows: slice) -> list[Bytes]:
    n = numa_slice.n
    return [tensor[tensor.size * rows.start // n : tensor.size * rows.stop // n] for tensor in stored]


def _cut_tensors(encoding: Encoding, old: Sequence[Stored], new: Sequence[Stored]) -> None:
    """Cut each tensor as the linear is cut: a matrix has whole blocks, and a flat tensor whole blocks of rows."""
    axis = 0 if is_cut_by_rows(new[0][0]) else 1
    for number, tensor in enumerate(encoding.tensors(old[0][0].n, old[0][0].k)):
        rows = tensor.shape[0]
        joined = np.concatenate([stored[number].reshape(rows, -1) for _, stored in old], axis)
        for (_, stored), part in zip(new, np.split(joined, len(new), axis), strict=True):
            stored[number].reshape(part.shape)[:] = part


def _read_codes_and_scales(
    encoding: Encoding, numa_slice: NumaSlice, stored: Sequence[Bytes], rows: slice
) -> tuple[I8, F32]:
    """Return the codes int8 [rows, k] and scales float32 [rows] of a block of rows."""
    weight, scale = _select_rows(numa_slice, stored, rows)
    ones = np.full(rows.stop - rows.start, 1 / encoding.grid.step, np.float32)
    codes = encoding.decode([weight, ones.view(np.uint8)], len(ones), numa_slice.k, slice(None))
    return codes.astype(np.int8), scale.view(np.float32)


def merge_scales(codes: Sequence[I8], scales: Sequence[F32]) -> tuple[I8, F32]:
    """Join codes int8 [n, k_0], [n, k_1], ..., each with a scale per row, float32 [n], finite and not negative.

    Returns codes int8 [n, k_0 + k_1 + ...] and scales float32 [n] (numerics.md, section 8). The largest scale stays;
    codes with smaller ones are rounded again. A row whose scales are equal, or 0, stays as it is.
    """
    if len(codes) == 1:
        return codes[0], scales[0]
    largest = np.maximum.reduce(list(scales))
    joined = np.empty((len(largest), sum(part.shape[1] for part in codes)), np.int8)
    start = 0
    for part, scale in zip(codes, scales, strict=True):
        ratio = np.divide(scale, largest, out=np.zeros_like(scale), where=largest != 0)
        stop = start + part.shape[1]
        joined[:, start:stop] = np.rint(part * ratio[:, None])
        start = stop
    return joined, largest
