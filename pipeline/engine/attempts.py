"""Attempts to make a unit away from the coordinator: each has a file of its own in partial/, and a record in attempts/
that is whole at any time and can be read by whoever sees the work directory.

Every engine runs a unit at least once, and two attempts may be made at the same time, on different hosts: they give the
same bytes under different names, and nobody removes one whose process may still live.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from ktconvert.layouts.files import documents, publish
from ktconvert.layouts.files.documents import NUMBER
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import lockfile
from ktconvert.pipeline.engine.journal import FILE, STATS
from ktconvert.pipeline.engine.lockfile import Holder
from ktconvert.pipeline.engine.paths import File, Paths, has_size
from ktconvert.pipeline.engine.units import Result, Unit, Written

ENDING = ".json"
RESULT = {"files": [FILE], "tensors": NUMBER, "stats": STATS}
RECORD = {
    "name": str,
    "unit": str,
    "fingerprint": str,
    "run": str,
    "host": str,
    "pid": int,
    "process": str,
    "began": (float, int),
    "ended": (float, int, None),
    "result": (RESULT, None),
    "failure": (str, None),
    "oom_kills": (NUMBER, None),
    "warnings": [str],
}
LATEST = 1 << 40  # seconds since the epoch


@dataclass(frozen=True)
class Attempt:
    """One attempt: who makes which unit, since when, and what came of it.

    name       of its file in partial/; no other attempt has it
    process    whose it is, as locks name it (lockfile.Holder)
    run        the coordinator's run (WorkDir.new_token), or a part's: deaths are counted within one
    began      seconds since the epoch; ended: None while it lasts, and where its process died
    result     what a Result says, once the file is whole and durable
    failure    the sentence with which it failed
    oom_kills  the kernel's count when it began (machine.oom_kills)
    warnings   what the user should read, in sentences
    """

    name: str
    unit: str
    fingerprint: str
    run: str
    host: str
    pid: int
    process: str
    began: float
    ended: float | None = None
    result: dict[str, Any] | None = None
    failure: str | None = None
    oom_kills: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def worker(self) -> str:
        """Who makes it, for people."""
        return f"{self.host}, process {self.pid}"

    def is_dead(self) -> bool:
        """Whether its process is certainly gone; of another host nobody knows."""
        return lockfile.lives(self.process.encode()) is False

    def written(self) -> Result:
        """What a finished attempt made."""
        assert self.result is not None
        files = tuple(Written(path, nbytes, sha256) for path, nbytes, sha256 in self.result["files"])
        return Result(files, self.result["tensors"], self.result["stats"])

    def is_whole(self, paths: Paths) -> bool:
        """Whether it is finished, and its files lie in partial/ with the recorded sizes."""
        if self.result is None or not self.result["files"]:
            return False
        return all(
            _is_below(inner) and has_size(paths.partial / self.name / inner, nbytes)
            for inner, nbytes, _ in self.result["files"]
        )

    def recorded_files(self, paths: Paths) -> list[File]:
        """The files of a finished attempt."""
        return [(paths.partial / self.name / file.path, file.nbytes, file.sha256) for file in self.written().files]


def _is_below(inner: str) -> bool:
    path = PurePath(inner)
    return not path.is_absolute() and ".." not in path.parts


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
        host=own.host,
        pid=own.pid,
        process=own.line.decode(),
        began=round(time.time(), 3),
        oom_kills=machine.oom_kills(),
    )
    _save(paths, attempt)
    return attempt


def finish(paths: Paths, attempt: Attempt, result: Result, warnings: Sequence[str]) -> Attempt:
    """Say that its file is whole; durable on return."""
    files = [[w.path, w.nbytes, w.sha256] for w in result.files]
    told = {"files": files, "tensors": result.tensors, "stats": result.stats}
    ended = replace(attempt, ended=round(time.time(), 3), result=told, warnings=tuple(warnings))
    _save(paths, ended)
    return ended


def fail(paths: Paths, attempt: Attempt, why: str) -> Attempt:
    """Remove what it wrote, and say why it ended."""
    publish.remove_tree(paths.partial / attempt.name)
    ended = replace(attempt, ended=round(time.time(), 3), failure=why)
    _save(paths, ended)
    return ended


def _save(paths: Paths, attempt: Attempt) -> None:
    path = paths.attempts / (attempt.name + ENDING)
    aside = path.with_name(f".{path.name}")
    publish.write_file(aside, (json.dumps(asdict(attempt), sort_keys=True) + "\n").encode())
    publish.publish(aside, path)


def read(paths: Paths, unit: Unit[Any] | None = None, known: Collection[str] = ()) -> list[Attempt]:
    """The attempts that are on record, of one unit or of all, the oldest first; records that cannot be understood do
    not count.

    known  names of those that are not to be read: a record of loose files is long
    """
    prefix = "" if unit is None else f"{unit.stored_name}."
    return sorted(_read(paths, prefix, known), key=lambda a: (a.began, a.name))


def _read(paths: Paths, prefix: str, known: Collection[str]) -> Iterator[Attempt]:
    if not paths.attempts.is_dir():
        return
    for path in paths.attempts.iterdir():
        if path.name.startswith(".") or not (path.name.startswith(prefix) and path.name.endswith(ENDING)):
            continue
        if path.name.removesuffix(ENDING) in known:
            continue
        try:
            record = documents.parse(path.read_bytes())
            documents.require_plain(record)
        except (OSError, ValueError):
            continue
        if (
            documents.mismatch(record, RECORD) is None
            and record["name"] + ENDING == path.name
            and all(0 <= (record[key] or 0) < LATEST for key in ("began", "ended"))
        ):
            yield Attempt(**{key: record[key] for key in RECORD} | {"warnings": tuple(record["warnings"])})


def note(event: str, attempt: Attempt) -> dict[str, Any]:
    """The journal's record of what has become of an attempt: `start`, `failed` or `lost` (noticed now)."""
    at = {"start": attempt.began, "failed": attempt.ended}.get(event) or round(time.time(), 3)
    about = {"unit": attempt.unit, "host": attempt.host, "pid": attempt.pid, "attempt": attempt.name}
    return {"event": event, "at": at, **about, **({} if attempt.failure is None else {"why": attempt.failure})}


