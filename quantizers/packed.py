"""Integer codes in words, as checkpoints store them: the definition in NumPy, which the C kernels match bit for bit.

Codes are stored unsigned: 0..15 or 0..255. Equations: numerics.md, section 1. Sources: compressed-tensors 0.19
(pack-quantized), AutoAWQ 0.2.9 (packing_utils.py, version GEMM), GPTQModel 7.7.0 (formats gptq and gptq_v2); the
definitions are tested with files in tests/golden that these libraries wrote.
"""

from __future__ import annotations

import numpy as np

from ktconvert.native_quant.arrays import F32, I8, I32, U8, U16, Array
from ktconvert.native_quant.matrix import Matrix
from ktconvert.quantizers.reference import bf16_to_f32

EMPTY_SCALE = np.uint16(0x3C00)  # scale of a group of zeros: 2^-7 in BF16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble p of a word, from the low bits up, holds code AWQ_ORDER[p] of its 8 codes
BITS = {"int4": 4, "int8": 8, "int8_signed": 8, "int4_words": 4, "int8_words": 8, "int4_awq": 4}


def unpack_codes(bits: int, words: Array) -> U8:
    """Return the codes of 32-bit words [..., w], low bits first: uint8 [..., w * 32 / bits]."""
    data = np.ascontiguousarray(words).view(np.dtype("<u4")).view(np.uint8)
    return data if bits == 8 else np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


def pack_words(bits: int, codes: I8) -> I32:
    """Return codes [n, k] as int32 [n, k*bits/32]: code + 2^(bits-1), unsigned, column after column, low bits first."""
    unsigned = (codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    if bits == 4:
        unsigned = unsigned[:, ::2] | np.left_shift(unsigned[:, 1::2], 4, dtype=np.uint8)
    return np.ascontiguousarray(unsigned).view("<i4")


def unpack_words(bits: int, words: Array) -> I8:
    """Return codes int8 [n, k]; the inverse of pack_words."""
    return to_signed(bits, unpack_codes(bits, words))


def to_signed(bits: int, codes: U8) -> I8:
    """Return codes less 2^(bits-1), their values in the absence of zero points."""
    return (codes ^ 0x80).view(np.int8) if bits == 8 else codes.view(np.int8) - np.int8(8)


def count_lowest_codes(data: U8) -> int:
    """Count the signed codes of 4 bits in these bytes that are -8."""
    return int(np.count_nonzero(data & 15 == 8) + np.count_nonzero(data >> 4 == 8))


def unpack_awq(words: Array) -> U8:
    """Return the codes of AWQ's words [..., w] in logical order: uint8 [..., 8 * w]."""
    stored = unpack_codes(4, words).reshape(*words.shape, 8)
    return stored[..., np.argsort(AWQ_ORDER)].reshape(*words.shape[:-1], -1)


def unpack_gptq_zeros(bits: int, words: Array, less_one: bool) -> U8:
    """Return the zero points of GPTQ's qzeros: uint8 [..., w * 32 / bits].

    less_one  whether each word is stored less 0x11111111 (8 bits: 0x01010101), as in checkpoint_format "gptq". The
              whole word is reduced, so that a zero point of 0 borrows from its neighbour. "gptq_v2" stores it unchanged
    """
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    if less_one:
        unsigned = unsigned + np.uint32(0x11111111 if bits == 4 else 0x01010101)
    return unpack_codes(bits, unsigned)


def read_codes(matrix: Matrix) -> U8:
    """Return the codes of a linear in any kind of packed integers, or in FP4: uint8 [n, k]."""
    name = matrix.kind.name
    stored = matrix.values
    n, k = matrix.shape
    if name == "int4_awq":
        return np.ascontiguousarray(unpack_awq(stored.T).T[matrix.skip : matrix.skip + n])
    if name in ("int4_words", "int8_words"):
        stored = unpack_codes(BITS[name], stored)
    elif matrix.kind.columns == 2:
        stored = np.stack([stored & 15, stored >> 4], axis=2).reshape(len(stored), -1)
    elif name == "int8_signed":
        stored = stored ^ 0x80
    return np.asarray(stored[:, matrix.skip : matrix.skip + k])


def read_signed_codes(matrix: Matrix) -> I8:
    """Return the codes less 2^(bits-1): int8 [n, k]."""
    return to_signed(BITS[matrix.kind.name], read_codes(matrix))


def dequantize_groups(bits: int, packed: I32, scale: U16) -> F32:
    """Return float32 [n, k]: code * scale, which is exact because both have at most 8 significant bits."""
    codes = unpack_words(bits, packed)
    n, groups = scale.shape
    y: F32 = codes.reshape(n, groups, -1).astype(np.float32) * bf16_to_f32(scale)[:, :, None]
    return y.reshape(codes.shape)
