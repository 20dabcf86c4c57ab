"""The C kernels that choose codes column after column, so that others make up for the error of one: the inner loop of
GPTQ, and coordinate descent. As in kernels.py, each function checks its arguments, calls C and raises its errors.
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
from ktconvert.native_quant.kernels import FLOAT32, INT8, PANEL_ROWS, pointer_to, scratch_for
from ktconvert.native_quant.own_cpus import use_own_cpus

MAX_COLUMNS: int = lib.KTQ_GPTQ_COLUMNS
_RESULTS: dict[str, int] = {"bf16": lib.KTQ_BF16, "f32": lib.KTQ_F32}  # the types to which values are rounded


class CodeRange(NamedTuple):
    """The codes of a grid: integers from the least to the greatest one, both included.

    precision  the significant bits that a code has at most; 0: all integers are codes
    """

    least: int
    most: int
    precision: int = 0


def gptq_block(
    code_range: CodeRange, kind: str, inverse: F32, scale: F32, weight: F32, value: F32, error: F32, *, threads: int = 1
) -> None:
    """Quantizes the columns of a block one after the other, each time correcting the columns to its right.

    code_range: -128 <= least <= 0 <= most <= 127, and a precision of at most 7. All arrays are float32. inverse [width,
    width]: the block's factor of the inverse Hessian, of which the upper triangle is read. scale [n, width]: of
    each weight; kind: "bf16" or "f32", its type before it became float32, to which values are rounded. weight [n,
    width] is corrected in place; value (the dequantized codes) and error, both [n, width], are written. width: at most
    MAX_COLUMNS. NaN stays NaN. The number of threads changes no bit. Equations: numerics.md, section 7.
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

    def part(rows: slice) -> int:
        pointers = (ffi.from_buffer("float[]", array[rows]) for array in (scale, weight, value, error))
        return lib.ktq_gptq_block(*code_range, _RESULTS[kind], len(weight[rows]), width, factor, *pointers)

    _by_rows(part, n, threads)


SLICE: int = lib.KTQ_SLICE_COLUMNS


def compensate(code_range: CodeRange, slices: F32, scale: F32, weight: F32, gradient: F32, *, threads: int = 1) -> None:
    """Quantizes all columns of a linear one after the other, each time correcting those to its right; and says what the
    errors that are left ask for.

    code_range as in gptq_block. All arrays are float32, k a multiple of SLICE. slices [k / SLICE, k, SLICE]: the factor
    U of the inverse Hessian in and above the diagonal, and below it U[j, i] / U[j, j]. scale [n, k]: of each weight.
    weight [n, k] becomes the values of the codes. gradient [n, k] is written: (weight - values) @ Hessian. NaN stays
    NaN. The number of threads changes no bit. Equations: numerics.md, section 7b.
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

    def part(rows: slice) -> int:
        scales, values, left = (ffi.from_buffer("float[]", array[rows]) for array in (scale, weight, gradient))
        scratch = ffi.cast("float *", scratch_for(4 * k))
        return lib.ktq_compensate(*code_range, len(weight[rows]), k, factor, scales, values, left, scratch)

    _by_rows(part, n, threads)


def descend(code_range: CodeRange, hessian: F32, scale: F32, codes: I8, gradient: F32, *, threads: int = 1) -> int:
    """One sweep of coordinate descent over codes; returns how many changed.

    code_range as in gptq_block. hessian float32 [k, k], symmetric; scale float32 [n, k / group], 0 where codes stay;
    codes int8 [n, k] and gradient float32 [n, k], which is (weight - codes * scale) @ hessian: both are kept up. The
    number of threads changes no bit. Equations: numerics.md, section 7b.
    """
    _require_codes(code_range, threads)
    if codes.ndim != 2 or not codes.size or scale.ndim != 2 or not scale.shape[1] or codes.shape[1] % scale.shape[1]:
        raise ValueError(f"codes {codes.shape} do not fall into groups of scales {scale.shape}")
    n, k = codes.shape
    metric = pointer_to("hessian", hessian, FLOAT32, (k, k), writable=False)
    diagonal = ffi.from_buffer("float[]", np.ascontiguousarray(np.diagonal(hessian)))
    pointer_to("scale", scale, FLOAT32, (n, scale.shape[1]), writable=False)
    pointer_to("codes", codes, INT8, (n, k))
    pointer_to("gradient", gradient, FLOAT32, (n, k))
    read_environment()
    changed: list[int] = []

    def part(rows: slice) -> int:
        count, group = ffi.new("int64_t *"), k // scale.shape[1]
        arrays = (("float[]", scale), ("int8_t[]", codes), ("float[]", gradient))
        scales, own, held = (ffi.from_buffer(in_c, array[rows]) for in_c, array in arrays)
        result: int = lib.ktq_descend(
            *code_range, len(codes[rows]), k, group, metric, diagonal, scales, own, held, count
        )
        changed.append(count[0])
        return result

    _by_rows(part, n, threads)
    return sum(changed)


def _require_codes(code_range: CodeRange, threads: int) -> None:
    least, most, precision = code_range
    if not -128 <= least <= 0 <= most <= 127:
        raise ValueError(f"code_range must hold 0 and lie in -128 to 127, not {least} to {most}")
    if not 0 <= precision <= 7:
        raise ValueError(f"precision must be 0 to 7, not {precision}")
    if threads < 1:
        raise ValueError(f"threads must be 1 or more, not {threads}")


def _require_own_memory(*arrays: F32) -> None:
    if any(np.may_share_memory(a, b) for a, b in combinations(arrays, 2)):
        raise ValueError("no two of the arrays may share memory")


def _by_rows(part: Callable[[slice], int], n: int, threads: int) -> None:
    """Run a function of rows, which returns C's error code, on all of n rows, in whole panels for each thread."""
    step = -(-n // (PANEL_ROWS * threads)) * PANEL_ROWS
    if step >= n:
        raise_error(part(slice(0, n)))
        return
    with ThreadPoolExecutor(-(-n // step), thread_name_prefix="gptq", initializer=use_own_cpus) as pool:
        for result in list(pool.map(part, (slice(first, first + step) for first in range(0, n, step)))):
            raise_error(result)
