"""compressed-tensors' pack-quantized integers: codes in 32-bit words, symmetric, one scale for a group of columns of a
row.

What llmcompressor and `ktconvert gpu` write, and Kimi-K2's INT4. The value of a code q is q * s (NUMERICS.md, section
1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.encodings.encoding import FLOATS, Encoding, Tensors, read_scales
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.native_quant.matrix import INT4, INT8, Kind, Matrix

METHOD, FORMAT = "compressed-tensors", "pack-quantized"  # what config.json calls them


def _row(bits: int, kind: Kind) -> Encoding:
    def claims(tensors: Tensors, quantization: Quantization) -> bool:
        """No header holds the width of the codes: it is the config's, else 4, and weight_shape must confirm it."""
        if quantization.method not in ("", METHOD) or quantization.asymmetric or len(quantization.bits) > 1:
            return False
        return bits == (quantization.bits[0] if quantization.bits else 4)

    def shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
        codes = tensors["packed"]
        if len(codes.shape) != 2 or 0 in codes.shape:
            raise InputError(
                f"tensor {codes.name!r} has shape {list(codes.shape)}, but must be a matrix of words; download it again"
            )
        return codes.shape[0], codes.shape[1] * 32 // bits

    def fit(tensors: Tensors, quantization: Quantization, input_major: bool) -> tuple[int, int]:
        n, k = shape(tensors, quantization)
        return bits, _group(tensors, n, k, quantization)

    def matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        n, k = shape(tensors, quantization)
        group = _group(tensors, n, k, quantization)
        _check_shape(source, tensors, n, k)
        codes = source.view(replace(tensors["packed"], dtype="U8", shape=(n, k * bits // 8)))
        return Matrix(codes, kind, read_scales(source, tensors["scale"], (n, k // group)), (1, group))

    return Encoding(
        kind.name.upper(),
        kind.name.upper(),
        {"packed": ("{t}_packed",), "scale": ("{t}_scale",), "shape": ("{t}_shape",)},
        ("I32",),
        kind,
        matrix,
        shape=shape,
        fit=fit,
        claims=claims,
        input_types=(kind.name,),
    )


def _group(tensors: Tensors, n: int, k: int, quantization: Quantization) -> int:
    """Columns that share a scale. InputError where the tensors or the config disagree, UnsupportedError for groups of
    other sizes.
    """
    codes, scale, about = tensors["packed"], tensors["scale"], tensors["shape"]
    if about.dtype not in ("I64", "I32") or about.shape != (2,):
        raise InputError(
            f"tensor {about.name!r} is {about.dtype} of shape {list(about.shape)}; must be two I64; download it again"
        )
    if scale.dtype not in FLOATS:
        raise InputError(f"tensor {scale.name!r} is {scale.dtype}; scales must be F32, BF16 or F16; download it again")
    groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == n else 0
    named = [size for size in quantization.groups if groups == -(-k // size)]
    if groups and (k % groups or (groups > 1 and named and all(k % size for size in named))):
        raise UnsupportedError(
            f"tensor {scale.name!r}: groups of {max(named, default=k // groups)} columns do not divide the {k} columns "
            f"of {codes.name!r}; use the model's BF16 or FP8 (E4M3) release"
        )
    if not groups or (groups > 1 and quantization.groups and not named):
        sizes = " or ".join(map(str, quantization.groups)) or "any size"
        raise InputError(
            f"tensor {scale.name!r} of shape {list(scale.shape)} does not fit {codes.name!r}, {n} x {k} in groups of "
            f"{sizes}; check group_size in config.json, or download both again"
        )
    return k // groups


def _check_shape(source: TensorSource, tensors: Tensors, n: int, k: int) -> None:
    """Raises InputError unless weight_shape is the shape of the codes."""
    about = tensors["shape"]
    recorded = np.array(source.view(about)).tolist()
    if recorded != [n, k]:
        raise InputError(
            f"{source.shards[about.shard].path}: tensor {about.name!r} says {recorded}, its codes are for {[n, k]}; "
            "download it again"
        )


ROWS = (_row(4, INT4), _row(8, INT8))
