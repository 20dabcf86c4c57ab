"""The lock of a work directory, for one process, or for several with a job share each (resume.md).

If the file system has locks, they are flock's: a single process holds `lock` exclusively; processes with job shares
hold it shared, and `lock.part-R-of-N` exclusively. Otherwise `lock.held` and `lock.held.part-R-of-N` are files that
exist as long as they are held. One process alone creates such a file, or replaces that of a process that has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from ktconvert.layouts.errors import OutputError
from ktconvert.layouts.files import documents, publish
from ktconvert.layouts.files.direct_file import explain_full_disk
from ktconvert.layouts.files.documents import Count, Number
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine.paths import ELSEWHERE, FOLDERS, make_private_folder, refuse_owner

OURS = {"token", "plan.json", "journal.jsonl", *FOLDERS}
NAMES = re.compile(r"lock(\.part-\d+-of-\d+|\.held(\.part-\d+-of-\d+)?(\.(after-)?[0-9a-f]+)*)?")
SHARE_NAME = re.compile(r"lock(\.held)?\.part-(\d+)-of-(\d+)")
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
PATIENCE = 1.0  # seconds that a single process needs to see our job share and yield
NAMED = 4  # processes to name in a message
LONGEST = 1024  # bytes to read of a lock file
UNNAMED = {"localhost", "localhost.localdomain", "(none)"}  # host names that several machines may share

Holders = list[tuple[Path, bytes]]  # locks, each with its content


class Holder(Struct, frozen=True, forbid_unknown_fields=True):
    """A process among all that ever ran on any host. start: machine.process_start, since process ids are reused."""

    pid: Count
    host: str
    boot: str
    start: Number
    namespace: str

    @classmethod
    def this(cls) -> Holder:
        """Return the calling process."""
        pid = os.getpid()
        return cls(pid, machine.host(), machine.boot_id(), machine.process_start(pid), machine.pid_namespace())

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"

    def is_alive(self) -> bool | None:
        """Return whether it still runs; None if unknown, for a process on a different host or in a container."""
        if self.host != machine.host():
            return None
        if self.boot != machine.boot_id():
            return None if self.host in UNNAMED else False
        if self.namespace != machine.pid_namespace():
            return None
        return machine.process_alive(self.pid, self.start)


@dataclass(frozen=True)
class JobShare:
    """The share of one of `count` processes in the units of a conversion; number: from 0."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def name(self) -> str:
        return f"part-{self.number}-of-{self.count}"


