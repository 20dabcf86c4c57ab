"""Encodings that ktconvert writes: how one matrix [n, k] is stored as bytes, and functions for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, F64, I8, Array
from ktconvert.native_quant.arrays import Bytes as Bytes
from ktconvert.quantizers import Grid, Matrix, differences
from ktconvert.quantizers.reference import bf16_to_f32, e8m0

Rows = slice | npt.NDArray[np.intp]

ZERO_ROWS = 32  # rows to decode at a time, until a number is not zero
# Codes of 0 and -0 have at most ZERO_BYTES different bytes (two codes of 4 bits each). More of them in the first
# BEGINNING bytes prove that other numbers exist, without decoding.
ZERO_BYTES, BEGINNING = 4, 256


class Read(Protocol):
    """Reader of bytes start..stop-1 of a matrix's tensor, by its index in Encoding.tensors; default: all bytes."""

    def __call__(self, tensor: int, start: int = 0, stop: int | None = None) -> Bytes: ...


class SourceExperts(Protocol):
    """The properties of MoeModel that encodings use: names of the encodings of its experts; layer -> MoeLayer."""

    @property
    def dtypes(self) -> tuple[str, ...]: ...
    @property
    def moe_layers(self) -> Mapping[int, Any]: ...


# (read, n, k) -> the defect in the numbers of one tensor; "" if there is none.
Defect = Callable[[Read, int, int], str]


@dataclass(frozen=True)
class Encoding:
    """One encoding of a matrix [n, k]. Its bytes are flat uint8 arrays, one for each of `tensors`, in order.

    name        of the numbers ("AMXINT4"); a format may give it another name
    version     raised whenever the bytes change; in every unit's fingerprint
    grid        its codes and scales
    multiple    number of which n and k must be multiples
    tensors     (n, k) -> the tensors, in file order: codes first, scales last
    quantize    (matrix, out): rounds each number by the largest values and stores it, in one pass; raises
                kernels.NonFinite for NaN and Inf
    decode      (stored, n, k, rows) -> the numbers of these rows, float32 [rows, k]
    defects     for each tensor: a function that explains what is wrong with its numbers; None if all bytes are numbers
    is_exact    whether every number of these experts keeps its value
    pack        (codes int8 [n, k], scales as `scales` returns them, out): stores codes that were chosen elsewhere; None
                if the encoding admits only one choice
    scales      (last tensor, n, k) -> the scales: float32, BF16 bits (uint16) or E8M0 bytes (uint8), [n, groups], or
                [n / b, groups] if b rows share them; None if there are none
    error_sums  a kernel that computes the result of the function `error_sums`; None if there is none
    """

    name: str
    version: int
    grid: Grid
    multiple: int
    tensors: Callable[[int, int], tuple[TensorInfo, ...]]
    quantize: Callable[[Matrix, Sequence[Bytes]], None]
    decode: Callable[[Sequence[Bytes], int, int, Rows], F32]
    defects: tuple[Defect | None, ...]
    is_exact: Callable[[SourceExperts], bool] = lambda model: False
    pack: Callable[[I8, Array, Sequence[Bytes]], None] | None = None
    scales: Callable[[Bytes, int, int], Array] | None = None
    error_sums: Callable[[Matrix, Sequence[Bytes]], F64] | None = None


def has_encoding(model: SourceExperts, names: Collection[str], fit: object) -> bool:
    """Return whether all weights have one of these encodings with this `fit`, and no rows alternate."""
    return all(
        weight.encoding.name in names and weight.fit(moe.input_major) == fit
        for moe in model.moe_layers.values()
        for weight in moe.weights.values()
    ) and not any(getattr(moe.style, "interleaved", False) for moe in model.moe_layers.values())


def suffixes(encoding: Encoding) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in encoding.tensors(0, 0))


def explain_size(multiple: int, hidden: int, intermediate: int, numa: int) -> str | None:
    """Explain why rows and columns of NUMA slices are not multiples of `multiple`; return None if they are."""
    if numa < 1:
        return "the number of NUMA slices must be at least 1"
    if hidden % multiple:
        return f"the hidden size {hidden} is not a multiple of {multiple}"
    if intermediate % numa:
        return f"the intermediate size {intermediate} does not divide by {numa}"
    if (intermediate // numa) % multiple:
        size = f"{intermediate}/{numa} = {intermediate // numa}"
        return f"the intermediate size per slice, {size}, is not a multiple of {multiple}"
    return None


def scale_values(encoding: Encoding, last: Bytes, n: int, k: int) -> F32:
    """Return scale_numbers of a matrix [n, k], from the last of its tensors."""
    assert encoding.scales is not None
    return scale_numbers(encoding.scales(last, n, k))


def scale_numbers(scales: Array) -> F32:
    """Return scales in the types of Encoding.scales as float32 numbers."""
    if scales.dtype == np.uint16:
        return bf16_to_f32(scales)
    return e8m0(scales) if scales.dtype == np.uint8 else np.asarray(scales, np.float32)


def is_zero(encoding: Encoding, stored: Sequence[Bytes], n: int, k: int) -> bool:
    if len(set(stored[0][:BEGINNING].tobytes())) > ZERO_BYTES:
        return False
    blocks = (slice(first, min(first + ZERO_ROWS, n)) for first in range(0, n, ZERO_ROWS))
    return not any(encoding.decode(stored, n, k, rows).any() for rows in blocks)


def error_sums(encoding: Encoding, matrix: Matrix, stored: Sequence[Bytes]) -> F64:
    """Return sums of x*x, y*y, x*y and (x-y)^2, float64 [4], with x the source in BF16 and y the stored numbers."""
    if encoding.error_sums is not None:
        return encoding.error_sums(matrix, stored)
    return differences.error_sums(matrix, lambda rows: encoding.decode(stored, *matrix.shape, rows))


def error_bytes(columns: int) -> int:
    """Return the memory in bytes that error_sums needs for a matrix with this many columns: some rows as float64."""
    return differences.ROWS * 64 * columns


def infer_sizes(encoding: Encoding, suffix: str, shape: tuple[int, ...], nbytes: int) -> tuple[int | None, int | None]:
    """Return (n, k) of the matrix of a stored tensor; None for a size that the tensor does not determine."""
    if suffix not in suffixes(encoding):
        return None, None
    unit, at = encoding.multiple, suffixes(encoding).index(suffix)
    one, tall, wide = (encoding.tensors(*size)[at] for size in ((unit, unit), (2 * unit, unit), (unit, 2 * unit)))
    if tall.nbytes != one.nbytes and wide.nbytes == one.nbytes:
        return nbytes * unit // one.nbytes, None  # a number for each row, whatever the shape
    if len(shape) != len(one.shape):
        return None, None
    n = k = None
    for axis, size in enumerate(shape):
        by_rows, by_columns = tall.shape[axis] != one.shape[axis], wide.shape[axis] != one.shape[axis]
        if by_rows and not by_columns:
            n = size * unit // one.shape[axis]
        elif by_columns and not by_rows:
            k = size * unit // one.shape[axis]
    return n, k


def select_rows(stored: Array, n: int, rows: Rows, unpack: Callable[[Array], Array]) -> Array:
    """Return some of n rows of an array [n / b, ...] with b rows per item; `unpack` returns the rows of items."""
    if len(stored) == n:
        return stored[rows]
    if not isinstance(rows, slice):
        return unpack(stored)[rows]
    start, stop, _ = rows.indices(n)
    each = n // len(stored)
    first = start // each
    return unpack(stored[first : -(-stop // each)])[start - first * each : stop - first * each]
