"""Types of ggml, in GGUF files: blocks of columns of a row that contain their scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.containers.gguf import GGML_TYPES, GgmlType
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.checkpoint import CheckpointEncoding, Tensors
from ktconvert.layouts.errors import KtconvertError
from ktconvert.native_quant.arrays import F32
from ktconvert.native_quant.matrix import GGML, Kind, Matrix

# Types that gguf-py dequantizes, without plain numbers.
DEQUANTIZED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4"),
    *("TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)


def _make_row(of: GgmlType) -> CheckpointEncoding:
    other = Kind(
        of.name.lower(), np.dtype(np.uint8), columns=of.columns, items=of.nbytes, decode=_make_decoder(of.name)
    )
    kind = GGML.get(of.name, other)

    def matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        info = tensors["weight"]
        n, k = info.shape
        return Matrix(source.view(replace(info, dtype="U8", shape=(n, k // of.columns * of.nbytes))), kind)

    def claims(tensors: Tensors, quantization: Quantization) -> bool:
        """Refuse NVFP4 with a scale for the whole tensor beside it, which gguf-py does not apply."""
        return of.name != "NVFP4" or "scale" not in tensors

    return CheckpointEncoding(of.name, of.name, {"weight": ("{t}",)}, (of.name,), kind, matrix, claims=claims)


def _make_decoder(name: str) -> Any:
    def decode(matrix: Matrix) -> F32:
        """Decode with gguf-py a type that C does not read."""
        try:
            import gguf
        except ImportError as error:
            raise KtconvertError(
                f"weights in {name} are decoded by gguf, not installed here: pip install 'ktconvert[gguf]'"
            ) from error

        blocks = np.ascontiguousarray(matrix.values)
        with np.errstate(all="ignore"):  # checks of the result find scales that are not numbers
            values: F32 = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
        return values[:, matrix.skip : matrix.skip + matrix.shape[1]]

    return decode


IN_CHECKPOINTS = tuple(_make_row(of) for of in GGML_TYPES.values() if of.name in DEQUANTIZED)
