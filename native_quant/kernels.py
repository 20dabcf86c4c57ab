"""The C kernels for NumPy arrays: each function checks its arguments, calls C and raises its errors.

All calls release the GIL and may run in many threads at once. Wrong arguments raise ValueError before C sees them. The
numbers are defined in quantizers/NUMERICS.md and are the same, bit for bit, whatever instruction set is in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import (
    ISAS,
    KERNELS,
    available_isas,
    isa,
    raise_error,
    read_environment,
    set_isa,
)
from ktconvert.native_quant.matrix import KINDS, Matrix, decode, readable, source_of

__all__ = [
    "GEOMETRIES",
    "ISAS",
    "KERNELS",
    "KINDS",
    "ROUNDINGS",
    "Geometry",
    "Matrix",
    "NonFinite",
    "available_isas",
    "convert",
    "decode",
    "dequantize",
    "error_sums",
    "isa",
    "pack_codes",
    "quantize_groups",
    "quantize_pack",
    "set_isa",
]

Array = npt.NDArray[Any]

# How groups round a quotient before it becomes a code: to BF16, as llmcompressor does, or to float32.
ROUNDINGS: dict[str, int] = {"library": lib.KTQ_LIBRARY, "float32": lib.KTQ_FLOAT32}


class Geometry(NamedTuple):
    """What the rows and columns of a packed weight are multiples of."""

    block_rows: int
    tile_columns: int


# By the bits of a code: the table of csrc/geometry.h.
GEOMETRIES: dict[int, Geometry] = {
    bits: Geometry(lib.ktq_block_rows(bits), lib.ktq_tile_columns(bits))
    for bits in range(1, 9)
    if lib.ktq_block_rows(bits)
}


class NonFinite(ValueError):
    """A weight is infinite or not a number; `row` and `column` say which, counted in the caller's array."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"the value at row {row}, column {column} is infinite or not a number")
        self.row = row
        self.column = column


# --- checks ---------------------------------------------------------------------------------------


# These checks run for every expert, so types are looked up here, once.
_BYTES, _FLOATS, _WORDS = (ffi.typeof(t) for t in ("uint8_t[]", "float[]", "uint16_t[]"))
_UINT8, _INT32, _UINT16, _FLOAT32 = (np.dtype(t) for t in (np.uint8, np.int32, np.uint16, np.float32))


def _check_bits(bits: int, n: int, k: int) -> None:
    if bits not in GEOMETRIES:
        raise ValueError(f"bits must be {' or '.join(map(str, GEOMETRIES))}, not {bits}")
    rows, columns = GEOMETRIES[bits]
    if n < 1 or k < 1 or n % rows or k % columns:
        needed = str(rows) if rows == columns else f"{rows} and {columns}"
        raise ValueError(f"{bits}-bit weights need rows and columns in multiples of {needed}, not {n} x {k}")


def _check_packed(bits: int, n: int, k: int, weight: Array, scale: Array, writable: bool) -> tuple[Any, Any]:
    """Pointers to packed weights and scales."""
    _check_bits(bits, n, k)
    _check_array("weight", weight, _UINT8, (n * k * bits // 8,), writable)
    _check_array("scale", scale, _FLOAT32, (n,), writable)
    return ffi.from_buffer(_BYTES, weight), ffi.from_buffer(_FLOATS, scale)


def _check_array(name: str, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...], writable: bool) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name} must be {dtype} of shape {shape}, not {array.dtype} of shape {array.shape}")
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        raise ValueError(f"{name} must be contiguous and aligned")
    if writable and not flags.writeable:
        raise ValueError(f"{name} must be writable")


class _Scratch(threading.local):
    """A buffer per thread that is kept between calls: faulting fresh pages in would cost a tenth of the work."""

    def __init__(self) -> None:
        self.columns = 0
        self.buffer: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.pointer: Any = ffi.NULL

    def get(self, k: int) -> Any:
        """32 * k uint16 (ktq.h), on a cache line of its own."""
        if self.columns < k:
            self.buffer = np.empty(32 * k * 2 + 64, np.uint8)
            self.pointer = ffi.cast("uint16_t *", (self.buffer.ctypes.data + 63) & ~63)
            self.columns = k
        return self.pointer


