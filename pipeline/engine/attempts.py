"""Attempts at units by processes other than the coordinator (resume.md).

Each attempt has a file of its own in partial/ and a record in attempts/ that is complete at any time. Two attempts at
one unit may run at the same time: they give the same bytes under different names. Files of a process that may be alive
are never removed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import secrets
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ktconvert.layouts.files import documents, publish
from ktconvert.layouts.files.documents import Number, Seconds
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine.journal import Failed, Lost, Start, timestamp
from ktconvert.pipeline.engine.lock import Holder
from ktconvert.pipeline.engine.paths import FileRecord, Paths, has_size
from ktconvert.pipeline.engine.units import Portion, Result, Unit

ENDING = ".json"


class Attempt(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One attempt at a unit or portion: its process, its time, and its result.

    name       name of its file in partial/, unique
    run        the run of a coordinator (WorkDir.new_token) or of a job share; deaths are counted within a run
    ended      None while the attempt lasts, and if its process died
    result     set once the file is complete and durable
    failure    the sentence with which it failed
    warnings   sentences for the user
    oom_kills  the kernel's count when it began (machine.oom_kills)
    portion    whether it makes a portion
    """

    name: str
    unit: str
    fingerprint: str
    run: str
    process: Holder
    began: Seconds
    ended: Seconds | None = None
    result: Result | None = None
    failure: str | None = None
    oom_kills: Number | None = None
    warnings: tuple[str, ...] = ()
    portion: bool = False

    @property
    def worker(self) -> str:
        return f"{self.process.host}, process {self.process.pid}"

    @property
    def process_fields(self) -> dict[str, Any]:
        """Fields of records and events that name the process and the attempt."""
        return {"host": self.process.host, "pid": self.process.pid, "attempt": self.name}

    def start_record(self) -> Start:
        return Start(at=self.began, unit=self.unit, **self.process_fields)

    def failure_record(self) -> Failed:
        return Failed(at=self.ended or timestamp(), unit=self.unit, why=str(self.failure), **self.process_fields)

    def loss_record(self) -> Lost:
        """Return the record that the attempt is useless from now on."""
        return Lost(unit=self.unit, **self.process_fields)

    def is_dead(self) -> bool:
        return self.process.is_alive() is False

    def require_result(self) -> Result:
        assert self.result is not None
        return self.result

    def is_whole(self, paths: Paths) -> bool:
        """Return whether it is finished, and its files are in partial/ with the recorded sizes."""
        if self.result is None or not self.result.files:
            return False
        inner_paths = [PurePath(file.path) for file in self.result.files]
        if any(path.is_absolute() or ".." in path.parts for path in inner_paths):
            return False
        return all(has_size(path, nbytes) for path, nbytes, _ in self.list_files(paths))

    def list_files(self, paths: Paths) -> list[FileRecord]:
        return [
            (paths.partial / self.name / file.path, file.nbytes, file.sha256) for file in self.require_result().files
        ]


def begin_attempt(paths: Paths, item: Unit[Any] | Portion, run: str) -> Attempt:
    """Record a new attempt of this process, so that other processes see it."""
    process = Holder.this()
    # The random part distinguishes processes of a restarted container, which may have the same host name and number.
    suffix = f"{re.sub('[^A-Za-z0-9-]', '-', process.host)}.{process.pid}.{secrets.token_hex(4)}"
    attempt = Attempt(
        name=f"{item.stored_name}.{suffix}",
        unit=item.name,
        fingerprint=item.fingerprint,
        run=run,
        process=process,
        began=timestamp(),
        oom_kills=machine.oom_kills(),
        portion=isinstance(item, Portion),
    )
    return _save_record(paths, attempt)


def record_result(paths: Paths, attempt: Attempt, result: Result, warnings: Sequence[str]) -> Attempt:
    """Record that an attempt has finished with this result; durable on return."""
    return _save_record(paths, replace(attempt, ended=timestamp(), result=result, warnings=tuple(warnings)))


def record_failure(paths: Paths, attempt: Attempt, why: str) -> Attempt:
    """Remove the file of an attempt, and record why the attempt failed."""
    publish.remove_tree(paths.partial / attempt.name)
    return _save_record(paths, replace(attempt, ended=timestamp(), failure=why))


