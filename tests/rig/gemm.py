"""Products of single kernels of the runtime: gemm.c, with the kernels of the installed library."""

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
I8, U8 = npt.NDArray[np.int8], npt.NDArray[np.uint8]
# The bits of a code, and the bytes of the scales of a weight [n, k], by format.
BITS_AND_SCALES: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "MXFP4": (4, lambda n, k: n * k // 32),
    "FP8": (8, lambda n, k: 4 * (n // 128) * (k // 128)),
    "FP8_PERCHANNEL": (8, lambda n, k: 4 * n),
    "MXFP8": (8, lambda n, k: n * k // 32),
    **dict.fromkeys(("RAWINT4", "GPTQ_INT4_64", "Q4_0"), (4, lambda n, k: n * k // 16)),
    "GPTQ_INT4": (4, lambda n, k: n * k // 32),
    "GPTQ_INT4_32": (4, lambda n, k: n * k // 8),
    "NVFP4": (4, lambda n, k: n // 32 * lib.KTQ_NVFP4_HEADER + n * k // 16),
    "Q8_0": (8, lambda n, k: n * k // 16),
    "Q4_K": (4, lambda n, k: n * k // 128 * 12),
    "Q5_K": (5, lambda n, k: n * k // 128 * 12),
    "Q6_K": (6, lambda n, k: n * k // 128 * 10),
    **dict.fromkeys(("BF16", "F16"), (16, lambda n, k: 0)),
}
FORMATS = {name: (getattr(lib, f"KTQ_FORMAT_{name}"), *rest) for name, rest in BITS_AND_SCALES.items()}


@functools.cache
def _load_c() -> Any:
    """Compile and load gemm.c."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "gemm.so"
        flags = ["-std=c11", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{CSRC}", f"-I{ARCH}"]
        source = Path(__file__).with_suffix(".c")
        subprocess.run([os.environ.get("CC", "cc"), *flags, source, "-o", library], check=True)
        c = ctypes.CDLL(str(library))
    c.time_gemm.restype = ctypes.c_double
    return c


def _kernels() -> ctypes.c_void_p:
    """Return the address of the library's table of kernels."""
    read_environment()
    return ctypes.c_void_p(int(ffi.cast("uintptr_t", lib.ktq_kernels())))


def _sizes(*sizes: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(size) for size in sizes]


def _address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    """Return the address of an array."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def gemm(bits: int, activations: I8, weight: U8, n: int, *, tiled_for: int | None = None) -> npt.NDArray[np.int32]:
    """Return dot products of int8 [m, k] (-127..127) with the codes of a packed weight [n, k]: int32 [m, n].

    tiled_for: number of tokens for which activations are laid out (m by default); in a forward, the rows of remainders
    come in addition to those.
    """
    m, k = activations.shape
    assert weight.shape == (n * k * bits // 8,) and weight.dtype == np.uint8 and activations.dtype == np.int8
    rows, out = np.ascontiguousarray(activations), np.empty((m, n), np.int32)
    raise_error(
        _load_c().gemm(
            _kernels(), bits, *_sizes(m, tiled_for or m, n, k), _address(rows), _address(weight), _address(out)
        )
    )
    return out


def time_gemm(bits: int, activations: I8, weights: U8, n: int, *, tiled_for: int | None = None) -> float:
    """Return the seconds of gemm() with each of `count` weights, uint8 [count, n*k*bits/8], in one thread."""
    m, k = activations.shape
    assert weights.shape == (len(weights), n * k * bits // 8) and len(weights)
    rows = np.ascontiguousarray(activations)
    sizes = _sizes(m, tiled_for or m, n, k)
    seconds: float = _load_c().time_gemm(
        _kernels(), bits, *sizes, _address(rows), *_sizes(len(weights)), _address(weights)
    )
    assert seconds > 0
    return seconds


def gemm_bf16(
    name: str, activations: npt.NDArray[np.uint16], codes: U8, scales: U8, n: int, int8: bool = False
) -> npt.NDArray[np.float32]:
    """Return sums of products of BF16 [m, k] with a weight [n, k] in a format of BF16 arithmetic: float32 [m, n].

    The weight is given as the bytes of its codes and scales. Subnormals count as 0. Equations: numerics.md, 5b.
    int8: integers below 8 bits are multiplied with activations of 8 bits.
    """
    m, k = activations.shape
    number, bits, scale_bytes = FORMATS[name]
    assert codes.shape == (n * k * bits // 8,) and scales.shape == (scale_bytes(n, k),)
    rows, out = np.ascontiguousarray(activations), np.empty((m, n), np.float32)
    weight = _address(codes), _address(scales) if scales.size else None
    raise_error(_load_c().gemm_bf16(_kernels(), number, int8, *_sizes(m, n, k), _address(rows), *weight, _address(out)))
    return out
