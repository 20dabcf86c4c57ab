"""The work directory beside an output: lock, plan, journal, partial files, the store of finished units (RESUME.md)."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts import publish
from ktconvert.layouts.errors import OutputError
from ktconvert.pipeline import journal as journals
from ktconvert.pipeline import machine
from ktconvert.pipeline.graph import Result, Unit

INSIDE = ".ktconvert"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Places:
    """Where things lie for one output. inside: the output cannot be renamed to, so work happens below it and files move into place."""

    output: Path
    root: Path
    inside: bool

    @property
    def plan(self) -> Path:
        """What was asked, complete."""
        return self.root / "plan.json"

    @property
    def journal(self) -> Path:
        """One line per finished unit."""
        return self.root / "journal.jsonl"

    @property
    def partial(self) -> Path:
        """Files being written; emptied at every start."""
        return self.root / "partial"

    @property
    def store(self) -> Path:
        """Finished units, named by their fingerprints."""
        return self.root / "store"

    @property
    def assembly(self) -> Path:
        """Where the final directory is put together."""
        return self.output if self.inside else self.root / "out"


def locate(output: Path, *, adopt: bool = False) -> Places:
    """Where the work for this output lies or will lie; adopt: the output already holds folders that are kept."""
    output = output.absolute()
    beside = Places(output, output.with_name(output.name + ".work"), inside=False)
    inside = Places(output, output / INSIDE, inside=True)
    if inside.plan.exists():
        return inside
    if beside.plan.exists():
        return beside
    if output.is_symlink() and output.is_dir():
        return inside
    if output.is_dir() and (adopt or machine.is_mount_point(output) or not os.access(output.parent, os.W_OK)):
        return inside
    return beside


class WorkDir:
    """The work directory, locked by this process. Use as a context manager.

    Raises OutputError when another process works on this output.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self._lock = _lock(places)
        for folder in (places.partial, places.store):
            folder.mkdir(exist_ok=True)
        for leftover in places.partial.iterdir():
            publish.remove_tree(leftover)
        self.journal = journals.Journal(places.journal)
        self.finished = journals.finished(self.journal.records)

    def __enter__(self) -> WorkDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()
        os.close(self._lock)

    def save_plan(self, document: dict[str, Any]) -> None:
        """Write plan.json, whole and durable."""
        partial = self.places.partial / "plan.json"
        publish.write_file(partial, encode(document))
        publish.publish(partial, self.places.plan)

    def record(self, unit: Unit, result: Result, seconds: float) -> None:
        """Make a published unit count."""
        entry = {
            "event": "done",
            "unit": f"{unit.stage}.{unit.key}",
            "fingerprint": unit.fingerprint,
            "files": [[w.path, w.nbytes, w.sha256] for w in result.files],
            "tensors": result.tensors,
            "seconds": round(seconds, 3),
            "stats": result.stats,
        }
        self.journal.append(entry, sync=True)
        self.finished[unit.fingerprint] = entry

    def forget(self, unit: Unit) -> None:
        """Let a finished unit be made again."""
        publish.remove_tree(self.places.store / unit.stored_name)
        self.finished.pop(unit.fingerprint, None)

    def remove(self) -> None:
        """The output is complete: nothing here is needed any more. The lock goes last."""
        for name in ("partial", "store", "out", "plan.json", "journal.jsonl", "lock"):
            publish.remove_tree(self.places.root / name)
        self.places.root.rmdir()


def _lock(places: Places) -> int:
    """Lock the work directory and leave our pid in the lock file; the open descriptor holds it."""
    path = places.root / "lock"
    while True:
        with publish.explained(path):
            places.root.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise OutputError(
                f"{places.output}: process {holder} is converting into it; wait for it or stop it."
            ) from error
        if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
            break
        os.close(fd)  # whoever held it finished and removed it in between
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def done_reason(places: Places, finished: dict[str, dict[str, Any]], unit: Unit) -> str | None:
    """Why a unit counts as finished: recorded, and its file lies in the store (or already in place) with the recorded size."""
    record = finished.get(unit.fingerprint)
    if record is None:
        return None
    for base, reason in (
        (places.store / unit.stored_name, "finished before"),
        (places.assembly / unit.final, "finished, in place"),
    ):
        if all(_size(base / path if path else base) == nbytes for path, nbytes, _ in record["files"]):
            return reason
    return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def encode(document: dict[str, Any]) -> bytes:
    """A JSON document as we store it."""
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
