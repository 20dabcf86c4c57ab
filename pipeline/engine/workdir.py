"""The work directory beside an output: lock, plan, journal, partial files, the store of finished units (RESUME.md)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import journal as journals
from ktconvert.pipeline.engine import lock
from ktconvert.pipeline.engine.units import Result, Unit

INSIDE = ".ktconvert"


@dataclass(frozen=True)
class Places:
    """Where things lie for one output. inside: the output cannot be renamed to, so work happens below it and files move
    into place.
    """

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
        return self.root / "out"

    @property
    def old(self) -> Path:
        """What lay at the output, where two folders cannot be swapped in one step."""
        return self.root / "old"

    @property
    def finals(self) -> tuple[Path, ...]:
        """Folders where a finished unit may lie under its final name."""
        return (self.assembly, self.output) if self.inside else (self.assembly,)


def locate(output: Path, *, adopt: bool = False) -> Places:
    """Where the work for this output lies or will lie; adopt: the output already holds folders that are kept."""
    output = output.absolute()
    beside = Places(output, output.with_name(output.name + ".work"), inside=False)
    inside = Places(output, output / INSIDE, inside=True)
    for begun in (inside, beside):
        if begun.plan.exists():
            return begun
    if inside.root.is_dir():
        return inside
    if output.is_symlink() and output.is_dir():
        return inside
    if output.is_dir() and (adopt or machine.is_mount_point(output) or not os.access(output.parent, os.W_OK)):
        return inside
    return beside


class WorkDir:
    """The work directory, locked by this process. Use as a context manager.

    may_replace: whether the user allowed what lies at the output to be replaced.
    Raises OutputError when another process works on this output, or the folder is not ours.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.may_replace = False
        self._lock = lock.acquire(places.root, places.output)
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
        self._lock.release()

    def save_plan(self, document: dict[str, Any]) -> None:
        """Write plan.json, whole and durable."""
        partial = self.places.partial / "plan.json"
        publish.write_file(partial, encode(document))
        publish.publish(partial, self.places.plan)

    def record(self, unit: Unit[Any], result: Result, seconds: float) -> None:
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

    def forget(self, unit: Unit[Any]) -> None:
        """Let a finished unit be made again."""
        self.journal.append({"event": "forgotten", "fingerprint": unit.fingerprint}, sync=True)
        self.finished.pop(unit.fingerprint, None)
        for name in (unit.stored_name, unit.side_name):
            publish.remove_tree(self.places.store / name)

    def drop(self) -> None:
        """Let everything be made again: it was begun with other options or another input."""
        self.journal.append({"event": "dropped"}, sync=True)
        self.finished.clear()
        for folder in (self.places.store, self.places.assembly):
            publish.remove_tree(folder)
        self.places.store.mkdir()

    def remove(self) -> None:
        """The output is complete: nothing here is needed any more. The plan goes first, the lock last."""
        for name in ("plan.json", *sorted(lock.OURS - {"plan.json"})):
            publish.remove_tree(self.places.root / name)
        self._lock.remove()
        # Another process may wait for the lock; NFS keeps open files until they are closed.
        with contextlib.suppress(OSError):
            self.places.root.rmdir()


def records(work: WorkDir, units: Iterable[Unit[Any]]) -> dict[Unit[Any], dict[str, Any]]:
    """The journal's record of every unit that is a part of the output, all of which are done."""
    return {unit: work.finished[unit.fingerprint] for unit in units if unit.kept}


def done_reason(places: Places, finished: dict[str, dict[str, Any]], unit: Unit[Any]) -> str | None:
    """Why a unit counts as finished: recorded, and each file lies in the store with the recorded size, or already in
    place; a side file, always in the store.

    A name in the store says what the content is; a final name does not, so a file that lies only there has to have the
    hash."""
    record = finished.get(unit.fingerprint)
    if record is None or (unit.side and not (places.store / unit.side_name).exists()):
        return None
    stored = places.store / unit.stored_name
    reason = "finished before"
    for path, nbytes, sha256 in record["files"]:
        if has_size(stored / path, nbytes):
            continue
        reason = "finished, in place"
        if not any(_is(folder / unit.final / path, nbytes, sha256) for folder in places.finals):
            return None
    return reason


def has_size(path: Path, nbytes: int) -> bool:
    """Whether a file is there and has this size."""
    try:
        return path.stat().st_size == nbytes
    except (OSError, ValueError):  # a damaged record may name what no file can be called
        return False


def _is(path: Path, nbytes: int, sha256: str) -> bool:
    return has_size(path, nbytes) and _hash(path, path.stat().st_mtime_ns) == sha256


@functools.cache
def _hash(path: Path, _mtime_ns: int) -> str:
    return publish.sha256_file(path)


def encode(document: dict[str, Any]) -> bytes:
    """A JSON document as we store it."""
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
