"""The definition of quantization in NumPy, slow and obvious, which every C kernel must equal bit for bit.

Equations: numerics.md and bytes.md. BF16 and FP16 values are their bits (uint16), FP8 values are uint8, since
NumPy lacks these types.
"""

import gguf
import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings import fp4
from ktconvert.native_quant.arrays import F32, I8, U8, U16
from ktconvert.native_quant.matrix import GGML, Matrix
from ktconvert.quantizers import MXFP4_EXPONENTS, packed
from ktconvert.quantizers.packed import EMPTY_SCALE
from ktconvert.quantizers.reference import E2M1, E4M3, bf16_to_f32, f32_to_bf16

SMALLEST_NORMAL = np.float32(2.0**-126)
PANEL_ROWS, HALF_ROWS, K_BLOCK = 32, 16, 3584
ROW_BLOCK = {8: 64, 4: 128}
STEP = {8: 1, 4: 16}  # distance of codes, in scales of rows


def decode(matrix: Matrix) -> U16:
    """Return the BF16 bits [n, k] of a linear of any kind that the kernels read."""
    values, kind = matrix.values, matrix.kind.name
    with np.errstate(all="ignore"):  # overflow and NaN are results here; amax detects them
        if kind == "bf16":
            return np.array(values, np.uint16)
        if kind == "fp16":
            return f32_to_bf16(np.ascontiguousarray(values).view(np.float16).astype(np.float32))
        if kind == "f32":
            return f32_to_bf16(np.ascontiguousarray(values))
        if kind == "fp8_e4m3":
            unsigned = f32_to_bf16(E4M3[values & 0x7F] * matrix.element_scales())
            sign: U16 = np.left_shift(values & 0x80, 8, dtype=np.uint16)
            return unsigned ^ sign
        if kind in packed.BITS:
            zeros = matrix.element_zeros()
            half = np.float32(1 << packed.BITS[kind] - 1)
            codes = packed.read_codes(matrix).astype(np.float32) - (half if zeros is None else zeros)
            return f32_to_bf16(codes * matrix.element_scales())
        if kind == "fp4_e2m1":
            return f32_to_bf16(E2M1[packed.read_codes(matrix)] * matrix.element_scales())
        name = next(name for name, ggml_kind in GGML.items() if ggml_kind.name == kind)
        decoded = gguf.quants.dequantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType[name])
        if name == "MXFP4":  # gguf-py reads the scale 255 as a number, but it means NaN
            is_nan = values.reshape(len(values), -1, matrix.kind.items)[..., 0] == 255
            decoded = np.where(np.repeat(is_nan, matrix.kind.columns, axis=1), np.nan, decoded)
        return f32_to_bf16(decoded[:, matrix.skip : matrix.skip + matrix.shape[1]].astype(np.float32))


# --- a scale for each row: AMXINT4, AMXINT8 -------------------------------------------------------


def finite_amax(bf16: U16) -> F32:
    """Return the largest magnitude along the last axis. Raise ValueError if a value is not finite."""
    amax = bf16_to_f32((bf16 & 0x7FFF).max(axis=-1))
    finite = np.isfinite(amax).reshape(len(amax), -1).all(axis=1)
    if not finite.all():
        raise ValueError(f"row {int(np.argmin(finite))} holds a value that is infinite or not a number")
    return amax


def row_scales(bits: int, bf16: U16) -> F32:
    """Return a scale per row, float32 [n]: amax * fl(1/127) or amax / 112, and 0 where that is subnormal."""
    amax = finite_amax(bf16)
    scale = amax * np.float32(1 / 127) if bits == 8 else (amax.astype(np.float64) / 112.0).astype(np.float32)
    return np.where(scale < SMALLEST_NORMAL, np.float32(0), scale)


