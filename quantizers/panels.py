"""Conversion from the order of panels (bytes.md, Panels)."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

ROWS = 32  # rows of a panel
COLUMNS = 32  # columns of a block
HALF = ROWS // 2
# Blocks in kt-kernel's order of BF16.
BLOCK_ROWS = 256
BLOCK_COLUMNS = 1792

Item = TypeVar("Item", bound=np.generic)


def from_panels(panels: npt.NDArray[Item]) -> npt.NDArray[Item]:
    """Convert panels [n/32, 32*k] to [n, k].

    Their order: blocks of 32 columns, halves of 16 rows, pairs of columns, rows, the two columns of a pair.
    """
    count, items = panels.shape
    k = items // ROWS
    split = panels.reshape(count, k // COLUMNS, 2, COLUMNS // 2, HALF, 2)
    return np.ascontiguousarray(split.transpose(0, 2, 4, 1, 3, 5)).reshape(count * ROWS, k)


def from_blocks(flat: npt.NDArray[Item], n: int, k: int) -> npt.NDArray[Item]:
    """Convert kt-kernel's order of BF16 to [n, k].

    It has blocks of 256 rows, which have blocks of 1792 columns, each in panels.
    """
    values = np.empty((n, k), flat.dtype)
    position = 0
    for row in range(0, n, BLOCK_ROWS):
        for column in range(0, k, BLOCK_COLUMNS):
            block = values[row : row + BLOCK_ROWS, column : column + BLOCK_COLUMNS]
            block[:] = from_panels(flat[position : position + block.size].reshape(len(block) // ROWS, -1))
            position += block.size
    return values
