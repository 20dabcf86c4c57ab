"""kt-kernel's MOE_INT4 and MOE_INT8 in NumPy: rounding halves away from 0, and their plain order (numerics.md, section
2c; bytes.md).
"""

from __future__ import annotations

import numpy as np

from ktconvert.quantizers.reference import F32, I8, SMALLEST_NORMAL, U8, U16, bf16_to_f32, row_scales

ROWS, BYTES = 8, 32  # rows that lie together; bytes of each of them until the next one's begin
STEP = {8: 1, 4: 16}


def scales(bits: int, bf16: U16) -> F32:
    """One scale per row, float32 [n]: amax / 127, or that of AMXINT4; 0 where it is subnormal. ValueError: a value is
    not finite.
    """
    of_amx = row_scales(bits, bf16)
    if bits == 4:
        return of_amx
    scale = bf16_to_f32((bf16 & 0x7FFF).max(axis=1)) / np.float32(127)
    return np.where(scale < SMALLEST_NORMAL, np.float32(0), scale)


def quantize(bits: int, bf16: U16) -> tuple[I8, F32]:
    """Codes int8 [n, k] (8 bits: -127..127, 4 bits: -7..7) and scales float32 [n]."""
    scale = scales(bits, bf16)
    step = (scale * np.float32(STEP[bits]))[:, None]
    quotient = np.divide(bf16_to_f32(bf16), step, out=np.zeros(bf16.shape, np.float32), where=step != 0)
    whole = np.trunc(quotient)
    away = np.where(np.abs(quotient - whole) >= 0.5, np.copysign(np.float32(1), quotient), np.float32(0))
    return (whole + away).astype(np.int8), scale


def pack(bits: int, codes: I8) -> U8:
    """Codes [n, k] in the plain order: 8 rows, then 32 columns (8 bits) or 64 (4 bits) of each of them."""
    n = len(codes)
    in_bytes = codes.reshape(n, -1, 8 // bits, BYTES)
    if bits == 4:  # the first 32 of 64 columns in the upper halves
        in_bytes = in_bytes[:, :, :1] << 4 | in_bytes[:, :, 1:] & 15
    return in_bytes.reshape(n // ROWS, ROWS, -1, BYTES).transpose(0, 2, 1, 3).reshape(-1).view(np.uint8)


def unpack(bits: int, weight: U8, n: int, k: int) -> I8:
    """The inverse of pack: codes int8 [n, k]."""
    blocks = weight.view(np.int8).reshape(n // ROWS, -1, ROWS, BYTES)
    codes = np.empty((n // ROWS, ROWS, blocks.shape[1], 8 // bits, BYTES), np.int8)
    in_rows = blocks.transpose(0, 2, 1, 3)
    if bits == 8:
        codes[:, :, :, 0] = in_rows
    else:
        np.right_shift(in_rows, 4, out=codes[:, :, :, 0])
        np.right_shift(in_rows << 4, 4, out=codes[:, :, :, 1])
    return codes.reshape(n, k)
