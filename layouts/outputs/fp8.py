"""FP8 E4M3 experts with a scale for each block of 128 x 128, in strips (FORMAT.md, section "Strips")."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.outputs.form import Rows, Tensor
from ktconvert.layouts.outputs.output import Bytes
from ktconvert.layouts.outputs.strip_form import StripForm, rows_of
from ktconvert.native_quant import kernels, kernels_strips
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import FLOAT_GRIDS, fp8, strips
from ktconvert.quantizers.errors import decode_finite
from ktconvert.quantizers.reference import f32_to_bf16
from ktconvert.quantizers.scales import E4M3

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel

BF16_INFINITY = 0x7F80
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
    pack(matrix, _codes(out[0], n, k), _scales(out[1], n, k))


def pack(matrix: Matrix, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> None:
    """kernels_strips.pack_fp8 where scales of a source in such blocks may be negative, 0, or so large that a number
    overflows: 128 rows at a time. Raises kernels.NonFinite.
    """
    if not fp8.is_kept(matrix) or matrix.scales is None or _usual(matrix.scales):
        kernels_strips.pack_fp8(matrix, codes, scales)
        return
    n, _ = matrix.shape
    held = codes.reshape(n // fp8.BLOCK, -1, codes.shape[1])
    for block in range(n // fp8.BLOCK):
        rows = matrix.rows(block * fp8.BLOCK, (block + 1) * fp8.BLOCK)
        try:
            require_finite(rows)
            kernels_strips.pack_fp8(fp8.with_positive_scales(rows), held[block], scales[block : block + 1])
        except kernels.NonFinite as bad:
            raise kernels.NonFinite(block * fp8.BLOCK + bad.row, bad.column) from None


def require_finite(matrix: Matrix) -> None:
    """Raises kernels.NonFinite where the product of a code and a large scale is infinite in BF16."""
    if matrix.scales is not None and (np.abs(matrix.scales) > fp8.LARGE_SCALE).any():
        decode_finite(matrix)


def _usual(scales: npt.NDArray[np.float32]) -> bool:
    return bool(((scales > 0) & (scales <= fp8.LARGE_SCALE)).all())


def unpack(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> npt.NDArray[np.float32]:
    """Float32 [n, k], rounded once, or some rows of it."""
    held, inside = rows_of(_codes(stored[0], n, k), n, rows)
    return fp8.values(strips.unlay(held)[inside], _scales(stored[1], n, k)[np.arange(n)[rows] // fp8.BLOCK])


def bad_code(stored: Sequence[Bytes], k: int) -> str:
    """No code is NaN."""
    wrong = (stored[0] & 0x7F) == fp8.NAN
    return f"code {int(np.argmax(wrong))} is not a number" if wrong.any() else ""


def bad_scale(rows: int, stored: Sequence[Bytes], k: int) -> str:
    """Every scale is finite and positive, and its products with the codes are finite in BF16.

    rows: of a strip, or 1 where codes lie row after row
    """
    scales = stored[1].view("<f4")
    wrong = ~(np.isfinite(scales) & (scales > 0))
    if wrong.any():
        return f"scale {int(np.argmax(wrong))} is {scales[wrong][0]}"
    k = max(k, fp8.BLOCK)  # of a damaged shape
    for index in map(int, np.flatnonzero(scales > fp8.LARGE_SCALE)):
        row, column = (fp8.BLOCK * at for at in divmod(index, k // fp8.BLOCK))
        starts = range(row * k + column * rows, (row + fp8.BLOCK) * k, rows * k)
        codes = np.concatenate([stored[0][start : start + fp8.BLOCK * rows] for start in starts])
        with np.errstate(over="ignore"):
            largest = E4M3[codes & 0x7F].max(initial=0) * scales[index]
        if f32_to_bf16(largest) >= BF16_INFINITY:
            return f"scale {index}, {scales[index]!s}, makes a number infinite"
    return ""


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
    defects=(bad_code, partial(bad_scale, strips.ROWS)),
    exact=exact,
    source=fp8.source_values,
    scaled=_scales,
    decoded_rows=kernels_strips.FP8_MULTIPLE,
)
