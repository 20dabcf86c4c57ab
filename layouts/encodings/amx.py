"""Codes with one float32 scale for each row (bytes.md): AMXINT4 and AMXINT8 in the order of kt-kernel's tiles,
MOE_INT4 and MOE_INT8 in its plain order, that of its build for aarch64 with KML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import F32, Bytes, Encoding, Read, Rows, never_exact, rows_of
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.quantizers import MOE_GRIDS, ROW_GRIDS, Matrix, moe_plain


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
        return np.array(kernels.error_sums(bits, matrix, stored[0], stored[1].view(np.float32)), np.float64)

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


# --- in kt-kernel's plain order --------------------------------------------------------------------


def _plain(name: str, of_tiles: Encoding) -> Encoding:
    """The tensors of an encoding in tiles, with codes that are chosen and lie otherwise."""
    grid = MOE_GRIDS[name.lower()]
    bits = grid.bits

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        kernels.quantize_plain(bits, matrix, out[0], out[1].view(np.float32))

    def pack(codes: npt.NDArray[np.int8], scales: npt.NDArray[Any], out: Sequence[Bytes]) -> None:
        if codes.min() < grid.low:
            raise ValueError(f"a code is {codes.min()}, not in {grid.low}..{grid.high}")
        out[0][:] = moe_plain.pack(bits, codes)
        out[1].view(np.float32)[:] = scales.reshape(-1)

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: Rows = slice(None)) -> F32:
        def unpack(blocks: Bytes) -> npt.NDArray[np.int8]:
            return moe_plain.unpack(bits, blocks.reshape(-1), len(blocks) * moe_plain.ROWS, k)

        codes = rows_of(stored[0].reshape(n // moe_plain.ROWS, -1), n, rows, unpack)
        return codes * np.float32(grid.step) * stored[1].view(np.float32)[rows, None]

    return replace(
        of_tiles, name=name, version=1, grid=grid, quantize=quantize, decode=decode, pack=pack, error_sums=None
    )


MOE_INT4 = _plain("MOE_INT4", AMXINT4)
MOE_INT8 = _plain("MOE_INT8", AMXINT8)


def to_tiles(stored: Sequence[Bytes], n: int, k: int) -> None:
    """Puts the codes of a part [n, k] into the order of tiles, in place. Raises ValueError for one out of range."""
    bits = 8 * stored[0].size // (n * k)
    kernels.pack_codes(bits, moe_plain.unpack(bits, stored[0], n, k), stored[0])


def _in_tiles(plain: Encoding, of_tiles: Encoding) -> Encoding:
    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        plain.quantize(matrix, out)
        to_tiles(out, *matrix.shape)

    return replace(of_tiles, name=plain.name, version=plain.version, grid=plain.grid, quantize=quantize)


MOE_INT4_TILES = _in_tiles(MOE_INT4, AMXINT4)
MOE_INT8_TILES = _in_tiles(MOE_INT8, AMXINT8)
