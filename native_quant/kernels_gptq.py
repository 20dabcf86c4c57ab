"""The inner loop of GPTQ for NumPy arrays: a kernel like those of kernels.py, which splits its rows over threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error, read_environment
from ktconvert.native_quant.kernels import _check_array
from ktconvert.native_quant.own_cpus import use_own_cpus

MAX_COLUMNS: int = lib.KTQ_GPTQ_COLUMNS
# The types to which values are rounded.
_RESULTS: dict[str, int] = {"bf16": lib.KTQ_BF16, "f32": lib.KTQ_F32}
PANEL = 32  # rows that the kernel works on at a time: a thread gets whole panels

Floats = npt.NDArray[np.float32]
CodeRange = tuple[int, int]  # the least and the greatest code, both included


def gptq_block(
    code_range: CodeRange,
    kind: str,
    inverse: Floats,
    scale: Floats,
    weight: Floats,
    value: Floats,
    error: Floats,
    *,
    threads: int = 1,
) -> None:
    """Quantizes the columns of a block one after the other, each time correcting the columns to its right.

    code_range: the least and the greatest code, -128 <= least <= 0 <= greatest <= 127. All arrays are float32. inverse
    [width, width]: the block's factor of the inverse Hessian, of which the upper triangle is read. scale [n, width]: of
    each weight; kind: "bf16" or "f32", its type before it became float32, to which values are rounded. weight [n,
    width] is corrected in place; value (the dequantized codes) and error, both [n, width], are written. width: at most
    MAX_COLUMNS. NaN stays NaN. The number of threads changes no bit. Equations: NUMERICS.md, section 7.
    """
    least, most = code_range
    if not -128 <= least <= 0 <= most <= 127:
        raise ValueError(f"code_range must hold 0 and lie in -128 to 127, not {least} to {most}")
    if kind not in _RESULTS:
        raise ValueError(f"kind '{kind}' is not one of bf16, f32")
    if threads < 1:
        raise ValueError(f"threads must be 1 or more, not {threads}")
    if weight.ndim != 2 or not weight.shape[0] or not 1 <= weight.shape[1] <= MAX_COLUMNS:
        raise ValueError(f"weight must have rows and 1 to {MAX_COLUMNS} columns, not shape {weight.shape}")
    n, width = weight.shape
    float32 = np.dtype(np.float32)
    _check_array("inverse", inverse, float32, (width, width), writable=False)
    _check_array("scale", scale, float32, (n, width), writable=False)
    for name, array in (("weight", weight), ("value", value), ("error", error)):
        _check_array(name, array, float32, (n, width), writable=True)
    for a, b in combinations((weight, value, error, scale, inverse), 2):
        if np.may_share_memory(a, b):
            raise ValueError("no two of the arrays may share memory")
    read_environment()
    panels = -(-n // PANEL)
    step = -(-panels // threads) * PANEL
    part = partial(_rows, code_range, _RESULTS[kind], inverse, scale, weight, value, error, step)
    if step >= n:
        raise_error(part(0))
        return
    with ThreadPoolExecutor(-(-n // step), thread_name_prefix="gptq", initializer=use_own_cpus) as pool:
        for result in list(pool.map(part, range(0, n, step))):
            raise_error(result)


def _rows(
    code_range: CodeRange,
    kind: int,
    inverse: Floats,
    scale: Floats,
    weight: Floats,
    value: Floats,
    error: Floats,
    step: int,
    first: int,
) -> int:
    """Quantizes rows first .. first + step - 1, or up to the last row; returns the error code of C."""
    rows: list[Any] = [
        ffi.from_buffer("float[]", array[first : first + step]) for array in (scale, weight, value, error)
    ]
    n, width = weight[first : first + step].shape
    result: int = lib.ktq_gptq_block(*code_range, kind, n, width, ffi.from_buffer("float[]", inverse), *rows)
    return result
