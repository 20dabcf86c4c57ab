"""The order of panels (bytes.md, Panels), in NumPy: what the kernels are compared with, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

ROWS = 32  # of a panel
COLUMNS = 32  # of a block
HALF = ROWS // 2
BLOCK_ROWS = 256  # of kt-kernel's order
BLOCK_COLUMNS = 1792

Item = TypeVar("Item", bound=np.generic)


def to_panels(values: npt.NDArray[Item]) -> npt.NDArray[Item]:
    """[n, k], multiples of 32, to panels [n/32, 32*k]: by blocks of 32 columns, halves of 16 rows, pairs of columns,
    rows, and the two columns of the pair.
    """
    n, k = values.shape
    split = values.reshape(n // ROWS, 2, HALF, k // COLUMNS, COLUMNS // 2, 2)
    return np.ascontiguousarray(split.transpose(0, 3, 1, 4, 2, 5)).reshape(n // ROWS, ROWS * k)


def from_panels(panels: npt.NDArray[Item]) -> npt.NDArray[Item]:
    """Panels [n/32, 32*k] back to [n, k]."""
    count, items = panels.shape
    k = items // ROWS
    split = panels.reshape(count, k // COLUMNS, 2, COLUMNS // 2, HALF, 2)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 1, 3, 5)).reshape(count * ROWS, k)


def to_blocks(values: npt.NDArray[Item]) -> npt.NDArray[Item]:
    """[n, k], multiples of 32, to kt-kernel's order of BF16 [n*k]: by blocks of 256 rows and in these of 1792 columns,
    each block in panels. The last ones may be smaller.
    """
    return np.concatenate([to_panels(values[rows, columns]).reshape(-1) for rows, columns in _blocks(*values.shape)])


def from_blocks(flat: npt.NDArray[Item], n: int, k: int) -> npt.NDArray[Item]:
    """to_blocks back to [n, k]."""
    values = np.empty((n, k), flat.dtype)
    at = 0
    for rows, columns in _blocks(n, k):
        block = values[rows, columns]
        block[:] = from_panels(flat[at : at + block.size].reshape(len(block) // ROWS, -1))
        at += block.size
    return values


def _blocks(n: int, k: int) -> Iterator[tuple[slice, slice]]:
    for row in range(0, n, BLOCK_ROWS):
        for column in range(0, k, BLOCK_COLUMNS):
            yield slice(row, row + BLOCK_ROWS), slice(column, column + BLOCK_COLUMNS)