def quantize(bits: int, bf16: U16) -> tuple[I8, F32]:
    """Return codes int8 [n, k] (8 bits: -127..127, 4 bits: -7..7) and scales float32 [n]."""
    scale = row_scales(bits, bf16)
    reciprocal = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    x = np.where(bf16 & 0x7F80, bf16_to_f32(bf16), np.float32(0))  # subnormal values count as 0
    with np.errstate(under="ignore"):
        q = np.rint(x * reciprocal[:, None]).astype(np.int32)
    if bits == 4:
        q = np.sign(q) * ((np.abs(q) + 8) >> 4)
    return q.astype(np.int8), scale


def pack(bits: int, codes: I8) -> U8:
    """Pack codes [n, k] in kt-kernel's order: row blocks, column blocks, panels of 32 rows, tiles, halves, quads."""
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
    """Return the codes int8 [n, k] of a packed weight: the inverse of pack."""
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
    """Return the packed weight and the scales of BF16 values [n, k], like the C kernel."""
    codes, scale = quantize(bits, bf16)
    return pack(bits, codes), scale


def dequantize(bits: int, weight: U8, scale: F32, n: int, k: int) -> F32:
    """Return float32 [n, k]: code * scale (8 bits) or 16 * code * scale (4 bits), rounded once."""
    return (unpack(bits, weight, n, k).astype(np.float32) * np.float32(STEP[bits])) * scale[:, None]


def quantize_plain(bits: int, bf16: U16) -> tuple[I8, F32]:
    """Return codes and scales of MOE_INT4 and MOE_INT8, which round halves away from 0 (numerics.md, 2c)."""
    scale = row_scales(bits, bf16)
    if bits == 8:
        scale = finite_amax(bf16) / np.float32(127)
        scale = np.where(scale < SMALLEST_NORMAL, np.float32(0), scale)
    step = (scale * np.float32(STEP[bits]))[:, None]
    quotient = np.divide(bf16_to_f32(bf16), step, out=np.zeros(bf16.shape, np.float32), where=step != 0)
    truncated = np.trunc(quotient)
    increment = np.where(np.abs(quotient - truncated) >= 0.5, np.copysign(np.float32(1), quotient), np.float32(0))
    return (truncated + increment).astype(np.int8), scale


# --- a scale for each group of columns: W4A16, W8A16, RAWINT4 (sections 6 and 6b) ------------------


def group_scales(bits: int, group: int, bf16: U16, rounding: str = "library") -> U16:
    """Return a scale per group of columns, BF16 [n, k/group]: amax / 7.5 or amax / 127.5, and 2^-7 where that is 0.

    rounding: as in quantize_groups; "signed": -x / 8 for the value x of largest magnitude with its sign, the negative
    one of two. Raise ValueError if a value is not finite.
    """
    grouped = bf16.reshape(len(bf16), -1, group)
    amax = finite_amax(grouped)
    with np.errstate(under="ignore"):
        if rounding == "signed":
            negative = (bf16_to_f32(grouped) == -amax[:, :, None]).any(axis=2)
            scale = f32_to_bf16(np.divide(np.where(negative, amax, -amax), 8, dtype=np.float32))
        else:
            scale = f32_to_bf16(np.divide(amax, (1 << (bits - 1)) - 0.5, dtype=np.float32))
    return np.where(scale & 0x7FFF == 0, EMPTY_SCALE, scale)


def quantize_groups(bits: int, group: int, bf16: U16, rounding: str = "library") -> tuple[I8, U16]:
    """Return codes int8 [n, k] (-8..7 or -128..127) and scales BF16 [n, k/group].

    rounding: "library" rounds x / scale to BF16 first, as llmcompressor does; "float32" does not; "signed" does not
    either, and has different scales (only 4 bits).
    """
    scale = group_scales(bits, group, bf16, rounding)
    with np.errstate(under="ignore"):
        q: F32 = np.divide(bf16_to_f32(bf16), np.repeat(bf16_to_f32(scale), group, axis=1), dtype=np.float32)
    if rounding == "library":
        q = bf16_to_f32(f32_to_bf16(q))
    half = 1 << (bits - 1)
    return np.rint(np.clip(q, -half, half - 1)).astype(np.int8), scale


