"""The work directory of a conversion: lock, plan, journal, partial files, store of finished units (resume.md)."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import KTConvertError
from ktconvert.layouts.files import documents, publish
from ktconvert.pipeline.engine import attempts, lock
from ktconvert.pipeline.engine import journal as journals
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.journal import Done, Dropped, Forgotten, Lost, Start, UnitEvent
from ktconvert.pipeline.engine.paths import Paths, has_content, has_size
from ktconvert.pipeline.engine.plan import SavedPlan
from ktconvert.pipeline.engine.units import FinishedUnit, Unit


class WorkDir:
    """A work directory that this process has locked; a context manager.

    finished     the journal's records of finished units, by fingerprint
    may_replace  whether an existing output may be replaced

    Raises OutputError if another process works in it, or if it is not ours.
    """

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.may_replace = False
        self._lock = lock.acquire(paths.root, paths.output)
        for folder in (paths.partial, paths.attempts, paths.store):
            folder.mkdir(exist_ok=True)
        removed = attempts.remove_useless_files(paths)
        self.journal = journals.Journal(paths.journal)
        self._note_attempts(removed)
        self.finished = journals.find_finished_units(self.journal.records)

    def __enter__(self) -> WorkDir:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Release the directory. Remove it after an error before the first finished unit."""
        if error_type is not None and issubclass(error_type, KTConvertError | OSError) and self._is_unused():
            with contextlib.suppress(OSError):  # would hide the error
                self.remove()
        self.journal.close()
        self._lock.release()

    def _is_unused(self) -> bool:
        """Return whether it exists and contains no unit and no attempt, which a worker may still make."""
        attempts_folder = self.paths.attempts
        return attempts_folder.is_dir() and not any(attempts_folder.iterdir()) and has_no_units(self.paths)

    def _note_attempts(self, removed: Iterable[Attempt]) -> None:
        """Add records of attempts that ended after the last coordinator had died."""
        noted = {(type(record), record.attempt) for record in self.journal.records if isinstance(record, UnitEvent)}
        for attempt in attempts.read_attempts(self.paths):
            if (Start, attempt.name) not in noted:
                self.journal.append(attempt.start_record())
        for attempt in removed:
            end = attempt.loss_record() if attempt.failure is None else attempt.failure_record()
            for record in (attempt.start_record(), end):
                if not {(type(record), attempt.name), (Lost, attempt.name)} & noted:
                    self.journal.append(record)

    def why_finished(self, unit: Unit[Any]) -> str | None:
        return why_finished(self.paths, self.finished, unit)

    def new_token(self) -> str:
        """Write a new token, by which workers recognize this folder, and return it."""
        token = secrets.token_hex(8)
        partial = self.paths.partial / "token"
        publish.write_file(partial, token.encode())
        publish.publish_path(partial, self.paths.token)
        return token

    def record_finished(self, unit: Unit[Any], finished: FinishedUnit) -> None:
        """Add a finished unit to the journal; durable on return."""
        record = Done(
            unit=unit.name,
            fingerprint=unit.fingerprint,
            result=finished.result,
            chain_files=finished.chain_files,
            seconds=round(finished.seconds, 3),
            **finished.worker,
        )
        self.journal.append(record, sync=True)
        self.finished[unit.fingerprint] = record

    def forget_unit(self, unit: Unit[Any]) -> None:
        """Remove a unit's files and record that it has to be made again."""
        self.journal.append(Forgotten(fingerprint=unit.fingerprint), sync=True)
        self.finished.pop(unit.fingerprint, None)
        for attempt in attempts.read_attempts(self.paths, unit):
            attempts.remove_attempt(self.paths, attempt)
        for name in (unit.stored_name, unit.side_name):
            publish.remove_tree(self.paths.store / name)

    def drop_all_units(self) -> None:
        """Remove the files of all units and record that they have to be made again."""
        self.journal.append(Dropped(), sync=True)
        self.finished.clear()
        for attempt in attempts.read_attempts(self.paths):
            if attempt.ended is not None:
                attempts.remove_attempt(self.paths, attempt)
        for folder in (self.paths.store, self.paths.assembly):
            publish.remove_tree(folder)
        self.paths.store.mkdir()

    def remove(self) -> None:
        remove_locked_folder(self.paths, self._lock)


def save_plan(paths: Paths, document: SavedPlan) -> None:
    """Write plan.json in one step, also in place of an old one."""
    partial = paths.partial / "plan.json"
    publish.write_file(partial, documents.encode_indented(document))
    publish.publish_path(partial, paths.plan)


def remove_locked_folder(paths: Paths, folder_lock: lock.Lock) -> None:
    """Remove the work directory of a complete output: the plan first, the lock last."""
    publish.remove_tree(paths.plan)
    for path in (paths.attempts, paths.partial):
        publish.remove_tree(paths.old)
        with contextlib.suppress(OSError):  # a worker that seemed dead may still write to it
            path.rename(paths.old)
    for name in sorted(lock.WORK_NAMES):
        publish.remove_tree(paths.root / name)
    folder_lock.remove()
    # Another process may be waiting for the lock, and NFS keeps open files.
    with contextlib.suppress(OSError):
        paths.root.rmdir()


def has_no_units(paths: Paths) -> bool:
    """Return whether no unit was finished yet, by this process or a job share, so that the saved plan does not count.

    A unit in the store counts without its record, since a kill may have come between the two.
    """
    return (
        not journals.find_finished_units(journals.read_records(paths.journal))
        and not any(attempt.is_whole(paths) for attempt in attempts.read_attempts(paths))
        and not (paths.store.is_dir() and any(paths.store.iterdir()))
    )


def why_finished(paths: Paths, finished: Mapping[str, Done], unit: Unit[Any]) -> str | None:
    """Return why a unit counts as finished, or None.

    It does if the journal records it and its files are in the store, or at their final places with the recorded hash.
    """
    if (record := finished.get(unit.fingerprint)) is None:
        return None
    sizes = {file.path: file.nbytes for file in record.chain_files}
    if unit.side_bytes and not has_size(paths.store / unit.side_name, sizes.get(unit.side_name, -1)):
        return None
    stored = paths.store / unit.stored_name
    reason = "finished before"
    for file in record.result.files:
        if has_size(stored / file.path, file.nbytes):
            continue
        reason = "finished, in the output"
        final_paths = [folder / unit.final / file.path for folder in paths.finals]
        present = (path for path in final_paths if has_size(path, file.nbytes))
        if not any(_has_content(path, file.nbytes, file.sha256, path.stat().st_mtime_ns) for path in present):
            return None
    return reason


@functools.cache
def _has_content(path: Path, nbytes: int, sha256: str, _mtime_ns: int) -> bool:
    return has_content(path, nbytes, sha256)
