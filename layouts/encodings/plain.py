"""Plain numbers: BF16, FP16 or float32 in checkpoints; BF16 in rows, panels or kt-kernel's blocks in outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ktconvert.layouts.encodings.checkpoint import CheckpointEncoding, Tensors, read_aligned
from ktconvert.layouts.encodings.encoding import Encoding, RowSelection, SourceExperts, TensorReader, select_rows
from ktconvert.layouts.sources.config import Quantization
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant import matrix as kinds
from ktconvert.native_quant.arrays import F32, Bytes
from ktconvert.quantizers import FLOAT_GRIDS, Matrix, panels
from ktconvert.quantizers.reference import bf16_to_f32

# --- in checkpoints -------------------------------------------------------------------------------


def _make_row(dtype: str, title: str, kind: kinds.Kind, *input_types: str) -> CheckpointEncoding:
    def make_matrix(
        source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool
    ) -> kinds.Matrix:
        return kinds.Matrix(read_aligned(source, tensors["weight"]), kind)

    return CheckpointEncoding(
        dtype, title, {"weight": ("{t}",)}, (dtype,), kind, make_matrix, quantized=False, input_types=input_types
    )


IN_CHECKPOINTS = (
    _make_row("BF16", "BF16", kinds.BF16, "bf16"),
    _make_row("F16", "FP16", kinds.FP16, "fp16"),
    _make_row("F32", "F32", kinds.F32),
)


# --- as we write them: BF16 -----------------------------------------------------------------------


def _make_encoding(row_group: int, suffix: str) -> Encoding:
    """Return an encoding of BF16.

    row_group  number of a matrix's rows in each row of the tensor: 1, or the rows of a panel
    """

    def tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
        return (TensorInfo(suffix, "BF16", (n // row_group, row_group * k), 2 * n * k),)

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        """Store BF16; FP16 and float32 are rounded once."""
        n, k = matrix.shape
        kernels.pack_bf16(matrix, out[0].view(np.uint16).reshape(n // row_group, row_group * k))

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: RowSelection = slice(None)) -> F32:
        items = stored[0].view(np.uint16).reshape(n // row_group, row_group * k)
        return bf16_to_f32(select_rows(items, n, rows, panels.from_panels))

    return Encoding(
        "BF16",
        version=1,
        grid=FLOAT_GRIDS["bf16"],
        multiple=kernels.BF16_MULTIPLE,
        tensors=tensors,
        quantize=quantize,
        decode=decode,
        is_exact=is_exact,
        defect_checks=(find_bad_number,),
    )


def is_exact(model: SourceExperts) -> bool:
    """Return whether experts are in BF16, or in MXFP4, whose numbers all are BF16 numbers."""
    return {"BF16", "MXFP4"}.issuperset(model.dtypes)


def find_bad_number(read: TensorReader, n: int, k: int) -> str:
    not_finite = (read(0).view("<u2") & 0x7FFF) >= 0x7F80
    return f"number {int(np.argmax(not_finite))} is infinite or not a number" if not_finite.any() else ""


def _block_tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
    """Return the numbers, and an empty tensor of scales, whose file kt-kernel requires."""
    return TensorInfo("weight", "I8", (2 * n * k,), 2 * n * k), TensorInfo("scale", "F32", (0,), 0)


PANELS = _make_encoding(panels.ROWS, "codes")
ROWS = _make_encoding(1, "weight")
BLOCKS = replace(
    PANELS,
    tensors=_block_tensors,
    quantize=lambda matrix, out: kernels.pack_bf16(matrix, out[0].view(np.uint16)),
    decode=lambda stored, n, k, rows: bf16_to_f32(panels.from_blocks(stored[0].view(np.uint16), n, k)[rows]),
    defect_checks=(find_bad_number, None),
)
