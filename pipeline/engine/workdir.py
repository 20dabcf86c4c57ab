"""The work directory beside an output: lock, plan, journal, partial files, the store of finished units (RESUME.md)."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import OutputError
from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import journal as journals
from ktconvert.pipeline.engine.units import Result, Unit

INSIDE = ".ktconvert"
OURS = {"lock", "plan.json", "journal.jsonl", "partial", "store", "out", "old"}


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
        for name in ("plan.json", *sorted(OURS - {"plan.json", "lock"}), "lock"):
            publish.remove_tree(self.places.root / name)
        # Another process may wait for the lock; NFS keeps open files until they are closed.
        with contextlib.suppress(OSError):
            self.places.root.rmdir()


def _lock(places: Places) -> int:
    """Lock the work directory and leave our pid in the lock file; the open descriptor holds it."""
    path = places.root / "lock"
    while True:
        _require_ours(places.root)
        try:
            with publish.explained(path):
                publish.make_folder(places.root)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if places.root.parent.is_dir():
                continue  # whoever held it removed the folder just now
            raise
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


def _require_ours(root: Path) -> None:
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    foreign = [name for name in names if name not in OURS and not name.startswith(".nfs")]
    if foreign or (names and "lock" not in names) or (root.exists() and not root.is_dir()):
        raise OutputError(
            f"{root}: ktconvert works in a folder of this name, and something else lies there; "
            "move it away or choose another --output."
        )


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
