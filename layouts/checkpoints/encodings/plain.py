"""Weights stored as plain numbers: BF16, FP16, float32."""

from __future__ import annotations

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.encodings.encoding import Encoding, Tensors, aligned
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.native_quant.matrix import BF16, F32, FP16, Kind, Matrix


def _row(dtype: str, title: str, kind: Kind, *input_types: str) -> Encoding:
    def matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        return Matrix(aligned(source, tensors["weight"]), kind)

    return Encoding(
        dtype, title, {"weight": ("{t}",)}, (dtype,), kind, matrix, quantized=False, input_types=input_types
    )


ROWS = (_row("BF16", "BF16", BF16, "bf16"), _row("F16", "FP16", FP16, "fp16"), _row("F32", "F32", F32))
