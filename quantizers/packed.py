"""Packed codes as checkpoints store them: the definition in NumPy, which the C kernels must equal bit for bit.

Codes are unsigned here: 0..15 or 0..255. Equations: numerics.md, section 1. Sources: compressed-tensors 0.19
(pack-quantized), AutoAWQ 0.2.9 (packing_utils.py, version GEMM), GPTQModel 7.7.0 (formats gptq and gptq_v2); the files
in tests/golden that these libraries wrote hold the definitions to them. Of ggml: ggml-common.h; gguf-py has the same
values, but for MXFP4 with the scale 255, which is NaN here (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.matrix import Matrix

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble p of a word, from the low bits up, is number AWQ_ORDER[p] of its 8
BITS = {"int4": 4, "int8": 8, "int8_signed": 8, "int4_words": 4, "int8_words": 8, "int4_awq": 4}


def fields(bits: int, words: npt.NDArray[Any]) -> U8:
    """The codes of 32-bit words [..., w], low bits first: uint8 [..., w * 32 / bits]."""
    data = np.ascontiguousarray(words).view(np.dtype("<u4")).view(np.uint8)
    return data if bits == 8 else np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


def lowest_codes(data: U8) -> int:
    """How many of the signed codes of 4 bits in these bytes are -8."""
    return int(np.count_nonzero(data & 15 == 8) + np.count_nonzero(data >> 4 == 8))


def awq_fields(words: npt.NDArray[Any]) -> U8:
    """The codes of AWQ's words [..., w], in the order of what they stand for: uint8 [..., 8 * w]."""
    stored = fields(4, words).reshape(*words.shape, 8)
    return stored[..., np.argsort(AWQ_ORDER)].reshape(*words.shape[:-1], -1)


def gptq_zeros(bits: int, words: npt.NDArray[Any], less_one: bool) -> U8:
    """The zero points of GPTQ's qzeros: uint8 [..., w * 32 / bits].

    less_one: checkpoint_format "gptq" stores each word less 0x11111111 (8 bits: 0x01010101), as a whole, so that a zero
    point of 0 has borrowed from its neighbour; "gptq_v2" does not.
    """
    whole = np.ascontiguousarray(words).view(np.uint32)
    return fields(bits, whole + np.uint32(0x11111111 if bits == 4 else 0x01010101) if less_one else whole)


def codes(matrix: Matrix) -> U8:
    """The codes of a linear in any kind of packed integers, or in FP4: uint8 [n, k]."""
    name, stored, (n, k) = matrix.kind.name, matrix.values, matrix.shape
    if name == "int4_awq":
        return np.ascontiguousarray(awq_fields(stored.T).T[matrix.skip : matrix.skip + n])
    if name in ("int4_words", "int8_words"):
        stored = fields(BITS[name], stored)
    elif matrix.kind.columns == 2:
        stored = np.stack([stored & 15, stored >> 4], axis=2).reshape(len(stored), -1)
    elif name == "int8_signed":
        stored = stored ^ 0x80
    return np.asarray(stored[:, matrix.skip : matrix.skip + k])


def signed_codes(matrix: Matrix) -> npt.NDArray[np.int8]:
    """The codes less 2^(bits-1), which is what they stand for where there are no zero points: int8 [n, k]."""
    half = 1 << BITS[matrix.kind.name] - 1
    return (codes(matrix) ^ 0x80).view(np.int8) if half == 128 else codes(matrix).view(np.int8) - np.int8(half)


# Blocks of ggml: uint8 [blocks, bytes of a block] to float32 [blocks, columns of a block].

DOUBLED_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _fp16(blocks: U8, at: int) -> F32:
    """The float16 at this byte, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _halves(bytes_: U8) -> U8:
    """Lower halves of all bytes, then upper halves, along the last axis."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)


def q4_0(blocks: U8) -> F32:
    """18 bytes: scale; byte j: columns j and j + 16."""
    return _fp16(blocks, 0) * (_halves(blocks[:, 2:]).astype(np.float32) - 8)


def q8_0(blocks: U8) -> F32:
    """34 bytes: scale; 32 signed bytes."""
    return _fp16(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def ggml_mxfp4(blocks: U8) -> F32:
    """17 bytes: E8M0 scale; byte j: columns j and j + 16. Half the scale times the doubled value: both are exact."""
    e = blocks[:, :1].astype(np.uint32)
    half = np.where(e < 2, np.uint32(0x200000) << e, (e - 1) << 23).astype(np.uint32).view(np.float32)
    half = np.where(e == 255, np.float32(np.nan), half)
    return half * DOUBLED_E2M1[_halves(blocks[:, 1:])]


def _k_scales(packed: U8) -> tuple[F32, F32]:
    """Scales and minima of 8 groups, 6 bits each, from 12 bytes: [blocks, 8, 1]."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    least = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)
    return scale[..., None].astype(np.float32), least[..., None].astype(np.float32)


def _k_values(blocks: U8, codes: U8) -> F32:
    """code * (d * scale) - dmin * least of 8 groups of 32 columns; codes: [blocks, 8, 32]."""
    scale, least = _k_scales(blocks[:, 4:16])
    d, dmin = _fp16(blocks, 0)[..., None] * scale, _fp16(blocks, 2)[..., None] * least
    return (d * codes.astype(np.float32) - dmin).reshape(len(blocks), 256)


def q4_k(blocks: U8) -> F32:
    """144 bytes: d, dmin, 12 bytes of scales; 32 bytes for each two groups."""
    return _k_values(blocks, _halves(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def q5_k(blocks: U8) -> F32:
    """176 bytes: as q4_k, with 32 bytes of which bit g is the fifth bit of group g."""
    low = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _k_values(blocks, low | np.left_shift(high, 4, dtype=np.uint8))


def q6_k(blocks: U8) -> F32:
    """210 bytes: 128 of lower bits, 64 of upper bits, 16 signed scales, d; two sides of 128 columns."""
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return (_fp16(blocks, 208)[..., None] * scales[..., None] * codes).reshape(len(blocks), 256)


GGML = {f.__name__: f for f in (q4_0, q8_0, ggml_mxfp4, q4_k, q5_k, q6_k)}