def forget(paths: Paths, attempt: Attempt) -> None:
    """Remove an attempt that has ended, with what is left of it."""
    publish.remove_tree(paths.partial / attempt.name)
    publish.remove_tree(paths.attempts / (attempt.name + ENDING))


def free(paths: Paths) -> None:
    """Remove the files of unfinished attempts of this host whose process is gone. Their records stay, since they count
    as deaths.
    """
    for attempt in read(paths):
        if attempt.ended is None and attempt.is_dead():
            with contextlib.suppress(FileNotFoundError):  # another process does the same
                publish.remove_tree(paths.partial / attempt.name)


def sweep(paths: Paths) -> list[Attempt]:
    """Remove what is of no use to anyone, in partial/ and attempts/; returns the attempts that were removed: failed,
    or their process is gone.
    """
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


# --- last words -----------------------------------------------------------------------------------

_speaking = threading.Lock()


@contextlib.contextmanager
def last_words(paths: Paths, attempt: Attempt) -> Iterator[None]:
    """Where a fatal signal ends the process within, Python's trace is left beside the record; else nothing is.

    One attempt of a process at a time: Python has one place for it.
    """
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
    if attempt.host == machine.host() and kills and attempt.oom_kills is not None and kills > attempt.oom_kills:
        return "the kernel has killed for memory since: give each worker fewer threads or more memory"
    return "it left no word, as a process that the system kills (SIGKILL, no memory left) does not"


def _words(paths: Paths, attempt: Attempt) -> Path:
    return paths.attempts / f".{attempt.name}.words"
