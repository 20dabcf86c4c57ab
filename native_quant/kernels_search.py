"""Scales of least squared error for NumPy arrays: a kernel like those of kernels.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error, read_environment
from ktconvert.native_quant.kernels import GEOMETRIES, NonFinite, _scratch

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
