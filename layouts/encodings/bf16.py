"""BF16, without scales: row after row, in panels of 32 rows, or in kt-kernel's blocks (FORMAT.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ktconvert.layouts.encodings.encoding import F32, Bytes, Encoding, Read, Rows, Tensor
from ktconvert.layouts.encodings.order import IN_PANELS, IN_ROWS, rows_of
from ktconvert.native_quant import kernels_panels
from ktconvert.quantizers import FLOAT_GRIDS, Matrix, panels
from ktconvert.quantizers.reference import bf16_to_f32

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel


def _encoding(order: int, suffix: str) -> Encoding:
    def tensors(n: int, k: int) -> tuple[Tensor, ...]:
        return (Tensor(suffix, "BF16", (n // order, order * k), 2 * n * k),)

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        """FP16 and float32 are rounded once."""
        n, k = matrix.shape
        kernels_panels.pack_bf16(matrix, out[0].view(np.uint16).reshape(n // order, order * k))

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
        held = stored[0].view(np.uint16).reshape(n // order, order * k)
        return bf16_to_f32(rows_of(held, n, rows, panels.unlay))

    return Encoding(
        "BF16",
        version=1,
        grid=FLOAT_GRIDS["bf16"],
        multiple=kernels_panels.BF16_MULTIPLE,
        tensors=tensors,
        quantize=quantize,
        decode=decode,
        is_exact=is_exact,
        defects=(bad_number,),
    )


def is_exact(model: MoeModel) -> bool:
    """Experts in BF16, and in MXFP4, whose numbers all are numbers of BF16."""
    return {"BF16", "MXFP4"}.issuperset(model.dtypes)


def bad_number(read: Read, n: int, k: int) -> str:
    """No number is infinite or NaN."""
    wrong = (read(0).view("<u2") & 0x7FFF) >= 0x7F80
    return f"number {int(np.argmax(wrong))} is infinite or not a number" if wrong.any() else ""


def _block_tensors(n: int, k: int) -> tuple[Tensor, ...]:
    """The numbers, and a file of scales, which kt-kernel wants to be there and empty."""
    return Tensor("weight", "I8", (2 * n * k,), 2 * n * k), Tensor("scale", "F32", (0,), 0)


def _quantize_blocks(matrix: Matrix, out: Sequence[Bytes]) -> None:
    kernels_panels.pack_bf16(matrix, out[0].view(np.uint16))


def _decode_blocks(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
    return bf16_to_f32(panels.unlay_blocks(stored[0].view(np.uint16), n, k)[rows])


PANELS = _encoding(IN_PANELS, "codes")
ROWS = _encoding(IN_ROWS, "weight")
BLOCKS = replace(
    PANELS, tensors=_block_tensors, quantize=_quantize_blocks, decode=_decode_blocks, defects=(bad_number, None)
)
