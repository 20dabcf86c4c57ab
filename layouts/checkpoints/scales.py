"""Reads the scales that stand beside an FP8 weight and says which block of it each one covers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.source import TensorInfo, TensorSource
from ktconvert.layouts.errors import InputError, UnsupportedError

DEFAULT_BLOCK = (128, 128)  # where no config names one: every block-scaled release so far
FLOATS = ("F32", "BF16", "F16")

Grid = tuple[tuple[int, int], tuple[int, int]]


def grid(
    weight: TensorInfo,
    scale: TensorInfo,
    blocks: Sequence[tuple[int, int]],
    input_major: bool,
    where: str = "config.json",
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


def read(source: TensorSource, scale: TensorInfo, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """The scales as float32 [shape]. Raises InputError, naming the place, where one is not finite."""
    raw = source.view(scale)
    if scale.dtype == "BF16":
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    elif scale.dtype == "F16":
        values = np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    else:
        values = raw.astype(np.float32)
    values = values.reshape(shape)
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise InputError(
            f"{source.shards[scale.shard].path}: tensor {scale.name!r}: scale [{row}, {column}] is {values[row, column]}; download it again"
        )
    return values


def _misfit(weight: TensorInfo, scale: TensorInfo, blocks: Sequence[tuple[int, int]]) -> InputError:
    named = " or ".join(f"{r}x{c}" for r, c in blocks) or "128x128, as no config names another"
    return InputError(
        f"tensor {scale.name!r} of shape {list(scale.shape)} does not fit {weight.name!r} of shape "
        f"{list(weight.shape)} in blocks of {named}; check weight_block_size in config.json, or download both again"
    )