_scratch = _Scratch()


# --- the kernels ----------------------------------------------------------------------------------


def convert(matrix: Matrix, call: Callable[[int, int, Any, Any], int]) -> None:
    """Calls a kernel, call(n, k, source, bad_row), with a linear as C reads it, and raises its errors: NonFinite says
    where the number lies in the matrix.
    """
    matrix = readable(matrix)
    source, keep = source_of(matrix)
    read_environment()
    bad_row = ffi.new("int64_t *")
    error = call(*matrix.shape, source, bad_row)
    if error == lib.KTQ_ENONFINITE:
        row = bad_row[0]
        raise NonFinite(row, int(np.argmax((decode(matrix.rows(row, row + 1))[0] & 0x7FFF) >= 0x7F80)))
    del keep
    raise_error(error)


def quantize_pack(
    bits: int,
    matrix: Matrix,
    weight: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
) -> None:
    """Quantizes a linear to 4 or 8 bits, one scale per row, in kt-kernel's AMXINT4 or AMXINT8 order.

    weight: uint8 [n*k*bits/8] and scale: float32 [n] are written. NonFinite: a value is infinite or NaN; weight and
    scale are then partly written.
    """

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        packed = _check_packed(bits, n, k, weight, scale, writable=True)
        return lib.ktq_quantize_pack(bits, n, k, source, _scratch.get(k), *packed, bad_row)

    convert(matrix, call)


