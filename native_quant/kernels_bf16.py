"""Products of BF16 for NumPy arrays: a single kernel of the runtime, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error, read_environment
from ktconvert.native_quant.kernels import _check_array

# A format's number in ktq.h, the bits of a code, and the bytes of the scales of a weight [n, k].
_FORMATS: dict[str, tuple[int, int, Callable[[int, int], int]]] = {
    "MXFP4": (lib.KTQ_FORMAT_MXFP4, 4, lambda n, k: n * k // 32),
    "FP8": (lib.KTQ_FORMAT_FP8, 8, lambda n, k: 4 * (n // 128) * (k // 128)),
    "BF16": (lib.KTQ_FORMAT_BF16, 16, lambda n, k: 0),
    "FP8_PERCHANNEL": (lib.KTQ_FORMAT_FP8_PERCHANNEL, 8, lambda n, k: 4 * n),
    "MXFP8": (lib.KTQ_FORMAT_MXFP8, 8, lambda n, k: n * k // 32),
    "NVFP4": (lib.KTQ_FORMAT_NVFP4, 4, lambda n, k: n // 32 * lib.KTQ_NVFP4_HEADER + n * k // 16),
}


def gemm_bf16(
    name: str,
    activations: npt.NDArray[np.uint16],
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    n: int,
) -> npt.NDArray[np.float32]:
    """Sums of products of BF16 [m, k] with a weight [n, k] in one of the formats of BF16 arithmetic: float32 [m, n].

    codes, scales: the bytes of its tensors; BF16 has no scales. Subnormals count as 0. Equations: NUMERICS.md, 5b.
    """
    if activations.ndim != 2 or activations.dtype != np.uint16 or 0 in activations.shape:
        raise ValueError(f"activations must be uint16 [m, k], not {activations.dtype} of shape {activations.shape}")
    m, k = activations.shape
    number, bits, scale_bytes = _FORMATS[name]
    _check_array("codes", codes, np.dtype(np.uint8), (n * k * bits // 8,), writable=False)
    size = scale_bytes(n, k)
    _check_array("scales", scales, np.dtype(np.uint8), (size,), writable=False)
    read_environment()
    out = np.empty((m, n), np.float32)
    rows = ffi.from_buffer("uint16_t[]", np.ascontiguousarray(activations))
    weight = ffi.from_buffer(codes), ffi.from_buffer(scales) if size else ffi.NULL
    raise_error(lib.ktq_gemm_bf16(number, m, n, k, rows, *weight, ffi.from_buffer("float[]", out)))
    return out
