"""The append-only record of a conversion: one JSON object per line; a torn last line is cut off (RESUME.md)."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from ktconvert.layouts.files import documents
from ktconvert.layouts.files.documents import NUMBER
from ktconvert.layouts.files.publish import explained

Record = dict[str, Any]
HEADER: Record = {"ktconvert-journal": 1}
FILE = [str, NUMBER, str]  # path below the unit's final place, bytes, sha256
FIGURES = {"relative_error": (float, int), "cosine": (float, int)}
STATS = {"layer?": NUMBER, "gate?": FIGURES, "up?": FIGURES, "down?": FIGURES}
TIME = (float, int)  # seconds since the epoch, or that it took
WHO = {"at?": TIME, "host?": str, "pid?": int, "attempt?": str}  # of an attempt in another process
# event -> what its record holds (documents.mismatch)
EVENTS: dict[str, dict[str, Any]] = {
    "run": {"pid": int, "oom_kills?": (NUMBER, None), "process?": str, "at?": TIME},
    "start": {"unit": str, **WHO},
    "failed": {"unit": str, "why": str, **WHO},
    "lost": {"unit": str, **WHO},
    "done": {
        "unit": str,
        "fingerprint": str,
        "files": [FILE],
        "beside": [FILE],  # named as in the store: what it left to the next unit of its chain, its side file
        "tensors": NUMBER,
        "stats": STATS,
        "seconds?": TIME,
        **WHO,
    },
    "end": {"at?": TIME, "why?": str},
    "forgotten": {"fingerprint": str},
    "assembled": {"inode": NUMBER},
}


def read(path: Path) -> list[Record]:
    """All whole records; what follows the last whole line, or the first line that is no record, does not count.

    A file that does not begin as ours holds none: whatever has no record is done again.
    """
    return _parse(path.read_bytes())[0] if path.exists() else []


def _line(record: Record) -> bytes:
    return (json.dumps(record, sort_keys=True) + "\n").encode()


def _parse(data: bytes) -> tuple[list[Record], int]:
    """The whole records and the length in bytes of the part that holds them."""
    records: list[Record] = []
    good = 0
    if not data.startswith(_line(HEADER)):
        return records, good
    for line in data.splitlines(keepends=True):
        try:
            record = documents.parse(line) if line.endswith(b"\n") else None
        except ValueError:
            break
        if not isinstance(record, dict) or documents.mismatch(record, _form(record.get("event"))):
            break
        records.append(record)
        good += len(line)
    return records, good


def _form(event: Any) -> dict[str, Any]:
    return EVENTS.get(event, {}) if isinstance(event, str) else {}


class Journal:
    """Open for appending by the one process that holds the lock; safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records, self._size = _parse(path.read_bytes()) if path.exists() else ([], 0)
        self._lock = threading.Lock()
        with explained(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._fd, self._size)
        if not self.records:
            self.append(HEADER, sync=True)

    def append(self, record: Record, *, sync: bool = False) -> None:
        """Add a record; with sync it is durable on return."""
        line = _line(record)
        with self._lock, explained(self.path):
            try:
                done = 0
                while done < len(line):
                    done += os.pwrite(self._fd, line[done:], self._size + done)
            except OSError:
                os.ftruncate(self._fd, self._size)  # a torn line would hide those that follow it
                raise
            self._size += len(line)
            self.records.append(record)
            if sync:
                os.fsync(self._fd)

    def close(self) -> None:
        """No more records."""
        os.close(self._fd)


def finished(records: list[Record]) -> dict[str, Record]:
    """The last record of each finished unit, by fingerprint; less those that were forgotten or dropped since."""
    latest: dict[str, Record] = {}
    for record in records:
        match record.get("event"):
            case "done":
                latest[record["fingerprint"]] = record
            case "forgotten":
                latest.pop(record["fingerprint"], None)
            case "dropped":
                latest.clear()
    return latest


def assembled(records: list[Record]) -> int | None:
    """The inode of the folder that was complete and about to become the output; None where it had not come to that."""
    inode = None
    for record in records:
        match record.get("event"):
            case "assembled":
                inode = int(record["inode"])
            case "forgotten" | "dropped":
                inode = None
    return inode


def death(records: list[Record]) -> Record | None:
    """How the last run ended, if it did not end by itself: {"pid", "units" in flight, "oom_kills" at its start}; else
    None.
    """
    run: Record | None = None
    flying: list[str] = []
    for record in records:
        match record.get("event"):
            case "run":
                run, flying = record, []
            case "start":
                flying.append(record["unit"])
            case "done":
                flying = [u for u in flying if u != record["unit"]]
            case "end":
                run = None
    return None if run is None else {"pid": run["pid"], "units": flying, "oom_kills": run.get("oom_kills")}
