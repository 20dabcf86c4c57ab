"""The folders and files of one conversion, and its work directory, which only its user can enter (resume.md)."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.errors import OutputError, bad_file
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.unfinished import PLAN, WORK_FOLDER, WORK_SUFFIX, find_output
from ktconvert.native_quant import machine

FOLDERS = {"partial", "attempts", "store", "out", "old"}  # folders in a work directory; all other entries are files
PRIVATE = 0o700  # mode of a work directory
ELSEWHERE = "choose a different --output"
FileRecord = tuple[Path, int, str]  # a file with its recorded bytes and sha256


class Below:
    """A property of Paths: the path of this name below its root."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: Paths, _: object = None) -> Path:
        return paths.root / self._name


@dataclass(frozen=True)
class Paths:
    """The paths of one conversion.

    output  path of the finished output
    root    the work directory
    inside  whether the work directory is in the output, because a rename cannot replace the output
    """

    output: Path
    root: Path
    inside: bool

    plan = Below(PLAN)  # options and identity of the input, complete
    journal = Below("journal.jsonl")  # one line per event
    partial = Below("partial")  # unfinished files; emptied at every start, except for attempts that may be adopted
    attempts = Below("attempts")  # one record per attempt at a unit in another process (attempts.py)
    token = Below("token")  # name of the coordinator's run; workers compare it to recognize the folder
    store = Below("store")  # finished units, named by their fingerprints
    assembly = Below("out")  # the output while it is assembled
    old = Below("old")  # the old output, if the file system cannot swap two folders in one step

    @property
    def finals(self) -> tuple[Path, ...]:
        """Folders in which a finished unit may have its final name."""
        return (self.assembly, self.output) if self.inside else (self.assembly,)


def locate(output: Path, *, adopt: bool = False) -> Paths:
    """Return the paths of the conversion into an output.

    adopt  whether the output holds folders that stay in it
    """
    output = output.absolute()
    inside = Paths(output, output / WORK_FOLDER, inside=True)
    if not output.name:  # the root folder has no siblings
        return inside
    outside = Paths(output, output.with_name(output.name + WORK_SUFFIX), inside=False)
    for paths in (inside, outside):
        if paths.plan.exists():
            return paths
    if inside.root.is_dir():
        return inside
    if output.is_symlink() and output.is_dir():
        return inside
    if output.is_dir() and (adopt or machine.is_mount_point(output) or not os.access(output.parent, os.W_OK)):
        return inside
    return outside


def require_no_work_directory(path: Path) -> None:
    """Raise InputError, with the output to give, for the work directory of an unfinished output."""
    if (output := find_output(path)) is not None:
        raise bad_file(path, "is the work directory of an unfinished conversion", f"give its output, {output}")


def has_size(path: Path, nbytes: int) -> bool:
    try:
        return path.stat().st_size == nbytes
    except (OSError, ValueError):  # a damaged record may hold an impossible file name
        return False


def has_content(path: Path, nbytes: int, sha256: str) -> bool:
    """Return whether a file can be read and has the recorded content."""
    try:
        return has_size(path, nbytes) and publish.sha256_file(path) == sha256
    except OSError:
        return False


def make_private_folder(root: Path, output: Path) -> None:
    """Make a work directory that only its user can enter, or accept one that this user made.

    Raises OutputError for a folder of a different user, who could put links where we write and remove, and, naming the
    output, for one that its file system does not allow.
    """
    publish.make_folder(root.parent)
    try:
        publish.make_single_folder(root, PRIVATE)
        publish.sync_folder(root.parent)
        return
    except FileExistsError:
        pass
    except OutputError as error:
        raise error.with_path(output) from None
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        raise refuse_owner(root) from None
    try:
        if not _has_our_owner(fd):
            raise refuse_owner(root)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & 0o777 != PRIVATE:
            with contextlib.suppress(OSError):  # file systems without modes
                os.fchmod(fd, mode & ~0o777 | PRIVATE)
        _require_no_links(root, fd)
    finally:
        os.close(fd)


def _has_our_owner(fd: int) -> bool:
    """Return whether this user owns an open folder, or a file server gives new files of this user to its owner."""
    owner = os.fstat(fd).st_uid
    if owner == os.geteuid():
        return True
    name = f"lock.held.{secrets.token_hex(8)}"  # a recognizable name, in case this process is killed here
    try:
        probe = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    except OSError:
        return False
    try:
        return os.fstat(probe).st_uid == owner
    finally:
        os.close(probe)
        os.unlink(name, dir_fd=fd)


def refuse_owner(root: Path) -> OutputError:
    """Return the error for a work directory of a different user."""
    problem = f"is a work directory of user {root.lstat().st_uid}, but this is user {os.geteuid()}"
    return OutputError(problem, "run as that user, or choose a different --output", path=root)


def _require_no_links(root: Path, fd: int) -> None:
    """Raise OutputError for a link, or a different user's entry, in place of our own folders and files."""
    owner = os.fstat(fd).st_uid
    for name in set(os.listdir(fd)) - {"old"}:  # the old output; it is only removed
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            has_expected_type = stat.S_ISDIR(status.st_mode) if name in FOLDERS else stat.S_ISREG(status.st_mode)
            if not has_expected_type and not name.startswith(".nfs"):
                kind = "a link" if stat.S_ISLNK(status.st_mode) else "something else"
                problem = f"is {kind}, not ktconvert's own {'folder' if name in FOLDERS else 'file'}"
                raise OutputError(problem, f"find out who created it, or {ELSEWHERE}", path=root / name)
            if status.st_uid != owner:
                problem = f"belongs to user {status.st_uid}, but the work directory to user {owner}"
                raise OutputError(problem, f"find out who created it, or {ELSEWHERE}", path=root / name)
