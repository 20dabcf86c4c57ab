"""The lock of a work directory: one process works in it alone, or several do, each as a part of its own (resume.md).

Where the file system has locks, they are flock's: `lock` is held exclusively by who works alone, and shared by parts;
each of these holds `lock.part-R-of-N` exclusively. Where it has none, `lock.held` and `lock.held.part-R-of-N` are files
that exist as long as they are held: made by one process alone, taken over from one that has ended, by one alone.
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
from ktconvert.layouts.files.direct_file import explained
from ktconvert.layouts.files.documents import Count, Number
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine.private_folder import ELSEWHERE, FOLDERS, make_private_folder, refuse_owner

OURS = {"token", "plan.json", "journal.jsonl", *FOLDERS}
NAMES = re.compile(r"lock(\.part-\d+-of-\d+|\.held(\.part-\d+-of-\d+)?(\.(after-)?[0-9a-f]+)*)?")
OF_PART = re.compile(r"lock(\.held)?\.part-(\d+)-of-(\d+)")
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
PATIENCE = 1.0  # seconds, for one that wants to work alone to see our part and to give way
NAMED = 4  # processes that a message names
LONGEST = 1024  # bytes that are read of a lock
UNNAMED = {"localhost", "localhost.localdomain", "(none)"}  # names that several machines may have

Holders = list[tuple[Path, bytes]]  # locks, each with what it contains


class Holder(Struct, frozen=True, forbid_unknown_fields=True):
    """A process among all that ever ran on any host. start: machine.process_start, since numbers come again."""

    pid: Count
    host: str
    boot: str
    start: Number
    namespace: str

    @classmethod
    def this(cls) -> Holder:
        """The process that calls."""
        pid = os.getpid()
        return cls(pid, machine.host(), machine.boot_id(), machine.process_start(pid), machine.pid_namespace())

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"

    def lives(self) -> bool | None:
        """Whether it still runs; None where that cannot be told: on another host, or in a container of its own."""
        if self.host != machine.host():
            return None
        if self.boot != machine.boot_id():
            return None if self.host in UNNAMED else False
        if self.namespace != machine.pid_namespace():
            return None
        return machine.process_alive(self.pid, self.start)


@dataclass(frozen=True)
class ProcessPart:
    """One of `count` processes that share the units; number from 0."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def name(self) -> str:
        return f"part-{self.number}-of-{self.count}"


@dataclass
class Lock:
    """A held lock. fds: whose flocks are held; files: there as long as it is held, with our name inside."""

    root: Path
    own: bytes = field(default_factory=lambda: documents.one_line(Holder.this()))
    fds: list[int] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def flock(self, path: Path, how: int) -> bool:
        """Lock a file; False without such locks. BlockingIOError if locked, FileNotFoundError if just removed."""
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
        """Let others work in the directory."""
        for path in self.files:
            if read(path) == self.own:  # else --force-unlock took it away
                path.unlink(missing_ok=True)
        for fd in self.fds:
            with contextlib.suppress(OSError):  # closing is not enough where a process was forked meanwhile
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
        self.files, self.fds = [], []

    def remove(self) -> None:
        """Remove what is left of locks in the directory, ours last. For who works alone."""
        for path in _locks(self.root) - {self.root / "lock", *self.files}:
            path.unlink(missing_ok=True)
        (self.root / "lock").unlink(missing_ok=True)
        self.release()


def acquire(root: Path, output: Path, part: ProcessPart | None = None) -> Lock:
    """Make a work directory, and lock it. OutputError where another process works in it, or the folder is not ours."""
    while True:
        lock = Lock(root)
        try:
            require_ours(root)
            with explained(root / "lock"):
                make_private_folder(root)
                _lock(lock, output, part)
            return lock
        except BaseException as error:
            lock.release()
            if isinstance(error, FileNotFoundError) and root.parent.is_dir():
                continue  # whoever held it removed it just now
            raise


def require_ours(root: Path) -> None:
    """Raise OutputError where something lies at `root` that is not a work directory."""
    if root.is_symlink():
        raise OutputError("is a link, and ktconvert works in a folder of its own", ELSEWHERE, path=root)
    try:
        names = {path.name for path in root.iterdir()} if root.is_dir() else set()
    except PermissionError:
        raise refuse_owner(root) from None
    locks = {name for name in names if NAMES.fullmatch(name)}
    foreign = [name for name in names - OURS - locks if not name.startswith(".nfs")]
    if foreign or (names and not locks) or (root.exists() and not root.is_dir()):
        remedy = "move it away or choose another --output"
        raise OutputError(f"{root}: ktconvert works in a folder of this name, and something else lies there; {remedy}.")


def unlock(root: Path, output: Path, part: ProcessPart | None = None) -> list[str]:
    """Take away locks that are files, bar our way, and may be of processes that have ended; returns which, in words.
    Raises OutputError where the file system itself holds a lock.
    """
    if not root.is_dir():
        return []
    require_ours(root)
    lock, taken = Lock(root), []
    try:
        _flock(lock, part)
    except BlockingIOError as error:
        raise OutputError(
            f"{_busy(output, _holders(root, error, part))} The file system itself keeps the lock until that process "
            "ends: --force-unlock cannot take it away."
        ) from error
    finally:
        lock.release()
    for path, _ in _others(lock, part):
        since = _since(path)
        if (content := _take_away(path, lock.own)) is not None:
            taken.append(f"{path} of {_who(path, content)}, made {since}")
    return taken


def parts_at_work(root: Path) -> bool:
    """Whether a part may be at work; each removes its lock at its end."""
    return any(
        (content := read(path)) and lives(content) is not False for path in _locks(root) if OF_PART.fullmatch(path.name)
    )


