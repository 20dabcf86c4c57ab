"""The work directory beside an output: lock, plan, journal, partial files, the store of finished units (RESUME.md)."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ktconvert.layouts.files import publish
from ktconvert.pipeline.engine import attempts, lock
from ktconvert.pipeline.engine import journal as journals
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.paths import Paths, has_content, has_size
from ktconvert.pipeline.engine.units import Result, Unit, Written


class WorkDir:
    """The work directory, locked by this process. Use as a context manager.

    may_replace: whether the user allowed what lies at the output to be replaced.
    Raises OutputError when another process works on this output, or the folder is not ours.
    """

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.may_replace = False
        self._lock = lock.acquire(paths.root, paths.output)
        for folder in (paths.partial, paths.attempts, paths.store):
            folder.mkdir(exist_ok=True)
        gone = attempts.sweep(paths)
        self.journal = journals.Journal(paths.journal)
        self._note_attempts(gone)
        self.finished = journals.finished(self.journal.records)

    def __enter__(self) -> WorkDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()
        self._lock.release()

    def _note_attempts(self, gone: Iterable[Attempt]) -> None:
        """Let the journal have what became of attempts after the last process that worked here had died."""
        noted = {(record.get("event"), record.get("attempt")) for record in self.journal.records}
        for attempt in attempts.read(self.paths):
            if ("start", attempt.name) not in noted:
                self.journal.append(attempts.note("start", attempt))
        for attempt in gone:
            end = "lost" if attempt.failure is None else "failed"
            for event in ("start", end):
                if not {(event, attempt.name), ("lost", attempt.name)} & noted:
                    self.journal.append(attempts.note(event, attempt))

    def save_plan(self, document: dict[str, Any]) -> None:
        """Write plan.json, whole and durable."""
        partial = self.paths.partial / "plan.json"
        publish.write_file(partial, encode(document))
        publish.publish(partial, self.paths.plan)

    def new_token(self) -> str:
        """A name for this run, where workers find it."""
        name = secrets.token_hex(8)
        partial = self.paths.partial / "token"
        publish.write_file(partial, name.encode())
        publish.publish(partial, self.paths.token)
        return name

    def record(
        self, unit: Unit[Any], result: Result, seconds: float, beside: Iterable[Written] = (), **who: Any
    ) -> None:
        """Make a published unit count.

        beside  what it has in the store for other units of its chain
        who     `host` and `pid` of the process that made it
        """
        entry = {
            "event": "done",
            "unit": unit.name,
            "fingerprint": unit.fingerprint,
            "files": [[w.path, w.nbytes, w.sha256] for w in result.files],
            "beside": [[w.path, w.nbytes, w.sha256] for w in beside],
            "tensors": result.tensors,
            "seconds": round(seconds, 3),
            "stats": result.stats,
            "at": round(time.time(), 3),
            **who,
        }
        self.journal.append(entry, sync=True)
        self.finished[unit.fingerprint] = entry

    def forget(self, unit: Unit[Any]) -> None:
        """Let a finished unit be made again."""
        self.journal.append({"event": "forgotten", "fingerprint": unit.fingerprint}, sync=True)
        self.finished.pop(unit.fingerprint, None)
        for attempt in attempts.read(self.paths, unit):
            attempts.forget(self.paths, attempt)
        for name in (unit.stored_name, unit.side_name):
            publish.remove_tree(self.paths.store / name)

    def drop(self) -> None:
        """Let everything be made again: it was begun with other options or another input."""
        self.journal.append({"event": "dropped"}, sync=True)
        self.finished.clear()
        for attempt in attempts.read(self.paths):
            if attempt.ended is not None:
                attempts.forget(self.paths, attempt)
        for folder in (self.paths.store, self.paths.assembly):
            publish.remove_tree(folder)
        self.paths.store.mkdir()

    def remove(self) -> None:
        """The output is complete: nothing here is needed any more. The plan goes first, the lock last."""
        publish.remove_tree(self.paths.plan)
        for path in (self.paths.attempts, self.paths.partial):
            publish.remove_tree(self.paths.old)
            if path.is_dir():  # a worker that was taken for dead may write there: under another name nobody can
                path.rename(self.paths.old)
        for name in sorted(lock.OURS):
            publish.remove_tree(self.paths.root / name)
        self._lock.remove()
        # Another process may wait for the lock; NFS keeps open files until they are closed.
        with contextlib.suppress(OSError):
            self.paths.root.rmdir()


def records(work: WorkDir, units: Iterable[Unit[Any]]) -> dict[Unit[Any], dict[str, Any]]:
    """The journal's record of every unit that is a part of the output, all of which are done."""
    return {unit: work.finished[unit.fingerprint] for unit in units if unit.kept}


def done_reason(paths: Paths, finished: dict[str, dict[str, Any]], unit: Unit[Any]) -> str | None:
    """Why a unit counts as finished: recorded, and each file lies in the store with the recorded size, or already in
    place; a side file, always in the store.

    A name in the store says what the content is; a final name does not, so a file that lies only there has to have the
    hash."""
    record = finished.get(unit.fingerprint)
    if record is None:
        return None
    beside = {name: nbytes for name, nbytes, _ in record["beside"]}
    if unit.side and not has_size(paths.store / unit.side_name, beside.get(unit.side_name, -1)):
        return None
    stored = paths.store / unit.stored_name
    reason = "finished before"
    for path, nbytes, sha256 in record["files"]:
        if has_size(stored / path, nbytes):
            continue
        reason = "finished, in place"
        placed = (folder / unit.final / path for folder in paths.finals)
        if not any(has_size(file, nbytes) and _is(file, nbytes, sha256, file.stat().st_mtime_ns) for file in placed):
            return None
    return reason


@functools.cache
def _is(path: Path, nbytes: int, sha256: str, _mtime_ns: int) -> bool:
    return has_content(path, nbytes, sha256)


def encode(document: dict[str, Any]) -> bytes:
    """A JSON document as we store it."""
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
