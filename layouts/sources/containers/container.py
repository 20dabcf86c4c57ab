"""The interface of containers of weights, and opening a file of weights for its header."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import REMEDY, InputError, bad_file, unreadable_file
from ktconvert.layouts.tensors import TensorInfo


@dataclass(frozen=True)
class Header:
    """Tensors of a file, in order. Size and hash of the header identify the file.

    config  the configuration in it, as in a config.json; {} if it contains none
    """

    entries: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    size: int
    mtime_ns: int
    sha256: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """Files of a directory that make up a checkpoint.

    index    tensor -> file, if there is an index
    decider  file that decides which files count: an index, or the only file of weights; "" if their names decide
    ignored  files that do not belong to it
    note     a sentence if they may be a second set of weights
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
    read_header   (path, file name for its tensors): reads a file's header, without weights, and checks every length
                  against the file; raises InputError
    select        (directory, its files) -> the checkpoint in them; None if no file is of this kind
    select_file   the checkpoint that a given file belongs to, by default only that file; raises InputError
    check         (directory, names, headers): raises InputError if the headers say that they are not one checkpoint
    input_type    its name in --input-type, if it has one
    experts_only  whether only experts are read, since other tensors are not stored as in a Hugging Face checkpoint
    """

    title: str
    suffix: str
    read_header: Callable[[Path, str], Header]
    select: Callable[[Path, list[str]], Selection | None]
    select_file: Callable[[Path], Selection] = lambda path: Selection([path.name])
    check: Callable[[Path, Sequence[str], Sequence[Header]], None] = lambda root, names, headers: None
    input_type: str | None = None
    experts_only: bool = False


HTML_MAGIC = (b"<!doctype html", b"<html")  # in lower case
LFS_MAGIC = b"version https://git-lfs"
LFS_REMEDY = f"run `git lfs pull` in that directory or {REMEDY}"


def refuse_substitute(path: Path, beginning: bytes, what: str) -> None:
    """Raise InputError if a file that begins so is a Git LFS pointer, or a web page that was saved instead.

    what  what the file should be, such as "the weights"
    """
    if beginning.startswith(LFS_MAGIC):
        raise bad_file(path, f"a Git LFS pointer, not {what}", LFS_REMEDY)
    if beginning[:64].lstrip().lower().startswith(HTML_MAGIC):
        raise bad_file(path, f"a web page, not {what}", REMEDY)


@contextlib.contextmanager
def open_regular_file(path: Path, suffix: str) -> Iterator[tuple[int, os.stat_result]]:
    """Open a file and yield its descriptor and status.

    Raises InputError if it is missing, not a regular file, a Git LFS pointer, or a web page that was saved instead.
    """
    try:
        # O_NONBLOCK: opening a pipe must not hang; it is rejected below.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise unreadable_file(path, e, "cannot be opened") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a regular file; give a {suffix} file or a directory of them")
        refuse_substitute(path, read_at(fd, 0, len(LFS_MAGIC), path), "the weights")
        yield fd, status
    finally:
        os.close(fd)


def read_unchanged(path: Path, suffix: str, start: int, count: int, size: int, mtime_ns: int) -> bytes:
    """Read bytes of a file that had this size and time of change. Raises InputError if it changed."""
    with open_regular_file(path, suffix) as (fd, status):
        data = read_at(fd, start, count, path)
        if (status.st_size, status.st_mtime_ns) != (size, mtime_ns) or len(data) != count:
            raise InputError(f"{path}: changed while it was being read; restore the old file and resume.")
    return data


def read_at(fd: int, start: int, count: int, path: Path) -> bytes:
    """Read bytes start .. start+count-1, fewer at the end of the file. Raises InputError if they cannot be read."""
    chunks: list[bytes] = []
    try:
        while count > 0 and (chunk := os.pread(fd, count, start)):
            chunks.append(chunk)
            start += len(chunk)
            count -= len(chunk)
    except OSError as e:
        raise unreadable_file(path, e, remedy=f"check the disk, or {REMEDY}") from None
    return b"".join(chunks)