@dataclass
class Lock:
    """A held lock. fds: files whose flocks are held; files: lock files that hold our name while the lock is held."""

    root: Path
    own: bytes = field(default_factory=lambda: documents.encode_line(Holder.this()))
    fds: list[int] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def flock(self, path: Path, how: int) -> bool:
        """Lock a file; False without such locks. Raise BlockingIOError if locked, FileNotFoundError if just removed."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.fds.append(fd)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            raise OSError(error.errno, error.strerror, str(path)) from error
        if not os.path.samestat(os.fstat(fd), path.stat()):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return True

    def release(self) -> None:
        """Release the lock, so that other processes may work in the directory."""
        for path in self.files:
            if read_lock(path) == self.own:  # otherwise --force-unlock has removed it
                path.unlink(missing_ok=True)
        for fd in self.fds:
            with contextlib.suppress(OSError):  # closing is not enough if a process was forked meanwhile
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
        self.files, self.fds = [], []

    def remove(self) -> None:
        """Remove all locks in the directory, ours last; for a single process."""
        for path in _locks(self.root) - {self.root / "lock", *self.files}:
            path.unlink(missing_ok=True)
        (self.root / "lock").unlink(missing_ok=True)
        self.release()


def acquire(root: Path, output: Path, share: JobShare | None = None) -> Lock:
    """Make a work directory, and lock it. Raise OutputError if it is in use, or is not ours."""
    while True:
        lock = Lock(root)
        try:
            require_ours(root)
            with explain_full_disk(root / "lock"):
                make_private_folder(root)
                _lock(lock, output, share)
            return lock
        except BaseException as error:
            lock.release()
            if isinstance(error, FileNotFoundError) and root.parent.is_dir():
                continue  # another process has just removed it
            raise


def require_ours(root: Path) -> None:
    """Raise OutputError if `root` exists and is not a work directory."""
    if root.is_symlink():
        raise OutputError("is a link, but ktconvert needs its own folder", ELSEWHERE, path=root)
    try:
        names = {path.name for path in root.iterdir()} if root.is_dir() else set()
    except PermissionError:
        raise refuse_owner(root) from None
    locks = {name for name in names if NAMES.fullmatch(name)}
    foreign = [name for name in names - OURS - locks if not name.startswith(".nfs")]
    if foreign or (names and not locks) or (root.exists() and not root.is_dir()):
        remedy = "move it away or choose a different --output"
        raise OutputError(f"{root}: not a work folder of ktconvert, which uses this name; {remedy}.")


def unlock(root: Path, output: Path, share: JobShare | None = None) -> list[str]:
    """Remove lock files that block us and may belong to processes that have ended; return a description of each.

    Raise OutputError if the file system itself holds a lock.
    """
    if not root.is_dir():
        return []
    require_ours(root)
    lock, removed = Lock(root), []
    try:
        _flock(lock, share)
    except BlockingIOError as error:
        busy = _busy_sentence(output, _holders(root, error, share))
        raise OutputError(
            f"{busy} The file system keeps this lock until that process ends; --force-unlock cannot remove it."
        ) from error
    finally:
        lock.release()
    for path, _ in _find_blocking_locks(lock, share):
        since = _lock_time(path)
        if (content := _remove_lock(path, lock.own)) is not None:
            removed.append(f"{path} of {_describe_holder(path, content)}, from {since}")
    return removed


def has_active_shares(root: Path) -> bool:
    """Return whether a process with a job share may be at work; it removes its lock at its end."""
    return any(
        (content := read_lock(path)) and is_alive(content) is not False
        for path in _locks(root)
        if SHARE_NAME.fullmatch(path.name)
    )


def _lock(lock: Lock, output: Path, share: JobShare | None) -> None:
    """Take the locks, and write our name into them; after a failure the caller releases those that were taken."""
    try:
        has_locks = _flock(lock, share)
    except BlockingIOError as error:
        raise OutputError(_busy_sentence(output, _holders(lock.root, error, share))) from error
    if not has_locks:
        held = lock.root / _lock_file_name(share)
        if (content := _take(held, lock.own)) is not None:
            raise OutputError(_refusal_sentence(output, [(held, content)]))
        lock.files.append(held)
    deadline = time.monotonic() + PATIENCE
    while others := _find_blocking_locks(lock, share):
        if share is None or time.monotonic() > deadline:
            raise OutputError(_refusal_sentence(output, others))
        time.sleep(PATIENCE / 20)
    if has_locks and share is None:
        for path in _share_flocks(lock.root):  # of a killed process: processes with job shares hold `lock`, too
            path.unlink()
    if has_locks or share is None:
        os.ftruncate(lock.fds[-1], 0)
        os.pwrite(lock.fds[-1], lock.own, 0)


def _flock(lock: Lock, share: JobShare | None) -> bool:
    """Take flocks; return False if the file system has none. Raise BlockingIOError with the file's name."""
    if share is None:
        return lock.flock(lock.root / "lock", fcntl.LOCK_EX)
    mine = lock.root / f"lock.{share.name}"
    if not (lock.flock(lock.root / "lock", fcntl.LOCK_SH) and lock.flock(mine, fcntl.LOCK_EX)):
        return False
    lock.files.append(mine)
    return True


def _lock_file_name(share: JobShare | None) -> str:
    return f"lock.held.{share.name}" if share else "lock.held"


def _locks(root: Path) -> set[Path]:
    return {path for path in root.iterdir() if NAMES.fullmatch(path.name)}


def _share_flocks(root: Path) -> list[Path]:
    return sorted(path for path in _locks(root) if (of := SHARE_NAME.fullmatch(path.name)) and not of[1])