def _save_record(paths: Paths, attempt: Attempt) -> Attempt:
    path = paths.attempts / (attempt.name + ENDING)
    temporary = path.with_name(f".{path.name}")
    publish.write_file(temporary, documents.encode_line(attempt))
    publish.publish_path(temporary, path)
    return attempt


def read_attempts(paths: Paths, item: Unit[Any] | Portion | None = None, known: Collection[str] = ()) -> list[Attempt]:
    """Return the recorded attempts at one unit or portion, or all, the oldest first; skip damaged records.

    known  names of attempts to skip, since the records of loose files are long
    """
    prefix = "" if item is None else f"{item.stored_name}."
    recorded = []
    for path in paths.attempts.iterdir() if paths.attempts.is_dir() else ():
        name = path.name.removesuffix(ENDING)
        if path.name == name or name in known or path.name.startswith(".") or not name.startswith(prefix):
            continue
        with contextlib.suppress(OSError, ValueError):
            attempt = documents.decode_document(path.read_bytes(), Attempt)
            recorded += [attempt] if attempt.name == name else []
    return sorted(recorded, key=lambda a: (a.began, a.name))


def remove_attempt(paths: Paths, attempt: Attempt) -> None:
    publish.remove_tree(paths.partial / attempt.name)
    publish.remove_tree(paths.attempts / (attempt.name + ENDING))


def remove_dead_files(paths: Paths) -> None:
    """Remove files of this host's unfinished attempts whose process died; keep the records, which count as deaths."""
    for attempt in read_attempts(paths):
        if attempt.ended is None and attempt.is_dead():
            with contextlib.suppress(FileNotFoundError):  # another process removes files, too
                publish.remove_tree(paths.partial / attempt.name)


def remove_useless_files(paths: Paths) -> list[Attempt]:
    """Remove useless files and records in partial/ and attempts/; return the attempts that failed or died."""
    # Listed before the records are read, so that files of attempts that begin now are kept.
    files = list(paths.partial.iterdir())
    records = list(paths.attempts.iterdir())
    kept_names = set()
    removed = []
    for attempt in read_attempts(paths):
        if attempt.is_whole(paths) or (attempt.ended is None and not attempt.is_dead()):
            kept_names.add(attempt.name)
        else:
            remove_attempt(paths, attempt)
            removed.append(attempt)
    for path in files:
        if path.name not in kept_names:
            publish.remove_tree(path)
    for path in records:
        if path.name.removesuffix(ENDING) not in kept_names and not path.name.startswith("."):  # written just now
            publish.remove_tree(path)
    return removed


_recording = threading.Lock()  # faulthandler has one file per process


@contextlib.contextmanager
def record_traceback(paths: Paths, attempt: Attempt) -> Iterator[None]:
    """Write a faulthandler traceback next to the attempt's record, if a fatal signal ends the process."""
    if faulthandler.is_enabled() or not _recording.acquire(blocking=False):
        yield
        return
    path = _traceback_path(paths, attempt)
    try:
        with path.open("w") as stream:
            faulthandler.enable(stream)
            try:
                yield
            finally:
                faulthandler.disable()
    finally:
        _recording.release()
        publish.remove_tree(path)


def explain_death(paths: Paths, attempt: Attempt) -> str:
    """Return in a few words how the process of an attempt died, as far as known."""
    kills = machine.oom_kills()
    try:
        trace = _traceback_path(paths, attempt).read_text(errors="replace").strip()
    except OSError:
        trace = ""
    if trace:
        return trace.splitlines()[0].removeprefix("Fatal Python error: ")
    if attempt.process.host == machine.host() and kills and attempt.oom_kills is not None and kills > attempt.oom_kills:
        return "the kernel has killed a process for memory since; give each worker fewer threads or more memory"
    return "no traceback; it was probably killed (SIGKILL, or out of memory)"


def _traceback_path(paths: Paths, attempt: Attempt) -> Path:
    return paths.attempts / f".{attempt.name}.words"
