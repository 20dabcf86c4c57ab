"""C kernels that search for scales of least squared error, for NumPy arrays.

As in kernels.py, each function checks its arguments, calls C and raises its errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.arrays import F32, I8, U16, Array
from ktconvert.native_quant.kernels import call_kernel, require_bits, scratch_buffer

ROW_MULTIPLE = 64  # k of search_scales is a multiple of it


def search_scales(bits: int, bf16: U16, importance: F32 | None = None) -> tuple[I8, F32]:
    """Return codes int8 [n, k] (4 bits: -7..7, 8 bits: -127..127) and scales float32 [n] of least squared error.

    bf16        bits of BF16 values, uint16 [n, k], each row contiguous, at any address; k is a multiple of 64
    importance  weight of a squared error in each column, float32 [k], finite, not negative; or second moments, float32
                [k, k], symmetric, finite, with these weights on the diagonal; None: equal weights
    Raises NonFinite. Equations: numerics.md, sections 2b and 2e.
    """
    require_bits(bits)
    scale = np.empty(len(bf16), np.float32)
    out = ffi.from_buffer("float[]", scale)
    return _search(lib.ktq_search_scales, bits, ROW_MULTIPLE, bf16, importance, out), scale


# Grids with a scale for each SEARCHED_GROUP columns: name -> (number in C, dtype of the stored scales).
SEARCHED_GROUPS: dict[str, tuple[int, type[np.unsignedinteger[Any]]]] = {
    "mxfp4": (lib.KTQ_GROUPS_MXFP4, np.uint8),
    "rawint4": (lib.KTQ_GROUPS_RAWINT4, np.uint16),
}
SEARCHED_GROUP = 32


def search_groups(grid: str, bf16: U16, importance: F32 | None = None) -> tuple[I8, Array]:
    """Return codes int8 [n, k] and scales [n, k/32] of least squared error for a grid of SEARCHED_GROUPS.

    bf16, importance and NonFinite are as for search_scales, but k is a multiple of 32. Equations: numerics.md, sections
    2d and 2e.
    """
    number, dtype = SEARCHED_GROUPS[grid]
    n, k = bf16.shape if bf16.ndim == 2 else (0, 0)
    scales = np.empty((n, k // SEARCHED_GROUP), dtype)
    out = SEARCHED_GROUP, bf16, importance, ffi.from_buffer("uint8_t[]", scales)
    return _search(lib.ktq_search_groups, number, *out), scales


def _search(kernel: Callable[..., int], grid: int, multiple: int, bf16: U16, importance: F32 | None, scales: Any) -> I8:
    """Run a search, which writes the scales, and return the codes. Raises ValueError for wrong arguments.

    grid: number of bits, or the number of a grid in C.
    """
    if bf16.ndim != 2 or bf16.dtype != np.uint16 or 0 in bf16.shape or bf16.shape[1] % multiple:
        raise ValueError(f"values must be uint16 [n, multiple of {multiple}], not {bf16.dtype} of shape {bf16.shape}")
    (n, k), (row_stride, column_stride) = bf16.shape, bf16.strides
    if column_stride != 2:
        raise ValueError(f"each row of values must be contiguous, not strides {bf16.strides}")
    weights = ffi.NULL
    moments = ffi.NULL
    moments_stride = 0
    vectors = ffi.NULL
    if importance is not None:
        actual = f"{importance.dtype} of shape {importance.shape}"
        stride = importance.strides
        if importance.shape not in ((k,), (k, k)) or importance.dtype != np.float32:
            raise ValueError(f"importance must be float32 [{k}] or [{k}, {k}], not {actual}")
        if importance.ndim == 2:
            if stride[1] != 4 or stride[0] % 4:
                raise ValueError(f"each row of second moments must be contiguous, not strides {stride}")
            moments = ffi.cast("float *", importance.__array_interface__["data"][0])
            moments_stride = stride[0] // 4
            vectors = ffi.from_buffer("float[]", np.empty(lib.KTQ_VECTOR_FLOATS * k, np.float32))
        diagonal = np.ascontiguousarray(np.diagonal(importance) if importance.ndim == 2 else importance)
        if not (diagonal >= 0).all() or not np.isfinite(importance).all():
            raise ValueError("importance must be finite and not negative")
        weights = ffi.from_buffer("float[]", diagonal)
    codes = np.empty((n, k), np.int8)
    rows = ffi.cast("uint8_t *", bf16.__array_interface__["data"][0])
    inputs = n, k, rows, row_stride, weights, moments, moments_stride
    outputs = ffi.cast("float *", scratch_buffer(k)), vectors, ffi.from_buffer("int8_t[]", codes), scales
    call_kernel(lambda bad_row: kernel(grid, *inputs, *outputs, bad_row), lambda row: bf16[row])
    return codes
