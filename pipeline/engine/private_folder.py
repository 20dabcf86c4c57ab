"""Work directories that only their user can enter: no other user's links or files are followed or removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from ktconvert.layouts.errors import OutputError
from ktconvert.layouts.files import publish

FOLDERS = {"partial", "attempts", "store", "out", "old"}  # in a work directory; all else there is a file
PRIVATE = 0o700  # the mode of a work directory
ELSEWHERE = "choose another --output"


def make_private_folder(root: Path) -> None:
    """Make a work directory that only its user can enter, or take one that this user made; raise OutputError for any
    other: who made it could put links where we write and remove.
    """
    publish.make_folder(root.parent)
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=PRIVATE)
        publish.sync_folder(root.parent)
        return
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        raise refuse_owner(root) from None
    try:
        if not _is_own(fd):
            raise refuse_owner(root)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & 0o777 != PRIVATE:
            with contextlib.suppress(OSError):  # file systems without modes
                os.fchmod(fd, mode & ~0o777 | PRIVATE)
        _require_no_links(root, fd)
    finally:
        os.close(fd)


def _is_own(fd: int) -> bool:
    """Return whether this user owns an open folder, or a file server gives new files of this user to its owner."""
    owner = os.fstat(fd).st_uid
    if owner == os.geteuid():
        return True
    name = f"lock.held.{secrets.token_hex(8)}"  # a name of ours, should this process be killed here
    try:
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    except OSError:
        return False
    try:
        return os.fstat(made).st_uid == owner
    finally:
        os.close(made)
        os.unlink(name, dir_fd=fd)


def refuse_owner(root: Path) -> OutputError:
    """Return the error for a work directory of another user."""
    what = f"is a work directory of user {root.lstat().st_uid}, and this is user {os.geteuid()}"
    return OutputError(what, "work as that user, or choose another --output", path=root)


def _require_no_links(root: Path, fd: int) -> None:
    """Raise OutputError where a link, or another user's entry, lies where we expect folders and files of our own."""
    owner = os.fstat(fd).st_uid
    for name in set(os.listdir(fd)) - {"old"}:  # that was at the output, and is only removed
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            is_right = stat.S_ISDIR(status.st_mode) if name in FOLDERS else stat.S_ISREG(status.st_mode)
            if not is_right and not name.startswith(".nfs"):
                kind = "a link" if stat.S_ISLNK(status.st_mode) else "something else"
                what = f"is {kind} where ktconvert expects its own {'folder' if name in FOLDERS else 'file'}"
                raise OutputError(what, f"see who put it there, or {ELSEWHERE}", path=root / name)
            if status.st_uid != owner:
                what = f"belongs to user {status.st_uid}, and the work directory to user {owner}"
                raise OutputError(what, f"see who put it there, or {ELSEWHERE}", path=root / name)
