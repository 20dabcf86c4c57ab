"""compressed-tensors' int-quantized weights (W8A8): a signed byte for each code, with scales for blocks, rows or the
whole weight, as FP8 has them. The value of a code q is (q - z) * s (numerics.md, section 1)."""

from __future__ import annotations

import math

import numpy as np

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.checkpoint import FLOATS, CheckpointEncoding, Tensors, missing, read_scales
from ktconvert.layouts.encodings.fp8 import grid
from ktconvert.layouts.errors import damaged_tensor
from ktconvert.native_quant.matrix import INT8_SIGNED, Matrix


def _claims(tensors: Tensors, quantization: Quantization) -> bool:
    """Other scales are those of 4-bit floats, two in a byte."""
    return "scale" in tensors and tensors["scale"].dtype in FLOATS


def _fit(tensors: Tensors, quantization: Quantization, input_major: bool) -> tuple[object, ...]:
    block = grid(tensors["weight"], tensors["scale"], quantization.blocks, input_major)[1]
    zeros, scale = tensors.get("zero_point"), tensors["scale"]
    if zeros is None and quantization.symmetric == (False,):
        raise missing(tensors["weight"], "zero points", f"{tensors['weight'].name}_zero_point")
    if zeros is None:
        return block
    if zeros.dtype != "I8" or zeros.shape != scale.shape:
        raise damaged_tensor(
            zeros.name,
            f"is {zeros.dtype} of shape {list(zeros.shape)}; zero points must be I8 of shape "
            f"{list(scale.shape)}, as {scale.name!r}",
        )
    return *block, "zero points"


def _matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
    weight, scale, zeros = tensors["weight"], tensors["scale"], tensors.get("zero_point")
    shape, block = grid(weight, scale, quantization.blocks, input_major)
    codes = None
    if zeros is not None:
        assert math.prod(zeros.shape) == math.prod(shape)
        codes = (source.view(zeros) ^ 0x80).astype(np.float32).reshape(shape)
    return Matrix(source.view(weight), INT8_SIGNED, read_scales(source, scale, shape), block, zeros=codes)


IN_CHECKPOINTS = (
    CheckpointEncoding(
        "W8A8",
        "INT8 (W8A8)",
        {
            "weight": ("{t}",),
            "scale": ("{t}_scale", "{t}_scale_inv"),
            "zero_point": ("{t}_zero_point",),
        },
        ("I8",),
        INT8_SIGNED,
        _matrix,
        fit=_fit,
        claims=_claims,
        optional=frozenset({"zero_point"}),
        input_types=("int8",),
    ),
)
