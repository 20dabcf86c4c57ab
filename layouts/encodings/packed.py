"""Pack-quantized W4A16 and W8A16: codes in int32 words, one BF16 scale for each group of columns, and the shape, as
compressed-tensors stores them and SGLang and vLLM load them (FORMAT.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import F32, Bytes, Defect, Encoding, Read, Rows, Tensor, never_exact
from ktconvert.native_quant import kernels
from ktconvert.quantizers import GROUP_GRIDS, Grid, Matrix, groups

SUFFIXES = ("weight_packed", "weight_shape", "weight_scale")  # in the order in which they lie in a shard
PIECE = 1 << 14  # bytes of codes that are read at a time


def pack_quantized(grid: Grid, rounding: str) -> Encoding:
    """The encoding with this grid. rounding: how quotients are rounded, a row of kernels.ROUNDINGS."""
    bits, group = grid.bits, grid.group
    assert group is not None

    def tensors(n: int, k: int) -> tuple[Tensor, ...]:
        packed, shape, scale = SUFFIXES
        return (
            Tensor(packed, "I32", (n, k * bits // 32), n * k * bits // 8),
            Tensor(shape, "I64", (2,), 16),
            Tensor(scale, "BF16", (n, k // group), 2 * n * (k // group)),
        )

    def typed(stored: Sequence[Bytes], n: int, k: int) -> list[npt.NDArray[Any]]:
        """Words, shape, bits of BF16 scales; views."""
        described = zip(stored, ("<i4", "<i8", "<u2"), tensors(n, k), strict=True)
        return [data.view(dtype).reshape(tensor.shape) for data, dtype, tensor in described]

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        words, shape, scale = typed(out, *matrix.shape)
        shape[:] = matrix.shape
        kernels.quantize_groups(bits, matrix, words, scale, group=group, rounding=rounding)

    def pack(codes: npt.NDArray[np.int8], scales: npt.NDArray[Any], out: Sequence[Bytes]) -> None:
        words, shape, scale = typed(out, *codes.shape)
        words[:] = groups.pack_words(bits, codes)
        shape[:] = codes.shape
        scale[:] = scales

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
        words, _, scale = typed(stored, n, k)
        return groups.dequantize_groups(bits, words[rows], scale[rows])

    return Encoding(
        grid.name,
        version=1,
        grid=grid,
        multiple=group,
        tensors=tensors,
        quantize=quantize,
        decode=decode,
        is_exact=never_exact,
        defects=(_all_zeros(bits), _bad_shape, _bad_scale),
        pack=pack,
        scales=lambda last, n, k: last.view("<u2").reshape(n, -1),
    )


def _all_zeros(bits: int) -> Defect:
    zero = 0x88 if bits == 4 else 0x80  # a byte of codes 0

    def all_zeros(read: Read, n: int, k: int) -> str:
        """No codes are all zeros, unless the scales say that the source was; of others only the beginning is read."""
        starts = range(0, n * k * bits // 8, PIECE)
        if any((read(0, start, start + PIECE) != zero).any() for start in starts):
            return ""
        if (read(2).view("<u2") == groups.EMPTY_SCALE).all():
            return ""
        return "it is all zeros: its expert would compute nothing"

    return all_zeros


def _bad_shape(read: Read, n: int, k: int) -> str:
    stored = read(1).view("<i8").tolist()
    return "" if stored == [n, k] else f"weight_shape says {' x '.join(map(str, stored))}"


def _bad_scale(read: Read, n: int, k: int) -> str:
    scales = read(2).view("<u2")
    bad = (scales >= 0x7F80) | (scales == 0)
    return f"scale {int(np.argmax(bad))} is not a positive number" if bad.any() else ""


# By the rounding of their quotients.
W4A16 = {rounding: pack_quantized(GROUP_GRIDS["W4A16"], rounding) for rounding in kernels.ROUNDINGS}
W8A16 = {rounding: pack_quantized(GROUP_GRIDS["W8A16"], rounding) for rounding in kernels.ROUNDINGS}
