"""What the bytes of 8-bit scales mean: E8M0 (OCP Microscaling Formats 1.0), and E4M3 of NVFP4 (numerics.md, section 1);
and codes of several scales brought to one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktconvert.quantizers.reference import F32, I8, U8, fp8_e4m3_magnitude

SMALLEST = 0x0040_0000  # 2^-127, a subnormal float32
NAN = 0x7FC0_0000

_codes = np.arange(256).astype(np.uint8)
E4M3: F32 = np.where(_codes & 0x80, -fp8_e4m3_magnitude(_codes), fp8_e4m3_magnitude(_codes))


def e8m0(exponents: U8) -> F32:
    """2^(e - 127), exact: 0 is 2^-127, and 255 is NaN."""
    bits = exponents.astype(np.uint32)
    bits <<= 23
    np.maximum(bits, SMALLEST, out=bits)
    np.copyto(bits, NAN, where=exponents == 255)
    return bits.view(np.float32)


def e8m0_exponents(numbers: F32) -> U8:
    """The exponents of powers of two that e8m0 gives."""
    return (np.ascontiguousarray(numbers).view(np.uint32) >> 23).astype(np.uint8)


def nvfp4(scales: U8, tensor_scale: np.float32, divides: bool) -> F32:
    """The scales of groups: their E4M3 codes times (or by) the scale of the whole tensor, rounded to float32."""
    each: F32 = E4M3.take(scales)
    with np.errstate(all="ignore"):  # what is not finite is refused by its reader
        return (np.divide if divides else np.multiply)(each, tensor_scale, out=each)


def to_one_scale(codes: Sequence[I8], scales: Sequence[F32]) -> tuple[I8, F32]:
    """Side by side: codes int8 [n, k_0], [n, k_1], ..., each with a scale per row, float32 [n], finite, none negative.

    Returns codes int8 [n, k_0 + k_1 + ...] and scales float32 [n] (numerics.md, section 8). The largest scale stays;
    codes of smaller ones are rounded again. A row whose scales are equal, or 0, stays as it is.
    """
    if len(codes) == 1:
        return codes[0], scales[0]
    largest = np.maximum.reduce(list(scales))
    out = np.empty((len(largest), sum(c.shape[1] for c in codes)), np.int8)
    at = 0
    for own, scale in zip(codes, scales, strict=True):
        ratio = np.divide(scale, largest, out=np.zeros_like(scale), where=largest != 0)
        out[:, at : at + own.shape[1]] = np.rint(own * ratio[:, None])
        at += own.shape[1]
    return out, largest
