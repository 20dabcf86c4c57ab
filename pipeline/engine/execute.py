"""From plans to their outputs: what lies there already, whether there is room, the run, the end of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from ktconvert.layouts.errors import KtconvertError
from ktconvert.native_quant import machine
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.pipeline.engine import attempts, existing, journal
from ktconvert.pipeline.engine.assemble import assemble, require_delivered, require_free
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.disk_space import fit_threads, require_disk
from ktconvert.pipeline.engine.existing import already_finished
from ktconvert.pipeline.engine.loop import Share, StopFlag, left_to_do, publish_unit, recorded, run_units
from ktconvert.pipeline.engine.paths import File, Paths, has_content
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.tasks import Tasks, made_of
from ktconvert.pipeline.engine.threads import thread_runners
from ktconvert.pipeline.engine.units import Runner
from ktconvert.pipeline.engine.workdir import WorkDir, save_plan
from ktconvert.pipeline.engine.worker import Reopen
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import duration, size


def tidy(paths: Paths) -> None:
    """Remove what is left beside a finished output: the last run was cut off after the output had appeared."""
    if paths.root.is_dir():
        with WorkDir(paths) as work:
            work.remove()


def execute(
    plans: Sequence[Plan],
    reporter: Reporter,
    *,
    overwrite: bool = False,
    trust_store: bool = False,
    executor: Executor | None = None,
    reopen: Reopen | None = None,
    threads: int | None = None,
) -> bool:
    """Do what the plans of one input say, from wherever each stands; units that read the same are made one after the
    other. Returns False when there was nothing to do. What makes one impossible is raised before anything is written.

    trust_store  files that an earlier run finished count by their sizes, and are not hashed
    executor     its workers `reopen` the plan, make units, of a chain portions of units, and pack with so many threads
                 each (None: the CPUs that they may use); None: threads of this process make them
    """
    if executor is not None:
        plans = [plan.shared_out() for plan in plans]
    finished = [_is_finished(plan, overwrite) for plan in plans]
    left = [plan for plan, done in zip(plans, finished, strict=True) if not done]
    for plan in left:
        plan.require_ready()
    if len(left) > 1:
        require_possible(left, overwrite)
        if executor is None:
            fit_threads(left)
    for plan, done in zip(plans, finished, strict=True):
        if done:
            tidy(plan.locate())
            existing.nothing_to_do(plan.request.output, reporter)
    with contextlib.ExitStack() as stack:
        works: list[tuple[Plan, WorkDir]] = []
        for plan, work in zip(left, _locked(left, stack), strict=True):
            if _is_finished(plan, overwrite):  # by a process that had the lock until now
                work.remove()
                existing.nothing_to_do(plan.request.output, reporter)
            else:
                works.append((plan, work))
        if not works:
            return False
        for plan, work in works:
            take_up(plan, work, reporter, overwrite=overwrite, trust_store=trust_store)
        require_disk(
            [(plan, work.paths, [u for u in plan.units if work.done_reason(u) is None]) for plan, work in works]
        )
        threads = fit_threads([plan for plan, _ in works], reporter) if executor is None else threads
        stop = StopFlag()
        stack.enter_context(stop.installed())
        for _, work in works:
            stack.enter_context(recorded(work))
        to_do = [left_to_do(plan, work) for plan, work in works]
        units = sum(map(len, to_do))
        runners: Sequence[Runner]
        if executor is None:
            assert threads is not None
            runners = stack.enter_context(thread_runners([work for _, work in works], reporter, threads, units))
        else:
            assert reopen is not None
            runners = tasks = [Tasks(work, reporter, executor, reopen, threads) for _, work in works]
            if any(stage.chain for plan, _ in works for stage in plan.stages):  # then there is no other output
                (work,) = (work for _, work in works)
                count = fit_threads([plan for plan, _ in works], reporter)
                (here,) = stack.enter_context(thread_runners([work], reporter, count, units, tasks[0].away))
                tasks[0].here = here
        shares = []
        for (plan, work), units_of_plan, runner in zip(works, to_do, runners, strict=True):
            keep, end = partial(publish_unit, plan, work, reporter), partial(_end, plan, work, reporter)
            shares.append(Share(plan, units_of_plan, runner, keep, end))
        run_units(shares, reporter, stop)
    return True


def require_possible(plans: Sequence[Plan], overwrite: bool) -> None:
    """Raise what would be raised once work directories are there, as far as that can be seen without them."""
    to_make = []
    for plan in plans:
        paths = plan.locate()
        states = existing.states_once_begun(plan, paths, overwrite)
        to_make.append((plan, paths, [state.unit for state in states if not state.done]))
    require_disk(to_make)


def _locked(plans: Sequence[Plan], stack: contextlib.ExitStack) -> list[WorkDir]:
    """The work directories of these plans, all or none: those that were made just now go where another is refused."""
    works: list[WorkDir] = []
    try:
        for plan in plans:
            works.append(stack.enter_context(WorkDir(plan.locate())))
    except KtconvertError:
        for work in works:
            if not work.paths.plan.exists():
                work.remove()
        raise
    return works


def take_up(plan: Plan, work: WorkDir, reporter: Reporter, *, overwrite: bool, trust_store: bool) -> None:
    """Agree with what was begun here before, and let what was finished count."""
    _adopt_plan(plan, work, reporter, overwrite)
    require_free(plan, work.finished, work.may_replace)
    if work.may_replace and journal.assembled(work.journal.records) is None:
        for replaced in existing.to_replace(plan):
            reporter.note(f"--overwrite removes {replaced}")
    adopt(plan, work, reporter, trusted=trust_store)
    _report_death(work, plan, reporter)


def _end(plan: Plan, work: WorkDir, reporter: Reporter) -> None:
    work.journal.append(journal.Start(unit="assemble"))
    assemble(plan, work)
    (done, seconds), output = reporter.rate(), plan.request.output
    out, peak = sum(unit.bytes_out for unit in plan.units if unit.kept), machine.peak_rss()
    reporter.event("finished", output=str(output), bytes=out, seconds=round(seconds, 3), peak_rss=peak)
    rate = f"{size(done / max(seconds, 1e-9))}/s read, peak RSS {size(peak)}"
    reporter.say(f"{output}: {size(out)} in {duration(seconds)} ({rate})")


def _is_finished(plan: Plan, overwrite: bool) -> bool:
    """Whether there is nothing to do. Raises OutputError where a part of the output is gone, which lay elsewhere."""
    if finished := already_finished(plan, overwrite):
        require_delivered(plan)
    return finished


def _adopt_plan(plan: Plan, work: WorkDir, reporter: Reporter, overwrite: bool) -> None:
    """Agree with what was begun here before, or begin."""
    old = existing.saved_plan(work.paths)
    afresh = existing.nothing_made(work.paths)
    dropped, touched = existing.agree(plan, old, overwrite or afresh) if old is not None else (False, [])
    if dropped:
        if not afresh:
            reporter.note("the unfinished conversion with other options or input is dropped, as --overwrite says")
        work.drop()
        old = None
    work.may_replace = overwrite or bool(old and old.overwrite)
    if touched:
        units = plan.units_reading(touched)
        for unit in units:
            work.forget(unit)
        reporter.note(f"{', '.join(touched[:3])} was modified since: {len(units)} units that read it are made again")
    if old != (document := plan.document(work.may_replace)):
        save_plan(work.paths, document)


def _report_death(work: WorkDir, plan: Plan, reporter: Reporter) -> None:
    last = journal.last_run(work.journal.records)
    done = sum(work.done_reason(unit) is not None for unit in plan.units)
    if last is None:
        if done:
            reporter.say(f"resuming: {done} of {len(plan.units)} units are finished")
        return
    run, units = last
    died = f"the last run (process {run.process.pid}) died" + (f" in {', '.join(units)}" if units else "")
    if (kills := machine.oom_kills()) and run.oom_kills is not None and kills > run.oom_kills:
        died += "; the kernel has killed for memory since then: lower --cpuinfer-threads or set --max-memory"
    reporter.note(f"{died}; {done} of {len(plan.units)} units are finished and kept")


# What earlier runs and other processes have finished is hashed before a run builds on it, or made again.
def adopt(plan: Plan, work: WorkDir, reporter: Reporter, *, trusted: bool = False) -> None:
    """Let what was finished count, after every byte of it was hashed (trusted: by its size): units in the store, and
    attempts that workers finished after the last coordinator had died, which are published and recorded.
    """
    missing = {unit.fingerprint: unit for unit in plan.units if work.done_reason(unit) is None}
    made = [a for a in attempts.read(work.paths) if a.fingerprint in missing and a.is_whole(work.paths)]

    def discard(attempt: Attempt) -> None:
        attempts.forget(work.paths, attempt)
        work.journal.append(attempt.lost())

    if not trusted:
        found = _stored(plan, work) + [(a.unit, a.recorded_files(work.paths), partial(discard, a)) for a in made]
        _discard_damaged(found, plan.request.options.execution.threads, reporter)
    for attempt in made:
        unit = missing[attempt.fingerprint]
        if attempt.is_whole(work.paths) and work.done_reason(unit) is None:
            publish_unit(plan, work, reporter, unit, made_of(work.paths, attempt))


# Files of a unit that are about to count: its name, the files, and how to have it made again.
_Found = tuple[str, Sequence[File], Callable[[], None]]


def _discard_damaged(found: Sequence[_Found], threads: int, reporter: Reporter) -> None:
    total = sum(nbytes for _, files, _ in found for _, nbytes, _ in files)
    if not any(files for _, files, _ in found):
        return
    reporter.say(f"hashing what was finished before: {len(found)} units, {size(total)}")

    def is_damaged(file: File) -> bool:
        good = has_content(*file)
        reporter.hashed(file[1])
        return not good

    with ThreadPoolExecutor(threads, "hash", unbind_thread) as pool:
        checks = [pool.map(is_damaged, files) for _, files, _ in found]  # all at once: most units have one file
        damaged = [[*check] for check in checks]
    for (unit, files, discard), wrong in zip(found, damaged, strict=True):
        if any(wrong):
            path = files[wrong.index(True)][0]
            reporter.warn(f"{unit} is made again: {path} is not what was written there (its SHA-256); check the disk.")
            discard()


def _stored(plan: Plan, work: WorkDir) -> list[_Found]:
    store, found = work.paths.store, list[_Found]()
    for unit in plan.units:
        if (record := work.finished.get(unit.fingerprint)) is None:
            continue
        files = [(store / unit.stored_name / w.path, w.nbytes, w.sha256) for w in record.result.files]
        for w in record.for_chain:
            file = (store / w.path, w.nbytes, w.sha256)
            if w.path == unit.handed_on_name:  # without it the unit stays, and the chain starts again before it
                found.append((unit.name, [file], file[0].unlink))
            elif w.path == unit.side_name:
                files.append(file)
        found.append((unit.name, files, partial(work.forget, unit)))
    # What was assembled without hard links lies elsewhere (done_reason).
    return [(name, [file for file in files if file[0].exists()], discard) for name, files, discard in found]
