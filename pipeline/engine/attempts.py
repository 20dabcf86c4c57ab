"""Attempts to make a unit away from the coordinator (resume.md): each has a file of its own in partial/, and a record
in attempts/ that is whole at any time. Two may be made at the same time: they give the same bytes under different
names, and nobody removes one whose process may still live.
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
from ktconvert.pipeline.engine.journal import Failed, Lost, Start, now
from ktconvert.pipeline.engine.lock import Holder
from ktconvert.pipeline.engine.paths import File, Paths, has_size
from ktconvert.pipeline.engine.units import Result, Unit

ENDING = ".json"


class Attempt(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One attempt: who makes which unit, since when, and what came of it.

    name       of its file in partial/; no other attempt has it
    run        the coordinator's run (WorkDir.new_token), or a part's: deaths are counted within one
    ended      None while it lasts, and where its process died; result: once the file is whole and durable
    failure    the sentence with which it failed; warnings: what the user should read, in sentences
    oom_kills  the kernel's count when it began (machine.oom_kills)
    portion    of a unit that is no unit of the plan (Unit)
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
    def who(self) -> dict[str, Any]:
        return {"host": self.process.host, "pid": self.process.pid, "attempt": self.name}

    def started(self) -> Start:
        return Start(at=self.began, unit=self.unit, **self.who)

    def failed(self) -> Failed:
        return Failed(at=self.ended or now(), unit=self.unit, why=str(self.failure), **self.who)

    def lost(self) -> Lost:
        """That it is of no use any more, noticed now."""
        return Lost(unit=self.unit, **self.who)

    def is_dead(self) -> bool:
        return self.process.lives() is False

    def written(self) -> Result:
        assert self.result is not None
        return self.result

    def is_whole(self, paths: Paths) -> bool:
        """Whether it is finished, and its files lie in partial/ with the recorded sizes."""
        if self.result is None or not self.result.files:
            return False
        inner = [PurePath(w.path) for w in self.result.files]
        below = not any(path.is_absolute() or ".." in path.parts for path in inner)
        return below and all(has_size(path, nbytes) for path, nbytes, _ in self.recorded_files(paths))

    def recorded_files(self, paths: Paths) -> list[File]:
        return [(paths.partial / self.name / file.path, file.nbytes, file.sha256) for file in self.written().files]


def begin(paths: Paths, unit: Unit[Any], run: str) -> Attempt:
    """Put a record of a new attempt of this process where others see it."""
    own = Holder.this()
    # The same process has the same number and host again where a container was restarted.
    who = f"{re.sub('[^A-Za-z0-9-]', '-', own.host)}.{own.pid}.{secrets.token_hex(4)}"
    attempt = Attempt(
        name=f"{unit.stored_name}.{who}",
        unit=unit.name,
        fingerprint=unit.fingerprint,
        run=run,
        process=own,
        began=now(),
        oom_kills=machine.oom_kills(),
        portion=unit.portion is not None,
    )
    return _save(paths, attempt)


def finish(paths: Paths, attempt: Attempt, result: Result, warnings: Sequence[str]) -> Attempt:
    """Say that its file is whole; durable on return."""
    return _save(paths, replace(attempt, ended=now(), result=result, warnings=tuple(warnings)))


def fail(paths: Paths, attempt: Attempt, why: str) -> Attempt:
    """Remove what it wrote, and say why it ended."""
    publish.remove_tree(paths.partial / attempt.name)
    return _save(paths, replace(attempt, ended=now(), failure=why))


def _save(paths: Paths, attempt: Attempt) -> Attempt:
    path = paths.attempts / (attempt.name + ENDING)
    aside = path.with_name(f".{path.name}")
    publish.write_file(aside, documents.one_line(attempt))
    publish.publish(aside, path)
    return attempt


def read(paths: Paths, unit: Unit[Any] | None = None, known: Collection[str] = ()) -> list[Attempt]:
    """The attempts on record, of one unit or of all, the oldest first; what cannot be understood does not count. known:
    names of those that are not to be read, since a record of loose files is long.
    """
    prefix = "" if unit is None else f"{unit.stored_name}."
    found = []
    for path in paths.attempts.iterdir() if paths.attempts.is_dir() else ():
        name = path.name.removesuffix(ENDING)
        if path.name == name or name in known or path.name.startswith(".") or not name.startswith(prefix):
            continue
        with contextlib.suppress(OSError, ValueError):
            attempt = documents.read(path.read_bytes(), Attempt)
            found += [attempt] if attempt.name == name else []
    return sorted(found, key=lambda a: (a.began, a.name))


def forget(paths: Paths, attempt: Attempt) -> None:
    publish.remove_tree(paths.partial / attempt.name)
    publish.remove_tree(paths.attempts / (attempt.name + ENDING))


def free(paths: Paths) -> None:
    """Remove files of unfinished attempts of this host whose process is gone; the records count as deaths."""
    for attempt in read(paths):
        if attempt.ended is None and attempt.is_dead():
            with contextlib.suppress(FileNotFoundError):  # another process does the same
                publish.remove_tree(paths.partial / attempt.name)


def sweep(paths: Paths) -> list[Attempt]:
    """Remove what is of no use in partial/ and attempts/; returns the attempts that failed or died."""
    files, records = list(paths.partial.iterdir()), list(paths.attempts.iterdir())  # before their records are read
    kept, gone = [], []
    for attempt in read(paths):
        if attempt.is_whole(paths) or (attempt.ended is None and not attempt.is_dead()):
            kept.append(attempt)
        else:
            forget(paths, attempt)
            gone.append(attempt)
    names = {attempt.name for attempt in kept}
    for path in files:
        if path.name not in names:
            publish.remove_tree(path)
    for path in records:
        if path.name.removesuffix(ENDING) not in names and not path.name.startswith("."):  # written just now
            publish.remove_tree(path)
    return gone


_speaking = threading.Lock()


@contextlib.contextmanager
def last_words(paths: Paths, attempt: Attempt) -> Iterator[None]:
    """Where a fatal signal ends the process within, Python's trace is left beside the record, for one at a time."""
    if faulthandler.is_enabled() or not _speaking.acquire(blocking=False):
        yield
        return
    path = _words(paths, attempt)
    try:
        with path.open("w") as stream:
            faulthandler.enable(stream)
            try:
                yield
            finally:
                faulthandler.disable()
    finally:
        _speaking.release()
        publish.remove_tree(path)


def words_of(paths: Paths, attempt: Attempt) -> str:
    """How the process of an attempt ended, as far as it can be known: a few words."""
    kills = machine.oom_kills()
    try:
        trace = _words(paths, attempt).read_text(errors="replace").strip()
    except OSError:
        trace = ""
    if trace:
        return trace.splitlines()[0].removeprefix("Fatal Python error: ")
    if attempt.process.host == machine.host() and kills and attempt.oom_kills is not None and kills > attempt.oom_kills:
        return "the kernel has killed for memory since: give each worker fewer threads or more memory"
    return "it left no word, as a process that the system kills (SIGKILL, no memory left) does not"


def _words(paths: Paths, attempt: Attempt) -> Path:
    return paths.attempts / f".{attempt.name}.words"
