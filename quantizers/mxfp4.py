"""MXFP4: the definition in NumPy of how exponents and codes are chosen and where they lie in panels, and the way back.

The C kernels must equal it bit for bit. Equations: numerics.md, section 9. Codes are 0..15 as in reference.E2M1;
exponents are E8M0 bytes, one for 32 columns of a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktconvert.quantizers import panels
from ktconvert.quantizers.reference import E2M1, F32, U8, U16, bf16_to_f32
from ktconvert.quantizers.scales import e8m0

GROUP = 32  # columns that share an exponent
LEAST, MOST = 1, 252  # exponents that are chosen: the largest number, 6 * 2^(252 - 127), is finite
OF_ZEROS = 127
# Between one magnitude and the next: a tie goes to the even code, the lower one of every other pair.
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def nearest(magnitude: npt.NDArray[np.float64]) -> U8:
    """The codes 0..7 nearest to magnitudes: a tie goes to the even code, what is larger than 6 to 6."""
    codes = np.zeros(magnitude.shape, np.uint8)
    for code, middle in enumerate(MIDDLES):
        codes += magnitude >= middle if code % 2 else magnitude > middle
    return codes


def quantize(bf16: U16) -> tuple[U8, U8]:
    """Codes uint8 [n, k] and exponents uint8 [n, k/32] of BF16 values; k: a multiple of 32. ValueError: a value is not
    finite.
    """
    n, k = bf16.shape
    unsigned: U16 = (bf16 & np.uint16(0x7FFF)).reshape(n, k // GROUP, GROUP)
    amax = unsigned.max(axis=2)
    if (infinite := (amax >= 0x7F80).any(axis=1)).any():
        raise ValueError(f"row {int(np.argmax(infinite))} holds a value that is infinite or not a number")
    magnitude = bf16_to_f32(unsigned).astype(np.float64)
    lower = np.clip((amax >> 7).astype(np.int64) - 2, LEAST, MOST)
    scaled = np.ldexp(magnitude, (127 - lower)[:, :, None])
    small, large = nearest(scaled), nearest(scaled / 2)
    # What is at most 1/4 becomes 0 either way. All else is a multiple of 2^-9 below 8: these sums are exact.
    counts = scaled > 0.25
    small_error = np.where(counts, scaled - E2M1[small], 0)
    large_error = np.where(counts, scaled - 2 * E2M1[large], 0)
    higher = (np.square(small_error).sum(axis=2) > np.square(large_error).sum(axis=2)) & (lower < MOST)
    signs = (bf16 >> 12 & 8).astype(np.uint8)
    codes = np.where(higher[:, :, None], large, small).reshape(n, k) | signs
    return codes, np.where(amax == 0, OF_ZEROS, lower + higher).astype(np.uint8)


def dequantize(codes: U8, exponents: U8) -> F32:
    """float32 [n, k], exact."""
    n, groups = exponents.shape
    values: F32 = E2M1.take(codes).reshape(n, groups, GROUP)
    values *= e8m0(exponents)[:, :, None]
    return values.reshape(n, groups * GROUP)


def codes_to_panels(codes: U8) -> U8:
    """Codes [n, k], multiples of 32, to panels uint8 [n/32, 16*k].

    A word of 16 bits has columns 0, 2, 4 and 6, or 1, 3, 5 and 7, of 8 columns of a row, from the low bits up; in half
    a block the two words of 8 columns stay together, row after row.
    """
    n, k = codes.shape
    split = codes.astype("<u2").reshape(n // panels.ROWS, 2, panels.HALF, k // GROUP, 4, 4, 2)
    words = split[..., 0, :] | split[..., 1, :] << 4 | split[..., 2, :] << 8 | split[..., 3, :] << 12
    ordered = np.ascontiguousarray(words.transpose(0, 3, 1, 4, 2, 5))
    return ordered.view(np.uint8).reshape(n // panels.ROWS, panels.ROWS * k // 2)


def codes_from_panels(held: U8) -> U8:
    """The inverse of codes_to_panels: codes [n, k]."""
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
