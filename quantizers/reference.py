"""The definition in NumPy: slow and obvious. Every C kernel must equal it bit for bit. Equations: numerics.md. BF16
values are their bits (uint16), FP16 values theirs (uint16), FP8 values theirs (uint8): NumPy has no such types.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers import packed

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
I8 = npt.NDArray[np.int8]
F32 = npt.NDArray[np.float32]

SMALLEST_NORMAL = np.float32(2.0**-126)
PANEL_ROWS, HALF_ROWS, K_BLOCK = 32, 16, 3584
ROW_BLOCK = {8: 64, 4: 128}
# What the codes of FP4 E2M1 stand for: sign, 2 exponent bits with bias 1, 1 fraction bit.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


# --- to BF16 --------------------------------------------------------------------------------------


def bf16_to_f32(bits: U16) -> F32:
    """BF16 is the upper half of a float32."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def f32_to_bf16(x: F32) -> U16:
    """Rounds to nearest even; NaN becomes 0x7fc0."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((u.astype(np.uint64) + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded)


def fp8_e4m3_magnitude(bits: U8) -> F32:
    """E4M3 without infinities, less its sign: 4 exponent bits with bias 7, 3 fraction bits; 0x7f is NaN."""
    exponent, fraction = (bits >> 3 & 15).astype(np.int64), (bits & 7).astype(np.float64)
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10))
    return np.where((bits & 0x7F) == 0x7F, np.nan, magnitude).astype(np.float32)


def decode(matrix: Matrix) -> U16:
    """BF16 bits [n, k] of a linear in any kind of values that the kernels read."""
    values, kind = matrix.values, matrix.kind.name
    with np.errstate(all="ignore"):  # overflow and NaN are results here; amax detects them
        if kind == "bf16":
            return np.array(values, np.uint16)
        if kind == "fp16":
            return f32_to_bf16(np.ascontiguousarray(values).view(np.float16).astype(np.float32))
        if kind == "f32":
            return f32_to_bf16(np.ascontiguousarray(values))
        if kind == "fp8_e4m3":
            unsigned = f32_to_bf16(fp8_e4m3_magnitude(values) * matrix.each_scale())
            sign: U16 = np.left_shift(values & 0x80, 8, dtype=np.uint16)
            return unsigned ^ sign
        if kind in packed.BITS:
            zeros = matrix.each_zero()
            half = np.float32(1 << packed.BITS[kind] - 1)
            codes = packed.codes(matrix).astype(np.float32) - (half if zeros is None else zeros)
            return f32_to_bf16(codes * matrix.each_scale())
        if kind == "fp4_e2m1":
            return f32_to_bf16(E2M1[packed.codes(matrix)] * matrix.each_scale())
        if kind in packed.GGML:
            blocks = np.ascontiguousarray(values).reshape(-1, matrix.kind.items)
            decoded = packed.GGML[kind](blocks).reshape(len(values), -1)
            return f32_to_bf16(decoded[:, matrix.skip : matrix.skip + matrix.shape[1]])
    raise ValueError(f"no definition of {kind}")


# --- to codes and scales --------------------------------------------------------------------------


def row_scales(bits: int, bf16: U16) -> F32:
    """One scale per row, float32 [n]: amax * fl(1/127) or amax / 112, and 0 where that is subnormal. ValueError: a
    value is not finite.
    """
    amax = bf16_to_f32((bf16 & 0x7FFF).max(axis=1))
    if not np.isfinite(amax).all():
        raise ValueError(f"row {int(np.argmin(np.isfinite(amax)))} holds a value that is infinite or not a number")
    int8, int4 = amax * np.float32(1 / 127), (amax.astype(np.float64) / 112.0).astype(np.float32)
    scale = int8 if bits == 8 else int4
    return np.where(scale < SMALLEST_NORMAL, np.float32(0), scale)


def quantize(bits: int, bf16: U16) -> tuple[I8, F32]:
    """Codes int8 [n, k] (8 bits: -127..127, 4 bits: -7..7) and scales float32 [n]."""
    scale = row_scales(bits, bf16)
    reciprocal = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    x = np.where(bf16 & 0x7F80, bf16_to_f32(bf16), np.float32(0))  # subnormal values count as 0
    with np.errstate(under="ignore"):
        q = np.rint(x * reciprocal[:, None]).astype(np.int32)
    if bits == 4:
        q = np.sign(q) * ((np.abs(q) + 8) >> 4)
    return q.astype(np.int8), scale


# --- to tiles -------------------------------------------------------------------------------------


def pack(bits: int, codes: I8) -> U8:
    """Codes [n, k] in kt-kernel's order: row blocks, column blocks, panels of 32 rows, tiles, halves, quads."""
    n, k = codes.shape
    ordered = []
    for row in range(0, n, ROW_BLOCK[bits]):
        for column in range(0, k, K_BLOCK):
            block = codes[row : row + ROW_BLOCK[bits], column : column + K_BLOCK]
            if bits == 4:  # a byte: the code of column j of a tile below, that of column j + 64 above
                low, high = block.reshape(block.shape[0], -1, 2, 64).swapaxes(0, 2).swapaxes(1, 2)
                block = (low & 15 | high << 4).reshape(block.shape[0], -1)
            tiles = block.reshape(-1, 2, HALF_ROWS, block.shape[1] // 64, 16, 4)  # panel, half, row, tile, quad, byte
            ordered.append(tiles.transpose(0, 3, 1, 4, 2, 5).reshape(-1))
    return np.concatenate(ordered).view(np.uint8)


def unpack(bits: int, weight: U8, n: int, k: int) -> I8:
    """The inverse of pack: codes int8 [n, k]."""
    codes = np.empty((n, k), np.int8)
    at = 0
    for row in range(0, n, ROW_BLOCK[bits]):
        for column in range(0, k, K_BLOCK):
            rows, columns = ROW_BLOCK[bits], min(K_BLOCK, k - column)
            size = rows * columns * bits // 8
            tiles = weight[at : at + size].view(np.int8).reshape(rows // PANEL_ROWS, -1, 2, 16, HALF_ROWS, 4)
            block = tiles.transpose(0, 2, 4, 1, 3, 5).reshape(rows, -1)
            if bits == 4:
                bytes_ = block.reshape(rows, -1, 64)
                block = np.stack([bytes_ << 4 >> 4, bytes_ >> 4], axis=2).reshape(rows, columns)
            codes[row : row + rows, column : column + columns] = block
            at += size
    return codes


def quantize_pack(bits: int, bf16: U16) -> tuple[U8, F32]:
    """The result of the C kernel: packed weight and scales of BF16 values [n, k]."""
    codes, scale = quantize(bits, bf16)
    return pack(bits, codes), scale


def dequantize(bits: int, weight: U8, scale: F32, n: int, k: int) -> F32:
    """float32 [n, k]: code * scale (8 bits), 16 * code * scale (4 bits), rounded once."""
    step = 1 if bits == 8 else 16
    return (unpack(bits, weight, n, k).astype(np.float32) * np.float32(step)) * scale[:, None]