def _find_blocking_locks(lock: Lock, share: JobShare | None) -> Holders:
    """Return the lock files that block us, with their contents, except those of processes that have ended."""
    blocking = []
    for path in sorted(_locks(lock.root) - set(lock.files)):
        match = SHARE_NAME.fullmatch(path.name)
        blocks = path.name in ("lock.held", _lock_file_name(share)) or (share is None and match and match[1])
        if blocks and (content := read_lock(path)) is not None and is_alive(content) is not False:
            blocking.append((path, content))
    return blocking


def _holders(root: Path, error: BlockingIOError, share: JobShare | None) -> Holders:
    locked = Path(error.filename)
    holders = [(path, read_lock(path) or b"") for path in (_share_flocks(root) if share is None else ())]
    return [held for held in holders if is_alive(held[1]) is not False] or [(locked, read_lock(locked) or b"")]


def read_lock(path: Path) -> bytes | None:
    """Read a lock file; None if it does not exist."""
    try:
        with path.open("rb") as file:
            return file.read(LONGEST)
    except FileNotFoundError:
        return None


def _holder(content: bytes) -> Holder | None:
    try:
        return documents.decode_document(content, Holder)
    except ValueError:
        return None


def is_alive(content: bytes) -> bool | None:
    """Return whether the process that a lock file names still runs; None if unknown."""
    holder = _holder(content)
    return holder.is_alive() if holder else None


def _take(path: Path, own: bytes) -> bytes | None:
    """Take the lock file at `path` and return None, or return its content if its process may be alive.

    The right to replace the lock of an ended process is itself a lock, whose name follows from the content to replace.
    So only one of several processes replaces it, and a process that had read it earlier finds a different content.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        while True:
            before = read_lock(path)
            if before is not None and is_alive(before) is not False:
                return before
            if not aside.exists():
                publish.write_file(aside, own)
            if before is None:
                if publish.publish_new(aside, path):
                    return None
                continue
            right = _right_to_replace(path, before)
            if (other := _take(right, own)) is not None:
                return other
            try:
                if read_lock(path) == before:
                    publish.publish_path(aside, path)
                    return None
            finally:
                right.unlink(missing_ok=True)
    finally:
        aside.unlink(missing_ok=True)


def _remove_lock(path: Path, own: bytes) -> bytes | None:
    """Remove the lock file of a process that may be alive, and return its content.

    Return None if there is none, or if the process is known to be alive.
    """
    before = read_lock(path)
    if before is None or is_alive(before):
        return None
    right = _right_to_replace(path, before)
    while _take(right, own) is not None:
        if _remove_lock(right, own) is None and read_lock(right) is not None:
            return None
    try:
        if read_lock(path) != before:
            return None
        path.unlink(missing_ok=True)
        return before
    finally:
        right.unlink(missing_ok=True)


def _right_to_replace(path: Path, content: bytes) -> Path:
    return path.with_name(f"{path.name}.after-{publish.sha256(content)[:12]}")


def _describe_holder(path: Path, content: bytes) -> str:
    name = str(_holder(content) or "another process")
    match = SHARE_NAME.fullmatch(path.name)
    return f"part {match[2]}/{match[3]} ({name})" if match else name


def _lock_time(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))


def _busy_sentence(output: Path, holders: Holders) -> str:
    names = [_describe_holder(path, content) for path, content in holders]
    if len(names) > NAMED:
        names[NAMED:] = [f"{len(names) - NAMED} more"]
    if len(names) == 1:
        return f"{output}: {names[0]} is converting into it; wait for it or stop it."
    return f"{output}: {', '.join(names[:-1])} and {names[-1]} are converting into it; wait for them or stop them."


def _refusal_sentence(output: Path, holders: Holders) -> str:
    unknown = [path for path, content in holders if is_alive(content) is None]
    if not unknown:
        return _busy_sentence(output, holders)
    return (
        f"{_busy_sentence(output, holders)} Its lock is {unknown[0]}, from {_lock_time(unknown[0])}. That process "
        "may have ended on its host; if so, add --force-unlock."
    )
