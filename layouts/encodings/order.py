"""The order of a matrix's rows in memory: row after row, or in panels of 32 rows as the kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import Rows
from ktconvert.quantizers import panels

IN_ROWS = 1  # rows of a matrix that lie in one row of its tensor
IN_PANELS = panels.ROWS

Item = TypeVar("Item", bound=np.generic)


def rows_of(
    held: npt.NDArray[Item], n: int, rows: Rows, of_panels: Callable[[npt.NDArray[Item]], npt.NDArray[Item]]
) -> npt.NDArray[Item]:
    """Some rows of a matrix of n rows, [rows, ...], that is held row after row, [n, ...], or in panels, [n / 32, ...].

    of_panels  panels -> their rows; only the panels that a slice touches are turned into rows
    """
    if len(held) == n:
        return held[rows]
    if not isinstance(rows, slice):
        return of_panels(held)[rows]
    start, stop, _ = rows.indices(n)
    first = start // IN_PANELS
    return of_panels(held[first : -(-stop // IN_PANELS)])[start - first * IN_PANELS : stop - first * IN_PANELS]
