"""What the rows of integer codes have in common: groups of columns, their order, checks of shapes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.config import Quantization
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.checkpoint import FLOATS
from ktconvert.layouts.errors import InputError, UnsupportedError, damaged_tensor
from ktconvert.layouts.tensors import TensorInfo


def columns_per_scale(
    codes: TensorInfo, scale: TensorInfo, shape: tuple[int, int], groups: int, quantization: Quantization
) -> int:
    """How many columns of a linear [n, k] of codes share a scale, where a row has `groups` scales; 0: they do not fit.

    Raises InputError where the tensors or the config disagree, UnsupportedError for groups that do not divide a row.
    """
    n, k = shape
    if scale.dtype not in FLOATS:
        raise damaged_tensor(scale.name, f"is {scale.dtype}; scales must be F32, BF16 or F16")
    named = [size for size in quantization.groups if groups == -(-k // size)]
    if groups and (k % groups or (groups > 1 and named and all(k % size for size in named))):
        raise UnsupportedError.of_tensor(
            scale.name,
            f": groups of {max(named, default=k // groups)} columns do not divide the {k} columns "
            f"of {codes.name!r}; use the model's BF16 or FP8 (E4M3) release",
        )
    if not groups or (groups > 1 and quantization.groups and not named):
        sizes = " or ".join(map(str, quantization.groups)) or "any size"
        raise damaged_tensor(
            scale.name,
            f"of shape {list(scale.shape)} does not fit {codes.name!r}, {n} x {k} in groups of {sizes}",
            "check group_size in config.json, or download both again",
        )
    return k // groups


def order_of_columns(source: TensorSource, stored: TensorInfo | None, group: int) -> npt.NDArray[np.int32] | None:
    """The group of each column, by g_idx; None where the columns of a group are neighbours, or all are -1: no order was
    set.

    Raises InputError unless all groups are of one size.
    """
    if stored is None:
        return None
    order = np.array(source.view(stored), np.int32)
    plain = np.arange(order.size, dtype=np.int32) // group
    if (order == plain).all() or (order == -1).all():
        return None
    if not (np.sort(order) == plain).all():
        raise damaged_tensor(
            stored.name,
            f"must name each of {order.size // group} groups for {group} columns",
            "download it again",
            source.path(stored),
        )
    return order


def missing(codes: TensorInfo, what: str, name: str) -> InputError:
    """The error that the config says that these codes have zero points or an order, whose tensor is not there."""
    return damaged_tensor(codes.name, f"has {what} by its config, but {name} is missing")


def require_matrix(codes: TensorInfo) -> None:
    """Raises InputError unless these words are a matrix."""
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise damaged_tensor(codes.name, f"has shape {list(codes.shape)}, but must be a matrix of words")


def require_shape(codes: TensorInfo, info: TensorInfo | None, dtype: str, shape: tuple[int, ...]) -> None:
    """Raises InputError where there is such a tensor beside the codes and it has another dtype or shape."""
    if info is not None and (info.dtype, info.shape) != (dtype, shape):
        raise damaged_tensor(
            info.name,
            f"is {info.dtype} of shape {list(info.shape)}; by {codes.name!r} and its scales it "
            f"must be {dtype} of shape {list(shape)}",
            "download both again",
        )
