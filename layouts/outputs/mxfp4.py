"""MXFP4 experts in strips: E2M1 codes, and an E8M0 scale for each 32 columns of a row (FORMAT.md, section "Strips")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.outputs.form import Rows, Tensor
from ktconvert.layouts.outputs.output import Bytes
from ktconvert.layouts.outputs.strip_form import StripForm, no_defect, rows_of
from ktconvert.native_quant import kernels_strips
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import FLOAT_GRIDS, mxfp4, strips
from ktconvert.quantizers.scales import e8m0

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel

CODE_BYTES = strips.ROWS // 2  # of a strip, for each column
BLOCK = CODE_BYTES * mxfp4.GROUP
NOT_A_NUMBER = 255


def tensors(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Strips of codes, two to a byte, and strips of scales."""
    count = n // strips.ROWS
    return (
        Tensor("codes", "U8", (count, CODE_BYTES * k), n * k // 2),
        Tensor("scales", "U8", (count, k), n * k // mxfp4.GROUP),
    )


def columns(items: int) -> int:
    """Of a strip with so many bytes of codes."""
    return items // CODE_BYTES


def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """What is MXFP4 keeps codes and scales; all else is rounded to it. Raises kernels.NonFinite."""
    kernels_strips.pack_mxfp4(matrix, *_strips(out, *matrix.shape))


def unpack(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
    """Float32 [n, k], exact, or some rows of it."""
    codes, scales = _strips(stored, n, k)
    (codes, within), (scales, _) = rows_of(codes, n, rows), rows_of(scales, n, rows)
    return mxfp4.dequantize(mxfp4.unlay_codes(codes)[within], mxfp4.unlay_exponents(scales)[within])


def scale_values(stored: Bytes, n: int, k: int) -> npt.NDArray[np.float32]:
    """One for each 32 columns: float32 [n, k / 32]."""
    return e8m0(mxfp4.unlay_exponents(stored.reshape(n // strips.ROWS, k)))


def bad_scale(stored: Sequence[Bytes], k: int) -> str:
    """Every scale is a number, and so are its products with the codes."""
    blocks = stored[0].reshape(-1, BLOCK)

    def codes(scale: int) -> Bytes:
        block, row = divmod(scale, strips.ROWS)
        return mxfp4.unlay_codes(blocks[block : block + 1])[row : row + 1]

    return first_bad(stored[1], codes)


def first_bad(scales: Bytes, codes: Callable[[int], Bytes]) -> str:
    """The first scale that is not a number or makes one infinite, for people; "": none. codes: of a scale, [1, 32]."""
    for index in map(int, np.flatnonzero(scales > mxfp4.MOST)):
        with np.errstate(over="ignore"):
            numbers = mxfp4.dequantize(codes(index), scales[index].reshape(1, 1))
        if not np.isfinite(numbers).all():
            what = "is not a number" if scales[index] == NOT_A_NUMBER else "makes a number infinite"
            return f"scale {index}, {scales[index]}, {what}"
    return ""


def exact(model: MoeModel) -> bool:
    """Experts that are MXFP4 in any storage, with scales for the columns of their linears, not for the rows."""
    return model.dtypes == ("MXFP4",) and not any(layer.input_major for layer in model.moe_layers.values())


def _strips(stored: Sequence[Bytes], n: int, k: int) -> tuple[Bytes, Bytes]:
    count = n // strips.ROWS
    return stored[0].reshape(count, CODE_BYTES * k), stored[1].reshape(count, k)


MXFP4 = StripForm(
    "MXFP4",
    version=1,
    grid=FLOAT_GRIDS["mxfp4"],
    multiple=kernels_strips.MXFP4_MULTIPLE,
    magnitude=np.uint8(0x77),
    coded="4 bits, and 8 bits of scale for each 32 columns of a row",
    lay_out=tensors,
    columns=columns,
    write=quantize,
    read=unpack,
    defects=(no_defect, bad_scale),
    exact=exact,
    scaled=scale_values,
)
