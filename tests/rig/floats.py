"""Weights in the formats of BF16 arithmetic, made from codes as bytes.md and ktq.h define them: bytes and values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rig.encodings import E2M1, E4M3

Bytes = npt.NDArray[np.uint8]
INTEGERS = {"RAWINT4": 32, "GPTQ_INT4": 128, "GPTQ_INT4_64": 64, "GPTQ_INT4_32": 32}  # columns that share a scale


@dataclass(frozen=True)
class Weight:
    """A weight [n, k].

    codes, scales  the bytes of its two tensors (BF16 and F16 have no scales)
    numbers        its values in float64
    scale          factors of the sums of 32 columns, float64 [n, k/32]
    """

    codes: Bytes
    scales: Bytes
    numbers: npt.NDArray[np.float64]
    scale: npt.NDArray[np.float64]


def weight(codes: npt.NDArray[Any], scales: npt.NDArray[Any], values: npt.NDArray[Any], scale: Any) -> Weight:
    """Make a Weight from codes, scales and unscaled values."""
    return Weight(as_bytes(codes), as_bytes(scales), values * np.repeat(scale, 32, axis=1), scale)


def from_bits(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
    """Return BF16 bits as float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bits(x: Any) -> npt.NDArray[np.uint16]:
    """Return the upper halves of float32 values."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def mxfp4(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Weight:
    """Make a weight of E2M1 codes [n, k] with an E8M0 code for each row and 32 columns, [n, k/32]."""
    return weight(pack_codes(codes), arrange_scales(scales), E2M1[codes], 2.0 ** (scales.astype(np.float64) - 127))


def to_panels(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Arrange values [n, k], multiples of 32, in panels [n/32, 32*k].

    The order is: blocks of 32 columns, halves of 16 rows, pairs of columns, rows, the two columns of a pair.
    """
    n, k = values.shape
    split = values.reshape(n // 32, 2, 16, k // 32, 16, 2)
    return np.ascontiguousarray(split.transpose(0, 3, 1, 4, 2, 5)).reshape(n // 32, 32 * k)


def to_blocks(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Arrange BF16 values [n, k] in kt-kernel's order: blocks of at most 256 rows and 1792 columns, each in panels."""
    n, k = values.shape
    blocks = [values[r : r + 256, c : c + 1792] for r in range(0, n, 256) for c in range(0, k, 1792)]
    return np.concatenate([to_panels(block).reshape(-1) for block in blocks])


def pack_codes(codes: npt.NDArray[np.uint8]) -> Bytes:
    """Pack 4-bit codes [n, k] in panels, uint8 [n/32, 16*k]."""
    n, k = codes.shape
    nibbles = codes.astype(np.uint16).reshape(n // 32, 2, 16, k // 32, 4, 4, 2)  # panel, half, row, block, v, g, pair
    words = sum(nibbles[..., g, :] << (4 * g) for g in range(4))
    return as_bytes(words.transpose(0, 3, 1, 4, 2, 5).astype("<u2")).reshape(n // 32, -1)


def arrange_scales(scales: npt.NDArray[Any]) -> Bytes:
    """Arrange scales [n, groups] by panel, then group of columns, then the panel's 32 rows."""
    n, groups = scales.shape
    return as_bytes(scales.reshape(n // 32, 32, groups).transpose(0, 2, 1))


def int4(name: str, codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]) -> Weight:
    """Make a weight of integers -8 .. 7 [n, k] with a scale for each row and group of columns, [n, groups]."""
    scale = np.repeat(scales.astype(np.float64), codes.shape[1] // scales.shape[1] // 32, axis=1)
    stored = to_bits(scales) if name == "RAWINT4" else scales
    return weight(pack_codes(codes.astype(np.uint8) & 15), arrange_scales(stored), codes, scale)


def fp8(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> Weight:
    """Make a weight of E4M3 codes [n, k] with a scale for each 128 x 128 block."""
    scale = np.repeat(np.repeat(scales.astype(np.float64), 128, 0), 4, 1)
    return weight(to_panels(codes), scales, E4M3[codes], scale)


def fp8_perchannel(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> Weight:
    """Make a weight of E4M3 codes [n, k] with a scale for each row."""
    scale = np.repeat(scales.astype(np.float64)[:, None], codes.shape[1] // 32, axis=1)
    return weight(to_panels(codes), scales, E4M3[codes], scale)


def mxfp8(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Weight:
    """Make a weight of E4M3 codes [n, k] with an E8M0 code for each row and 32 columns, [n, k/32]."""
    return weight(to_panels(codes), arrange_scales(scales), E4M3[codes], 2.0 ** (scales.astype(np.float64) - 127))


def nvfp4(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], global_scale: float) -> Weight:
    """Make a weight of E2M1 codes [n, k] with an E4M3 code for each row and 16 columns, and a global scale."""
    n, k = codes.shape
    header = np.tile(np.array([global_scale], "<f4").view(np.uint8), (n // 32, 16))
    stored = np.concatenate([header, arrange_scales(scales).reshape(n // 32, -1)], axis=1)
    values = E2M1[codes] * np.repeat(E4M3[scales], 16, axis=1)
    return weight(pack_codes(codes), stored, values, np.full((n, k // 32), global_scale))


def bf16(bits: npt.NDArray[np.uint16]) -> Weight:
    """Make a weight of BF16 bits."""
    return make_unscaled(bits, from_bits(bits))


def f16(halves: npt.NDArray[np.float16]) -> Weight:
    """Make a weight of float16 values."""
    return make_unscaled(halves.view(np.uint16), halves.astype(np.float64))


def make_unscaled(bits: npt.NDArray[np.uint16], values: npt.NDArray[np.float64]) -> Weight:
    """Make a weight without scales."""
    n, k = bits.shape
    return weight(to_panels(bits), np.empty(0, np.uint8), values, np.ones((n, k // 32)))


def as_bytes(data: npt.NDArray[Any]) -> Bytes:
    """Return a copy of the data as bytes."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy()


def random(name: str, n: int, k: int, seed: int = 0, size: float = 0.02) -> Weight:
    """Draw a weight whose values have about this size, with different scales."""
    rng = np.random.default_rng([seed, n, k])
    if name == "BF16":
        return bf16(to_bits(rng.standard_normal((n, k)) * size))
    if name == "F16":
        return f16((rng.standard_normal((n, k)) * size * 2.0 ** rng.integers(-20, 2, (n, k))).astype(np.float16))
    e4m3 = rng.integers(0, 256, (n, k), np.uint8)
    e4m3[e4m3 & 0x7F == 0x7F] = 0

    def draw_scales(*shape: int) -> npt.NDArray[np.float32]:
        """Draw scales of few bits, so that sums times scales are exact in float64."""
        return from_bits(to_bits(rng.uniform(0.5, 2, shape) * size / 128)).astype(np.float32)

    if name == "FP8":
        return fp8(e4m3, draw_scales(n // 128, k // 128))
    if name == "FP8_PERCHANNEL":
        return fp8_perchannel(e4m3, draw_scales(n))
    if name in INTEGERS:
        scales = draw_scales(n, k // INTEGERS[name]) * rng.choice([-16, 16], (n, k // INTEGERS[name]))
        return int4(name, rng.integers(-8, 8, (n, k), np.int8), scales.astype(np.float32))
    if name == "NVFP4":
        steps = rng.integers(0, 127, (n, k // 16), np.uint8)
        return nvfp4(rng.integers(0, 16, (n, k), np.uint8), steps, float(draw_scales(1)[0]))
    largest = 256 if name == "MXFP8" else 3
    exponents = 127 + np.round(np.log2(size / largest)).astype(int) + rng.integers(-2, 3, (n, k // 32))
    if name == "MXFP8":
        return mxfp8(e4m3, exponents.astype(np.uint8))
    return mxfp4(rng.integers(0, 16, (n, k), np.uint8), exponents.astype(np.uint8))


def forward(
    linear: Callable[[int, str], Any],
    hidden: Any,
    ids: Any,
    weights: Any,
    limit: float = 0.0,
    alpha: float = 0.0,
    least: float = -np.inf,
) -> npt.NDArray[np.float64]:
    """Return the output of experts for each token, in float64.

    linear: returns a float64 matrix [n, k] by expert and projection; hidden: BF16 bits [m, H]; ids and weights: [m,
    chosen experts]; least: lower limit of the gate.
    """
    out = np.zeros(hidden.shape)
    for token, x in enumerate(from_bits(hidden)):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up, down = (linear(int(expert), projection) for projection in ("gate", "up", "down"))
            g, u = gate @ x, up @ x
            if limit:
                g, u = np.clip(g, least, limit), np.clip(u, -limit, limit)
            h = g / (1 + np.exp(-alpha * g)) * (u + 1) if alpha else g / (1 + np.exp(-g)) * u
            out[token] += float(weight) * (down @ h)
    return out


def activations(m: int, k: int, seed: int = 1) -> npt.NDArray[np.uint16]:
    """Draw Gaussian rows as BF16 bits."""
    return to_bits(np.random.default_rng([seed, m, k]).standard_normal((m, k)))
