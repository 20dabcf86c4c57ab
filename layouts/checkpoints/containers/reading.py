"""A file of weights, opened for its header: regular, readable, and no Git LFS pointer."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ktconvert.layouts.errors import REMEDY, InputError, damaged_file

LFS_MAGIC = b"version https://git-lfs"
LFS_REMEDY = f"run `git lfs pull` in that directory or {REMEDY}"


@contextlib.contextmanager
def opened(path: Path, suffix: str) -> Iterator[tuple[int, os.stat_result]]:
    """A file's descriptor and status. InputError where it is missing, no regular file or a Git LFS pointer."""
    try:
        # O_NONBLOCK: a pipe in a checkpoint's place must not hang us; it is refused below.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise damaged_file(path, f"cannot be opened ({e.strerror})") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a regular file; give a {suffix} file or a directory of them")
        if read_at(fd, 0, len(LFS_MAGIC), path) == LFS_MAGIC:
            raise damaged_file(path, "a Git LFS pointer, not the weights", LFS_REMEDY)
        yield fd, status
    finally:
        os.close(fd)


def read_at(fd: int, start: int, count: int, path: Path) -> bytes:
    """Bytes start .. start+count-1, fewer at the end of the file. InputError where they cannot be read."""
    parts: list[bytes] = []
    try:
        while count > 0 and (part := os.pread(fd, count, start)):
            parts.append(part)
            start += len(part)
            count -= len(part)
    except OSError as e:
        raise damaged_file(path, f"cannot be read ({e.strerror})", f"check the disk, or {REMEDY}") from None
    return b"".join(parts)
