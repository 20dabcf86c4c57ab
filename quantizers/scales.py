"""What the bytes of 8-bit scales mean: E8M0 (OCP Microscaling Formats 1.0), and E4M3 scales of NVFP4. Equations:
numerics.md, section 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktconvert.quantizers.reference import fp8_e4m3_magnitude

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

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
