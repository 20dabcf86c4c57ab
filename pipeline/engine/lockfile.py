"""A lock that is a file with a process's name inside, for file systems without locks: made by one process alone, taken
over from one that has ended, by one alone.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine

UNNAMED = {"localhost", "localhost.localdomain", "(none)"}  # names that several machines may have
LINE = re.compile(r"(\d{1,9}) (\S+) (\S+) (\d{1,19}) (\S+)\n")
LONGEST = 512  # bytes that are read of a lock


@dataclass(frozen=True)
class Holder:
    """The process that a lock names, as it writes itself into it: `PID HOST BOOT_ID START PID_NAMESPACE`.

    start  machine.process_start: a number may have been given to another process since
    """

    pid: int
    host: str
    boot: str
    start: int
    namespace: str

    @classmethod
    def this(cls) -> Holder:
        """The process that calls."""
        pid = os.getpid()
        return cls(pid, machine.host(), machine.boot_id(), machine.process_start(pid), machine.pid_namespace())

    @classmethod
    def of(cls, line: bytes) -> Holder | None:
        """Whom a lock names; None where it names nobody that we could understand."""
        match = LINE.fullmatch(line.decode(errors="replace"))
        return cls(int(match[1]), match[2], match[3], int(match[4]), match[5]) if match else None

    @property
    def line(self) -> bytes:
        """What its lock contains."""
        return f"{self.pid} {self.host} {self.boot} {self.start} {self.namespace}\n".encode()

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"

    def lives(self) -> bool | None:
        """Whether it still runs; None where that cannot be told from here: it runs on another host, or in a container
        of its own.
        """
        if self.host != machine.host():
            return None
        if self.boot != machine.boot_id():
            return None if self.host in UNNAMED else False
        if self.namespace != machine.pid_namespace():
            return None
        return machine.process_alive(self.pid, self.start)


def lives(line: bytes) -> bool | None:
    """The same of what a lock contains; a lock that cannot be understood may be another version's."""
    holder = Holder.of(line)
    return holder.lives() if holder else None


def named(line: bytes) -> str:
    """Whom a lock names, in words."""
    return str(Holder.of(line) or "another process")


def read(path: Path) -> bytes | None:
    """What a lock contains, or None where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(LONGEST)
    except FileNotFoundError:
        return None


def take(path: Path, own: Holder) -> bytes | None:
    """Make the lock at `path` ours and return None, or return what it contains if another process has it that may live.

    The lock of a process that has ended is replaced. The right to do that is a lock of its own, whose name follows from
    what is to be replaced, and is taken in the same way: so of several that try at once one replaces it, and one that
    had looked before that finds another content, and looks again.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        while True:
            before = read(path)
            if before is not None and lives(before) is not False:
                return before
            if not aside.exists():
                publish.write_file(aside, own.line)
            if before is None:
                if publish.publish_new(aside, path):
                    return None
                continue
            right = _right_to_replace(path, before)
            if (other := take(right, own)) is not None:
                return other
            try:
                if read(path) == before:
                    publish.publish(aside, path)
                    return None
            finally:
                right.unlink(missing_ok=True)
    finally:
        aside.unlink(missing_ok=True)


def take_away(path: Path, own: Holder) -> bytes | None:
    """Remove the lock of a process of which it cannot be told whether it lives, and return what it contained.

    Returns None where there is no lock, or a process has it that lives.
    """
    before = read(path)
    if before is None or lives(before):
        return None
    right = _right_to_replace(path, before)
    while take(right, own) is not None:
        if take_away(right, own) is None and read(right) is not None:
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
