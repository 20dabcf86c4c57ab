"""MXFP4 as numbers, and in panels (bytes.md): codes 0..15 as in reference.E2M1, and exponents, E8M0 bytes, one for 32
columns of a row.
"""

from __future__ import annotations

import numpy as np

from ktconvert.quantizers import panels
from ktconvert.quantizers.reference import E2M1, F32, U8, e8m0

GROUP = 32  # columns that share an exponent
LEAST, MOST = 1, 252  # exponents that are chosen: the largest number, 6 * 2^(252 - 127), is finite


def dequantize(codes: U8, exponents: U8) -> F32:
    """float32 [n, k], exact."""
    n, groups = exponents.shape
    values: F32 = E2M1.take(codes).reshape(n, groups, GROUP)
    values *= e8m0(exponents)[:, :, None]
    return values.reshape(n, groups * GROUP)


def codes_from_panels(held: U8) -> U8:
    """Panels uint8 [n/32, 16*k] back to codes [n, k].

    A word of 16 bits has columns 0, 2, 4 and 6, or 1, 3, 5 and 7, of 8 columns of a row, from the low bits up; in half
    a block the two words of 8 columns stay together, row after row.
    """
    count, items = held.shape
    k = items // (panels.ROWS // 2)
    pairs = np.ascontiguousarray(held).view("<u4").reshape(count, k // GROUP, 2, 4, panels.HALF)
    words = np.ascontiguousarray(pairs.transpose(0, 2, 4, 1, 3)).view(np.uint8).reshape(-1, 2, 2)  # parity, byte
    codes = np.empty((len(words), 2, 2, 2), np.uint8)  # of 8 columns: byte, nibble, parity
    for parity in range(2):
        for byte in range(2):
            np.bitwise_and(words[:, parity, byte], 15, out=codes[:, byte, 0, parity])
            np.right_shift(words[:, parity, byte], 4, out=codes[:, byte, 1, parity])
    return codes.reshape(count * panels.ROWS, k)


def exponents_to_panels(exponents: U8) -> U8:
    """Exponents [n, k/32] to panels [n/32, k]: block after block, each with those of its 32 rows."""
    n, groups = exponents.shape
    split = exponents.reshape(n // panels.ROWS, panels.ROWS, groups)
    return np.ascontiguousarray(split.transpose(0, 2, 1)).reshape(n // panels.ROWS, groups * panels.ROWS)


def exponents_from_panels(held: U8) -> U8:
    """The inverse of exponents_to_panels: exponents [n, k/32]."""
    count, k = held.shape
    split = held.reshape(count, k // panels.ROWS, panels.ROWS)
    return np.ascontiguousarray(split.transpose(0, 2, 1)).reshape(count * panels.ROWS, k // panels.ROWS)
