"""The contract of a container of weights, and how a file of weights is opened for its header."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import REMEDY, InputError, damaged_file, unreadable_file
from ktconvert.layouts.tensors import TensorInfo


@dataclass(frozen=True)
class Header:
    """A file's tensors, in order; size and hash of its header identify it anywhere; config: as a config.json, or {}."""

    entries: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    size: int
    mtime_ns: int
    sha256: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """The files of a directory that make up a checkpoint.

    index    tensor -> file, where there is an index
    decider  the file that decides which files count: an index, or the only file of weights; "": their names do
    ignored  files that do not belong to it; note: a sentence where they may be a second set of weights
    """

    names: list[str]
    index: dict[str, str] | None = None
    ignored: tuple[str, ...] = ()
    decider: str = ""
    note: str = ""


@dataclass(frozen=True)
class Container:
    """A kind of weight file: a row of CONTAINERS.

    title         its usual name, for messages
    read_header   (path, what tensors have as their file): reads a file's header, without weights, and checks every
                  length against the file. InputError
    select        (directory, its files) -> the checkpoint that they make up; None if no file is of this kind
    of_file       the checkpoint that a named file belongs to, alone by default. InputError
    check         (directory, names, headers): InputError where the files say that they are not one checkpoint
    input_type    its name in --input-type, where it has one
    experts_only  tensors other than experts are not stored as in a Hugging Face checkpoint, so nothing else is read
    """

    title: str
    suffix: str
    read_header: Callable[[Path, str], Header]
    select: Callable[[Path, list[str]], Selection | None]
    of_file: Callable[[Path], Selection] = lambda path: Selection([path.name])
    check: Callable[[Path, Sequence[str], Sequence[Header]], None] = lambda root, names, headers: None
    input_type: str | None = None
    experts_only: bool = False


LFS_MAGIC = b"version https://git-lfs"
LFS_REMEDY = f"run `git lfs pull` in that directory or {REMEDY}"


@contextlib.contextmanager
def opened(path: Path, suffix: str) -> Iterator[tuple[int, os.stat_result]]:
    """A file's descriptor and status. InputError where it is missing, no regular file or a Git LFS pointer."""
    try:
        # O_NONBLOCK: a pipe in a checkpoint's place must not hang us; it is refused below.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise unreadable_file(path, e, "cannot be opened") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a regular file; give a {suffix} file or a directory of them")
        if read_at(fd, 0, len(LFS_MAGIC), path) == LFS_MAGIC:
            raise damaged_file(path, "a Git LFS pointer, not the weights", LFS_REMEDY)
        yield fd, status
    finally:
        os.close(fd)


def read_unchanged(path: Path, suffix: str, start: int, count: int, size: int, mtime_ns: int) -> bytes:
    """Bytes of a file that had this size and time of change. InputError if it changed."""
    with opened(path, suffix) as (fd, status):
        data = read_at(fd, start, count, path)
        if (status.st_size, status.st_mtime_ns) != (size, mtime_ns) or len(data) != count:
            raise InputError(f"{path}: changed while it was being read; put the old file back and resume.")
    return data


def read_at(fd: int, start: int, count: int, path: Path) -> bytes:
    """Bytes start .. start+count-1, fewer at the end of the file. InputError where they cannot be read."""
    parts: list[bytes] = []
    try:
        while count > 0 and (part := os.pread(fd, count, start)):
            parts.append(part)
            start += len(part)
            count -= len(part)
    except OSError as e:
        raise unreadable_file(path, e, remedy=f"check the disk, or {REMEDY}") from None
    return b"".join(parts)
