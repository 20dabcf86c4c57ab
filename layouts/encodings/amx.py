"""AMXINT4 and AMXINT8: codes in the order of kt-kernel's tiles, one float32 scale for each row (bytes.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import F32, Bytes, Encoding, Read, Rows, never_exact
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.quantizers import ROW_GRIDS, Matrix


def _encoding(name: str, grid_name: str) -> Encoding:
    grid = ROW_GRIDS[grid_name]
    bits, block_rows = grid.bits, kernels.GEOMETRIES[grid.bits].block_rows

    def tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
        """Codes, flat, in whole pages; one float32 for each row."""
        nbytes = n * k * bits // 8
        return TensorInfo("weight", "I8", (nbytes,), nbytes), TensorInfo("scale", "F32", (n,), 4 * n)

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        kernels.quantize_pack(bits, matrix, out[0], out[1].view(np.float32))

    def pack(codes: npt.NDArray[np.int8], scales: npt.NDArray[Any], out: Sequence[Bytes]) -> None:
        kernels.pack_codes(bits, codes, out[0])
        out[1].view(np.float32)[:] = scales.reshape(-1)

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
        """Of a slice only the blocks of rows that it touches are decoded; each lies by itself."""
        if not isinstance(rows, slice):
            return decode(stored, n, k)[rows]
        start, stop, _ = rows.indices(n)
        first, last = start // block_rows * block_rows, min(n, -(-stop // block_rows) * block_rows)
        codes, scales = stored[0].reshape(n, -1)[first:last].reshape(-1), stored[1].view(np.float32)[first:last]
        return kernels.dequantize(bits, codes, scales, last - first, k)[start - first : stop - first]

    def error_sums(matrix: Matrix, stored: Sequence[Bytes]) -> npt.NDArray[np.float64]:
        sums = kernels.error_sums(bits, matrix, stored[0], stored[1].view(np.float32))
        return np.array(sums, dtype=np.float64)

    return Encoding(
        name,
        version=1,
        grid=grid,
        multiple=max(kernels.GEOMETRIES[bits]),
        tensors=tensors,
        quantize=quantize,
        decode=decode,
        is_exact=never_exact,
        defects=(None, bad_scale),
        pack=pack,
        scales=lambda last, n, k: last.view(np.float32).reshape(n, 1),
        error_sums=error_sums,
    )


def bad_scale(read: Read, n: int, k: int) -> str:
    """Scales are finite and not negative, as those of finite weights always are."""
    scales = read(1).view("<f4")
    bad = ~(np.isfinite(scales) & (scales >= 0))
    row = int(np.argmax(bad))
    return f"the scale of row {row} is {scales[row]}" if bad.any() else ""


AMXINT4 = _encoding("AMXINT4", "int4")
AMXINT8 = _encoding("AMXINT8", "int8")
