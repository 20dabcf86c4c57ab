"""FP8 E4M3 with scales: one for each block, for each row, or for the whole weight. MXFP8 is FP8 whose scales are powers
of two, stored as E8M0."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.encodings.encoding import E8M0, FLOATS, Encoding, Tensors, aligned, read_scales
from ktconvert.layouts.checkpoints.source import TensorInfo, TensorSource
from ktconvert.layouts.errors import InputError
from ktconvert.native_quant.matrix import FP8_E4M3, Matrix

DEFAULT_BLOCK = (128, 128)  # where no config names one: every block-scaled release so far
MX_BLOCK = (1, 32)  # of OCP Microscaling Formats 1.0

Grid = tuple[tuple[int, int], tuple[int, int]]


def grid(
    weight: TensorInfo,
    scale: TensorInfo,
    blocks: Sequence[tuple[int, int]],
    input_major: bool,
) -> Grid:
    """(shape of the scale grid, rows and columns of a block) for one stored 2-D weight, or for each of a 3-D one.

    blocks       the block sizes that the config names; none: per channel, per tensor or 128x128, whichever fits.
                 E8M0 scales may also be of 1x32, whatever the config says, or of any block that divides the weight.
    input_major  the weight is stored [k, n], so its channels are columns.
    Raises InputError where no reading fits both shapes.
    """
    if scale.dtype not in (*FLOATS, *E8M0):
        raise InputError(
            f"tensor {scale.name!r} is {scale.dtype}; scales must be F32, BF16, F16 or E8M0; download it again"
        )
    shape, of = scale.shape, weight.shape
    if len(of) == 3:
        if shape[:1] != of[:1]:
            raise _misfit(weight, scale, blocks)
        shape, of = shape[1:], of[1:]
    if len(of) != 2:
        raise _misfit(weight, scale, blocks)
    rows, columns = of
    channels = (1, columns) if input_major else (rows, 1)
    if len(shape) <= 1:
        count = math.prod(shape)
        shape = channels if count == max(channels) and count != 1 else (1, 1) if count == 1 else (0, 0)
    powers = scale.dtype in E8M0
    sizes = [*(blocks or [DEFAULT_BLOCK]), *([MX_BLOCK[::-1] if input_major else MX_BLOCK] if powers else [])]
    named = [(b, (-(-rows // b[0]), -(-columns // b[1]))) for b in sizes]
    whole = [((rows, columns), (1, 1)), ((1, columns), (rows, 1)), ((rows, 1), (1, columns))]
    # A name in _inv is the block form: where the config names the block, nothing else will do.
    readings = named if blocks and scale.name.endswith("_inv") else [*named, *whole]
    for block, fits in readings:
        if len(shape) == 2 and tuple(shape) == fits:
            return fits, block
    if powers and len(shape) == 2 and all(shape) and rows % shape[0] == columns % shape[1] == 0:
        return (shape[0], shape[1]), (rows // shape[0], columns // shape[1])
    raise _misfit(weight, scale, blocks)


def _misfit(weight: TensorInfo, scale: TensorInfo, blocks: Sequence[tuple[int, int]]) -> InputError:
    named = " or ".join(f"{r}x{c}" for r, c in blocks) or "128x128, as no config names another"
    return InputError(
        f"tensor {scale.name!r} of shape {list(scale.shape)} does not fit {weight.name!r} of shape "
        f"{list(weight.shape)} in blocks of {named}; check weight_block_size in config.json, or download both again"
    )


def _matrix(source: TensorSource, tensors: Tensors, quantization: Quantization, input_major: bool) -> Matrix:
    weight, scale = tensors["weight"], tensors["scale"]
    shape, block = grid(weight, scale, quantization.blocks, input_major)
    return Matrix(aligned(source, weight), FP8_E4M3, read_scales(source, scale, shape), block)


def _fit(tensors: Tensors, quantization: Quantization, input_major: bool) -> tuple[int, int]:
    return grid(tensors["weight"], tensors["scale"], quantization.blocks, input_major)[1]


def _row(name: str, title: str, powers: bool, *input_types: str) -> Encoding:
    """powers: whether its scales are E8M0."""

    def claims(tensors: Tensors, quantization: Quantization) -> bool:
        scale = tensors.get("scale")
        return (scale is not None and scale.dtype in E8M0) == powers

    return Encoding(
        name,
        title,
        {"weight": ("{t}",), "scale": ("{t}_scale_inv", "{t}_scale", "{s}.scale", "{s}.qscale_weight")},
        ("F8_E4M3",),
        FP8_E4M3,
        _matrix,
        fit=_fit,
        claims=claims,
        input_types=input_types,
    )


ROWS = (_row("F8_E4M3", "FP8", False, "fp8"), _row("MXFP8", "MXFP8", True, "mxfp8", "fp8"))
