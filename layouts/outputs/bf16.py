"""BF16 experts as they are, in strips (FORMAT.md, section "Strips")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.outputs.form import Rows, Tensor
from ktconvert.layouts.outputs.output import Bytes
from ktconvert.layouts.outputs.strip_form import StripForm, rows_of
from ktconvert.native_quant import kernels_strips
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import FLOAT_GRIDS, strips
from ktconvert.quantizers.reference import bf16_to_f32

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel


def tensors(n: int, k: int) -> tuple[Tensor]:
    """Strips of BF16: no scales."""
    return (Tensor("codes", "BF16", (n // strips.ROWS, strips.ROWS * k), 2 * n * k),)


def columns(items: int) -> int:
    """Of a strip with so many items."""
    return items // strips.ROWS


def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """Each number as BF16: FP16 and float32 are rounded once. Raises kernels.NonFinite."""
    n, k = matrix.shape
    kernels_strips.pack_bf16(matrix, _codes(out, n, k))


def unpack(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
    """Float32 [n, k], exact, or some rows of it."""
    held, rows = rows_of(_codes(stored, n, k), n, rows)
    return bf16_to_f32(strips.unlay(held)[rows])


def bad_code(stored: Sequence[Bytes], k: int) -> str:
    """No number is infinite or NaN."""
    wrong = (stored[0].view("<u2") & 0x7FFF) >= 0x7F80
    return f"number {int(np.argmax(wrong))} is infinite or not a number" if wrong.any() else ""


def exact(model: MoeModel) -> bool:
    """Experts in BF16, and in MXFP4, whose numbers all are numbers of BF16."""
    return {"BF16", "MXFP4"}.issuperset(model.dtypes)


def _codes(stored: Sequence[Bytes], n: int, k: int) -> npt.NDArray[np.uint16]:
    return stored[0].view(np.uint16).reshape(n // strips.ROWS, strips.ROWS * k)


BF16 = StripForm(
    "BF16",
    version=1,
    grid=FLOAT_GRIDS["bf16"],
    multiple=kernels_strips.BF16_MULTIPLE,
    magnitude=np.uint16(0x7FFF),
    coded="16 bits, no scales",
    lay_out=tensors,
    columns=columns,
    write=quantize,
    read=unpack,
    defects=(bad_code,),
    exact=exact,
)