def _lock(lock: Lock, output: Path, part: ProcessPart | None) -> None:
    """Take what is to be held, and leave our name in it; the caller releases what was taken before a failure."""
    try:
        has_locks = _flock(lock, part)
    except BlockingIOError as error:
        raise OutputError(_busy(output, _holders(lock.root, error, part))) from error
    if not has_locks:
        held = lock.root / _held(part)
        if (content := _take(held, lock.own)) is not None:
            raise OutputError(_refusal(output, [(held, content)]))
        lock.files.append(held)
    deadline = time.monotonic() + PATIENCE
    while others := _others(lock, part):
        if part is None or time.monotonic() > deadline:
            raise OutputError(_refusal(output, others))
        time.sleep(PATIENCE / 20)
    if has_locks and part is None:
        for path in _flocks_of_parts(lock.root):  # of one that was killed: parts hold `lock`, too
            path.unlink()
    if has_locks or part is None:
        os.ftruncate(lock.fds[-1], 0)
        os.pwrite(lock.fds[-1], lock.own, 0)


def _flock(lock: Lock, part: ProcessPart | None) -> bool:
    """Take flocks; False where the file system has none. Raises BlockingIOError with the file's name."""
    if part is None:
        return lock.flock(lock.root / "lock", fcntl.LOCK_EX)
    mine = lock.root / f"lock.{part.name}"
    if not (lock.flock(lock.root / "lock", fcntl.LOCK_SH) and lock.flock(mine, fcntl.LOCK_EX)):
        return False
    lock.files.append(mine)
    return True


# Files that belong to locks.
def _held(part: ProcessPart | None) -> str:
    return f"lock.held.{part.name}" if part else "lock.held"


def _locks(root: Path) -> set[Path]:
    return {path for path in root.iterdir() if NAMES.fullmatch(path.name)}


def _flocks_of_parts(root: Path) -> list[Path]:
    return sorted(path for path in _locks(root) if (of := OF_PART.fullmatch(path.name)) and not of[1])


def _others(lock: Lock, part: ProcessPart | None) -> Holders:
    """The locks that are files and bar the way, with what they contain; none of processes that have ended."""
    found = []
    for path in sorted(_locks(lock.root) - set(lock.files)):
        of_part = OF_PART.fullmatch(path.name)
        bars = path.name in ("lock.held", _held(part)) or (part is None and of_part and of_part[1])
        if bars and (content := read(path)) is not None and lives(content) is not False:
            found.append((path, content))
    return found


def _holders(root: Path, error: BlockingIOError, part: ProcessPart | None) -> Holders:
    met = Path(error.filename)
    holders = [(path, read(path) or b"") for path in (_flocks_of_parts(root) if part is None else ())]
    return [held for held in holders if lives(held[1]) is not False] or [(met, read(met) or b"")]


def read(path: Path) -> bytes | None:
    """What a lock contains, or None where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(LONGEST)
    except FileNotFoundError:
        return None


def _holder(content: bytes) -> Holder | None:
    try:
        return documents.read(content, Holder)
    except ValueError:
        return None


def lives(content: bytes) -> bool | None:
    """Whether the process that a lock names still runs; None where that cannot be told."""
    holder = _holder(content)
    return holder.lives() if holder else None


# Locks that are files.
def _take(path: Path, own: bytes) -> bytes | None:
    """Make the lock at `path` ours and return None, or return what it contains if another process has it that may live.
    The right to replace that of one that has ended is a lock of its own, whose name follows from what is to be
    replaced: of several that try at once one replaces it, and one that had looked before finds another content.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        while True:
            before = read(path)
            if before is not None and lives(before) is not False:
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
                if read(path) == before:
                    publish.publish(aside, path)
                    return None
            finally:
                right.unlink(missing_ok=True)
    finally:
        aside.unlink(missing_ok=True)


def _take_away(path: Path, own: bytes) -> bytes | None:
    """Remove the lock of a process that may live, and return what it contained; None if there is none, or it lives."""
    before = read(path)
    if before is None or lives(before):
        return None
    right = _right_to_replace(path, before)
    while _take(right, own) is not None:
        if _take_away(right, own) is None and read(right) is not None:
            return None
    try:
        if read(path) != before:
            return None
        path.unlink(missing_ok=True)
        return before
    finally:
        right.unlink(missing_ok=True)


def _right_to_replace(path: Path, content: bytes) -> Path:
    return path.with_name(f"{path.name}.after-{publish.sha256(content)[:12]}")


# In words.
def _who(path: Path, content: bytes) -> str:
    name = str(_holder(content) or "another process")
    part = OF_PART.fullmatch(path.name)
    return f"part {part[2]}/{part[3]} ({name})" if part else name


def _since(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))


def _busy(output: Path, holders: Holders) -> str:
    names = [_who(path, content) for path, content in holders]
    if len(names) > NAMED:
        names[NAMED:] = [f"{len(names) - NAMED} more"]
    if len(names) == 1:
        return f"{output}: {names[0]} is converting into it; wait for it or stop it."
    return f"{output}: {', '.join(names[:-1])} and {names[-1]} are converting into it; wait for them or stop them."


def _refusal(output: Path, holders: Holders) -> str:
    unknown = [path for path, content in holders if lives(content) is None]
    if not unknown:
        return _busy(output, holders)
    return (
        f"{_busy(output, holders)} Its lock is the file {unknown[0]}, made {_since(unknown[0])}; whether that process "
        "still runs cannot be told from here: if it has ended, add --force-unlock."
    )