# --- FP8 in blocks of 128 x 128, and MXFP4 (section 9) ---------------------------------------------

BLOCK = 128
SMALLEST = np.float32(2.0**-6)  # smallest normal value; subnormal codes have its spacing


def fp8_scales(bf16: U16) -> F32:
    """Return amax / 448 of each block, at least 2^-126, and 1 for a block of zeros: float32 [n/128, k/128]."""
    n, k = bf16.shape
    blocks = bf16.reshape(n // BLOCK, BLOCK, k // BLOCK, BLOCK) & 0x7FFF
    amax = bf16_to_f32(blocks.max(axis=(1, 3)))
    return np.where(amax == 0, np.float32(1), np.maximum(amax / np.float32(448), SMALLEST_NORMAL))


def repeat_blocks(scales: npt.NDArray[np.float32]) -> F32:
    """Return the scale of every element: float32 [n, k]."""
    return scales.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)


def fp8_codes(x: F32) -> U8:
    """Return the nearest E4M3 code of each finite x: ties to even, at most 448; signs are kept, also of zeros."""
    magnitude = np.abs(x)
    power = np.frexp(np.maximum(magnitude, SMALLEST))[1] - 1
    units = np.rint(np.ldexp(magnitude, 3 - power)).astype(np.int64)  # 8 .. 16, or less if subnormal
    codes = np.minimum(8 * (power + 6) + units, 0x7E)  # 0x7E is 448
    return (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def quantize_fp8(bf16: U16) -> tuple[U8, F32]:
    """Return codes uint8 [n, k] and scales float32 [n/128, k/128] of finite BF16 values."""
    scales = fp8_scales(bf16)
    with np.errstate(under="ignore"):
        return fp8_codes(bf16_to_f32(bf16) / repeat_blocks(scales)), scales


# The middles between neighbouring magnitudes of E2M1: a tie goes to the even code, the lower one of every second pair.
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
ZEROS_EXPONENT = 127  # exponent of a group of zeros


def nearest_e2m1(magnitude: npt.NDArray[np.float64]) -> U8:
    """Return the codes 0..7 nearest to magnitudes: ties go to the even code, larger values to 6."""
    codes = np.zeros(magnitude.shape, np.uint8)
    for code, middle in enumerate(MIDDLES):
        codes += magnitude >= middle if code % 2 else magnitude > middle
    return codes


def quantize_mxfp4(bf16: U16) -> tuple[U8, U8]:
    """Return codes uint8 [n, k] and exponents uint8 [n, k/32] of BF16 values; k is a multiple of 32.

    Raise ValueError if a value is not finite.
    """
    n, k = bf16.shape
    unsigned: U16 = (bf16 & np.uint16(0x7FFF)).reshape(n, k // fp4.GROUP, fp4.GROUP)
    finite_amax(unsigned)
    amax = unsigned.max(axis=2)
    magnitude = bf16_to_f32(unsigned).astype(np.float64)
    lower = np.clip((amax >> 7).astype(np.int64) - 2, *MXFP4_EXPONENTS)
    scaled = np.ldexp(magnitude, (127 - lower)[:, :, None])
    small, large = nearest_e2m1(scaled), nearest_e2m1(scaled / 2)
    # Values of at most 1/4 become 0 either way. All others are multiples of 2^-9 below 8, so these sums are exact.
    counts = scaled > 0.25
    small_error = np.where(counts, scaled - E2M1[small], 0)
    large_error = np.where(counts, scaled - 2 * E2M1[large], 0)
    higher = (np.square(small_error).sum(axis=2) > np.square(large_error).sum(axis=2)) & (lower < MXFP4_EXPONENTS[1])
    signs = (bf16 >> 12 & 8).astype(np.uint8)
    codes = np.where(higher[:, :, None], large, small).reshape(n, k) | signs
    return codes, np.where(amax == 0, ZEROS_EXPONENT, lower + higher).astype(np.uint8)
