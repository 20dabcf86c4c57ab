"""The order of strips (FORMAT.md, Strips), in NumPy: what the kernels are compared with, and the way back."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

ROWS = 32  # of a strip
COLUMNS = 32  # of a block
HALF = ROWS // 2

Item = TypeVar("Item", bound=np.generic)


def lay(values: npt.NDArray[Item]) -> npt.NDArray[Item]:
    """[n, k], multiples of 32, to strips [n/32, 32*k]: by blocks of 32 columns, halves of 16 rows, pairs of columns,
    rows, and the two columns of the pair.
    """
    n, k = values.shape
    split = values.reshape(n // ROWS, 2, HALF, k // COLUMNS, COLUMNS // 2, 2)
    return np.ascontiguousarray(split.transpose(0, 3, 1, 4, 2, 5)).reshape(n // ROWS, ROWS * k)


def unlay(strips: npt.NDArray[Item]) -> npt.NDArray[Item]:
    """Strips [n/32, 32*k] back to [n, k]."""
    count, items = strips.shape
    k = items // ROWS
    split = strips.reshape(count, k // COLUMNS, 2, COLUMNS // 2, HALF, 2)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 1, 3, 5)).reshape(count * ROWS, k)
