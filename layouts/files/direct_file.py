"""New files of known size, written past the page cache; files of BF16 rows; errors for a full disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ktconvert.layouts.errors import InputError, ResourceError
from ktconvert.layouts.files.shards import ALIGNMENT
from ktconvert.native_quant.arrays import U16, Bytes

STAGING_BYTES = 4 << 20
# Error for a lack of space -> remedy. The same command then resumes, or starts if nothing was written.
DISK_FULL_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}


@contextlib.contextmanager
def _close_on_failure(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


@contextlib.contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turn 'no space', 'quota' and 'file too large' into a ResourceError that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_REMEDIES:
            raise ResourceError(no_space_sentence(path, error)) from error
        raise


def no_space_sentence(path: Path | str, error: OSError) -> str:
    assert error.errno is not None
    return f"{path}: {os.strerror(error.errno)}; {DISK_FULL_REMEDIES[error.errno]}, then run the command again."


def allocate_aligned(nbytes: int) -> Bytes:
    """Return zeroed bytes on pages of their own, uint8 [nbytes], as direct writes require."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)[:nbytes]


def reserve_space(fd: int, nbytes: int) -> None:
    """Give a new file this size, and reserve the disk space if the file system can."""
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


class DirectFile:
    """A new file of known size, written past the page cache where the file system allows it.

    Its space is reserved first. `append` hashes in file order; any thread may call `write_at` for whole pages, which
    `skip` then hashes. `close` truncates the padding and syncs. Raises ResourceError for a full disk, quota or limit.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.sha256 = hashlib.sha256()
        self._staging = allocate_aligned(min(STAGING_BYTES, -(-size // ALIGNMENT) * ALIGNMENT))
        self._staged = 0
        self._offset = 0
        with explain_full_disk(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with _close_on_failure(self._fd):
                self._direct = self._set_direct(True)
                reserve_space(self._fd, -(-size // ALIGNMENT) * ALIGNMENT)

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write whole pages without hashing them; offset, length and address are multiples of ALIGNMENT."""
        view = memoryview(data.data)
        done = 0
        with explain_full_disk(self.path):
            while done < len(view):
                direct = self._direct  # read before the write: another thread may turn it off meanwhile
                try:
                    done += os.pwrite(self._fd, view[done:], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    self._direct = self._set_direct(False)

    def _set_direct(self, direct: bool) -> bool:
        """Start or stop direct writes and return whether writes are direct now.

        os.open does not set O_DIRECT, because it may fail for that and leave the file behind.
        """
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except OSError:
            if not direct:
                raise
            return False  # tmpfs and others do not support O_DIRECT
        return direct

    def append(self, data: bytes | Bytes | memoryview) -> None:
        view = memoryview(data.data if isinstance(data, np.ndarray) else data).cast("B")
        self.sha256.update(view)
        source = np.frombuffer(view, dtype=np.uint8)
        while source.size:
            chunk, source = np.split(source, [self._staging.size - self._staged])
            self._staging[self._staged : self._staged + chunk.size] = chunk
            self._staged += chunk.size
            if self._staged == self._staging.size:
                self._flush()

    def _flush(self) -> None:
        padded = -(-self._staged // ALIGNMENT) * ALIGNMENT
        self._staging[self._staged : padded] = 0
        if padded:
            self.write_at(self._offset, self._staging[:padded])
        self._offset += self._staged
        self._staged = 0

    def skip(self, data: Bytes) -> None:
        """Hash the next whole pages of the file, which write_at wrote."""
        if self._staged:
            self._flush()
        self.sha256.update(data.data)
        self._offset += data.size

    def close(self) -> str:
        with explain_full_disk(self.path):
            self._flush()
            if self._offset != self.size:
                raise AssertionError(f"{self.path}: {self._offset} bytes written, {self.size} planned")
            os.ftruncate(self._fd, self.size)
            os.fchmod(self._fd, readable_mode())
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        return self.sha256.hexdigest()

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *exc: object) -> None:
        fd, self._fd = self._fd, -1  # a late write_at must not reach a file that reuses the number
        if fd >= 0:
            os.close(fd)


@functools.cache
def read_umask() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next((line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), "022"), 8)


def readable_mode() -> int:
    """Return 0666 less the user's umask, so that the account that serves the model can read the file."""
    return 0o666 & ~read_umask()


class RowFile:
    """A file of `count` rows of `width` BF16 values (as bits), row after row, without a header; a context manager.

    The space of a new file is reserved at once. Raises ResourceError if the disk is full, InputError for a wrong size.
    """

    def __init__(self, path: Path, count: int, width: int, *, new: bool) -> None:
        self.path = path
        self.count = count
        self.width = width
        size = 2 * count * width
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if new else os.O_RDONLY
        with explain_full_disk(path):
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            with _close_on_failure(self._fd):
                if new:
                    reserve_space(self._fd, size)
                if os.fstat(self._fd).st_size != size:
                    raise InputError(f"{path}: its size is not that of {count} rows of {width}; remove it and resume.")

    def read(self, start: int, stop: int) -> U16:
        """Return rows start..stop-1, uint16 [stop - start, width]."""
        rows = np.empty((stop - start, self.width), np.uint16)
        view = rows.reshape(-1).view(np.uint8).data
        offset = 2 * start * self.width
        while view:
            nbytes = os.preadv(self._fd, [view], offset)
            if not nbytes:
                raise InputError(f"{self.path}: became shorter while it was read; remove it and resume.")
            view = view[nbytes:]
            offset += nbytes
        return rows

    def write(self, start: int, rows: U16) -> None:
        """Write rows, uint16 [n, width], from row `start` on."""
        view = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        offset = 2 * start * self.width
        with explain_full_disk(self.path):
            while view:
                nbytes = os.pwrite(self._fd, view, offset)
                view = view[nbytes:]
                offset += nbytes

    def sync(self) -> None:
        with explain_full_disk(self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
