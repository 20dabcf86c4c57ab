"""Checks of the arguments of the public classes. They raise ArgumentError, which names the argument and its value."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection
from typing import Any

import numpy as np

from ktconvert.layouts.errors import ArgumentError

UINT16, INT64, FLOAT32 = np.dtype(np.uint16), np.dtype(np.int64), np.dtype(np.float32)
MARKS = (np.dtype(np.bool_), np.dtype(np.uint8))  # dtypes of `skip`


def require_integer(name: str, value: Any, lowest: int, highest: int | None = None) -> int:
    """Return a whole number as an int. Raise ArgumentError for any other value, and for a number out of range."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < lowest or (highest is not None and number > highest):
        limits = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise ArgumentError(f"{name} must be an int {limits}, not {describe(value)}")
    return number


def require_one_of(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise ArgumentError unless the value is one of the choices."""
    if type(value) not in {type(choice) for choice in choices} or value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, not {describe(value)}")


def require_path(name: str, value: Any) -> str:
    """Return a path as a text. Raise ArgumentError for any other value."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise ArgumentError(f"{name} must be a path, not {describe(value)}")
    return path


class AnySize(str):
    """The name of a dimension that may have any size: it equals every size."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


def require_array(
    name: str, value: Any, dtypes: tuple[np.dtype[Any], ...], shape: tuple[int | AnySize, ...], meaning: str = ""
) -> None:
    """Raise ArgumentError unless the value is a contiguous NumPy array of one of the dtypes and of this shape.

    meaning  description of the values, for the message
    """
    if not isinstance(value, np.ndarray) or value.dtype not in dtypes or value.shape != shape:
        kinds = " or ".join(dtype.name for dtype in dtypes)
        needed = f"{kinds} [{', '.join(map(str, shape))}]{meaning and f' ({meaning})'}"
        raise ArgumentError(
            f"{name} must be a NumPy array of {needed}, not {describe(value)}{advise(name, value, dtypes)}"
        )
    flags = value.flags
    if not flags.c_contiguous or not flags.aligned:
        raise ArgumentError(f"{name} must be contiguous and aligned; pass np.ascontiguousarray({name})")


def advise(name: str, value: Any, dtypes: tuple[np.dtype[Any], ...]) -> str:
    """Return how to convert a tensor of torch into an array of one of the dtypes; empty for any other value."""
    conversions = {f"torch.{dtype.name}": "numpy()" for dtype in dtypes}
    if UINT16 in dtypes:
        conversions["torch.bfloat16"] = "view(torch.uint16).numpy()"
    conversion = conversions.get(str(getattr(value, "dtype", "")))
    return f"; pass {name}.{conversion}" if conversion else ""


def describe(value: Any) -> str:
    """Return a short text that tells what was given for an argument: dtype and shape, a value, or a type."""
    if (shape := getattr(value, "shape", None)) is not None and hasattr(value, "dtype"):
        kind = "" if isinstance(value, np.ndarray) else f"{type(value).__name__} "
        device = getattr(value, "device", "cpu")
        return f"{kind}{value.dtype} {list(shape)}{'' if str(device) == 'cpu' else f' on {device}'}"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
