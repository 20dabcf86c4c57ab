"""FP8 E4M3 with a float32 scale for each block of 128 x 128, row after row or in panels of 32 rows (FORMAT.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import F32, Bytes, Defect, Encoding, Read, Rows, Tensor
from ktconvert.layouts.encodings.order import IN_PANELS, IN_ROWS, rows_of
from ktconvert.native_quant import kernels, kernels_panels
from ktconvert.quantizers import FLOAT_GRIDS, Matrix, errors, fp8, panels
from ktconvert.quantizers.reference import f32_to_bf16
from ktconvert.quantizers.scales import E4M3

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.experts import MoeModel

BF16_INFINITY = 0x7F80
SOURCES = ("F8_E4M3", "MXFP8")  # encodings of checkpoints that may have such blocks


def _encoding(order: int, codes_suffix: str, scales_suffix: str) -> Encoding:
    def tensors(n: int, k: int) -> tuple[Tensor, ...]:
        blocks = (n // fp8.BLOCK, k // fp8.BLOCK)
        return (
            Tensor(codes_suffix, "F8_E4M3", (n // order, order * k), n * k),
            Tensor(scales_suffix, "F32", blocks, 4 * blocks[0] * blocks[1]),
        )

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        n, k = matrix.shape
        _pack(matrix, out[0].reshape(n // order, order * k), block_scales(out[1], n, k))

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
        """The product of code and scale, rounded once."""
        codes = rows_of(stored[0].reshape(n // order, order * k), n, rows, panels.unlay)
        return fp8.values(codes, block_scales(stored[1], n, k)[np.arange(n)[rows] // fp8.BLOCK])

    def error_sums(matrix: Matrix, stored: Sequence[Bytes]) -> npt.NDArray[np.float64]:
        """Against the source's own numbers where its codes are kept: BF16 would round them."""
        return errors.error_sums(matrix, lambda rows: decode(stored, *matrix.shape, rows), fp8.source_values)

    return Encoding(
        "FP8",
        version=1,
        grid=FLOAT_GRIDS["fp8"],
        multiple=kernels_panels.FP8_MULTIPLE,
        tensors=tensors,
        quantize=quantize,
        decode=decode,
        is_exact=is_exact,
        defects=(bad_code, _bad_scale(order)),
        scales=block_scales,
        error_sums=error_sums,
    )


def block_scales(last: Bytes, n: int, k: int) -> npt.NDArray[np.float32]:
    """Float32 [n / 128, k / 128]; a view."""
    return last.view(np.float32).reshape(n // fp8.BLOCK, k // fp8.BLOCK)


def is_exact(model: MoeModel) -> bool:
    """FP8 in blocks of 128 x 128 keeps codes and scales."""
    return all(
        weight.encoding.name in SOURCES
        and weight.fit(moe.input_major) == (fp8.BLOCK, fp8.BLOCK)
        and not getattr(moe.style, "interleaved", False)  # every other row: no blocks
        for moe in model.moe_layers.values()
        for weight in moe.weights.values()
    )


def _pack(matrix: Matrix, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> None:
    """kernels_panels.pack_fp8 also where scales of a source in such blocks are negative, 0, or so large that a number
    overflows: 128 rows at a time. Raises kernels.NonFinite.
    """
    if not fp8.is_kept(matrix) or matrix.scales is None or _usual(matrix.scales):
        kernels_panels.pack_fp8(matrix, codes, scales)
        return
    n, _ = matrix.shape
    held = codes.reshape(n // fp8.BLOCK, -1, codes.shape[1])
    for block in range(n // fp8.BLOCK):
        rows = matrix.rows(block * fp8.BLOCK, (block + 1) * fp8.BLOCK)
        try:
            require_finite(rows)
            kernels_panels.pack_fp8(fp8.with_positive_scales(rows), held[block], scales[block : block + 1])
        except kernels.NonFinite as bad:
            raise kernels.NonFinite(block * fp8.BLOCK + bad.row, bad.column) from None


def require_finite(matrix: Matrix) -> None:
    """Raises kernels.NonFinite where the product of a code and a large scale is infinite in BF16."""
    if matrix.scales is not None and (np.abs(matrix.scales) > fp8.LARGE_SCALE).any():
        errors.decode_finite(matrix)


def _usual(scales: npt.NDArray[np.float32]) -> bool:
    return bool(((scales > 0) & (scales <= fp8.LARGE_SCALE)).all())


def bad_code(read: Read, n: int, k: int) -> str:
    """No code is NaN."""
    wrong = (read(0) & 0x7F) == fp8.NAN
    return f"code {int(np.argmax(wrong))} is not a number" if wrong.any() else ""


def _bad_scale(order: int) -> Defect:
    def bad_scale(read: Read, n: int, k: int) -> str:
        """Every scale is finite and positive, and its products with the codes are finite in BF16."""
        scales = read(1).view("<f4")
        wrong = ~(np.isfinite(scales) & (scales > 0))
        if wrong.any():
            return f"scale {int(np.argmax(wrong))} is {scales[wrong][0]}"
        width = max(k, fp8.BLOCK)  # of a damaged shape
        for index in map(int, np.flatnonzero(scales > fp8.LARGE_SCALE)):
            row, column = (fp8.BLOCK * at for at in divmod(index, width // fp8.BLOCK))
            starts = range(row * width + column * order, (row + fp8.BLOCK) * width, order * width)
            codes = np.concatenate([read(0, start, start + fp8.BLOCK * order) for start in starts])
            with np.errstate(over="ignore"):
                largest = E4M3[codes & 0x7F].max(initial=0) * scales[index]
            if f32_to_bf16(largest) >= BF16_INFINITY:
                return f"scale {index}, {scales[index]!s}, makes a number infinite"
        return ""

    return bad_scale


PANELS = _encoding(IN_PANELS, "codes", "scales")
ROWS = _encoding(IN_ROWS, "weight", "weight_scale_inv")
