"""Atomic creation and removal of files: written under a temporary name, synced, renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from ktconvert.layouts.errors import InputError, OutputError
from ktconvert.layouts.files.direct_file import STAGING_BYTES, DirectFile, explain_full_disk, read_umask, readable_mode

REMOVAL_ATTEMPTS = 10  # number of attempts to remove a folder
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT}  # of mkdir; /proc refuses with ENOENT
MARK = "written by ktconvert, which may replace it"  # text in the metadata of single files that commands write
MARK_RANGE = 64 << 10  # number of bytes at each end of a file in which MARK may be
# Constants of renameat2.
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
AT_FDCWD = -100


def make_readable(path: Path) -> None:
    """Give a file or folder of a different process the mode that this process would have given it, if permitted."""
    file_mode = readable_mode()
    for entry in (path, *(path.rglob("*") if path.is_dir() else ())):
        mode = file_mode | 0o111 & ~read_umask() if entry.is_dir() else file_mode
        current_mode = stat.S_IMODE(entry.stat().st_mode)
        if current_mode & 0o777 != mode:
            with contextlib.suppress(PermissionError):  # a different user owns it
                entry.chmod(current_mode & ~0o777 | mode)


def write_file(path: Path, data: bytes | memoryview, *, sync: bool = True) -> str:
    """Write a small file and return its sha256.

    sync  whether to sync the file, and to replace a file of this name; else the name must be new, and the caller must
          call sync_tree
    """
    with explain_full_disk(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if sync else os.O_EXCL)
        fd = os.open(path, flags, readable_mode())
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
    return sha256(data)


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_file(source: Path, path: Path) -> tuple[int, str]:
    """Copy a companion file, sync it, and return its size in bytes and sha256.

    Raises InputError if the source becomes shorter.
    """
    with explain_full_disk(path), source.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with DirectFile(path, size) as target:
            remaining = size
            while remaining and (chunk := file.read(min(STAGING_BYTES, remaining))):
                target.append(chunk)
                remaining -= len(chunk)
            if remaining:
                raise InputError(f"{source}: became shorter while it was copied; restore the old file and resume.")
            return size, target.close()


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    with _open_folder(path) as fd:
        os.fsync(fd)


def sync_tree(path: Path) -> None:
    """Make a folder and everything below it durable, with one call for the whole file system."""
    with explain_full_disk(path), _open_folder(path) as fd:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, durably. Raises OutputError if one of them is a file or not allowed."""
    if not path.is_dir():
        make_folder(path.parent)
        try:
            make_single_folder(path)
        except FileExistsError:
            if not path.is_dir():
                raise _refuse_file(path) from None
        sync_folder(path.parent)


def make_single_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder in an existing one. Raises OutputError if the system does not allow it."""
    try:
        path.mkdir(mode)
    except OSError as error:
        if error.errno not in NOT_ALLOWED:
            raise
        raise _explain_not_allowed(path, error.errno) from None


def _explain_not_allowed(path: Path, number: int) -> OutputError:
    """Return the error for a folder that the system does not allow to make, for this reason (errno)."""
    remedy = "choose an output in a different directory"
    if number == errno.EACCES:
        remedy += f", or make {path.parent} writable"
    return OutputError(f"cannot be created ({os.strerror(number)})", remedy, path=path)


def require_creatable(path: Path) -> None:
    """Raise the OutputError that making a folder and its missing parents would raise, by modes and file system."""
    parent = path.parent
    if parent.is_dir():
        status = os.statvfs(parent)
        if not status.f_blocks:  # such as /proc, whose modes allow root to write
            raise _explain_not_allowed(path, errno.EOPNOTSUPP)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise _explain_not_allowed(path, errno.EROFS if status.f_flag & os.ST_RDONLY else errno.EACCES)
    elif os.path.lexists(parent):
        raise _refuse_file(parent)
    else:
        require_creatable(parent)


def _refuse_file(path: Path) -> OutputError:
    return OutputError("is a file, not a directory", "choose a different output", path=path)


def publish_path(partial: Path, final: Path) -> None:
    """Rename a synced file or folder, durably."""
    with explain_full_disk(final):
        partial.rename(final)
        sync_folder(final.parent)


def publish_new(partial: Path, final: Path) -> bool:
    """Give a synced file a name if nothing has that name; return whether the file has it now.

    With hard links the file keeps its first name, too. Raises OutputError on file systems that have neither hard links
    nor renames without replacement.
    """
    try:
        os.link(partial, final)
    except FileExistsError:  # a network file system may have repeated our own call
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
                f"{final}: this file system has no locks, hard links or renames without replacement, so that several "
                f"processes could write the file ({os.strerror(code)}); choose a different file system."
            ) from error
    sync_folder(final.parent)
    return True


def require_replaceable(path: Path) -> None:
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(MARK_RANGE)
            file.seek(max(0, path.stat().st_size - MARK_RANGE))
            if MARK.encode() in head or MARK.encode() in file.read():
                return
    raise OutputError(f"{path}: exists, and ktconvert did not write it; move it away or choose a different name.")


def write_marked_file(path: Path, data: bytes) -> None:
    """Write a small file atomically under its final name; `data` contains MARK near its beginning or end.

    A symbolic link stays one. Raises OutputError if the name belongs to a file without MARK.
    """
    assert MARK.encode() in data[:MARK_RANGE] + data[-MARK_RANGE:]
    path = Path(os.path.realpath(path.expanduser()))
    require_replaceable(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_file(partial, data)
        publish_path(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def link_or_move(source: Path, target: Path) -> None:
    """Give a stored file, or a folder of files, a second name by hard links; rename them if links are unsupported."""
    if source.is_dir():
        target.mkdir(exist_ok=True)
        for child in sorted(source.iterdir()):
            link_or_move(child, target / child.name)
        return
    with explain_full_disk(target):
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


def remove_all_but(folder: Path, names: Collection[str], spare: Collection[str] = ()) -> None:
    """Remove all files below a folder except `names`, and empty folders; skip the folder's entries in `spare`."""
    for path in sorted(folder.rglob("*"), reverse=True):
        name = path.relative_to(folder)
        if name.parts[0] in spare:
            continue
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif name.as_posix() not in names:
            path.unlink()


def exchange_paths(new: Path, old: Path, aside: Path) -> None:
    """Swap two names, in one step if the file system can do so.

    Otherwise (network shares, FAT) the function removes `aside`, and renames `old` to it before it renames the others.
    After an interruption, `old` may be missing; then its contents are in `aside`.
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


def _renameat2(source: Path, target: Path, flag: int) -> int:
    """Call renameat2; return 0, or -1 with the reason in ctypes' errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flag))


def remove_tree(path: Path) -> None:
    """Remove a file or folder of ours if it exists, even while another process adds files to it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    for tries_left in reversed(range(REMOVAL_ATTEMPTS)):
        try:
            if path.exists():
                shutil.rmtree(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or not tries_left:
                raise
