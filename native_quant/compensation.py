"""C kernels that choose codes column by column so that later columns compensate errors: GPTQ and coordinate descent.

As in kernels.py, each function checks its arguments, calls C and raises its errors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.arrays import F32, I8
from ktconvert.native_quant.instruction_sets import raise_error, read_environment
from ktconvert.native_quant.kernels import FLOAT32, INT8, PANEL_ROWS, pointer_to, scratch_buffer
from ktconvert.native_quant.machine import unbind_thread

MAX_COLUMNS: int = lib.KTQ_GPTQ_COLUMNS
_RESULTS: dict[str, int] = {"bf16": lib.KTQ_BF16, "f32": lib.KTQ_F32}  # types of rounded values


class CodeRange(NamedTuple):
    """The codes of a grid: integers from `least` to `most`, both included.

    precision  largest number of significant bits of a code; 0: all integers are codes
    """

    least: int
    most: int
    precision: int = 0


def gptq_block(
    code_range: CodeRange, kind: str, inverse: F32, scale: F32, weight: F32, value: F32, error: F32, *, threads: int = 1
) -> None:
    """Quantize the columns of a block from left to right, and correct the columns to the right of each.

    All arrays are float32; width is at most MAX_COLUMNS.
    code_range  -128 <= least <= 0 <= most <= 127, precision at most 7
    kind        "bf16" or "f32": the original type of the weight, to which values are rounded
    inverse     [width, width]: the block's factor of the inverse Hessian; only the upper triangle is read
    scale       [n, width]: the scale of each weight
    weight      [n, width]: corrected in place
    value       [n, width], written: the dequantized codes
    error       [n, width], written: their errors
    NaN stays NaN. The number of threads changes no bit. Equations: numerics.md, section 7.
    """
    _require_codes(code_range, threads)
    if kind not in _RESULTS:
        raise ValueError(f"kind '{kind}' is not one of bf16, f32")
    if weight.ndim != 2 or not weight.shape[0] or not 1 <= weight.shape[1] <= MAX_COLUMNS:
        raise ValueError(f"weight must have rows and 1 to {MAX_COLUMNS} columns, not shape {weight.shape}")
    n, width = weight.shape
    factor = pointer_to("inverse", inverse, FLOAT32, (width, width), writable=False)
    pointer_to("scale", scale, FLOAT32, (n, width), writable=False)
    for name, array in (("weight", weight), ("value", value), ("error", error)):
        pointer_to(name, array, FLOAT32, (n, width))
    _require_own_memory(weight, value, error, scale, inverse)
    read_environment()

    def quantize(rows: slice) -> int:
        pointers = (ffi.from_buffer("float[]", array[rows]) for array in (scale, weight, value, error))
        return lib.ktq_gptq_block(*code_range, _RESULTS[kind], len(weight[rows]), width, factor, *pointers)

    _split_rows(quantize, n, threads)


SLICE: int = lib.KTQ_SLICE_COLUMNS


def compensate(code_range: CodeRange, slices: F32, scale: F32, weight: F32, gradient: F32, *, threads: int = 1) -> None:
    """Quantize all columns of a linear from left to right, and correct the columns to the right of each.

    All arrays are float32; k is a multiple of SLICE.
    code_range  as in gptq_block
    slices      [k / SLICE, k, SLICE]: the factor U of the inverse Hessian on and above the diagonal, and
                U[j, i] / U[j, j] below it
    scale       [n, k]: the scale of each weight
    weight      [n, k]: replaced by the values of the codes
    gradient    [n, k], written: (weight - values) @ Hessian, the gradient of the remaining error
    NaN stays NaN. The number of threads changes no bit. Equations: numerics.md, section 7b.
    """
    _require_codes(code_range, threads)
    if weight.ndim != 2 or not weight.size or weight.shape[1] % SLICE:
        raise ValueError(f"weight must have rows, and columns in multiples of {SLICE}, not shape {weight.shape}")
    n, k = weight.shape
    factor = pointer_to("slices", slices, FLOAT32, (k // SLICE, k, SLICE), writable=False)
    pointer_to("scale", scale, FLOAT32, (n, k), writable=False)
    pointer_to("weight", weight, FLOAT32, (n, k))
    pointer_to("gradient", gradient, FLOAT32, (n, k))
    _require_own_memory(weight, gradient, scale, slices)
    read_environment()

    def quantize(rows: slice) -> int:
        pointers = (ffi.from_buffer("float[]", array[rows]) for array in (scale, weight, gradient))
        scratch = ffi.cast("float *", scratch_buffer(4 * k))
        return lib.ktq_compensate(*code_range, len(weight[rows]), k, factor, *pointers, scratch)

    _split_rows(quantize, n, threads)


def descend(code_range: CodeRange, hessian: F32, scale: F32, codes: I8, gradient: F32, *, threads: int = 1) -> int:
    """Run one sweep of coordinate descent over codes and return the number of changed codes.

    code_range  as in gptq_block
    hessian     float32 [k, k], symmetric
    scale       float32 [n, k / group]; codes with scale 0 stay
    codes       int8 [n, k], updated
    gradient    float32 [n, k], updated: (weight - codes * scale) @ hessian
    The number of threads changes no bit. Equations: numerics.md, section 7b.
    """
    _require_codes(code_range, threads)
    if codes.ndim != 2 or not codes.size or scale.ndim != 2 or not scale.shape[1] or codes.shape[1] % scale.shape[1]:
        raise ValueError(f"codes {codes.shape} do not divide into groups with scales {scale.shape}")
    n, k = codes.shape
    metric = pointer_to("hessian", hessian, FLOAT32, (k, k), writable=False)
    diagonal = ffi.from_buffer("float[]", np.ascontiguousarray(np.diagonal(hessian)))
    pointer_to("scale", scale, FLOAT32, (n, scale.shape[1]), writable=False)
    pointer_to("codes", codes, INT8, (n, k))
    pointer_to("gradient", gradient, FLOAT32, (n, k))
    read_environment()
    changed: list[int] = []

    def sweep(rows: slice) -> int:
        count = ffi.new("int64_t *")
        group = k // scale.shape[1]
        arrays = (("float[]", scale), ("int8_t[]", codes), ("float[]", gradient))
        pointers = (ffi.from_buffer(c_type, array[rows]) for c_type, array in arrays)
        result: int = lib.ktq_descend(*code_range, len(codes[rows]), k, group, metric, diagonal, *pointers, count)
        changed.append(count[0])
        return result

    _split_rows(sweep, n, threads)
    return sum(changed)


def _require_codes(code_range: CodeRange, threads: int) -> None:
    least, most, precision = code_range
    if not -128 <= least <= 0 <= most <= 127:
        raise ValueError(f"code_range must contain 0 and be within -128 to 127, not {least} to {most}")
    if not 0 <= precision <= 7:
        raise ValueError(f"precision must be 0 to 7, not {precision}")
    if threads < 1:
        raise ValueError(f"threads must be 1 or more, not {threads}")


def _require_own_memory(*arrays: F32) -> None:
    if any(np.may_share_memory(a, b) for a, b in combinations(arrays, 2)):
        raise ValueError("no two of the arrays may share memory")


def _split_rows(kernel: Callable[[slice], int], n: int, threads: int) -> None:
    """Run kernel(rows), which returns C's error code, on all n rows, split into whole panels for each thread."""
    step = -(-n // (PANEL_ROWS * threads)) * PANEL_ROWS
    if step >= n:
        raise_error(kernel(slice(0, n)))
        return
    with ThreadPoolExecutor(-(-n // step), thread_name_prefix="gptq", initializer=unbind_thread) as pool:
        for result in list(pool.map(kernel, (slice(first, first + step) for first in range(0, n, step)))):
            raise_error(result)