def pack_codes(bits: int, codes: npt.NDArray[np.int8], weight: npt.NDArray[np.uint8]) -> None:
    """Packs codes that another quantizer chose, in kt-kernel's AMXINT4 or AMXINT8 order.

    codes: int8 [n, k], -7..7 or -127..127, each row contiguous. weight: uint8 [n*k*bits/8] is written. ValueError names
    the first code that is out of range; weight is then partly written.
    """
    if codes.ndim != 2 or codes.dtype != np.int8:
        raise ValueError(f"codes must be int8 [n, k], not {codes.dtype} of shape {codes.shape}")
    (n, k), (row_stride, column_stride) = codes.shape, codes.strides
    _check_bits(bits, n, k)
    if column_stride != 1 or row_stride < 0:
        raise ValueError(f"each row of codes must be contiguous, and none before another, not strides {codes.strides}")
    _check_array("weight", weight, _UINT8, (n * k * bits // 8,), writable=True)
    if np.may_share_memory(codes, weight):
        raise ValueError("codes and weight must not share memory")
    read_environment()
    bad_row = ffi.new("int64_t *")
    first = ffi.cast("int8_t *", codes.__array_interface__["data"][0])
    error = lib.ktq_pack_codes(bits, n, k, first, row_stride, ffi.from_buffer(_BYTES, weight), bad_row)
    if error == lib.KTQ_ERANGE:
        row, largest = codes[bad_row[0]].astype(np.int16), 2 ** (bits - 1) - 1
        column = int(np.argmax(np.abs(row) > largest))
        where = f"row {bad_row[0]}, column {column}"
        raise ValueError(f"the code at {where} is {row[column]}, not in -{largest}..{largest}")
    raise_error(error)


def quantize_groups(
    bits: int,
    matrix: Matrix,
    packed: npt.NDArray[np.int32],
    scale: npt.NDArray[np.uint16],
    *,
    group: int = 128,
    rounding: str = "library",
) -> None:
    """Quantizes a linear to 4 or 8 bits, one BF16 scale per group of columns, in compressed-tensors' packed order.

    n is arbitrary; k is a multiple of the group, and the group of 32. rounding: a key of ROUNDINGS. packed: int32 [n,
    k*bits/32] and scale: uint16 [n, k/group] are written. NonFinite: a value is infinite or NaN; packed and scale are
    then partly written. Equations: NUMERICS.md, section 6.
    """

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {bits}")
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding '{rounding}' is not one of {', '.join(ROUNDINGS)}")
        if group < 32 or group % 32 or k % group:
            raise ValueError(
                f"a group must be a multiple of 32 that divides the columns: {group} does not fit {k} columns"
            )
        _check_array("packed", packed, _INT32, (n, k * bits // 32), writable=True)
        _check_array("scale", scale, _UINT16, (n, k // group), writable=True)
        out = ffi.from_buffer(_BYTES, packed), ffi.from_buffer(_WORDS, scale)
        return lib.ktq_quantize_groups(bits, group, ROUNDINGS[rounding], n, k, source, _scratch.get(k), *out, bad_row)

    convert(matrix, call)


def dequantize(
    bits: int, weight: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32], n: int, k: int
) -> npt.NDArray[np.float32]:
    """The values of packed weights: float32 [n, k]; a code times its scale (INT4: 16 times the code)."""
    packed = _check_packed(bits, n, k, weight, scale, writable=False)
    out = np.empty((n, k), np.float32)
    raise_error(lib.ktq_dequantize(bits, n, k, *packed, ffi.from_buffer(_FLOATS, out)))
    return out


def error_sums(
    bits: int,
    matrix: Matrix,
    weight: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
) -> tuple[float, float, float, float]:
    """How far packed weights are from their source: sums of x*x, y*y, x*y and (x-y)*(x-y), in float64.

    x is the source as BF16, y the dequantized weight. From them: relative error sqrt(dd/xx), cosine xy/sqrt(xx*yy).
    The order of the additions is fixed, so the sums are the same with every instruction set.
    """
    sums = ffi.new("double[4]")

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        packed = _check_packed(bits, n, k, weight, scale, writable=False)
        return lib.ktq_error_sums(bits, n, k, source, _scratch.get(k), *packed, sums)

    convert(matrix, call)
    return sums[0], sums[1], sums[2], sums[3]


# --- scales of least squared error -----------------------------------------------------------------


LANES = 64  # what k is a multiple of


def search_scales(
    bits: int, bf16: npt.NDArray[np.uint16], importance: npt.NDArray[np.float32] | None = None
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Codes int8 [n, k] (4 bits: -7..7, 8 bits: -127..127) and scales float32 [n] of least squared error.

    bf16: bits of BF16 values, uint16 [n, k], each row contiguous, at any address; k: a multiple of 64. importance: how
    much a squared error counts in each column, float32 [k], finite, none negative; None: all alike. NonFinite: a value
    is infinite or NaN. Equations: NUMERICS.md, section 2b.
    """
    if bits not in GEOMETRIES:
        raise ValueError(f"bits must be {' or '.join(map(str, GEOMETRIES))}, not {bits}")
    if bf16.ndim != 2 or bf16.dtype != np.uint16 or 0 in bf16.shape or bf16.shape[1] % LANES:
        raise ValueError(f"values must be uint16 [n, multiple of {LANES}], not {bf16.dtype} of shape {bf16.shape}")
    (n, k), (row_stride, column_stride) = bf16.shape, bf16.strides
    if column_stride != 2:
        raise ValueError(f"each row of values must be contiguous, not strides {bf16.strides}")
    weights = ffi.NULL
    if importance is not None:
        if importance.shape != (k,) or importance.dtype != np.float32:
            raise ValueError(f"importance must be float32 [{k}], not {importance.dtype} of shape {importance.shape}")
        importance = np.ascontiguousarray(importance)
        if not (importance >= 0).all() or not np.isfinite(importance).all():
            raise ValueError("importance must be finite, and nowhere negative")
        weights = ffi.from_buffer("float[]", importance)
    read_environment()
    codes, scale, bad_row = np.empty((n, k), np.int8), np.empty(n, np.float32), ffi.new("int64_t *")
    rows = ffi.cast("uint8_t *", bf16.__array_interface__["data"][0])
    scratch = ffi.cast("float *", _scratch.get(k))
    out = ffi.from_buffer("int8_t[]", codes), ffi.from_buffer("float[]", scale)
    error = lib.ktq_search_scales(bits, n, k, rows, row_stride, weights, scratch, *out, bad_row)
    if error == lib.KTQ_ENONFINITE:
        row = int(bad_row[0])
        raise NonFinite(row, int(np.argmax((bf16[row] & 0x7FFF) >= 0x7F80)))
    raise_error(error)
    return codes, scale
