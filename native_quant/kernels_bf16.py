"""Products of BF16 for NumPy arrays: a single kernel of the runtime, for tests and benchmarks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error, read_environment
from ktconvert.native_quant.kernels import _check_array

# A format's number in ktq.h, the bits of a code, and the rows, columns and bytes of a scale (0: there are none).
_FORMATS = {
    "MXFP4": (lib.KTQ_FORMAT_MXFP4, 4, 1, 32, 1),
    "FP8": (lib.KTQ_FORMAT_FP8, 8, 128, 128, 4),
    "BF16": (lib.KTQ_FORMAT_BF16, 16, 1, 1, 0),
}


def gemm_bf16(
    name: str,
    activations: npt.NDArray[np.uint16],
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    n: int,
) -> npt.NDArray[np.float32]:
    """Sums of products of BF16 [m, k] with a weight [n, k] in the format MXFP4, FP8 or BF16: float32 [m, n].

    codes, scales: the bytes of its tensors; BF16 has no scales. Subnormals count as 0. Equations: NUMERICS.md, 5b.
    """
    if activations.ndim != 2 or activations.dtype != np.uint16 or 0 in activations.shape:
        raise ValueError(f"activations must be uint16 [m, k], not {activations.dtype} of shape {activations.shape}")
    m, k = activations.shape
    number, bits, scale_rows, scale_columns, scale_bytes = _FORMATS[name]
    _check_array("codes", codes, np.dtype(np.uint8), (n * k * bits // 8,), writable=False)
    size = n // scale_rows * (k // scale_columns) * scale_bytes
    _check_array("scales", scales, np.dtype(np.uint8), (size,), writable=False)
    read_environment()
    out = np.empty((m, n), np.float32)
    rows = ffi.from_buffer("uint16_t[]", np.ascontiguousarray(activations))
    weight = ffi.from_buffer(codes), ffi.from_buffer(scales) if scale_bytes else ffi.NULL
    raise_error(lib.ktq_gemm_bf16(number, m, n, k, rows, *weight, ffi.from_buffer("float[]", out)))
    return out
