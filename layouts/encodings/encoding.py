"""Encodings that ktconvert writes: how one matrix [n, k] is stored as bytes, and functions for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, F64, I8, Array
from ktconvert.native_quant.arrays import Bytes as Bytes
from ktconvert.quantizers import Grid, Matrix, differences
from ktconvert.quantizers.reference import bf16_to_f32, e8m0_to_f32

RowSelection = slice | npt.NDArray[np.intp]

BIAS = "bias"  # suffix of the tensor of biases
ZERO_ROWS = 32  # rows to decode at a time, until a number is not zero
# A matrix of zeros has codes of 0 and -0 only, so its code bytes have at most 4 values (each holds up to two codes).
# More values in the first PROBED_BYTES bytes prove, without decoding, that the matrix is not zero.
ZERO_BYTE_VALUES = 4
PROBED_BYTES = 256


class TensorReader(Protocol):
    """Reader of the stored tensors of one matrix."""

    def __call__(self, tensor: int, start: int = 0, stop: int | None = None) -> Bytes:
        """Return bytes start..stop-1 of a tensor; by default all of them.

        tensor  its index in Encoding.tensors
        """


class SourceExperts(Protocol):
    """The properties of MoeModel that encodings use.

    dtypes      names of the encodings of its experts
    moe_layers  layer number -> MoeLayer
    """

    @property
    def dtypes(self) -> tuple[str, ...]: ...
    @property
    def moe_layers(self) -> Mapping[int, Any]: ...


# (read, n, k) -> the defect in the numbers of one tensor of a matrix [n, k]; "" if there is none.
DefectCheck = Callable[[TensorReader, int, int], str]


@dataclass(frozen=True)
class Encoding:
    """One encoding of a matrix [n, k]. Its bytes are flat uint8 arrays, one for each of `tensors`, in order.

    name           name of the encoding ("AMXINT4"); a format may have a different name
    version        version of the bytes, in every unit's fingerprint; raised whenever they change
    grid           codes and scales of the encoding
    multiple       number of which n and k must be multiples
    tensors        (n, k) -> the tensors, in file order: codes first, scales last
    quantize       (matrix, out): rounds each number, with scales by the largest values, and stores it, in one pass;
                   raises kernels.NonFinite for NaN and Inf
    decode         (stored, n, k, rows) -> the numbers of these rows, float32 [rows, k]
    defect_checks  for each tensor the check that finds a defect in its numbers; None if all bytes are valid numbers
    is_exact       whether every number of these experts keeps its value
    pack           (codes int8 [n, k], scales as `unpack_scales` returns them, out): stores codes that a quantizer
                   chose; None if the encoding admits only one choice
    unpack_scales  (bytes of the tensor of scales, n, k) -> the scales: float32, BF16 bits (uint16) or E8M0 bytes
                   (uint8), [n, groups], or [n / b, groups] if b rows share them; None if there are no scales
    error_sums     kernel that computes the same as the function `error_sums`; None if there is none
    without_bias   the same encoding without biases, if this one has a bias for each row as last tensor (with_bias)
    """

    name: str
    version: int
    grid: Grid
    multiple: int
    tensors: Callable[[int, int], tuple[TensorInfo, ...]]
    quantize: Callable[[Matrix, Sequence[Bytes]], None]
    decode: Callable[[Sequence[Bytes], int, int, RowSelection], F32]
    defect_checks: tuple[DefectCheck | None, ...]
    is_exact: Callable[[SourceExperts], bool] = lambda model: False
    pack: Callable[[I8, Array, Sequence[Bytes]], None] | None = None
    unpack_scales: Callable[[Bytes, int, int], Array] | None = None
    error_sums: Callable[[Matrix, Sequence[Bytes]], F64] | None = None
    without_bias: Encoding | None = None

    @property
    def scale_index(self) -> int:
        """Index of the tensor of scales, if there are any."""
        return len(self.defect_checks) - (1 if self.without_bias is None else 2)


@functools.cache
def with_bias(encoding: Encoding) -> Encoding:
    """Return an encoding that also stores a bias for each row, F32 [n], after all other tensors.

    Its functions neither read nor write the biases, except the check for defects.
    """
    count = len(tensor_suffixes(encoding))
    pack, sums = encoding.pack, encoding.error_sums

    def tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
        return *encoding.tensors(n, k), TensorInfo(BIAS, "F32", (n,), 4 * n)

    def find_bad_bias(read: TensorReader, n: int, k: int) -> str:
        biases = read(count).view("<f4")
        row = int(np.argmin(np.isfinite(biases)))
        return "" if np.isfinite(biases[row]) else f"the bias of row {row} is {biases[row]}"

    return replace(
        encoding,
        tensors=tensors,
        quantize=lambda matrix, out: encoding.quantize(matrix, out[:count]),
        decode=lambda stored, n, k, rows: encoding.decode(stored[:count], n, k, rows),
        defect_checks=(*encoding.defect_checks, find_bad_bias),
        pack=None if pack is None else lambda codes, scales, out: pack(codes, scales, out[:count]),
        error_sums=None if sums is None else lambda matrix, stored: sums(matrix, stored[:count]),
        without_bias=encoding,
    )


def has_encoding(model: SourceExperts, names: Collection[str], scheme: object) -> bool:
    """Return whether all weights have one of these encodings and this scheme, and no gate and up rows alternate.

    scheme  a result of CheckpointEncoding.resolve_scheme
    """
    return all(
        weight.encoding.name in names and weight.resolve_scheme(moe.input_major) == scheme
        for moe in model.moe_layers.values()
        for weight in moe.kinds.values()
    ) and not any(getattr(moe.style, "interleaved", False) for moe in model.moe_layers.values())


def tensor_suffixes(encoding: Encoding) -> tuple[str, ...]:
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


def unpack_float_scales(encoding: Encoding, scale_bytes: Bytes, n: int, k: int) -> F32:
    """Return the scales of a matrix [n, k] as float32 numbers, from the tensor of scales."""
    assert encoding.unpack_scales is not None
    return scales_to_f32(encoding.unpack_scales(scale_bytes, n, k))


def scales_to_f32(scales: Array) -> F32:
    """Return scales in the types of Encoding.unpack_scales as float32 numbers."""
    if scales.dtype == np.uint16:
        return bf16_to_f32(scales)
    return e8m0_to_f32(scales) if scales.dtype == np.uint8 else np.asarray(scales, np.float32)


def is_zero(encoding: Encoding, stored: Sequence[Bytes], n: int, k: int) -> bool:
    if len(set(stored[0][:PROBED_BYTES].tobytes())) > ZERO_BYTE_VALUES:
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
    suffixes = tensor_suffixes(encoding)
    if suffix not in suffixes:
        return None, None
    index = suffixes.index(suffix)
    # Compare the tensor of the smallest matrix with those of matrices of twice the rows and twice the columns.
    multiple = encoding.multiple
    smallest = encoding.tensors(multiple, multiple)[index]
    tall = encoding.tensors(2 * multiple, multiple)[index]
    wide = encoding.tensors(multiple, 2 * multiple)[index]
    if tall.nbytes != smallest.nbytes and wide.nbytes == smallest.nbytes:
        return nbytes * multiple // smallest.nbytes, None  # a number for each row, whatever the shape
    if len(shape) != len(smallest.shape):
        return None, None
    n = k = None
    for axis, size in enumerate(shape):
        depends_on_rows = tall.shape[axis] != smallest.shape[axis]
        depends_on_columns = wide.shape[axis] != smallest.shape[axis]
        if depends_on_rows and not depends_on_columns:
            n = size * multiple // smallest.shape[axis]
        elif depends_on_columns and not depends_on_rows:
            k = size * multiple // smallest.shape[axis]
    return n, k


def select_rows(stored: Array, n: int, rows: RowSelection, unpack: Callable[[Array], Array]) -> Array:
    """Return some of the n rows of an array [n / b, ...] that holds b rows in each item.

    unpack  (items) -> their rows, in order
    """
    if len(stored) == n:
        return stored[rows]
    if not isinstance(rows, slice):
        return unpack(stored)[rows]
    start, stop, _ = rows.indices(n)
    item_rows = n // len(stored)
    first_item = start // item_rows
    first_row = first_item * item_rows
    items = stored[first_item : -(-stop // item_rows)]
    return unpack(items)[start - first_row : stop - first_row]
