"""Rows of BF16 in a file: activations that are too many for memory, written and read some rows at a time."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files.direct_file import explained

Rows = npt.NDArray[np.uint16]


class RowFile:
    """`count` rows of `width` BF16 values (as their bits), row after row and nothing else. Use as a context manager.

    A new file has its space reserved at once. Raises ResourceError when the disk is full, InputError for another size.
    """

    def __init__(self, path: Path, count: int, width: int, *, new: bool) -> None:
        self.path, self.count, self.width = path, count, width
        size = 2 * count * width
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if new else os.O_RDONLY
        with explained(path):
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            if new and size:
                try:
                    os.posix_fallocate(self._fd, 0, size)
                except BaseException:
                    os.close(self._fd)
                    raise
        if os.fstat(self._fd).st_size != size:
            os.close(self._fd)
            raise InputError(f"{path}: has another size than {count} rows of {width}; remove it and resume.")

    def read(self, start: int, stop: int) -> Rows:
        """Rows start..stop-1, uint16 [stop - start, width]."""
        rows = np.empty((stop - start, self.width), np.uint16)
        view, at = rows.reshape(-1).view(np.uint8).data, 2 * start * self.width
        while view:
            got = os.preadv(self._fd, [view], at)
            if not got:
                raise InputError(f"{self.path}: became shorter while it was read; remove it and resume.")
            view, at = view[got:], at + got
        return rows

    def write(self, start: int, rows: Rows) -> None:
        """Put rows, uint16 [n, width], from row `start` on."""
        view, at = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data, 2 * start * self.width
        with explained(self.path):
            while view:
                put = os.pwrite(self._fd, view, at)
                view, at = view[put:], at + put

    def sync(self) -> None:
        with explained(self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
