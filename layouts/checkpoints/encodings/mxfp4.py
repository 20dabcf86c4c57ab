"""MXFP4: FP4 E2M1 codes, two to a byte, with one E8M0 scale for 32 columns of a row (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from dataclasses import replace

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.encodings.encoding import E8M0, Encoding, Tensors, nibble_columns, read_scales
from ktconvert.layouts.checkpoints.source import TensorInfo, TensorSource
from ktconvert.layouts.errors import InputError
from ktconvert.native_quant.matrix import FP4_E2M1, Matrix

GROUP = 32  # columns that share a scale


def _row(
    role: str, pattern: str, scales: tuple[str, ...], dtypes: tuple[str, ...] = ("U8",), transposed: bool = False
) -> Encoding:
    def claims(tensors: Tensors, quantization: Quantization) -> bool:
        """The type of the scales tells it from other formats of 4 bits under the same names."""
        return (scale := tensors.get("scale")) is not None and scale.dtype in E8M0

    def shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
        codes = tensors[role]
        if role != "blocks":
            return nibble_columns(codes)
        if len(codes.shape) not in (3, 4) or 0 in codes.shape or codes.shape[-1] != GROUP // 2:
            raise InputError(
                f"tensor {codes.name!r} has shape {list(codes.shape)}, but must be blocks of {GROUP // 2} bytes, "
                f"[rows, columns / {GROUP}, {GROUP // 2}], of one weight or of a stack; download it again"
            )
        return *codes.shape[:-2], codes.shape[-2] * GROUP

    def fit(tensors: Tensors, quantization: Quantization, input_major: bool) -> tuple[()]:
        require_groups(tensors[role], tensors["scale"], shape(tensors, quantization), GROUP)
        return ()

    def matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        n, k = shape(tensors, quantization)
        codes = source.view(replace(tensors[role], dtype="U8", shape=(n, k // 2)))
        return Matrix(codes, FP4_E2M1, read_scales(source, tensors["scale"], (n, k // GROUP)), (1, GROUP))

    return Encoding(
        "MXFP4",
        "MXFP4",
        {role: (pattern,), "scale": scales},
        dtypes,
        FP4_E2M1,
        matrix,
        shape=shape,
        fit=fit,
        claims=claims,
        transposed=transposed,
        input_types=("mxfp4", "fp4"),
    )


def require_groups(codes: TensorInfo, scale: TensorInfo, shape: tuple[int, ...], group: int) -> None:
    """Raises InputError unless there is one scale for each `group` columns of each row."""
    *rows, k = shape
    if k % group or scale.shape != (*rows, k // group):
        raise InputError(
            f"tensor {scale.name!r} of shape {list(scale.shape)} does not fit {codes.name!r}, which is {list(shape)} "
            f"with a scale for each {group} columns of a row; download both again"
        )


ROWS = (
    # DeepSeek-V4; I8 or U8 is only a container.
    _row("weight", "{t}", ("{s}.scale", "{t}_scale", "{t}_scale_inv"), ("I8", "U8")),
    # compressed-tensors' mxfp4-pack-quantized.
    _row("packed", "{t}_packed", ("{t}_scale",)),
    # gpt-oss; in BF16 transformers holds its experts as gate_up_proj [E, H, 2I] and down_proj [E, I, H].
    _row("blocks", "{t}_blocks", ("{t}_scales",), transposed=True),
)
