"""AWQ's 4-bit integers, as AutoAWQ's GEMM version writes them: words of codes along the rows, [k, n/8], with one scale
and one zero point for a group of columns.

The value of a code q is (q - z) * s (NUMERICS.md, section 1). Nibble p of a word is row 0, 2, 4, 6, 1, 3, 5, 7 [p]."""

from __future__ import annotations

import numpy as np

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.checkpoint import (
    CheckpointEncoding,
    Tensors,
    read_scales,
    require_matrix,
    require_shape,
)
from ktconvert.layouts.encodings.gptq import BETTER, NAMES, group_of_scales
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.matrix import INT4_AWQ, Matrix
from ktconvert.quantizers import packed

METHOD = "awq"
GEMM = ("", "gemm", "exllama", "ipex")  # versions in config.json that store what GEMM does


def _claims(tensors: Tensors, quantization: Quantization) -> bool:
    """Where no config says what they are, eight times as many scales as words in a row are AWQ's."""
    if quantization.method:
        return quantization.method == METHOD
    codes, scales = tensors["qweight"], tensors.get("scales")
    return scales is not None and len(scales.shape) == len(codes.shape) == 2 and scales.shape[1] == 8 * codes.shape[1]


def _shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
    codes, scales = tensors["qweight"], tensors["scales"]
    require_matrix(codes)
    version = quantization.format
    if version in GEMM and scales.shape[:1] == codes.shape[:1] and scales.shape[1:] != (8 * codes.shape[1],):
        version = "gemv"  # whose scales are [n, groups]
    if version not in GEMM:
        raise UnsupportedError.of_tensor(
            codes.name, f": the order of AWQ's version {version!r} is not an input; {BETTER}"
        )
    if quantization.bits not in ((), (4,)):
        named = ", ".join(map(str, quantization.bits))
        raise UnsupportedError.of_tensor(codes.name, f": AWQ with {named} bits is not an input; {BETTER}")
    return 8 * codes.shape[1], codes.shape[0]


def _fit(tensors: Tensors, quantization: Quantization, input_major: bool) -> tuple[object, ...]:
    n, k = _shape(tensors, quantization)
    group = group_of_scales(tensors, n, k, quantization)
    require_shape(tensors["qweight"], tensors["qzeros"], "I32", (k // group, n // 8))
    return 4, group


def _matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
    n, k = _shape(tensors, quantization)
    group = group_of_scales(tensors, n, k, quantization)
    words = source.view(tensors["qweight"]).view(np.uint32).T
    scales = np.ascontiguousarray(read_scales(source, tensors["scales"], (k // group, n)).T)
    zeros = np.ascontiguousarray(packed.awq_fields(source.view(tensors["qzeros"])).T, np.float32)
    return Matrix(words, INT4_AWQ, scales, (1, group), zeros=zeros)


IN_CHECKPOINTS = (
    CheckpointEncoding(
        "AWQ_INT4",
        "AWQ",
        {role: NAMES[role] for role in ("qweight", "qzeros", "scales")},
        ("I32",),
        INT4_AWQ,
        _matrix,
        shape=_shape,
        fit=_fit,
        claims=_claims,
        item_bytes={"scales": 8, "qzeros": 96},
        input_types=("awq",),
    ),
)
