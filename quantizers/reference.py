"""Numbers of few bits, which the C kernels match bit for bit: BF16, E4M3, E2M1, E8M0, and the scales of NVFP4.

E8M0 is defined in OCP Microscaling Formats 1.0. Equations: numerics.md, section 1. NumPy has no such types, so values
are represented by their bits: BF16 as uint16, the others as uint8.
"""

from __future__ import annotations

import numpy as np

from ktconvert.native_quant.arrays import F32 as F32
from ktconvert.native_quant.arrays import U8, U16

# Values of the codes of FP4 E2M1: sign, 2 exponent bits with bias 1, 1 fraction bit.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Values of the codes of FP8 E4M3: sign, 4 exponent bits with bias 7, 3 fraction bits; no infinities, and 0x7f is NaN.
_e, _f = np.divmod(np.arange(127), 8)
_magnitudes = np.append(np.where(_e == 0, _f * 2.0**-9, (8 + _f) * 2.0 ** (_e - 10)), np.nan)
E4M3: F32 = np.concatenate([_magnitudes, -_magnitudes]).astype(np.float32)


def bf16_to_f32(bits: U16) -> F32:
    """Return float32 numbers, whose upper halves are the BF16 bits."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def f32_to_bf16(x: F32) -> U16:
    """Round to nearest even; NaN becomes 0x7fc0."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((u.astype(np.uint64) + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded)


def e8m0_to_f32(exponents: U8) -> F32:
    """Return 2^(e - 127), exact: 0 is 2^-127, and 255 is NaN."""
    bits = exponents.astype(np.uint32)
    bits <<= 23
    np.maximum(bits, 0x0040_0000, out=bits)  # 2^-127, a subnormal float32
    np.copyto(bits, 0x7FC0_0000, where=exponents == 255)
    return bits.view(np.float32)


def e8m0_exponents(numbers: F32) -> U8:
    """Return the exponents of powers of two, as e8m0_to_f32 reads them."""
    return (np.ascontiguousarray(numbers).view(np.uint32) >> 23).astype(np.uint8)


def nvfp4_scales(codes: U8, tensor_scale: F32, divides: bool) -> F32:
    """Return NVFP4's scales of groups in float32: E4M3 codes times (or divided by) the scale of the whole tensor."""
    scales: F32 = E4M3.take(codes)
    with np.errstate(all="ignore"):  # readers reject values that are not finite
        return (np.divide if divides else np.multiply)(scales, tensor_scale, out=scales)
