"""Codes with one float32 scale per row (bytes.md).

AMXINT4 and AMXINT8 are in the order of kt-kernel's tiles. MOE_INT4 and MOE_INT8 are in its plain order, which its build
for aarch64 with KML uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ktconvert.layouts.encodings.encoding import Encoding, RowSelection, TensorReader, select_rows
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels
from ktconvert.native_quant.arrays import F32, F64, I8, Array, Bytes
from ktconvert.quantizers import MOE_GRIDS, ROW_GRIDS, Matrix


def _make_encoding(name: str, grid_name: str) -> Encoding:
    """Return kt-kernel's AMX encoding of a grid: panels of codes, and float32 scales for each row."""
    grid = ROW_GRIDS[grid_name]
    bits = grid.bits
    block_rows = kernels.GEOMETRIES[bits].block_rows

    def tensors(n: int, k: int) -> tuple[TensorInfo, ...]:
        """Return the codes, a flat tensor of whole pages, and the scales, one float32 per row."""
        nbytes = n * k * bits // 8
        return TensorInfo("weight", "I8", (nbytes,), nbytes), TensorInfo("scale", "F32", (n,), 4 * n)

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        kernels.quantize_pack(bits, matrix, out[0], out[1].view(np.float32))

    def pack(codes: I8, scales: Array, out: Sequence[Bytes]) -> None:
        kernels.pack_codes(bits, codes, out[0])
        out[1].view(np.float32)[:] = scales.reshape(-1)

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: RowSelection = slice(None)) -> F32:
        """Decode only the blocks of rows that a slice touches; each block is contiguous."""
        if not isinstance(rows, slice):
            return decode(stored, n, k)[rows]
        start, stop, _ = rows.indices(n)
        first = start // block_rows * block_rows
        last = min(n, -(-stop // block_rows) * block_rows)
        codes = stored[0].reshape(n, -1)[first:last].reshape(-1)
        scales = stored[1].view(np.float32)[first:last]
        return kernels.dequantize(bits, codes, scales, last - first, k)[start - first : stop - first]

    def error_sums(matrix: Matrix, stored: Sequence[Bytes]) -> F64:
        return np.array(kernels.error_sums(bits, matrix, stored[0], stored[1].view(np.float32)), np.float64)

    return Encoding(
        name,
        version=1,
        grid=grid,
        multiple=max(kernels.GEOMETRIES[bits]),
        tensors=tensors,
        quantize=quantize,
        decode=decode,
        defect_checks=(None, find_bad_scale),
        pack=pack,
        unpack_scales=lambda scale_bytes, n, k: scale_bytes.view(np.float32).reshape(n, 1),
        error_sums=error_sums,
    )


def find_bad_scale(read: TensorReader, n: int, k: int) -> str:
    """Check that scales are finite and not negative, as the scales of finite weights are."""
    scales = read(1).view("<f4")
    is_bad = ~(np.isfinite(scales) & (scales >= 0))
    row = int(np.argmax(is_bad))
    return f"the scale of row {row} is {scales[row]}" if is_bad.any() else ""


AMXINT4 = _make_encoding("AMXINT4", "int4")
AMXINT8 = _make_encoding("AMXINT8", "int8")


# --- in kt-kernel's plain order --------------------------------------------------------------------

# Blocks of PLAIN_ROWS rows, which interleave their bytes: PLAIN_BYTES bytes of each row in turn.
PLAIN_ROWS = 8
PLAIN_BYTES = 32


def pack_plain(bits: int, codes: I8) -> Bytes:
    """Return codes [n, k] in the plain order: 8 rows, then 32 columns (8 bits) or 64 (4 bits) of each of them."""
    n = len(codes)
    code_bytes = codes.reshape(n, -1, 8 // bits, PLAIN_BYTES)
    if bits == 4:
        # The upper halves of bytes have the first 32 of 64 columns.
        code_bytes = code_bytes[:, :, :1] << 4 | code_bytes[:, :, 1:] & 15
    blocks = code_bytes.reshape(n // PLAIN_ROWS, PLAIN_ROWS, -1, PLAIN_BYTES)
    return blocks.transpose(0, 2, 1, 3).reshape(-1).view(np.uint8)


def unpack_plain(bits: int, weight: Bytes, n: int, k: int) -> I8:
    """Return codes int8 [n, k]; the inverse of pack_plain."""
    blocks = weight.view(np.int8).reshape(n // PLAIN_ROWS, -1, PLAIN_ROWS, PLAIN_BYTES)
    codes = np.empty((n // PLAIN_ROWS, PLAIN_ROWS, blocks.shape[1], 8 // bits, PLAIN_BYTES), np.int8)
    row_bytes = blocks.transpose(0, 2, 1, 3)
    if bits == 8:
        codes[:, :, :, 0] = row_bytes
    else:
        np.right_shift(row_bytes, 4, out=codes[:, :, :, 0])
        np.right_shift(row_bytes << 4, 4, out=codes[:, :, :, 1])
    return codes.reshape(n, k)


def _make_plain(name: str, tiled: Encoding) -> Encoding:
    """Return an encoding in the plain order, with codes as MOE methods choose them and the tensors of `tiled`."""
    grid = MOE_GRIDS[name.lower()]
    bits = grid.bits

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        kernels.quantize_plain(bits, matrix, out[0], out[1].view(np.float32))

    def pack(codes: I8, scales: Array, out: Sequence[Bytes]) -> None:
        if codes.min() < grid.low:
            raise ValueError(f"a code is {codes.min()}, not in {grid.low}..{grid.high}")
        out[0][:] = pack_plain(bits, codes)
        out[1].view(np.float32)[:] = scales.reshape(-1)

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: RowSelection = slice(None)) -> F32:
        def unpack(blocks: Bytes) -> I8:
            return unpack_plain(bits, blocks.reshape(-1), len(blocks) * PLAIN_ROWS, k)

        codes = select_rows(stored[0].reshape(n // PLAIN_ROWS, -1), n, rows, unpack)
        return codes * np.float32(grid.step) * stored[1].view(np.float32)[rows, None]

    return replace(tiled, name=name, version=1, grid=grid, quantize=quantize, decode=decode, pack=pack, error_sums=None)


MOE_INT4 = _make_plain("MOE_INT4", AMXINT4)
MOE_INT8 = _make_plain("MOE_INT8", AMXINT8)


def reorder_into_tiles(stored: Sequence[Bytes], n: int, k: int) -> None:
    """Reorder the codes of a slice [n, k] into the order of tiles, in place.

    Raises ValueError for a code that is out of range.
    """
    bits = 8 * stored[0].size // (n * k)
    kernels.pack_codes(bits, unpack_plain(bits, stored[0], n, k), stored[0])


def _make_tiled(plain: Encoding, tiled: Encoding) -> Encoding:
    """Return an encoding in the order of tiles, with codes as `plain` chooses them."""

    def quantize(matrix: Matrix, out: Sequence[Bytes]) -> None:
        plain.quantize(matrix, out)
        reorder_into_tiles(out, *matrix.shape)

    return replace(tiled, name=plain.name, version=plain.version, grid=plain.grid, quantize=quantize)


MOE_INT4_TILES = _make_tiled(MOE_INT4, AMXINT4)
MOE_INT8_TILES = _make_tiled(MOE_INT8, AMXINT8)
