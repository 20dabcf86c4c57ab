"""Products of the runtime, of a kernel alone: gemm.c, with the kernels of the library that ships."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error, read_environment

CSRC = Path(__file__).resolve().parents[2] / "native_quant" / "csrc"
ARCH = CSRC / "arch" / ("x86" if platform.machine() == "x86_64" else "generic")
# A format's number in ktq.h, the bits of a code, and the bytes of the scales of a weight [n, k].
FORMATS: dict[str, tuple[int, int, Callable[[int, int], int]]] = {
    "MXFP4": (lib.KTQ_FORMAT_MXFP4, 4, lambda n, k: n * k // 32),
    "FP8": (lib.KTQ_FORMAT_FP8, 8, lambda n, k: 4 * (n // 128) * (k // 128)),
    "BF16": (lib.KTQ_FORMAT_BF16, 16, lambda n, k: 0),
    "FP8_PERCHANNEL": (lib.KTQ_FORMAT_FP8_PERCHANNEL, 8, lambda n, k: 4 * n),
    "MXFP8": (lib.KTQ_FORMAT_MXFP8, 8, lambda n, k: n * k // 32),
    "RAWINT4": (lib.KTQ_FORMAT_RAWINT4, 4, lambda n, k: n * k // 16),
    "GPTQ_INT4": (lib.KTQ_FORMAT_GPTQ_INT4, 4, lambda n, k: n * k // 32),
    "GPTQ_INT4_64": (lib.KTQ_FORMAT_GPTQ_INT4_64, 4, lambda n, k: n * k // 16),
    "GPTQ_INT4_32": (lib.KTQ_FORMAT_GPTQ_INT4_32, 4, lambda n, k: n * k // 8),
    "NVFP4": (lib.KTQ_FORMAT_NVFP4, 4, lambda n, k: n // 32 * lib.KTQ_NVFP4_HEADER + n * k // 16),
    "Q4_0": (lib.KTQ_FORMAT_Q4_0, 4, lambda n, k: n * k // 16),
    "Q8_0": (lib.KTQ_FORMAT_Q8_0, 8, lambda n, k: n * k // 16),
    "Q4_K": (lib.KTQ_FORMAT_Q4_K, 4, lambda n, k: n * k // 128 * 12),
    "Q5_K": (lib.KTQ_FORMAT_Q5_K, 5, lambda n, k: n * k // 128 * 12),
    "Q6_K": (lib.KTQ_FORMAT_Q6_K, 6, lambda n, k: n * k // 128 * 10),
    "F16": (lib.KTQ_FORMAT_F16, 16, lambda n, k: 0),
}


@functools.cache
def _c() -> Any:
    """gemm.c, compiled."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "gemm.so"
        flags = ["-std=c11", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{CSRC}", f"-I{ARCH}"]
        source = Path(__file__).with_suffix(".c")
        subprocess.run([os.environ.get("CC", "cc"), *flags, source, "-o", library], check=True)
        c = ctypes.CDLL(str(library))
    c.time_gemm.restype = ctypes.c_double
    return c


def _kernels() -> ctypes.c_void_p:
    """The table of the kernels in use."""
    read_environment()
    return ctypes.c_void_p(int(ffi.cast("uintptr_t", lib.ktq_kernels())))


def _sizes(*sizes: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(size) for size in sizes]


def _at(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def gemm(
    bits: int,
    activations: npt.NDArray[np.int8],
    weight: npt.NDArray[np.uint8],
    n: int,
    *,
    tiled_for: int | None = None,
) -> npt.NDArray[np.int32]:
    """Dot products of int8 [m, k] (-127..127) with the codes of a packed weight [n, k]: int32 [m, n].

    The activations are laid out as the instruction set wants them for `tiled_for` tokens (m by default): in a forward
    the rows of remainders come on top of those.
    """
    m, k = activations.shape
    assert weight.shape == (n * k * bits // 8,) and weight.dtype == np.uint8 and activations.dtype == np.int8
    rows, out = np.ascontiguousarray(activations), np.empty((m, n), np.int32)
    raise_error(_c().gemm(_kernels(), bits, *_sizes(m, tiled_for or m, n, k), _at(rows), _at(weight), _at(out)))
    return out


def time_gemm(
    bits: int,
    activations: npt.NDArray[np.int8],
    weights: npt.NDArray[np.uint8],
    n: int,
    *,
    tiled_for: int | None = None,
) -> float:
    """Seconds of gemm() with each of `count` weights, uint8 [count, n*k*bits/8], one after the other, in one thread.

    The products alone: the activations are laid out before.
    """
    m, k = activations.shape
    assert weights.shape == (len(weights), n * k * bits // 8) and len(weights)
    rows = np.ascontiguousarray(activations)
    sizes = _sizes(m, tiled_for or m, n, k)
    seconds: float = _c().time_gemm(_kernels(), bits, *sizes, _at(rows), *_sizes(len(weights)), _at(weights))
    assert seconds > 0
    return seconds


def gemm_bf16(
    name: str,
    activations: npt.NDArray[np.uint16],
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    n: int,
) -> npt.NDArray[np.float32]:
    """Sums of products of BF16 [m, k] with a weight [n, k] in one of the formats of BF16 arithmetic: float32 [m, n].

    codes, scales: the bytes of its tensors; BF16 has no scales. Subnormals count as 0. Equations: numerics.md, 5b.
    """
    m, k = activations.shape
    number, bits, scale_bytes = FORMATS[name]
    assert codes.shape == (n * k * bits // 8,) and scales.shape == (scale_bytes(n, k),)
    rows, out = np.ascontiguousarray(activations), np.empty((m, n), np.float32)
    weight = _at(codes), _at(scales) if scales.size else None
    raise_error(_c().gemm_bf16(_kernels(), number, *_sizes(m, n, k), _at(rows), *weight, _at(out)))
    return out
