"""kt-kernel's native methods: which weights of a checkpoint each computes with, and how these lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.archs import Fused
from ktconvert.layouts.checkpoints.shapes import MoeLayer
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings import Tensors, Weight, fp8, mxfp4, plain
from ktconvert.layouts.encodings import nvfp4 as nvfp4_encoding
from ktconvert.layouts.encodings.checkpoint import read_scales
from ktconvert.layouts.encodings.encoding import Bytes
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant import kernels_panels
from ktconvert.native_quant._ktq import lib
from ktconvert.native_quant.matrix import FP4_E2M1, Matrix
from ktconvert.quantizers import mxfp4 as mxfp4_codes
from ktconvert.quantizers import panels

NVFP4_HEADER: int = lib.KTQ_NVFP4_HEADER  # bytes before the scales of a panel
FP8 = ("F8_E4M3", "MXFP8")  # encodings whose codes are E4M3


@dataclass(frozen=True)
class Stored:
    """A part of a linear as a checkpoint holds it.

    part     the part; `origin` says where it begins in the whole linear
    source   the checkpoint
    tensors  of the whole linear, by role
    """

    part: Matrix
    source: TensorSource
    tensors: Tensors


@dataclass(frozen=True)
class Native:
    """One of the methods.

    name      of the method
    multiple  the hidden size and the intermediate size per NUMA part must be multiples of it
    holds     whether a stored weight is of this method
    tensors   (n, k) -> the tensors of a part in memory: codes, and scales if it has any
    write     a part, and where its tensors are to be written; no number changes, but for a scale of NVFP4 that divides,
              of which 1 by it is held, rounded once. Raises kernels.NonFinite.
    """

    name: str
    multiple: int
    holds: Callable[[Weight, MoeLayer], bool]
    tensors: Callable[[int, int], tuple[TensorInfo, ...]]
    write: Callable[[Stored, Sequence[Bytes]], None]


def _in_rows(layer: MoeLayer) -> bool:
    """Whether neighbouring columns of a linear lie side by side, and neighbouring rows one after the other."""
    return not layer.input_major and not (isinstance(layer.style, Fused) and layer.style.interleaved)


def _scaled(encodings: Sequence[str], block: Callable[[Weight], tuple[int, int]]) -> Callable[[Weight, MoeLayer], bool]:
    """Weights of these encodings with a scale for each block of so many rows and columns."""

    def holds(weight: Weight, layer: MoeLayer) -> bool:
        return weight.encoding.name in encodings and _in_rows(layer) and weight.fit() == block(weight)

    return holds


def _named(encoding: str) -> Callable[[Weight, MoeLayer], bool]:
    return lambda weight, layer: weight.encoding.name == encoding and _in_rows(layer)


def _fp8_codes(n: int, k: int) -> TensorInfo:
    return fp8.PANELS.tensors(n, k)[0]


def _lay_fp8(stored: Stored, codes: Bytes) -> None:
    n, k = stored.part.shape
    kernels_panels.lay_fp8(stored.part.values, codes.reshape(n // panels.ROWS, panels.ROWS * k))


def _part_of(grid: npt.NDArray[np.generic], part: Matrix, columns: int) -> npt.NDArray[np.generic]:
    """What a grid [N, K / columns] of the whole linear holds for the part."""
    (n, k), (row, column) = part.shape, part.origin
    return grid[row : row + n, column // columns : (column + k) // columns]


def _write_per_channel(stored: Stored, out: Sequence[Bytes]) -> None:
    fp8.require_finite(stored.part)
    _lay_fp8(stored, out[0])
    assert stored.part.scales is not None
    first, (n, _) = stored.part.origin[0], stored.part.shape
    out[1].view(np.float32)[:] = stored.part.scales[first : first + n, 0]


def _write_mxfp8(stored: Stored, out: Sequence[Bytes]) -> None:
    fp8.require_finite(stored.part)
    _lay_fp8(stored, out[0])
    assert stored.part.scales is not None
    scales = _part_of(stored.part.scales, stored.part, mxfp4_codes.GROUP).view(np.uint32)
    exponents = (scales >> 23).astype(np.uint8)  # 2^-127 is subnormal: 0
    out[1][:] = mxfp4_codes.lay_exponents(exponents).reshape(-1)


def _nvfp4_tensors(n: int, k: int) -> tuple[TensorInfo, TensorInfo]:
    """Codes as MXFP4's. Scales by panels: the one of the whole weight, which multiplies, then groups of 16 columns with
    their 32 rows.
    """
    count, of_panel = n // panels.ROWS, NVFP4_HEADER + 2 * k
    return mxfp4.PANELS.tensors(n, k)[0], TensorInfo("scales", "U8", (count, of_panel), count * of_panel)


def _write_nvfp4(stored: Stored, out: Sequence[Bytes]) -> None:
    part, tensors = stored.part, stored.tensors
    n, k = part.shape
    count, blocks = n // panels.ROWS, k // mxfp4_codes.GROUP
    fp8.require_finite(part)
    # As MXFP4 with scales of 1, whose codes stay.
    codes = Matrix(part.values, FP4_E2M1, np.ones((n, blocks), np.float32), (1, mxfp4_codes.GROUP), skip=part.skip)
    kernels_panels.pack_mxfp4(codes, out[0].reshape(count, -1), np.empty((count, k), np.uint8))
    scales = stored.source.view(tensors["scale"])
    scales = _part_of(scales.reshape(-1, scales.shape[-1]), part, nvfp4_encoding.GROUP)
    role = nvfp4_encoding.FACTOR if nvfp4_encoding.FACTOR in tensors else nvfp4_encoding.DIVISOR
    whole = read_scales(stored.source, tensors[role], (1, 1))
    held = out[1].reshape(count, NVFP4_HEADER + 2 * k)
    held[:, :4] = (whole if role == nvfp4_encoding.FACTOR else 1 / whole).view(np.uint8)
    of_panels = scales.reshape(count, panels.ROWS, 2 * blocks).transpose(0, 2, 1)
    held[:, NVFP4_HEADER:].reshape(of_panels.shape)[:] = of_panels


METHODS = {
    method.name: method
    for method in (
        Native(
            "BF16",
            kernels_panels.BF16_MULTIPLE,
            lambda weight, layer: weight.encoding.name == "BF16",
            plain.PANELS.tensors,
            lambda stored, out: plain.PANELS.quantize(stored.part, out),
        ),
        Native(
            "FP8",
            kernels_panels.FP8_MULTIPLE,
            _scaled(FP8, lambda weight: (kernels_panels.FP8_MULTIPLE,) * 2),
            fp8.PANELS.tensors,
            lambda stored, out: fp8.PANELS.quantize(stored.part, out),
        ),
        Native(
            "FP8_PERCHANNEL",
            panels.ROWS,
            _scaled(("F8_E4M3",), lambda weight: (1, weight.shape[-1])),
            lambda n, k: (_fp8_codes(n, k), TensorInfo("scales", "F32", (n,), 4 * n)),
            _write_per_channel,
        ),
        Native(
            "MXFP4",
            kernels_panels.MXFP4_MULTIPLE,
            _named("MXFP4"),
            mxfp4.PANELS.tensors,
            lambda stored, out: mxfp4.PANELS.quantize(stored.part, out),
        ),
        Native(
            "MXFP8",
            panels.ROWS,
            _scaled(("MXFP8",), lambda weight: (1, mxfp4_codes.GROUP)),
            lambda n, k: (_fp8_codes(n, k), mxfp4.PANELS.tensors(n, k)[1]),
            _write_mxfp8,
        ),
        Native("NVFP4", kernels_panels.MXFP4_MULTIPLE, _named("NVFP4"), _nvfp4_tensors, _write_nvfp4),
    )
}
