"""The lock of a work directory, for one process, or for several with a job share each (resume.md).

If the file system has locks, they are flock's: a single process holds `lock` exclusively; processes with job shares
hold it shared, and `lock.part-R-of-N` exclusively. Otherwise `lock.held` and `lock.held.part-R-of-N` are files that
exist as long as they are held. Only one process creates such a file, or replaces that of a process that has ended.
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

WORK_NAMES = {"token", "plan.json", "journal.jsonl", *FOLDERS}
NAMES = re.compile(r"lock(\.part-\d+-of-\d+|\.held(\.part-\d+-of-\d+)?(\.(after-)?[0-9a-f]+)*)?")
SHARE_NAME = re.compile(r"lock(\.held)?\.part-(\d+)-of-(\d+)")
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
PATIENCE = 1.0  # seconds that a single process needs to see our job share and yield
MAX_NAMED = 4  # processes to name in a message
MAX_LOCK_BYTES = 1024  # bytes to read of a lock file
UNNAMED = {"localhost", "localhost.localdomain", "(none)"}  # host names that several machines may share

Holders = list[tuple[Path, bytes]]  # locks, each with its content


class Holder(Struct, frozen=True, forbid_unknown_fields=True):
    """A process among all that ever ran on any host.

    start  its start time (machine.process_start), since process ids are reused
    """

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
    """The share of one process in the units of a conversion.

    number  number of the process, from 0
    count   number of processes
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def name(self) -> str:
        return f"part-{self.number}-of-{self.count}"


@dataclass
class Lock:
    """A held lock.

    content  the content of our lock files, which names this process
    fds      descriptors of the files whose flocks are held
    files    lock files with our content, while the lock is held
    """

    root: Path
    content: bytes = field(default_factory=lambda: documents.encode_line(Holder.this()))
    fds: list[int] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def lock_file(self, path: Path, mode: int) -> bool:
        """Lock a file with flock; return False if the file system has no such locks.

        Raises BlockingIOError if the file is locked, FileNotFoundError if it was just removed.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.fds.append(fd)
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
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
            if read_lock(path) == self.content:  # otherwise --force-unlock has removed it
                path.unlink(missing_ok=True)
        for fd in self.fds:
            with contextlib.suppress(OSError):  # closing is not enough if a process was forked meanwhile
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
        self.files = []
        self.fds = []

    def remove(self) -> None:
        """Remove all locks in the directory, ours last; for a single process."""
        for path in _list_locks(self.root) - {self.root / "lock", *self.files}:
            path.unlink(missing_ok=True)
        (self.root / "lock").unlink(missing_ok=True)
        self.release()


def acquire(root: Path, output: Path, share: JobShare | None = None) -> Lock:
    """Make a work directory, and lock it. Raises OutputError if it is in use, or is not ours."""
    while True:
        lock = Lock(root)
        try:
            require_ours(root)
            with explain_full_disk(root / "lock"):
                make_private_folder(root, output)
                _take_locks(lock, output, share)
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
    foreign = [name for name in names - WORK_NAMES - locks if not name.startswith(".nfs")]
    if foreign or (names and not locks) or (root.exists() and not root.is_dir()):
        remedy = "move it away or choose a different --output"
        raise OutputError(f"{root}: not a work folder of ktconvert, which uses this name; {remedy}.")


def unlock(root: Path, output: Path, share: JobShare | None = None) -> list[str]:
    """Remove lock files that block us and may belong to processes that have ended; return a description of each.

    Raises OutputError if the file system itself holds a lock.
    """
    if not root.is_dir():
        return []
    require_ours(root)
    lock = Lock(root)
    removed = []
    try:
        _take_flocks(lock, share)
    except BlockingIOError as error:
        busy = _busy_sentence(output, _find_holders(root, error, share))
        raise OutputError(
            f"{busy} The file system keeps this lock until that process ends; --force-unlock cannot remove it."
        ) from error
    finally:
        lock.release()
    for path, _ in _find_blocking_locks(lock, share):
        since = _format_lock_time(path)
        if (content := _remove_lock(path, lock.content)) is not None:
            removed.append(f"{path} of {_describe_holder(path, content)}, from {since}")
    return removed


def has_active_shares(root: Path) -> bool:
    """Return whether a process with a job share may be at work; it removes its lock at its end."""
    return any(
        (content := read_lock(path)) and is_alive(content) is not False
        for path in _list_locks(root)
        if SHARE_NAME.fullmatch(path.name)
    )


def _take_locks(lock: Lock, output: Path, share: JobShare | None) -> None:
    """Take the locks, and write our name into them; after a failure the caller releases those that were taken."""
    try:
        has_flocks = _take_flocks(lock, share)
    except BlockingIOError as error:
        raise OutputError(_busy_sentence(output, _find_holders(lock.root, error, share))) from error
    if not has_flocks:
        lock_file = lock.root / _lock_file_name(share)
        if (content := _take_lock_file(lock_file, lock.content)) is not None:
            raise OutputError(_refusal_sentence(output, [(lock_file, content)]))
        lock.files.append(lock_file)
    deadline = time.monotonic() + PATIENCE
    while others := _find_blocking_locks(lock, share):
        if share is None or time.monotonic() > deadline:
            raise OutputError(_refusal_sentence(output, others))
        time.sleep(PATIENCE / 20)
    if has_flocks and share is None:
        # Left by killed processes: running processes with job shares hold `lock`, too.
        for path in _list_share_locks(lock.root):
            path.unlink()
    if has_flocks or share is None:
        os.ftruncate(lock.fds[-1], 0)
        os.pwrite(lock.fds[-1], lock.content, 0)


def _take_flocks(lock: Lock, share: JobShare | None) -> bool:
    """Take flocks; return False if the file system has none. Raises BlockingIOError with the file's name."""
    if share is None:
        return lock.lock_file(lock.root / "lock", fcntl.LOCK_EX)
    share_lock = lock.root / f"lock.{share.name}"
    if not (lock.lock_file(lock.root / "lock", fcntl.LOCK_SH) and lock.lock_file(share_lock, fcntl.LOCK_EX)):
        return False
    lock.files.append(share_lock)
    return True


