"""The work directory beside an output: lock, plan, journal, partial files, the store of finished units (resume.md)."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.files import documents, publish
from ktconvert.pipeline.engine import attempts, lock
from ktconvert.pipeline.engine import journal as journals
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.journal import Done, Dropped, Forgotten, Lost, OfUnit, Start
from ktconvert.pipeline.engine.paths import Paths, has_content, has_size
from ktconvert.pipeline.engine.plan import SavedPlan
from ktconvert.pipeline.engine.units import Made, Unit


class WorkDir:
    """The work directory, locked by this process, to be used as a context manager; OutputError where another process
    has it, or it is not ours. may_replace: whether what lies at the output may be replaced.
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
        noted = {(type(record), record.attempt) for record in self.journal.records if isinstance(record, OfUnit)}
        for attempt in attempts.read(self.paths):
            if (Start, attempt.name) not in noted:
                self.journal.append(attempt.started())
        for attempt in gone:
            end = attempt.lost() if attempt.failure is None else attempt.failed()
            for record in (attempt.started(), end):
                if not {(type(record), attempt.name), (Lost, attempt.name)} & noted:
                    self.journal.append(record)

    def done_reason(self, unit: Unit[Any]) -> str | None:
        return done_reason(self.paths, self.finished, unit)

    def new_token(self) -> str:
        name = secrets.token_hex(8)
        partial = self.paths.partial / "token"
        publish.write_file(partial, name.encode())
        publish.publish(partial, self.paths.token)
        return name

    def record(self, unit: Unit[Any], made: Made) -> None:
        record = Done(
            unit=unit.name,
            fingerprint=unit.fingerprint,
            result=made.result,
            for_chain=made.for_chain,
            seconds=round(made.seconds, 3),
            **made.who,
        )
        self.journal.append(record, sync=True)
        self.finished[unit.fingerprint] = record

    def forget(self, unit: Unit[Any]) -> None:
        self.journal.append(Forgotten(fingerprint=unit.fingerprint), sync=True)
        self.finished.pop(unit.fingerprint, None)
        for attempt in attempts.read(self.paths, unit):
            attempts.forget(self.paths, attempt)
        for name in (unit.stored_name, unit.side_name):
            publish.remove_tree(self.paths.store / name)

    def drop(self) -> None:
        """Let everything be made again."""
        self.journal.append(Dropped(), sync=True)
        self.finished.clear()
        for attempt in attempts.read(self.paths):
            if attempt.ended is not None:
                attempts.forget(self.paths, attempt)
        for folder in (self.paths.store, self.paths.assembly):
            publish.remove_tree(folder)
        self.paths.store.mkdir()

    def remove(self) -> None:
        remove(self.paths, self._lock)


def save_plan(paths: Paths, document: SavedPlan) -> None:
    """Let plan.json appear, or another one in its place."""
    partial = paths.partial / "plan.json"
    publish.write_file(partial, documents.indented(document))
    publish.publish(partial, paths.plan)


def remove(paths: Paths, held: lock.Lock) -> None:
    """The output is complete: nothing here is needed any more. The plan goes first, the lock last."""
    publish.remove_tree(paths.plan)
    for path in (paths.attempts, paths.partial):
        publish.remove_tree(paths.old)
        if path.is_dir():  # a worker that was taken for dead may write there: under another name nobody can
            path.rename(paths.old)
    for name in sorted(lock.OURS):
        publish.remove_tree(paths.root / name)
    held.remove()
    # Another process may wait for the lock; NFS keeps open files until they are closed.
    with contextlib.suppress(OSError):
        paths.root.rmdir()


def done_reason(paths: Paths, finished: Mapping[str, Done], unit: Unit[Any]) -> str | None:
    """Why a unit counts as finished: recorded, with its files in the store, or elsewhere with the recorded hash."""
    if (record := finished.get(unit.fingerprint)) is None:
        return None
    sizes = {w.path: w.nbytes for w in record.for_chain}
    if unit.side and not has_size(paths.store / unit.side_name, sizes.get(unit.side_name, -1)):
        return None
    stored = paths.store / unit.stored_name
    reason = "finished before"
    for w in record.result.files:
        if has_size(stored / w.path, w.nbytes):
            continue
        reason = "finished, in place"
        placed = [folder / unit.final / w.path for folder in paths.finals]
        there = (path for path in placed if has_size(path, w.nbytes))
        if not any(_is(path, w.nbytes, w.sha256, path.stat().st_mtime_ns) for path in there):
            return None
    return reason


@functools.cache
def _is(path: Path, nbytes: int, sha256: str, _mtime_ns: int) -> bool:
    return has_content(path, nbytes, sha256)
