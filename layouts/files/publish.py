"""The only code that makes a file appear: written aside, synced, renamed, its folder synced. All of it is seen or
nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import mmap
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.errors import InputError, OutputError, ResourceError
from ktconvert.layouts.files.shards import ALIGNMENT

STAGING_BYTES = 4 << 20
REMOVALS = 10  # tries
# Why there is no room -> what to do. The same command goes on where it stopped, or begins where nothing had begun.
FULL = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
MARK = "written by ktconvert, which may replace it"  # in the metadata of the single files that commands write
MARKED = 64 << 10  # bytes at either end of a file that are searched for it
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
AT_FDCWD = -100

Bytes = npt.NDArray[np.uint8]


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn 'no space', 'quota' and 'file too large' into a ResourceError that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise ResourceError(no_room(path, error)) from error
        raise


def no_room(path: Path | str, error: OSError) -> str:
    """What is said of an error of FULL."""
    assert error.errno is not None
    return f"{path}: {os.strerror(error.errno)}; {FULL[error.errno]}, then run the command again."


def aligned_buffer(nbytes: int) -> Bytes:
    """Zeroed bytes on pages of their own, as direct writes need them; uint8 [nbytes]."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)[:nbytes]


class DirectFile:
    """A new file of known size, written past the page cache where the file system allows it.

    Space is reserved before the first byte. `append` hashes in file order; `write_at` may be called from any thread for
    whole pages that `skip` then hashes. close() cuts the padding off and syncs. Raises ResourceError when the disk,
    quota or limit is full."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.sha256 = hashlib.sha256()
        self._staging = aligned_buffer(min(STAGING_BYTES, -(-size // ALIGNMENT) * ALIGNMENT))
        self._staged = 0
        self._offset = 0
        with explained(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._direct = self._set_direct(True)
            if size:
                try:
                    os.posix_fallocate(self._fd, 0, -(-size // ALIGNMENT) * ALIGNMENT)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        os.close(self._fd)
                        raise

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write whole pages (offset, length and address multiples of ALIGNMENT) without hashing."""
        view, done = memoryview(data.data), 0
        with explained(self.path):
            while done < len(view):
                direct = self._direct  # before the write: another thread may give it up meanwhile
                try:
                    done += os.pwrite(self._fd, view[done:], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    self._direct = self._set_direct(False)

    def _set_direct(self, direct: bool) -> bool:
        """Begin or end direct writes; whether they are direct now. Not by open(): it may fail and leave the file."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except OSError:
            if not direct:
                raise
            return False  # tmpfs and others do not support O_DIRECT
        return direct

    def append(self, data: bytes | Bytes | memoryview) -> None:
        """Write and hash the next bytes of the file, any length."""
        view = memoryview(data.data if isinstance(data, np.ndarray) else data).cast("B")
        self.sha256.update(view)
        source = np.frombuffer(view, dtype=np.uint8)
        while source.size:
            take = min(source.size, self._staging.size - self._staged)
            self._staging[self._staged : self._staged + take] = source[:take]
            self._staged += take
            source = source[take:]
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
        """Finish the file, sync it, and return its sha256 in hex."""
        with explained(self.path):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fd, self._fd = self._fd, -1  # a late write_at must not reach a file that gets the number next
        if fd >= 0:
            os.close(fd)


@functools.cache
def umask() -> int:
    """The user's."""
    status = Path("/proc/self/status").read_text()
    return int(next((line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), "022"), 8)


def readable_mode() -> int:
    """0666 less the user's umask: the account that serves the model must be able to read it."""
    return 0o666 & ~umask()


def make_readable(path: Path) -> None:
    """Give a file of another process, or a folder of files, the mode that it would have from this one, if we may."""
    mode = readable_mode()
    for each in (path, *(path.rglob("*") if path.is_dir() else ())):
        own = mode | 0o111 & ~umask() if each.is_dir() else mode
        now = stat.S_IMODE(each.stat().st_mode)
        if now & 0o777 != own:
            with contextlib.suppress(PermissionError):  # another user's
                each.chmod(now & ~0o777 | own)


def write_file(path: Path, data: bytes) -> str:
    """Write a whole small file, synced; not yet visible under a final name if `path` lies in a work directory. Returns
    its sha256.
    """
    with explained(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, readable_mode())
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    return sha256(data)


def write_unsynced(path: Path, data: Bytes) -> str:
    """Write one of many small files of a folder that sync_tree makes durable at the end. Returns its sha256."""
    with explained(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, readable_mode())
        try:
            view = data.data
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
    return hashlib.sha256(data.data).hexdigest()


def sha256(data: bytes) -> str:
    """In hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """In hex; read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_file(source: Path, path: Path) -> tuple[int, str]:
    """Copy a companion file in pieces, synced; returns its size in bytes and sha256.

    Raises InputError if it becomes shorter meanwhile.
    """
    with explained(path), source.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with DirectFile(path, size) as target:
            left = size
            while left and (chunk := file.read(min(STAGING_BYTES, left))):
                target.append(chunk)
                left -= len(chunk)
            if left:
                raise InputError(f"{source}: became shorter while it was copied; put the old file back and resume.")
            return size, target.close()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(path: Path) -> None:
    """Make a folder and everything below it durable, by one call for the whole file system."""
    with explained(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.syncfs(fd):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(path))
        finally:
            os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, as far as they are missing, durably."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def publish(partial: Path, final: Path) -> None:
    """Give a synced file (or folder) its final name, durably."""
    with explained(final):
        partial.rename(final)
        sync_folder(final.parent)


def publish_new(partial: Path, final: Path) -> bool:
    """Give a synced file a name that nothing has, or leave all as it is; whether it was given.

    The file keeps its first name, too, where the file system has hard links. Raises OutputError where it has neither
    these nor renames that do not replace.
    """
    try:
        os.link(partial, final)
    except FileExistsError:  # by our own call, if a network file system had to repeat it
        with contextlib.suppress(FileNotFoundError):
            return partial.samefile(final)
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if _renameat2(partial, final, RENAME_NOREPLACE):
            code = ctypes.get_errno()
            if code == errno.EEXIST:
                return False
            raise OutputError(
                f"{final}: cannot be made by one process alone, since this file system has no locks, no hard links and "
                f"no renames that do not replace ({os.strerror(code)}); choose another one."
            ) from error
    sync_folder(final.parent)
    return True


def require_replaceable(path: Path) -> None:
    """Raise OutputError where something lies that write_whole did not write."""
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(MARKED)
            file.seek(max(0, path.stat().st_size - MARKED))
            if MARK.encode() in head or MARK.encode() in file.read():
                return
    raise OutputError(f"{path}: lies there already, and ktconvert did not write it; move it away or give another name.")


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file under its final name: all of it is seen, or nothing. A link stays one.

    data  has MARK near its beginning or end
    Raises OutputError where something lies there that was not written like this.
    """
    assert MARK.encode() in data[:MARKED] + data[-MARKED:]
    path = Path(os.path.realpath(path.expanduser()))
    require_replaceable(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_file(partial, data)
        publish(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def place(source: Path, target: Path) -> None:
    """Let a stored file (or folder of files) appear under a second name: hard links, or else a rename."""
    if source.is_dir():
        target.mkdir(exist_ok=True)
        for child in sorted(source.iterdir()):
            place(child, target / child.name)
        return
    with explained(target):
        if target.exists():
            if target.samefile(source):
                return
            target.unlink()
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            source.rename(target)


def keep_only(folder: Path, names: Collection[str], spare: Collection[str] = ()) -> None:
    """Remove all files below a folder but these, and folders left empty; entries to spare are not entered."""
    for path in sorted(folder.rglob("*"), reverse=True):
        name = path.relative_to(folder)
        if name.parts[0] in spare:
            continue
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif name.as_posix() not in names:
            path.unlink()


def exchange(new: Path, old: Path, aside: Path) -> None:
    """Swap two names: in one step, or by way of `aside` where the file system cannot (network shares, FAT), replacing
    what lies there.

    Cut off in the second way, `old` may be missing: it is in `aside` then.
    """
    if _renameat2(new, old, RENAME_EXCHANGE):
        remove_tree(aside)
        old.rename(aside)
        try:
            new.rename(old)
        except OSError:
            aside.rename(old)
            raise
        aside.rename(new)
    sync_folder(old.parent)


def _renameat2(new: Path, old: Path, flag: int) -> int:
    """0, or -1 and the reason in ctypes' errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), flag))


def remove_tree(path: Path) -> None:
    """Remove a file or folder of ours, if it is there, even while another process adds to it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    for tries_left in reversed(range(REMOVALS)):
        try:
            if path.exists():
                shutil.rmtree(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or not tries_left:
                raise
