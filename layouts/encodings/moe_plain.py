"""MOE_INT4 and MOE_INT8 in kt-kernel's plain order, that of its build for aarch64 with KML: one float32 scale for each
row (bytes.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings import amx
from ktconvert.layouts.encodings.encoding import F32, Bytes, Encoding, Rows
from ktconvert.native_quant import kernels
from ktconvert.quantizers import MOE_GRIDS, Matrix, moe_plain


def _encoding(name: str, of_tiles: Encoding) -> Encoding:
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
        """Of a slice only the blocks of rows that it touches are decoded; each lies by itself."""
        if not isinstance(rows, slice):
            return decode(stored, n, k)[rows]
        start, stop, _ = rows.indices(n)
        first, last = start // moe_plain.ROWS * moe_plain.ROWS, min(n, -(-stop // moe_plain.ROWS) * moe_plain.ROWS)
        codes = moe_plain.unpack(bits, stored[0].reshape(n, -1)[first:last].reshape(-1), last - first, k)
        scales = stored[1].view(np.float32)[start:stop]
        return codes[start - first : stop - first] * np.float32(grid.step) * scales[:, None]

    return replace(
        of_tiles, name=name, version=1, grid=grid, quantize=quantize, decode=decode, pack=pack, error_sums=None
    )


MOE_INT4 = _encoding("MOE_INT4", amx.AMXINT4)
MOE_INT8 = _encoding("MOE_INT8", amx.AMXINT8)


# --- in memory, in the order that kernels read ----------------------------------------------------


def to_tiles(stored: Sequence[Bytes], n: int, k: int) -> None:
    """Puts the codes of a part [n, k] into the order of AMXINT4 or AMXINT8, in place. Raises ValueError for a code that
    is out of range.
    """
    bits = 8 * stored[0].size // (n * k)
    kernels.pack_codes(bits, moe_plain.unpack(bits, stored[0], n, k), stored[0])


def _in_tiles(plain: Encoding, of_tiles: Encoding) -> Encoding:
    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        plain.quantize(matrix, out)
        to_tiles(out, *matrix.shape)

    return replace(of_tiles, name=plain.name, version=plain.version, grid=plain.grid, quantize=quantize)


MOE_INT4_TILES = _in_tiles(MOE_INT4, amx.AMXINT4)
MOE_INT8_TILES = _in_tiles(MOE_INT8, amx.AMXINT8)
