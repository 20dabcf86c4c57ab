"""NUMA slices of weights as checkpoints store them, written in the order of the kernels.

No number changes, except that the reciprocal of an NVFP4 scale that divides is stored, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ktconvert.layouts.encodings import Tensors, fp4, fp8
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.native_quant import kernels
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.arrays import Array, Bytes
from ktconvert.native_quant.matrix import BF16, FP4_E2M1, INT4_WORDS, Matrix
from ktconvert.quantizers import panels

NVFP4_HEADER: int = lib.KTQ_NVFP4_HEADER  # bytes before the scales of a panel


@dataclass(frozen=True)
class StoredSlice:
    """A NUMA slice of a linear in a checkpoint.

    linear   the slice; its `origin` is the position in the whole linear
    tensors  role -> tensor of the whole linear
    """

    linear: Matrix
    source: TensorSource
    tensors: Tensors


def write_fp8_codes(stored: StoredSlice, codes: Bytes) -> None:
    """Write FP8 codes in panels. Raises kernels.NonFinite."""
    fp8.require_finite(stored.linear)
    n, k = stored.linear.shape
    kernels.reorder_fp8(stored.linear.values, codes.reshape(n // panels.ROWS, panels.ROWS * k))


def _cut_grid(grid: Array, linear: Matrix, columns: int) -> Array:
    """Return a slice's values of a grid [N, K / columns] of the whole linear."""
    (n, k), (row, column) = linear.shape, linear.origin
    return grid[row : row + n, column // columns : (column + k) // columns]


def write_per_channel(stored: StoredSlice, out: Sequence[Bytes]) -> None:
    write_fp8_codes(stored, out[0])
    assert stored.linear.scales is not None
    first, (n, _) = stored.linear.origin[0], stored.linear.shape
    out[1].view(np.float32)[:] = stored.linear.scales[first : first + n, 0]


def write_mxfp8(stored: StoredSlice, out: Sequence[Bytes]) -> None:
    write_fp8_codes(stored, out[0])
    assert stored.linear.scales is not None
    scales = _cut_grid(stored.linear.scales, stored.linear, fp4.GROUP).view(np.uint32)
    exponents = (scales >> 23).astype(np.uint8)  # 2^-127 is subnormal: 0
    out[1][:] = fp4.exponents_to_panels(exponents).reshape(-1)


def _write_nibbles(linear: Matrix, codes: Bytes) -> None:
    """Write 4-bit codes of any meaning in the order of MXFP4."""
    n, k = linear.shape
    rows = np.ascontiguousarray(linear.values).view(np.uint8) if linear.kind == INT4_WORDS else linear.values
    # MXFP4 with scales of 1 keeps its codes.
    ones = np.ones((n, k // fp4.GROUP), np.float32)
    as_mxfp4 = Matrix(rows, FP4_E2M1, ones, (1, fp4.GROUP), skip=linear.skip)
    count = n // panels.ROWS
    kernels.pack_mxfp4(as_mxfp4, codes.reshape(count, -1), np.empty((count, k), np.uint8))


def write_nvfp4(stored: StoredSlice, out: Sequence[Bytes]) -> None:
    linear, tensors = stored.linear, stored.tensors
    n, k = linear.shape
    count, blocks = n // panels.ROWS, k // fp4.GROUP
    fp8.require_finite(linear)
    _write_nibbles(linear, out[0])
    group_scales, weight_scales = fp4.read_two_scales(stored.source, tensors)
    scales = _cut_grid(group_scales, linear, fp4.NVFP4_GROUP)
    scale = weight_scales[linear.origin[0] % len(weight_scales)]  # the same in all rows of gate, and in all rows of up
    out_panels = out[1].reshape(count, NVFP4_HEADER + 2 * k)
    out_panels[:, :4] = (scale if fp4.FACTOR in tensors else 1 / scale).view(np.uint8)
    in_panels = scales.reshape(count, panels.ROWS, 2 * blocks).transpose(0, 2, 1)
    out_panels[:, NVFP4_HEADER:].reshape(in_panels.shape)[:] = in_panels


def write_integers(stored: StoredSlice, out: Sequence[Bytes]) -> None:
    linear = stored.linear
    (n, k), group = linear.shape, linear.block[1]
    count = n // panels.ROWS
    if linear.zeros is not None and (linear.zeros != 8).any():
        raise _tensor_error(stored, "qzeros", "zero points other than 8, but no config has sym: false")
    if linear.column_groups is not None:
        raise _tensor_error(stored, "g_idx", "an order of columns, but no config has desc_act: true")
    fp8.require_finite(linear)
    _write_nibbles(linear, out[0])
    np.bitwise_xor(out[0], 0x88, out=out[0])  # offset binary to two's complement
    assert linear.scales is not None
    scales = _cut_grid(linear.scales, linear, group).reshape(count, panels.ROWS, k // group).transpose(0, 2, 1)
    if out[1].size == 2 * scales.size:
        out[1].view(np.uint16).reshape(scales.shape)[:] = scales.view(np.uint32) >> 16
    else:
        out[1].view(np.float32).reshape(scales.shape)[:] = scales


def _tensor_error(stored: StoredSlice, role: str, contents: str) -> UnsupportedError:
    info = stored.tensors[role]
    remedy = "convert the model with `ktconvert cpu`"
    return UnsupportedError.from_tensor(info.name, f"holds {contents}", remedy, path=stored.source.path(info))


def write_blocks(stored: StoredSlice, out: Sequence[Bytes]) -> None:
    kernels.reorder_ggml(stored.linear, out[0], out[1])


def write_halves(stored: StoredSlice, out: Sequence[Bytes]) -> None:
    bits = stored.linear.values.view(np.uint16)
    if (infinite := (bits & 0x7C00) == 0x7C00).any():
        raise kernels.NonFinite(*np.argwhere(infinite)[0].tolist())
    n, k = bits.shape
    kernels.pack_bf16(Matrix(bits, BF16), out[0].view(np.uint16).reshape(n // panels.ROWS, panels.ROWS * k))