def _lock_file_name(share: JobShare | None) -> str:
    return f"lock.held.{share.name}" if share else "lock.held"


def _list_locks(root: Path) -> set[Path]:
    return {path for path in root.iterdir() if NAMES.fullmatch(path.name)}


def _list_share_locks(root: Path) -> list[Path]:
    """Return the files that processes with job shares lock with flock."""
    return sorted(path for path in _list_locks(root) if (match := SHARE_NAME.fullmatch(path.name)) and not match[1])


def _find_blocking_locks(lock: Lock, share: JobShare | None) -> Holders:
    """Return the lock files that block us, with their contents, except those of processes that have ended."""
    blocking = []
    for path in sorted(_list_locks(lock.root) - set(lock.files)):
        match = SHARE_NAME.fullmatch(path.name)
        blocks = path.name in ("lock.held", _lock_file_name(share)) or (share is None and match and match[1])
        if blocks and (content := read_lock(path)) is not None and is_alive(content) is not False:
            blocking.append((path, content))
    return blocking


def _find_holders(root: Path, error: BlockingIOError, share: JobShare | None) -> Holders:
    """Return the locks of running processes that may have caused an error of flock."""
    locked_file = Path(error.filename)
    share_locks = _list_share_locks(root) if share is None else ()
    holders = [(path, read_lock(path) or b"") for path in share_locks]
    running = [(path, content) for path, content in holders if is_alive(content) is not False]
    return running or [(locked_file, read_lock(locked_file) or b"")]


def read_lock(path: Path) -> bytes | None:
    """Read a lock file; None if it does not exist."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_LOCK_BYTES)
    except FileNotFoundError:
        return None


def _parse_holder(content: bytes) -> Holder | None:
    try:
        return documents.decode_document(content, Holder)
    except ValueError:
        return None


def is_alive(content: bytes) -> bool | None:
    """Return whether the process that a lock file names still runs; None if unknown."""
    holder = _parse_holder(content)
    return holder.is_alive() if holder else None


def _take_lock_file(path: Path, content: bytes) -> bytes | None:
    """Take the lock file at `path` and return None, or return its content if its process may be alive.

    content  our content for the file

    The right to replace the lock of an ended process is itself a lock, whose name follows from the content to replace.
    So only one of several processes replaces it, and a process that had read it earlier finds a different content.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        while True:
            old_content = read_lock(path)
            if old_content is not None and is_alive(old_content) is not False:
                return old_content
            if not temporary.exists():
                publish.write_file(temporary, content)
            if old_content is None:
                if publish.publish_new(temporary, path):
                    return None
                continue
            replacement_lock = _replacement_lock_path(path, old_content)
            if (other := _take_lock_file(replacement_lock, content)) is not None:
                return other
            try:
                if read_lock(path) == old_content:
                    publish.publish_path(temporary, path)
                    return None
            finally:
                replacement_lock.unlink(missing_ok=True)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_lock(path: Path, content: bytes) -> bytes | None:
    """Remove the lock file of a process that may be alive, and return its content.

    Return None if there is none, or if the process is known to be alive.

    content  our content for lock files
    """
    old_content = read_lock(path)
    if old_content is None or is_alive(old_content):
        return None
    replacement_lock = _replacement_lock_path(path, old_content)
    while _take_lock_file(replacement_lock, content) is not None:
        if _remove_lock(replacement_lock, content) is None and read_lock(replacement_lock) is not None:
            return None
    try:
        if read_lock(path) != old_content:
            return None
        path.unlink(missing_ok=True)
        return old_content
    finally:
        replacement_lock.unlink(missing_ok=True)


def _replacement_lock_path(path: Path, content: bytes) -> Path:
    """Return the path of the lock that allows a process to replace a lock file with this content."""
    return path.with_name(f"{path.name}.after-{publish.sha256(content)[:12]}")


def _describe_holder(path: Path, content: bytes) -> str:
    name = str(_parse_holder(content) or "another process")
    match = SHARE_NAME.fullmatch(path.name)
    return f"job share {match[2]}/{match[3]} ({name})" if match else name


def _format_lock_time(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))


def _busy_sentence(output: Path, holders: Holders) -> str:
    names = [_describe_holder(path, content) for path, content in holders]
    if len(names) > MAX_NAMED:
        names[MAX_NAMED:] = [f"{len(names) - MAX_NAMED} more"]
    if len(names) == 1:
        return f"{output}: {names[0]} is writing to it; wait for it or stop it."
    return f"{output}: {', '.join(names[:-1])} and {names[-1]} are writing to it; wait for them or stop them."


def _refusal_sentence(output: Path, holders: Holders) -> str:
    unknown = [path for path, content in holders if is_alive(content) is None]
    busy = _busy_sentence(output, holders)
    if not unknown:
        return busy
    return (
        f"{busy} Its lock is {unknown[0]}, from {_format_lock_time(unknown[0])}. That process may have ended on its "
        "host; if so, add --force-unlock."
    )
