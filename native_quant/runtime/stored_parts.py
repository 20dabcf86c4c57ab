"""Parts of weights as checkpoints store them, written as the kernels read them. No number changes, but for a scale of
NVFP4 that divides, of which 1 by it is held, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings import Tensors, fp4, fp8
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant import kernels
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.arrays import Array, Bytes
from ktconvert.native_quant.matrix import BF16, FP4_E2M1, INT4_WORDS, Matrix
from ktconvert.quantizers import panels

NVFP4_HEADER: int = lib.KTQ_NVFP4_HEADER  # bytes before the scales of a panel


@dataclass(frozen=True)
class StoredPart:
    """A part of a linear as a checkpoint holds it, whose `origin` is in the whole linear; its tensors by role."""

    part: Matrix
    source: TensorSource
    tensors: Tensors


def put_fp8(stored: StoredPart, codes: Bytes) -> None:
    """Writes codes of FP8 in panels. Raises kernels.NonFinite."""
    fp8.require_finite(stored.part)
    n, k = stored.part.shape
    kernels.reorder_fp8(stored.part.values, codes.reshape(n // panels.ROWS, panels.ROWS * k))


def _part_of(grid: Array, part: Matrix, columns: int) -> Array:
    """What a grid [N, K / columns] of the whole linear holds for the part."""
    (n, k), (row, column) = part.shape, part.origin
    return grid[row : row + n, column // columns : (column + k) // columns]


def write_per_channel(stored: StoredPart, out: Sequence[Bytes]) -> None:
    put_fp8(stored, out[0])
    assert stored.part.scales is not None
    first, (n, _) = stored.part.origin[0], stored.part.shape
    out[1].view(np.float32)[:] = stored.part.scales[first : first + n, 0]


def write_mxfp8(stored: StoredPart, out: Sequence[Bytes]) -> None:
    put_fp8(stored, out[0])
    assert stored.part.scales is not None
    scales = _part_of(stored.part.scales, stored.part, fp4.GROUP).view(np.uint32)
    exponents = (scales >> 23).astype(np.uint8)  # 2^-127 is subnormal: 0
    out[1][:] = fp4.exponents_to_panels(exponents).reshape(-1)


def _put_nibbles(part: Matrix, codes: Bytes) -> None:
    """Writes codes of 4 bits in the order of MXFP4's, whatever they stand for."""
    n, k = part.shape
    rows = np.ascontiguousarray(part.values).view(np.uint8) if part.kind == INT4_WORDS else part.values
    # As MXFP4 with scales of 1, whose codes stay.
    ones = np.ones((n, k // fp4.GROUP), np.float32)
    as_mxfp4 = Matrix(rows, FP4_E2M1, ones, (1, fp4.GROUP), skip=part.skip)
    count = n // panels.ROWS
    kernels.pack_mxfp4(as_mxfp4, codes.reshape(count, -1), np.empty((count, k), np.uint8))


def write_nvfp4(stored: StoredPart, out: Sequence[Bytes]) -> None:
    part, tensors = stored.part, stored.tensors
    n, k = part.shape
    count, blocks = n // panels.ROWS, k // fp4.GROUP
    fp8.require_finite(part)
    _put_nibbles(part, out[0])
    groups, whole = fp4.read_two_scales(stored.source, tensors)
    scales = _part_of(groups, part, fp4.NVFP4_GROUP)
    one = whole[part.origin[0] % len(whole)]  # the same in all rows of gate, and in all of up
    held = out[1].reshape(count, NVFP4_HEADER + 2 * k)
    held[:, :4] = (one if fp4.FACTOR in tensors else 1 / one).view(np.uint8)
    of_panels = scales.reshape(count, panels.ROWS, 2 * blocks).transpose(0, 2, 1)
    held[:, NVFP4_HEADER:].reshape(of_panels.shape)[:] = of_panels


def write_integers(stored: StoredPart, out: Sequence[Bytes]) -> None:
    part = stored.part
    (n, k), group = part.shape, part.block[1]
    count = n // panels.ROWS
    if part.zeros is not None and (part.zeros != 8).any():
        raise _not_plain(stored, "qzeros", "zero points other than 8, though no config says sym: false")
    if part.group_of is not None:
        raise _not_plain(stored, "g_idx", "an order of columns, though no config says desc_act: true")
    fp8.require_finite(part)
    _put_nibbles(part, out[0])
    np.bitwise_xor(out[0], 0x88, out=out[0])  # offset binary to two's complement
    assert part.scales is not None
    scales = _part_of(part.scales, part, group).reshape(count, panels.ROWS, k // group).transpose(0, 2, 1)
    if out[1].size == 2 * scales.size:
        out[1].view(np.uint16).reshape(scales.shape)[:] = scales.view(np.uint32) >> 16
    else:
        out[1].view(np.float32).reshape(scales.shape)[:] = scales


def _not_plain(stored: StoredPart, role: str, what: str) -> UnsupportedError:
    info = stored.tensors[role]
    remedy = "convert the model with `ktconvert cpu`"
    return UnsupportedError.from_tensor(info.name, f"holds {what}", remedy, path=stored.source.path(info))


def write_blocks(stored: StoredPart, out: Sequence[Bytes]) -> None:
    kernels.reorder_ggml(stored.part, out[0], out[1])


def write_halves(stored: StoredPart, out: Sequence[Bytes]) -> None:
    bits = stored.part.values.view(np.uint16)
    if (infinite := (bits & 0x7C00) == 0x7C00).any():
        raise kernels.NonFinite(*np.argwhere(infinite)[0].tolist())
    n, k = bits.shape
    kernels.pack_bf16(Matrix(bits, BF16), out[0].view(np.uint16).reshape(n // panels.ROWS, panels.ROWS * k))
