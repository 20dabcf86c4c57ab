"""MXFP4: FP4 E2M1 codes, two to a byte, with one E8M0 scale for 32 columns of a row (OCP Microscaling Formats 1.0); as
checkpoints have it, and as we write it: row after row or in panels of 32 (bytes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.checkpoint import E8M0, CheckpointEncoding, Tensors, nibble_columns, read_scales
from ktconvert.layouts.encodings.encoding import F32, Bytes, Defect, Encoding, Read, Rows, SourceExperts, rows_of
from ktconvert.layouts.errors import damaged_tensor
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import FP4_E2M1, Matrix
from ktconvert.quantizers import FLOAT_GRIDS, mxfp4, panels
from ktconvert.quantizers.packed import fields
from ktconvert.quantizers.reference import E2M1
from ktconvert.quantizers.scales import e8m0

# --- in checkpoints -------------------------------------------------------------------------------

GROUP = mxfp4.GROUP  # columns that share a scale


def _row(
    role: str, pattern: str, scales: tuple[str, ...], dtypes: tuple[str, ...] = ("U8",), transposed: bool = False
) -> CheckpointEncoding:
    def claims(tensors: Tensors, quantization: Quantization) -> bool:
        """The type of the scales tells it from other formats of 4 bits under the same names."""
        return (scale := tensors.get("scale")) is not None and scale.dtype in E8M0

    def shape(tensors: Tensors, quantization: Quantization) -> tuple[int, ...]:
        codes = tensors[role]
        if role != "blocks":
            return nibble_columns(codes)
        if len(codes.shape) not in (3, 4) or 0 in codes.shape or codes.shape[-1] != GROUP // 2:
            raise damaged_tensor(
                codes.name,
                f"has shape {list(codes.shape)}, but must be blocks of {GROUP // 2} bytes, "
                f"[rows, columns / {GROUP}, {GROUP // 2}], of one weight or of a stack",
            )
        return *codes.shape[:-2], codes.shape[-2] * GROUP

    def fit(tensors: Tensors, quantization: Quantization, input_major: bool) -> tuple[()]:
        require_groups(tensors[role], tensors["scale"], shape(tensors, quantization), GROUP)
        return ()

    def matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
        n, k = shape(tensors, quantization)
        codes = source.view(replace(tensors[role], dtype="U8", shape=(n, k // 2)))
        return Matrix(codes, FP4_E2M1, read_scales(source, tensors["scale"], (n, k // GROUP)), (1, GROUP))

    return CheckpointEncoding(
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
        raise damaged_tensor(
            scale.name,
            f"of shape {list(scale.shape)} does not fit {codes.name!r}, which is {list(shape)} "
            f"with a scale for each {group} columns of a row",
            "download both again",
        )


IN_CHECKPOINTS = (
    # DeepSeek-V4; I8 or U8 is only a container.
    _row("weight", "{t}", ("{s}.scale", "{t}_scale", "{t}_scale_inv"), ("I8", "U8")),
    # compressed-tensors' mxfp4-pack-quantized.
    _row("packed", "{t}_packed", ("{t}_scale",)),
    # gpt-oss; in BF16 transformers holds its experts as gate_up_proj [E, H, 2I] and down_proj [E, I, H].
    _row("blocks", "{t}_blocks", ("{t}_scales",), transposed=True),
)


# --- as we write it -------------------------------------------------------------------------------

NOT_A_NUMBER = 255
ROWS_AT_A_TIME = 128  # that lie in panels while they are written row after row


def is_exact(model: SourceExperts) -> bool:
    """Experts that are MXFP4 in any storage, with scales for the columns of their linears, not for the rows."""
    return model.dtypes == ("MXFP4",) and not any(layer.input_major for layer in model.moe_layers.values())


def _bad_scale(codes_of: Callable[[Read, int], Bytes]) -> Defect:
    """codes_of: the codes [1, 32] that a scale belongs to."""

    def bad_scale(read: Read, n: int, k: int) -> str:
        """Every scale is a number, and so are its products with the codes."""
        scales = read(1)
        for index in map(int, np.flatnonzero(scales > mxfp4.MOST)):
            with np.errstate(over="ignore"):
                numbers = mxfp4.dequantize(codes_of(read, index), scales[index].reshape(1, 1))
            if not np.isfinite(numbers).all():
                what = "is not a number" if scales[index] == NOT_A_NUMBER else "makes a number infinite"
                return f"scale {index}, {scales[index]}, {what}"
        return ""

    return bad_scale


# --- in panels ------------------------------------------------------------------------------------

CODE_BYTES = panels.ROWS // 2  # of a panel, for each column
BLOCK = CODE_BYTES * GROUP


def panel_tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    """Panels of codes, two to a byte, and panels of scales."""
    count = n // panels.ROWS
    return (
        TensorInfo("codes", "U8", (count, CODE_BYTES * k), n * k // 2),
        TensorInfo("scales", "U8", (count, k), n * k // GROUP),
    )


def _quantize_panels(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """What is MXFP4 keeps codes and scales; all else is rounded to it."""
    count = matrix.shape[0] // panels.ROWS
    kernels.pack_mxfp4(matrix, out[0].reshape(count, -1), out[1].reshape(count, -1))


NIBBLES = np.zeros(256, np.uint8)  # codes as quantizers choose them, as bytes -> codes of E2M1
NIBBLES[np.rint(2 * E2M1).astype(np.int8).view(np.uint8)[::-1]] = np.arange(16)[::-1]  # 0, and not -0


def _codes_matrix(codes: npt.NDArray[np.int8], exponents: npt.NDArray[Any]) -> Matrix:
    """MXFP4 with codes int8 [n, k], halves of numbers, and exponents uint8 [n, k/32]."""
    nibbles = NIBBLES[codes.view(np.uint8)]
    return Matrix(nibbles[:, ::2] | nibbles[:, 1::2] << 4, FP4_E2M1, e8m0(exponents), (1, GROUP))


def _decode_panels(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
    codes, scales = (each.reshape(n // panels.ROWS, -1) for each in stored)
    return mxfp4.dequantize(
        rows_of(codes, n, rows, mxfp4.codes_from_panels), rows_of(scales, n, rows, mxfp4.exponents_from_panels)
    )


def _panel_codes(read: Read, scale: int) -> Bytes:
    block, row = divmod(scale, panels.ROWS)
    return mxfp4.codes_from_panels(read(0, block * BLOCK, (block + 1) * BLOCK).reshape(1, BLOCK))[row : row + 1]


# --- row after row --------------------------------------------------------------------------------


def _row_tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    """As DeepSeek-V4 has them."""
    groups = k // GROUP
    return TensorInfo("weight", "I8", (n, k // 2), n * k // 2), TensorInfo("scale", "F8_E8M0", (n, groups), n * groups)


def _quantize_rows(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """As in panels, some of which exist at a time."""
    n, k = matrix.shape
    codes, scales = out[0].reshape(n, k // 2), out[1].reshape(n, -1)
    for first in range(0, n, ROWS_AT_A_TIME):
        rows = slice(first, min(n, first + ROWS_AT_A_TIME))
        made = [np.empty(tensor.shape, np.uint8) for tensor in panel_tensors(rows.stop - first, k)]
        try:
            kernels.pack_mxfp4(matrix.rows(first, rows.stop), made[0], made[1])
        except kernels.NonFinite as bad:
            raise kernels.NonFinite(first + bad.row, bad.column) from None
        kernels.mxfp4_rows(made[0], made[1], codes[rows], scales[rows])


def _decode_rows(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
    return mxfp4.dequantize(fields(4, stored[0].reshape(n, k // 2)[rows]), stored[1].reshape(n, -1)[rows])


def _row_codes(read: Read, scale: int) -> Bytes:
    size = GROUP // 2
    return fields(4, read(0, scale * size, (scale + 1) * size).reshape(1, size))


PANELS = Encoding(
    "MXFP4",
    version=1,
    grid=FLOAT_GRIDS["mxfp4"],
    multiple=kernels.MXFP4_MULTIPLE,
    tensors=panel_tensors,
    quantize=_quantize_panels,
    decode=_decode_panels,
    is_exact=is_exact,
    defects=(None, _bad_scale(_panel_codes)),
    pack=lambda codes, exponents, out: _quantize_panels(_codes_matrix(codes, exponents), out),
    scales=lambda last, n, k: mxfp4.exponents_from_panels(last.reshape(n // panels.ROWS, k)),
)
ROWS = replace(
    PANELS,
    multiple=GROUP,
    tensors=_row_tensors,
    quantize=_quantize_rows,
    decode=_decode_rows,
    defects=(None, _bad_scale(_row_codes)),
    pack=lambda codes, exponents, out: _quantize_rows(_codes_matrix(codes, exponents), out),
    scales=lambda last, n, k: last.reshape(n, -1),
)
