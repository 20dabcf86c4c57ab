"""The journal of a conversion: an append-only file with one JSON object per line (resume.md)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct, field

from ktconvert.layouts.files import documents
from ktconvert.layouts.files.direct_file import explain_full_disk
from ktconvert.layouts.files.documents import Number, Seconds
from ktconvert.pipeline.engine.lock import Holder
from ktconvert.pipeline.engine.units import Result, Written

HEADER = b'{"ktconvert-journal": 1}\n'


def timestamp() -> float:
    return round(time.time(), 3)


class Event(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, tag_field="event"):
    """Base class of all records.

    at  time of the event
    """

    at: Seconds = field(default_factory=timestamp)


class Run(Event, frozen=True, kw_only=True, tag="run"):
    """Record that a process begins a run.

    oom_kills  machine.oom_kills() at that time
    """

    process: Holder
    oom_kills: Number | None = None


class End(Event, frozen=True, kw_only=True, tag="end"):
    """Record that the process ends the run itself.

    why  the sentence with which the run failed; None if it did not fail
    """

    why: str | None = None


class UnitEvent(Event, frozen=True, kw_only=True):
    """Base class of records about a unit.

    host, pid, attempt  those of a worker that makes the unit; None for the coordinator
    """

    unit: str
    host: str | None = None
    pid: int | None = None
    attempt: str | None = None


class Start(UnitEvent, frozen=True, kw_only=True, tag="start"):
    """Record that a process begins to make a unit."""


class Failed(UnitEvent, frozen=True, kw_only=True, tag="failed"):
    """Record that an attempt fails.

    why  the sentence with which it failed
    """

    why: str


class Lost(UnitEvent, frozen=True, kw_only=True, tag="lost"):
    """Record that an attempt becomes useless: its process died, or a different attempt finished first."""


class Taken(UnitEvent, frozen=True, kw_only=True, tag="taken"):
    """Record that a unit has consumed a portion that a worker made."""


class Done(UnitEvent, frozen=True, kw_only=True, tag="done"):
    """Record that a unit is published.

    chain_files  its files in the store for later units of its chain
    """

    fingerprint: str
    result: Result
    chain_files: tuple[Written, ...] = field(default=(), name="for_chain")
    seconds: Seconds


class Forgotten(Event, frozen=True, kw_only=True, tag="forgotten"):
    """Record that a finished unit has to be made again."""

    fingerprint: str


class Dropped(Event, frozen=True, kw_only=True, tag="dropped"):
    """Record that all units have to be made again."""


class Assembled(Event, frozen=True, kw_only=True, tag="assembled"):
    """Record that the folder with this inode is complete and about to become the output."""

    inode: Number


Record = Run | End | Start | Failed | Lost | Taken | Done | Forgotten | Dropped | Assembled


def read_records(path: Path) -> list[Record]:
    """Return all whole records; none of a file that does not begin with our header.

    Reading stops at a torn line, or at one that is no record; work without a record is done again.
    """
    return _parse(path.read_bytes())[0] if path.exists() else []


def _parse(data: bytes) -> tuple[list[Record], int]:
    """Return the whole records, and the length in bytes of the header and these records."""
    records: list[Record] = []
    if not data.startswith(HEADER):
        return records, 0
    length = len(HEADER)
    for line in data[length:].splitlines(keepends=True):
        try:
            records.append(documents.decode_document(line if line.endswith(b"\n") else b"", Record))  # type: ignore[arg-type]
        except ValueError:
            break
        length += len(line)
    return records, length


class Journal:
    """A journal that the process with the lock appends to; safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records, self._size = _parse(path.read_bytes()) if path.exists() else ([], 0)
        self._lock = threading.Lock()
        with explain_full_disk(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._fd, self._size)
        if not self._size:
            self._write(HEADER, sync=True)

    def append(self, record: Record, *, sync: bool = False) -> None:
        """Append a record; with sync it is durable on return."""
        with self._lock:
            self._write(documents.encode_line(record), sync)
            self.records.append(record)

    def _write(self, line: bytes, sync: bool) -> None:
        with explain_full_disk(self.path):
            try:
                written = 0
                while written < len(line):
                    written += os.pwrite(self._fd, line[written:], self._size + written)
            except OSError:
                os.ftruncate(self._fd, self._size)  # a torn line would hide the lines after it
                raise
            self._size += len(line)
            if sync:
                os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def find_finished_units(records: Iterable[Record]) -> dict[str, Done]:
    """Return the last record of each finished unit by fingerprint, without units that were forgotten since."""
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


def find_assembled_inode(records: Iterable[Record]) -> int | None:
    """Return the inode of the complete folder that was about to become the output; None if there was none yet."""
    inode = None
    for record in records:
        match record:
            case Assembled():
                inode = record.inode
            case Forgotten() | Dropped():
                inode = None
    return inode


def find_killed_run(records: Iterable[Record]) -> tuple[Run, dict[str, Start]] | None:
    """Return the last run and its units in flight if it did not end itself; otherwise None."""
    run: Run | None = None
    in_flight: dict[str, Start] = {}
    for record in records:
        match record:
            case Run():
                run, in_flight = record, {}
            case Start():
                in_flight[record.unit] = record
            case Done() | Taken():
                in_flight.pop(record.unit, None)
            case End():
                run = None
    return None if run is None else (run, in_flight)
