"""FP8 E4M3 with scales: one for each block, for each row, or for the whole weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.encodings.encoding import FLOATS, Encoding, Tensors, aligned, read_scales
from ktconvert.layouts.checkpoints.source import TensorInfo, TensorSource
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.native_quant.matrix import FP8_E4M3, Matrix

DEFAULT_BLOCK = (128, 128)  # where no config names one: every block-scaled release so far

Grid = tuple[tuple[int, int], tuple[int, int]]


def grid(
    weight: TensorInfo,
    scale: TensorInfo,
    blocks: Sequence[tuple[int, int]],
    input_major: bool,
) -> Grid:
    """(shape of the scale grid, rows and columns of a block) for one stored 2-D weight, or for each of a 3-D one.

    blocks       the block sizes that the config names; none: per channel, per tensor or 128x128, whichever fits.
    input_major  the weight is stored [k, n], so its channels are columns.
    Raises InputError where no reading fits both shapes.
    """
    if scale.dtype in ("U8", "F8_E8M0"):
        raise UnsupportedError(
            f"tensor {scale.name!r} is {scale.dtype}: MXFP8 scales (ue8m0) are not an input yet; "
            "use the model's BF16 or block-scaled FP8 release"
        )
    if scale.dtype not in FLOATS:
        raise InputError(f"tensor {scale.name!r} is {scale.dtype}; scales must be F32, BF16 or F16; download it again")
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
    named = [(b, (-(-rows // b[0]), -(-columns // b[1]))) for b in blocks or [DEFAULT_BLOCK]]
    whole = [((rows, columns), (1, 1)), ((1, columns), (rows, 1)), ((rows, 1), (1, columns))]
    # A name in _inv is the block form: where the config names the block, nothing else will do.
    readings = named if blocks and scale.name.endswith("_inv") else [*named, *whole]
    for block, fits in readings:
        if len(shape) == 2 and tuple(shape) == fits:
            return fits, block
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


ROWS = (
    Encoding(
        "F8_E4M3",
        "FP8",
        {"weight": ("{t}",), "scale": ("{t}_scale_inv", "{t}_scale", "{s}.scale", "{s}.qscale_weight")},
        ("F8_E4M3",),
        FP8_E4M3,
        _matrix,
        fit=_fit,
        input_types=("fp8",),
    ),
)
