"""Types of ggml, in GGUF files: blocks of columns of a row that contain their scales."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ktconvert.layouts.encodings.checkpoint import CheckpointEncoding, Tensors
from ktconvert.layouts.extras import require_packages
from ktconvert.layouts.sources.config import Quantization
from ktconvert.layouts.sources.containers.gguf import GGML_TYPES, GgmlType
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.native_quant.arrays import F32
from ktconvert.native_quant.matrix import GGML, Kind, Matrix

# Types that gguf-py dequantizes, except those of plain numbers.
DEQUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4"),
    *("TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)


def _make_row(ggml_type: GgmlType) -> CheckpointEncoding:
    """Return the row that reads a ggml type: its blocks as UINT8 rows, decoded by our kernels or by gguf-py."""
    name = ggml_type.name
    kind = GGML.get(name) or Kind(
        name.lower(),
        np.dtype(np.uint8),
        columns=ggml_type.columns,
        items=ggml_type.nbytes,
        decode=_make_decoder(name),
    )

    def make_matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        info = tensors["weight"]
        n, k = info.shape
        shape = (n, k // ggml_type.columns * ggml_type.nbytes)
        return Matrix(source.view(msgspec.structs.replace(info, dtype="U8", shape=shape)), kind)

    def accepts(tensors: Tensors, quantization: Quantization) -> bool:
        """Reject NVFP4 that has a scale for the whole tensor, which gguf-py does not apply."""
        return name != "NVFP4" or "scale" not in tensors

    return CheckpointEncoding(name, name, {"weight": ("{t}",)}, (name,), kind, make_matrix, accepts=accepts)


def _make_decoder(name: str) -> Any:
    def decode(matrix: Matrix) -> F32:
        """Decode a type that our C code does not read, with gguf-py."""
        require_packages(f"decoding weights in {name}", ["gguf"], "gguf")
        from gguf import GGMLQuantizationType, quants

        blocks = np.ascontiguousarray(matrix.values)
        with np.errstate(all="ignore"):  # checks of the result find scales that are not numbers
            values: F32 = quants.dequantize(blocks, GGMLQuantizationType[name])
        return values[:, matrix.skip : matrix.skip + matrix.shape[1]]

    return decode


IN_CHECKPOINTS = tuple(_make_row(ggml_type) for ggml_type in GGML_TYPES.values() if ggml_type.name in DEQUANTIZED)
