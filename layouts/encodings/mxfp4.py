"""MXFP4: E2M1 codes and an E8M0 scale for each 32 columns of a row; row after row or in panels of 32 (FORMAT.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ktconvert.layouts.encodings.encoding import F32, Bytes, Defect, Encoding, Read, Rows, Tensor
from ktconvert.layouts.encodings.order import rows_of
from ktconvert.native_quant import kernels, kernels_panels
from ktconvert.quantizers import FLOAT_GRIDS, Matrix, mxfp4, panels
from ktconvert.quantizers.packed import fields

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel

NOT_A_NUMBER = 255
ROWS_AT_A_TIME = 128  # that lie in panels while they are written row after row


def is_exact(model: MoeModel) -> bool:
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
BLOCK = CODE_BYTES * mxfp4.GROUP


def panel_tensors(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Panels of codes, two to a byte, and panels of scales."""
    count = n // panels.ROWS
    return (
        Tensor("codes", "U8", (count, CODE_BYTES * k), n * k // 2),
        Tensor("scales", "U8", (count, k), n * k // mxfp4.GROUP),
    )


def _quantize_panels(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """What is MXFP4 keeps codes and scales; all else is rounded to it."""
    count = matrix.shape[0] // panels.ROWS
    kernels_panels.pack_mxfp4(matrix, out[0].reshape(count, -1), out[1].reshape(count, -1))


def _decode_panels(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
    codes, scales = (each.reshape(n // panels.ROWS, -1) for each in stored)
    return mxfp4.dequantize(rows_of(codes, n, rows, mxfp4.unlay_codes), rows_of(scales, n, rows, mxfp4.unlay_exponents))


def _panel_codes(read: Read, scale: int) -> Bytes:
    block, row = divmod(scale, panels.ROWS)
    return mxfp4.unlay_codes(read(0, block * BLOCK, (block + 1) * BLOCK).reshape(1, BLOCK))[row : row + 1]


# --- row after row --------------------------------------------------------------------------------


def _row_tensors(n: int, k: int) -> tuple[Tensor, Tensor]:
    """As DeepSeek-V4 has them."""
    groups = k // mxfp4.GROUP
    return Tensor("weight", "I8", (n, k // 2), n * k // 2), Tensor("scale", "F8_E8M0", (n, groups), n * groups)


def _quantize_rows(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """As in panels, some of which exist at a time."""
    n, k = matrix.shape
    codes, scales = out[0].reshape(n, k // 2), out[1].reshape(n, -1)
    for first in range(0, n, ROWS_AT_A_TIME):
        rows = slice(first, min(n, first + ROWS_AT_A_TIME))
        panels = [np.empty(tensor.shape, np.uint8) for tensor in panel_tensors(rows.stop - first, k)]
        try:
            kernels_panels.pack_mxfp4(matrix.rows(first, rows.stop), panels[0], panels[1])
        except kernels.NonFinite as bad:
            raise kernels.NonFinite(first + bad.row, bad.column) from None
        kernels_panels.mxfp4_rows(panels[0], panels[1], codes[rows], scales[rows])


def _decode_rows(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
    return mxfp4.dequantize(fields(4, stored[0].reshape(n, k // 2)[rows]), stored[1].reshape(n, -1)[rows])


def _row_codes(read: Read, scale: int) -> Bytes:
    size = mxfp4.GROUP // 2
    return fields(4, read(0, scale * size, (scale + 1) * size).reshape(1, size))


PANELS = Encoding(
    "MXFP4",
    version=1,
    grid=FLOAT_GRIDS["mxfp4"],
    multiple=kernels_panels.MXFP4_MULTIPLE,
    tensors=panel_tensors,
    quantize=_quantize_panels,
    decode=_decode_panels,
    is_exact=is_exact,
    defects=(None, _bad_scale(_panel_codes)),
    scales=lambda last, n, k: mxfp4.unlay_exponents(last.reshape(n // panels.ROWS, k)),
)
ROWS = Encoding(
    "MXFP4",
    version=1,
    grid=FLOAT_GRIDS["mxfp4"],
    multiple=mxfp4.GROUP,
    tensors=_row_tensors,
    quantize=_quantize_rows,
    decode=_decode_rows,
    is_exact=is_exact,
    defects=(None, _bad_scale(_row_codes)),
    scales=lambda last, n, k: last.reshape(n, -1),
)
