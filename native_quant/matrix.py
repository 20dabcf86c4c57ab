"""A linear as a checkpoint stores it: its encoding, slicing, and decoding to BF16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.arrays import F32 as Floats
from ktconvert.native_quant.arrays import I32, U16, Array
from ktconvert.native_quant.instruction_sets import raise_error, read_environment

DECODED_COLUMNS = 1 << 20  # columns per step of a decoder in Python: 4 MiB of float32


@dataclass(frozen=True)
class Kind:
    """Encoding of the items of a stored row. All are decoded to BF16, rounded to nearest even.

    Equations: numerics.md, section 1.

    name     name of the definition in quantizers/reference.py
    dtype    NumPy type of an item
    number   constant of ktq.h; None: C cannot decode the kind, and `decode` does
    scaled   whether values are multiplied by scales
    columns  columns of a block
    items    items that store a block
    rows     rows of one column that an item stores
    by_rows  whether C requires that the columns of a row are contiguous
    decode   function that decodes a few rows of a Matrix to float32 [n, k]; only if `number` is None
    """

    name: str
    dtype: np.dtype[Any]
    number: int | None = None
    scaled: bool = False
    columns: int = 1
    items: int = 1
    rows: int = 1
    by_rows: bool = False
    decode: Callable[[Matrix], Floats] | None = None

    @property
    def can_transpose(self) -> bool:
        """True if C also reads it transposed, that is with either axis contiguous."""
        return self.number is not None and self.columns == self.items == self.rows == 1 and not self.by_rows


@dataclass(frozen=True)
class Matrix:
    """A linear [n out_features, k in_features] in its stored encoding; a view that copies nothing.

    An item is the array element in which codes are stored, such as a byte or a 32-bit word. A storage block is the
    smallest number of columns that fill whole items: 1 for BF16, 2 for INT4, 256 for Q4_K (see Kind). N and K are the
    sizes of the whole stored linear, of which this may be a slice.

    values         2-D array of items. [n, k] if a storage block is one column; one of the axes must be contiguous, so a
                   transposed view is possible. Otherwise [n, items] with all storage blocks of a row, or, if an item
                   stores several rows, [items, k]
    scales         float32 [ceil(N / block[0]), ceil(K / block[1])], of the whole linear; None: no scales
    block          rows and columns that share a scale
    origin         row and column of element [0, 0] in the whole linear, which select its scales
    skip           columns of each row's first storage block that do not belong to the slice (rows of the first item)
    width          k, if the last storage block has more columns; None: all its columns
    height         n, if the last item has more rows; None: all its rows
    zeros          only for integers: zero points, float32 in the shape of scales; None: 2^(bits-1)
    column_groups  int32 [K]: the column of `scales` for each column of the whole linear; None: determined by `block`
    """

    values: Array
    kind: Kind
    scales: Floats | None = None
    block: tuple[int, int] = (1, 1)
    origin: tuple[int, int] = (0, 0)
    skip: int = 0
    width: int | None = None
    height: int | None = None
    zeros: Floats | None = None
    column_groups: I32 | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k): out_features, in_features."""
        n, items = self.values.shape
        if self.kind.rows > 1:
            return (n * self.kind.rows - self.skip if self.height is None else self.height), items
        if self.width is not None:
            return n, self.width
        return n, items // self.kind.items * self.kind.columns - self.skip

    def rows(self, start: int, stop: int) -> Matrix:
        """Return the linear's rows start..stop-1."""
        origin = (self.origin[0] + start, self.origin[1])
        item_rows = self.kind.rows
        if item_rows == 1:
            return replace(self, values=self.values[start:stop], origin=origin)
        first = (self.skip + start) // item_rows
        last = -(-(self.skip + stop) // item_rows)
        skip = self.skip + start - first * item_rows
        return replace(self, values=self.values[first:last], origin=origin, skip=skip, height=stop - start)

    def columns(self, start: int, stop: int) -> Matrix:
        """Return the linear's columns start..stop-1."""
        origin = self.origin[0], self.origin[1] + start
        block_columns, items = self.kind.columns, self.kind.items
        if block_columns == items == 1:
            return replace(self, values=self.values[:, start:stop], origin=origin)
        first = (self.skip + start) // block_columns
        last = -(-(self.skip + stop) // block_columns)
        values = self.values[:, first * items : last * items]
        skip = self.skip + start - first * block_columns
        return replace(self, values=values, origin=origin, skip=skip, width=stop - start)

    def alternate_rows(self, first: int) -> Matrix:
        """Return the rows first, first + 2, and so on; scales become one per row. Copies a transposed matrix."""
        if self.kind.dtype == np.uint32:  # words of a column are contiguous, or store several rows
            return Matrix(decode(self)[first::2], BF16)
        values = self.values[first::2]
        if self.values.strides[1] != self.values.itemsize:  # neither axis of every second row is contiguous
            values = np.ascontiguousarray(values)
        if self.scales is None:
            return replace(self, values=values)

        def per_row(grid: Floats) -> Floats:
            rows = np.repeat(grid, self.block[0], axis=0)[self.origin[0] :][: len(self.values)]
            return np.ascontiguousarray(rows[first::2])

        zeros = None if self.zeros is None else per_row(self.zeros)
        block, origin = (1, self.block[1]), (0, self.origin[1])
        return replace(self, values=values, scales=per_row(self.scales), zeros=zeros, block=block, origin=origin)

    @property
    def T(self) -> Matrix:
        """The transposed linear: a view where C reads both orientations of the kind, else decoded to BF16."""
        if not self.kind.can_transpose:
            return Matrix(decode(self).T, BF16, origin=self.origin[::-1])
        scales = None if self.scales is None else np.ascontiguousarray(self.scales.T)
        return Matrix(self.values.T, self.kind, scales, self.block[::-1], self.origin[::-1])

    def element_scales(self) -> Floats:
        """Return the scale of every element: float32 [n, k]."""
        assert self.scales is not None, self.kind
        return self._expand(self.scales)

    def element_zeros(self) -> Floats | None:
        """Return the zero point of every element: float32 [n, k]; None if all are 2^(bits-1)."""
        return None if self.zeros is None else self._expand(self.zeros)

    def _expand(self, grid: Floats) -> Floats:
        (n, k), (row, column), (rows, columns) = self.shape, self.origin, self.block
        at = (
            (column + np.arange(k)) // columns
            if self.column_groups is None
            else self.column_groups[column : column + k]
        )
        return cast("Floats", grid[np.ix_((row + np.arange(n)) // rows, at)])


BF16 = Kind("bf16", np.dtype(np.uint16), lib.KTQ_BF16)
FP16 = Kind("fp16", np.dtype(np.uint16), lib.KTQ_FP16)
F32 = Kind("f32", np.dtype(np.float32), lib.KTQ_F32)
FP8_E4M3 = Kind("fp8_e4m3", np.dtype(np.uint8), lib.KTQ_FP8_E4M3, scaled=True)
# An integer of b bits is stored as code + 2^(b-1). With 4 bits, the even column is in the lower half of a byte.
INT4 = Kind("int4", np.dtype(np.uint8), lib.KTQ_INT4, scaled=True, columns=2, by_rows=True)
FP4_E2M1 = Kind("fp4_e2m1", np.dtype(np.uint8), lib.KTQ_FP4_E2M1, scaled=True, columns=2, by_rows=True)
INT8 = Kind("int8", np.dtype(np.uint8), lib.KTQ_INT8, scaled=True, by_rows=True)
INT8_SIGNED = Kind("int8_signed", np.dtype(np.uint8), lib.KTQ_INT8_SIGNED, scaled=True, by_rows=True)
# The same codes in 32-bit words, low bits first; words need not be contiguous: GPTQ's [k*b/32, n] transposed.
INT4_WORDS = Kind("int4_words", np.dtype(np.uint32), lib.KTQ_INT4, scaled=True, columns=8)
INT8_WORDS = Kind("int8_words", np.dtype(np.uint32), lib.KTQ_INT8, scaled=True, columns=4)
# A word holds 8 rows of a column, in the order 0 2 4 6 1 3 5 7: AWQ's [k, n/8] transposed.
INT4_AWQ = Kind("int4_awq", np.dtype(np.uint32), lib.KTQ_INT4_AWQ, scaled=True, rows=8)
# Blocks of ggml: columns and bytes.
Q4_0 = Kind("q4_0", np.dtype(np.uint8), lib.KTQ_Q4_0, columns=32, items=18, by_rows=True)
Q8_0 = Kind("q8_0", np.dtype(np.uint8), lib.KTQ_Q8_0, columns=32, items=34, by_rows=True)
Q4_K = Kind("q4_k", np.dtype(np.uint8), lib.KTQ_Q4_K, columns=256, items=144, by_rows=True)
Q5_K = Kind("q5_k", np.dtype(np.uint8), lib.KTQ_Q5_K, columns=256, items=176, by_rows=True)
Q6_K = Kind("q6_k", np.dtype(np.uint8), lib.KTQ_Q6_K, columns=256, items=210, by_rows=True)
GGML_MXFP4 = Kind("ggml_mxfp4", np.dtype(np.uint8), lib.KTQ_GGML_MXFP4, columns=32, items=17, by_rows=True)
GGML = {"Q4_0": Q4_0, "Q8_0": Q8_0, "Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K, "MXFP4": GGML_MXFP4}  # ggml's names
# One kind for each encoding that C decodes.
KINDS = {kind.name: kind for kind in (BF16, FP16, F32, FP8_E4M3, INT4, INT8, FP4_E2M1, *GGML.values())}
INTEGERS = (INT4, INT8, INT8_SIGNED, INT4_WORDS, INT8_WORDS, INT4_AWQ)


def decode(matrix: Matrix) -> U16:
    """Decode a linear to BF16 bits: uint16 [n, k], rounded to nearest even. Raises ValueError for a bad matrix."""
    n, k = matrix.shape
    out = np.empty((n, k), np.uint16)
    if matrix.kind.decode is None:
        _decode(matrix, out)
    else:
        step = max(1, DECODED_COLUMNS // max(1, k))
        for first in range(0, n, step):
            rows = matrix.rows(first, min(first + step, n))
            _decode(Matrix(matrix.kind.decode(rows), F32), out[first : first + step])
    return out


def bf16_rows(matrix: Matrix) -> U16:
    """Return BF16 bits as `decode` does, but as a view, at any address, if BF16 is stored row by row."""
    as_stored = matrix.kind is BF16 and matrix.values.strides[1] == matrix.values.itemsize
    return matrix.values if as_stored else decode(matrix)


def _decode(matrix: Matrix, out: U16) -> None:
    source, keep = c_source(matrix)
    read_environment()
    raise_error(lib.ktq_decode(*matrix.shape, source, ffi.from_buffer("uint16_t[]", out)))
    del keep


def to_c_readable(matrix: Matrix) -> Matrix:
    """Return the matrix itself if C reads its kind, else decode it to BF16."""
    return matrix if matrix.kind.number is not None else Matrix(decode(matrix), BF16, origin=matrix.origin)


# A source is created for every slice of every expert, so its types are looked up once.
_VOID, _SOURCE = (ffi.typeof(t) for t in ("void *", "ktq_source *"))


def c_source(matrix: Matrix) -> tuple[Any, Any]:
    """Return the C struct of a linear whose kind C reads, and the objects besides `values` that it points to."""
    values, kind = matrix.values, matrix.kind
    if kind.number is None:
        raise ValueError(f"{kind.name} values must be decoded first")
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"values must have two dimensions, neither of them 0, not shape {values.shape}")
    if values.dtype != kind.dtype:
        raise ValueError(f"{kind.name} values must be {kind.dtype} in this machine's byte order, not {values.dtype!r}")
    n, k = matrix.shape
    if kind.rows > 1:
        stored = values.shape[0] * kind.rows
        needed = n
        axis = "rows"
    else:
        stored = values.shape[1] // kind.items * kind.columns
        needed = k
        axis = "columns"
    if values.shape[1] % kind.items or needed < 1 or matrix.skip < 0 or matrix.skip + needed > stored:
        raise ValueError(f"values of shape {values.shape} hold {stored} {axis}, not {needed} after {matrix.skip}")
    (row_stride, column_stride), item = values.strides, kind.dtype.itemsize
    # NumPy may give any stride to an axis of length 1.
    row_stride = row_stride if values.shape[0] > 1 else item
    column_stride = column_stride if values.shape[1] > 1 else item
    can_transpose = kind.items == kind.rows == 1 and not kind.by_rows
    if item not in (
        (row_stride, column_stride) if can_transpose else (row_stride if kind.rows > 1 else column_stride,)
    ):
        raise ValueError(f"one axis of values must be contiguous, not strides {values.strides}")
    if row_stride < 0 or column_stride < 0:
        raise ValueError(f"values must not run backwards, as strides {values.strides} do")

    source = (kind.number, _address(values), row_stride, column_stride)
    if not kind.scaled:
        if any(array is not None for array in (matrix.scales, matrix.zeros, matrix.column_groups)):
            raise ValueError(f"{kind.name} values have no scales of their own")
        return ffi.new(_SOURCE, (*source, ffi.NULL, *[0] * 5, matrix.skip)), None
    scales, zeros, column_groups = _check_scales(matrix)
    grid = (_address(scales), scales.shape[1], *matrix.block, *matrix.origin)
    optional = (ffi.NULL if array is None else _address(array) for array in (zeros, column_groups))
    return ffi.new(_SOURCE, (*source, *grid, matrix.skip, *optional)), (scales, zeros, column_groups)


def _check_scales(matrix: Matrix) -> tuple[Floats, Any, Any]:
    """Return scales, zero points and column groups as contiguous arrays. Raises ValueError for inconsistent ones."""
    name = matrix.kind.name
    shape = matrix.shape
    scales = matrix.scales
    block = matrix.block
    origin = matrix.origin
    if scales is None or scales.ndim != 2 or scales.dtype != np.float32:
        raise ValueError(f"{name} values need float32 scales with two dimensions")
    if min(block) < 1 or min(origin) < 0 or max(*block, *origin) >= 2**31:
        raise ValueError(f"block {block} and origin {origin} are out of range")
    zeros, column_groups = matrix.zeros, matrix.column_groups
    if matrix.kind not in INTEGERS and (zeros is not None or column_groups is not None):
        raise ValueError(f"{name} values have no zero points, and no groups but blocks")
    if zeros is not None and (zeros.dtype != np.float32 or zeros.shape != scales.shape):
        raise ValueError(f"zero points must be float32 of shape {scales.shape}, as the scales")
    last = [(start + size - 1) // step for size, start, step in zip(shape, origin, block, strict=True)]
    if column_groups is not None:
        groups = column_groups[origin[1] : origin[1] + shape[1]]
        if column_groups.ndim != 1 or column_groups.dtype != np.int32 or len(groups) != shape[1] or groups.min() < 0:
            raise ValueError("the group of each column must be an int32, 0 or more")
        last[1] = int(groups.max())
    if any(index >= count for index, count in zip(last, scales.shape, strict=True)):
        raise ValueError(f"scales of shape {scales.shape} do not cover {shape} at {origin} in blocks of {block}")
    arrays = (a if a is None else np.require(a, requirements=["C", "A"]) for a in (scales, zeros, column_groups))
    return tuple(arrays)  # type: ignore[return-value]


def _address(array: Array) -> Any:
    """Return the address of the first element, for any strides (ffi.from_buffer accepts only contiguous arrays)."""
    return ffi.cast(_VOID, array.__array_interface__["data"][0])
