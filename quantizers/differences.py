"""Errors of quantized numbers against their source."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ktconvert.native_quant import kernels
from ktconvert.native_quant.arrays import F32, F64, U16
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers.reference import bf16_to_f32

ROWS = 64  # number of rows to decode at a time, to save memory
CHUNK = 1 << 14  # number of float64 values to hold at a time; they fit the cache


def decode_finite(matrix: Matrix) -> U16:
    """Return a linear as BF16 bits, uint16 [n, k]. Raise kernels.NonFinite for a value that is NaN or infinite."""
    bf16 = kernels.decode(matrix)
    if bf16.max() >= 0xFF80 or bf16.view(np.int16).max() >= 0x7F80:  # NaN and infinities of either sign
        not_finite = (bf16 & 0x7FFF) >= 0x7F80
        row, column = np.unravel_index(int(np.argmax(not_finite)), not_finite.shape)
        raise kernels.NonFinite(int(row), int(column))
    return bf16


def sum_products(x: F32, y: F32) -> F64:
    """Return sums of x*x, y*y, x*y and (x-y)^2 over arrays of one shape: float64 [4]."""
    sums = np.zeros(4)
    x, y = x.reshape(-1), y.reshape(-1)
    for start in range(0, x.size, CHUNK):
        a = x[start : start + CHUNK].astype(np.float64)
        b = y[start : start + CHUNK].astype(np.float64)
        d = a - b
        # einsum makes no array of products, and does not start the threads of a BLAS as dot does.
        sums += [np.einsum("i,i", p, q) for p, q in ((a, a), (b, b), (a, b), (d, d))]
    return sums


def source_values(matrix: Matrix) -> F32:
    """Return a linear in BF16, as float32 [n, k]."""
    return bf16_to_f32(kernels.decode(matrix))


def error_sums(matrix: Matrix, values: Callable[[slice], F32], source: Callable[[Matrix], F32] = source_values) -> F64:
    """Return the result of sum_products for a linear.

    values  (slice of rows) -> y, their stored numbers
    source  (some rows of the linear) -> x, their numbers in the source
    """
    n = matrix.shape[0]
    sums = np.zeros(4)
    for start in range(0, n, ROWS):
        stop = min(start + ROWS, n)
        sums += sum_products(source(matrix.rows(start, stop)), values(slice(start, stop)))
    return sums
