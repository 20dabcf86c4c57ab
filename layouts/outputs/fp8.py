"""FP8 E4M3 experts with a scale for each block of 128 x 128, in strips (FORMAT.md, section "Strips")."""

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
from ktconvert.quantizers import FLOAT_GRIDS, fp8, strips
from ktconvert.quantizers.errors import decode_finite

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel

STORED = ("F8_E4M3", "MXFP8")  # encodings that may have such blocks


def tensors(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Strips of codes, and the scales of blocks."""
    blocks = (n // fp8.BLOCK, k // fp8.BLOCK)
    return (
        Tensor("codes", "F8_E4M3", (n // strips.ROWS, strips.ROWS * k), n * k),
        Tensor("scales", "F32", blocks, 4 * blocks[0] * blocks[1]),
    )


def columns(items: int) -> int:
    """Of a strip with so many items."""
    return items // strips.ROWS


def exact(model: MoeModel) -> bool:
    """FP8 in blocks of 128 x 128 keeps codes and scales."""
    return all(
        weight.encoding.name in STORED
        and weight.fit(moe.input_major) == (fp8.BLOCK, fp8.BLOCK)
        and not getattr(moe.style, "interleaved", False)  # every other row: no blocks
        for moe in model.moe_layers.values()
        for weight in moe.weights.values()
    )


def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
    """Rounded, unless the source is FP8 in such blocks. Raises kernels.NonFinite."""
    n, k = matrix.shape
    kernels_strips.pack_fp8(sound(matrix), _codes(out[0], n, k), _scales(out[1], n, k))


def sound(matrix: Matrix) -> Matrix:
    """The same numbers; of FP8 in such blocks, with positive scales. Raises kernels.NonFinite where one overflows."""
    if not fp8.is_kept(matrix) or matrix.scales is None:
        return matrix
    if (np.abs(matrix.scales) > fp8.LARGE_SCALE).any():
        decode_finite(matrix)
    return fp8.with_positive_scales(matrix) if (matrix.scales <= 0).any() else matrix


def unpack(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
    """Float32 [n, k], rounded once, or some rows of it."""
    held, inside = rows_of(_codes(stored[0], n, k), n, rows)
    return fp8.values(strips.unlay(held)[inside], _scales(stored[1], n, k)[np.arange(n)[rows] // fp8.BLOCK])


def bad_code(stored: Sequence[Bytes]) -> str:
    """No code is NaN."""
    wrong = (stored[0] & 0x7F) == fp8.NAN
    return f"code {int(np.argmax(wrong))} is not a number" if wrong.any() else ""


def bad_scale(stored: Sequence[Bytes]) -> str:
    """Every scale is finite and positive."""
    scales = stored[1].view("<f4")
    wrong = ~(np.isfinite(scales) & (scales > 0))
    return f"scale {int(np.argmax(wrong))} is {scales[wrong][0]}" if wrong.any() else ""


def _codes(codes: Bytes, n: int, k: int) -> npt.NDArray[np.uint8]:
    return codes.reshape(n // strips.ROWS, strips.ROWS * k)


def _scales(scales: Bytes, n: int, k: int) -> npt.NDArray[np.float32]:
    return scales.view(np.float32).reshape(n // fp8.BLOCK, k // fp8.BLOCK)


FP8 = StripForm(
    "FP8",
    version=1,
    grid=FLOAT_GRIDS["fp8"],
    multiple=kernels_strips.FP8_MULTIPLE,
    magnitude=np.uint8(0x7F),
    coded="E4M3, a float32 scale for each 128 x 128",
    lay_out=tensors,
    columns=columns,
    write=quantize,
    read=unpack,
    defects=(bad_code, bad_scale),
    exact=exact,
    source=fp8.source_values,
    scaled=_scales,
    decoded_rows=kernels_strips.FP8_MULTIPLE,
)
