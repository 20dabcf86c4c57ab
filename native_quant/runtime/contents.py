"""What shows that a directory is no longer the one that was read."""

from __future__ import annotations

import stat
from pathlib import Path

Status = tuple[str, int, int, int]


def contents(path: Path) -> frozenset[Status]:
    """Name, size in bytes, time of change (ns) and inode of each file of weights or of JSON, and of each folder."""
    found = (_status(entry) for entry in path.iterdir() if not entry.name.startswith("."))
    return frozenset(status for status in found if status is not None)


def _status(path: Path) -> Status | None:
    try:
        status = path.stat()
    except OSError:  # a link to nothing
        return path.name, 0, 0, 0
    if path.suffix not in (".safetensors", ".json") and not stat.S_ISDIR(status.st_mode):
        return None
    return path.name, status.st_size, status.st_mtime_ns, status.st_ino
