"""NVFP4: FP4 E2M1 codes, two to a byte, with one E4M3 scale for 16 columns of a row, and one float32 scale for all.

Of that there are two conventions, which its name shows: modelopt's weight_scale_2 multiplies the others,
compressed-tensors' weight_global_scale divides them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.checkpoint import (
    FLOATS,
    CheckpointEncoding,
    Tensors,
    nibble_columns,
    read_scales,
    require_finite,
)
from ktconvert.layouts.encodings.mxfp4 import require_groups
from ktconvert.layouts.errors import damaged_tensor
from ktconvert.native_quant.matrix import FP4_E2M1, Matrix
from ktconvert.quantizers.scales import nvfp4

GROUP = 16  # columns that share a scale
FACTOR, DIVISOR = "factor", "divisor"  # roles of the scale for all
NAMES = {FACTOR: "{t}_scale_2", DIVISOR: "{t}_global_scale"}


def _row(role: str, pattern: str, whole: str) -> CheckpointEncoding:
    """whole: FACTOR or DIVISOR."""

    def claims(tensors: Tensors, quantization: Quantization) -> bool:
        """The type of the scales tells it from other formats of 4 bits under the same names."""
        scale, other = tensors.get("scale"), DIVISOR if whole == FACTOR else FACTOR
        return scale is not None and scale.dtype == "F8_E4M3" and (whole in tensors or other not in tensors)

    def shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
        return nibble_columns(tensors[role])

    def fit(tensors: Tensors, quantization: Quantization, input_major: bool) -> tuple[()]:
        logical, one = shape(tensors, quantization), tensors[whole]
        require_groups(tensors[role], tensors["scale"], logical, GROUP)
        stack = logical[:-2]
        if one.dtype not in FLOATS or one.shape[: len(stack)] != stack or math.prod(one.shape) != math.prod(stack):
            raise damaged_tensor(
                one.name,
                f"is {one.dtype} of shape {list(one.shape)}, but must be one F32 for each weight "
                f"of {tensors[role].name!r}",
            )
        return ()

    def matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        n, k = shape(tensors, quantization)
        codes = source.view(replace(tensors[role], dtype="U8", shape=(n, k // 2)))
        return Matrix(codes, FP4_E2M1, _scales(source, tensors, whole, (n, k // GROUP)), (1, GROUP))

    return CheckpointEncoding(
        "NVFP4",
        "NVFP4",
        {role: (pattern,), "scale": ("{t}_scale",), whole: (NAMES[whole],)},
        ("U8",),
        FP4_E2M1,
        matrix,
        shape=shape,
        fit=fit,
        claims=claims,
        input_types=("nvfp4",),
    )


def _scales(source: TensorSource, tensors: Tensors, whole: str, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """The scales of the groups, float32 [shape]. Raises InputError, naming the place, where one is not finite."""
    one = read_scales(source, tensors[whole], (1, 1))[0, 0]
    if one == 0 and whole == DIVISOR:
        info = tensors[whole]
        raise damaged_tensor(info.name, "divides scales and is 0", "download it again", source.path(info))
    scales = nvfp4(source.view(tensors["scale"]).reshape(shape), one, whole == DIVISOR)
    require_finite(source, tensors["scale"], scales)
    return scales


IN_CHECKPOINTS = (
    _row("weight", "{t}", FACTOR),
    _row("weight", "{t}", DIVISOR),
    _row("packed", "{t}_packed", DIVISOR),
    _row("packed", "{t}_packed", FACTOR),
)
