"""Packers of floating-point weights in panels of 32 rows (FORMAT.md, Panels), for NumPy arrays: kernels like those of
kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error, read_environment
from ktconvert.native_quant.kernels import NonFinite, _check_array, _scratch, convert
from ktconvert.native_quant.matrix import Matrix

PANEL_ROWS = 32
# What n and k of a part are multiples of.
BF16_MULTIPLE: int = lib.KTQ_BF16_MULTIPLE
MXFP4_MULTIPLE: int = lib.KTQ_MXFP4_MULTIPLE
FP8_MULTIPLE: int = lib.KTQ_FP8_MULTIPLE


def check_size(multiple: int, n: int, k: int) -> None:
    """Raises ValueError unless n and k are multiples of `multiple`."""
    if n < 1 or k < 1 or n % multiple or k % multiple:
        raise ValueError(f"rows and columns must be multiples of {multiple}, not {n} x {k}")


def _order(name: str, codes: npt.NDArray[Any], dtype: np.dtype[Any], n: int, k: int) -> int:
    """The order of codes by their shape: panels, or rows. Raises ValueError for codes that are neither."""
    rows = codes.shape == (n, k)
    _check_array(name, codes, dtype, (n, k) if rows else (n // PANEL_ROWS, PANEL_ROWS * k), writable=True)
    return lib.KTQ_ROWS if rows else lib.KTQ_PANELS


def pack_bf16(matrix: Matrix, codes: npt.NDArray[np.uint16]) -> None:
    """A linear as BF16, in the order of panels, row after row, or in kt-kernel's blocks (panels.to_blocks).

    n and k: multiples of BF16_MULTIPLE. codes: uint16 [n/32, 32*k] (panels), [n, k] (rows) or [n*k] (blocks) is
    written. NonFinite: a value is infinite or NaN; codes are then partly written.
    """

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        check_size(BF16_MULTIPLE, n, k)
        if codes.ndim == 1:
            _check_array("codes", codes, np.dtype(np.uint16), (n * k,), writable=True)
        order = lib.KTQ_BLOCKS if codes.ndim == 1 else _order("codes", codes, np.dtype(np.uint16), n, k)
        out = ffi.from_buffer("uint16_t[]", codes)
        return lib.ktq_pack_bf16(order, n, k, source, _scratch.get(k), out, bad_row)

    convert(matrix, call)


def pack_mxfp4(matrix: Matrix, codes: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8]) -> None:
    """Puts a linear, as MXFP4, into the order of panels. Equations: NUMERICS.md, section 9.

    A linear that has E2M1 codes and an E8M0 scale for each 32 columns keeps them. n and k: multiples of 32 (those that
    are multiplied: of MXFP4_MULTIPLE).
    codes: uint8 [n/32, 16*k] and exponents: uint8 [n/32, k] are written. NonFinite: a value is infinite or NaN; what is
    written means nothing then.
    """

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        check_size(PANEL_ROWS, n, k)
        _check_array("codes", codes, np.dtype(np.uint8), (n // PANEL_ROWS, PANEL_ROWS * k // 2), writable=True)
        _check_array("exponents", exponents, np.dtype(np.uint8), (n // PANEL_ROWS, k), writable=True)
        out = ffi.from_buffer("uint8_t[]", codes), ffi.from_buffer("uint8_t[]", exponents)
        return lib.ktq_pack_mxfp4(n, k, source, _scratch.get(k), *out, bad_row)

    convert(matrix, call)


def mxfp4_rows(
    codes: npt.NDArray[np.uint8],
    exponents: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.uint8],
    row_exponents: npt.NDArray[np.uint8],
) -> None:
    """Puts MXFP4 in panels, as pack_mxfp4 writes it, into the order of rows.

    rows: uint8 [n, k/2], the even column in the lower half of a byte, and row_exponents: uint8 [n, k/32], are written.
    """
    n, k = rows.shape[0], 2 * rows.shape[1]
    check_size(PANEL_ROWS, n, k)
    arrays = (
        (codes, (n // PANEL_ROWS, PANEL_ROWS * k // 2)),
        (exponents, (n // PANEL_ROWS, k)),
        (rows, (n, k // 2)),
        (row_exponents, (n, k // PANEL_ROWS)),
    )
    for array, shape in arrays:
        _check_array("each array", array, np.dtype(np.uint8), shape, writable=array is rows or array is row_exponents)
    raise_error(lib.ktq_mxfp4_rows(n, k, *(ffi.from_buffer("uint8_t[]", array) for array, _ in arrays)))


def pack_fp8(matrix: Matrix, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> None:
    """A linear as FP8 E4M3 with a scale for each block of 128 x 128, in the order of panels or row after row.

    A linear that is FP8 in such blocks keeps its codes and scales. n and k: multiples of FP8_MULTIPLE. codes: uint8
    [n/32, 32*k] (panels) or [n, k], and scales: float32 [n/128, k/128], are written. NonFinite: a value is infinite or
    NaN; codes and scales are then partly written.
    """

    def call(n: int, k: int, source: Any, bad_row: Any) -> int:
        check_size(FP8_MULTIPLE, n, k)
        order = _order("codes", codes, np.dtype(np.uint8), n, k)
        blocks = (n // FP8_MULTIPLE, k // FP8_MULTIPLE)
        _check_array("scales", scales, np.dtype(np.float32), blocks, writable=True)
        scratch = _scratch.get(FP8_MULTIPLE // PANEL_ROWS * k)
        out = ffi.from_buffer("uint8_t[]", codes), ffi.from_buffer("float[]", scales)
        return lib.ktq_pack_fp8(order, n, k, source, scratch, *out, bad_row)

    convert(matrix, call)


def reorder_fp8(values: npt.NDArray[np.uint8], codes: npt.NDArray[np.uint8]) -> None:
    """Puts codes of FP8 E4M3, uint8 [n, k] with contiguous rows, into the order of panels.

    n and k: multiples of 32. codes: uint8 [n/32, 32*k] is written. NonFinite: a code is NaN; nothing is written then.
    """
    n, k = values.shape
    check_size(PANEL_ROWS, n, k)
    if values.dtype != np.uint8 or values.strides[1] != 1 or values.strides[0] < k:
        raise ValueError(f"codes must be uint8 with contiguous rows, not {values.dtype} with strides {values.strides}")
    _check_array("codes", codes, np.dtype(np.uint8), (n // PANEL_ROWS, PANEL_ROWS * k), writable=True)
    read_environment()
    bad_row = ffi.new("int64_t *")
    rows = ffi.cast("uint8_t *", values.__array_interface__["data"][0])
    error = lib.ktq_reorder_fp8(n, k, rows, values.strides[0], ffi.from_buffer("uint8_t[]", codes), bad_row)
    if error == lib.KTQ_ENONFINITE:
        raise NonFinite(bad_row[0], int(np.argmax(values[bad_row[0]] & 0x7F == 0x7F)))
    raise_error(error)
