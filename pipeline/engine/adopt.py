"""What earlier runs and other processes have finished is hashed before a run builds on it, or made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from ktconvert.native_quant.own_cpus import use_own_cpus
from ktconvert.pipeline.engine import attempts
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.loop import publish_unit
from ktconvert.pipeline.engine.paths import File, has_content
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.tasks import made_of
from ktconvert.pipeline.engine.units import Unit
from ktconvert.pipeline.engine.workdir import WorkDir, done_reason
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.ui.text import size


def adopt(plan: Plan, work: WorkDir, reporter: Reporter, *, trusted: bool = False) -> None:
    """Let what was finished count: units in the store, and attempts that workers finished after the last coordinator
    had died, which are published and recorded. Every byte is hashed before.

    trusted  files of the recorded sizes count as they are
    """
    made = _made_elsewhere(plan, work)
    found = [] if trusted else [*_stored(plan, work), *(_attempted(work, attempt) for attempt, _ in made)]
    _discard_damaged(found, plan.request.options.execution.threads, reporter)
    for attempt, unit in made:
        if attempt.is_whole(work.paths) and done_reason(work.paths, work.finished, unit) is None:
            publish_unit(plan, work, reporter, unit, made_of(work.paths, attempt))


@dataclass(frozen=True)
class _Found:
    """Files of a unit that are about to count; discard: how to have it made again."""

    unit: str
    files: Sequence[File]
    discard: Callable[[], None]


def _discard_damaged(found: Sequence[_Found], threads: int, reporter: Reporter) -> None:
    """Hash all files, several at a time, and discard what has one that is not as it was written."""
    files = [(one, file) for one in found for file in one.files]
    if not files:
        return
    total = sum(nbytes for _, (_, nbytes, _) in files)
    reporter.say(f"hashing what was finished before: {len(found)} units, {size(total)}")

    def is_as_written(file: File) -> bool:
        good = has_content(*file)
        reporter.hashed(file[1])
        return good

    with ThreadPoolExecutor(threads, "hash", use_own_cpus) as pool:
        good = list(pool.map(is_as_written, [file for _, file in files]))
    damaged = {
        id(one): (one, path) for (one, (path, *_)), as_written in zip(files, good, strict=True) if not as_written
    }
    for one, path in damaged.values():
        reporter.warn(f"{one.unit} is made again: {path} is not what was written there (its SHA-256); check the disk.")
        one.discard()


def _stored(plan: Plan, work: WorkDir) -> list[_Found]:
    """What the journal has of this plan, as far as it lies in the store."""
    store, found = work.paths.store, []
    for unit in plan.units:
        record = work.finished.get(unit.fingerprint)
        if record is None:
            continue
        files = [(store / unit.stored_name / w.path, w.nbytes, w.sha256) for w in record.result.files]
        for w in record.for_chain:
            file = (store / w.path, w.nbytes, w.sha256)
            if w.path == unit.handed_on_name:  # without it the unit stays, and the chain starts again before it
                found.append(_Found(unit.name, _present([file]), file[0].unlink))
            elif w.path == unit.side_name:
                files.append(file)
        found.append(_Found(unit.name, _present(files), partial(work.forget, unit)))
    return found


def _present(files: Sequence[File]) -> list[File]:
    """Those that there are: what was assembled without hard links lies elsewhere (done_reason)."""
    return [file for file in files if file[0].exists()]


def _made_elsewhere(plan: Plan, work: WorkDir) -> list[tuple[Attempt, Unit[Any]]]:
    """Finished attempts at units of this plan that are not done."""
    units = {unit.fingerprint: unit for unit in plan.units if done_reason(work.paths, work.finished, unit) is None}
    return [
        (attempt, units[attempt.fingerprint])
        for attempt in attempts.read(work.paths)
        if attempt.fingerprint in units and attempt.is_whole(work.paths)
    ]


def _attempted(work: WorkDir, attempt: Attempt) -> _Found:
    def discard() -> None:
        attempts.forget(work.paths, attempt)
        work.journal.append(attempts.lost(attempt))

    return _Found(attempt.unit, attempt.recorded_files(work.paths), discard)
