"""The append-only record of a conversion: one JSON object per line; a torn last line is cut off (resume.md)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct, field

from ktconvert.layouts.files import documents
from ktconvert.layouts.files.direct_file import explained
from ktconvert.layouts.files.documents import Number, Seconds
from ktconvert.pipeline.engine.lock import Holder
from ktconvert.pipeline.engine.units import Result, Written

HEADER = b'{"ktconvert-journal": 1}\n'


def now() -> float:
    return round(time.time(), 3)


class Event(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, tag_field="event"):
    """What all records have: when it happened."""

    at: Seconds = field(default_factory=now)


class Run(Event, frozen=True, kw_only=True, tag="run"):
    """A process begins to work. oom_kills: machine.oom_kills() at that time."""

    process: Holder
    oom_kills: Number | None = None


class End(Event, frozen=True, kw_only=True, tag="end"):
    """It stops by itself; why: the sentence with which it failed."""

    why: str | None = None


class OfUnit(Event, frozen=True, kw_only=True):
    """Something happens to a unit. host, pid, attempt: where it is made in another process."""

    unit: str
    host: str | None = None
    pid: int | None = None
    attempt: str | None = None


class Start(OfUnit, frozen=True, kw_only=True, tag="start"):
    """Somebody begins to make it."""


class Failed(OfUnit, frozen=True, kw_only=True, tag="failed"):
    """An attempt ended with this sentence."""

    why: str


class Lost(OfUnit, frozen=True, kw_only=True, tag="lost"):
    """An attempt is of no use any more: it ended without a word, or another was done first."""


class Taken(OfUnit, frozen=True, kw_only=True, tag="taken"):
    """A portion that a worker made went into its unit."""


class Done(OfUnit, frozen=True, kw_only=True, tag="done"):
    """It is published. for_chain: the files that it has in the store for other units of its chain."""

    fingerprint: str
    result: Result
    for_chain: tuple[Written, ...] = ()
    seconds: Seconds


class Forgotten(Event, frozen=True, kw_only=True, tag="forgotten"):
    """A finished unit is to be made again."""

    fingerprint: str


class Dropped(Event, frozen=True, kw_only=True, tag="dropped"):
    """Everything is to be made again."""


class Assembled(Event, frozen=True, kw_only=True, tag="assembled"):
    """The folder of this inode is complete and about to become the output."""

    inode: Number


Record = Run | End | Start | Failed | Lost | Taken | Done | Forgotten | Dropped | Assembled


def read(path: Path) -> list[Record]:
    """All whole records; what follows the last whole line, or the first line that is no record, does not count, and
    nothing of a file that does not begin as ours: whatever has no record is done again.
    """
    return _parse(path.read_bytes())[0] if path.exists() else []


def _parse(data: bytes) -> tuple[list[Record], int]:
    """The whole records and the length in bytes of the part that holds them, with the header."""
    records: list[Record] = []
    if not data.startswith(HEADER):
        return records, 0
    good = len(HEADER)
    for line in data[good:].splitlines(keepends=True):
        try:
            records.append(documents.read(line if line.endswith(b"\n") else b"", Record))  # type: ignore[arg-type]
        except ValueError:
            break
        good += len(line)
    return records, good


class Journal:
    """Open for appending by the one process that holds the lock; safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records, self._size = _parse(path.read_bytes()) if path.exists() else ([], 0)
        self._lock = threading.Lock()
        with explained(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._fd, self._size)
        if not self._size:
            self._write(HEADER, sync=True)

    def append(self, record: Record, *, sync: bool = False) -> None:
        """Add a record; with sync it is durable on return."""
        with self._lock:
            self._write(documents.one_line(record), sync)
            self.records.append(record)

    def _write(self, line: bytes, sync: bool) -> None:
        with explained(self.path):
            try:
                done = 0
                while done < len(line):
                    done += os.pwrite(self._fd, line[done:], self._size + done)
            except OSError:
                os.ftruncate(self._fd, self._size)  # a torn line would hide those that follow it
                raise
            self._size += len(line)
            if sync:
                os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def finished(records: Iterable[Record]) -> dict[str, Done]:
    """The last record of each finished unit, by fingerprint; less those that were forgotten or dropped since."""
    latest: dict[str, Done] = {}
    for record in records:
        match record:
            case Done():
                latest[record.fingerprint] = record
            case Forgotten():
                latest.pop(record.fingerprint, None)
            case Dropped():
                latest.clear()
    return latest


def assembled(records: Iterable[Record]) -> int | None:
    """The inode of the folder that was complete and about to become the output; None where it had not come to that."""
    inode = None
    for record in records:
        match record:
            case Assembled():
                inode = record.inode
            case Forgotten() | Dropped():
                inode = None
    return inode


def last_run(records: Iterable[Record]) -> tuple[Run, dict[str, Start]] | None:
    """The last run and the units that it was making, if it did not end by itself; else None."""
    run: Run | None = None
    flying: dict[str, Start] = {}
    for record in records:
        match record:
            case Run():
                run, flying = record, {}
            case Start():
                flying[record.unit] = record
            case Done() | Taken():
                flying.pop(record.unit, None)
            case End():
                run = None
    return None if run is None else (run, flying)
