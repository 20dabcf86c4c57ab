"""Execution of plans: refusals, resuming, the run itself, and the assembly of each output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from ktconvert.layouts.errors import KtconvertError
from ktconvert.native_quant import machine
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.pipeline.engine import attempts, existing, journal
from ktconvert.pipeline.engine.assemble import assemble, require_free_side_output, require_side_output
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.disk_space import require_disk
from ktconvert.pipeline.engine.loop import (
    OutputSchedule,
    Remaining,
    StopFlag,
    find_remaining,
    publish_unit,
    record_run,
    run_units,
)
from ktconvert.pipeline.engine.paths import FileRecord, Paths, has_content
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.runners import ExecutorRunner, Runner, as_finished_unit, open_thread_runners
from ktconvert.pipeline.engine.threads import fit_threads
from ktconvert.pipeline.engine.workdir import WorkDir, save_plan
from ktconvert.pipeline.engine.worker import Reopen
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import duration, size


def remove_work_directory(paths: Paths) -> None:
    """Remove the work directory of a finished output, whose last run ended after the output had appeared."""
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
    """Make the outputs of plans for one input, from wherever each stands. Return False if all are finished.

    Units that read the same tensors are made one after the other. If one output is impossible, the error is raised
    before anything is written.

    trust_store  check files of earlier runs by their sizes only, without hashing them
    executor     its workers `reopen` the plan and make units, and portions of units of a chain, with so many threads
                 each (None: the CPUs that they may use); None: threads of this process make all units
    """
    finished = [_is_finished(plan, overwrite) for plan in plans]
    unfinished = [plan for plan, done in zip(plans, finished, strict=True) if not done]
    for plan in unfinished:
        plan.hooks.require_ready()
    with_workers = executor is not None
    if len(unfinished) > 1:
        require_possible(unfinished, overwrite, with_workers=with_workers)
        if executor is None:
            fit_threads(unfinished)
    for plan, done in zip(plans, finished, strict=True):
        if done:
            remove_work_directory(plan.locate())
            existing.report_nothing_to_do(plan.options.output, reporter)
    with contextlib.ExitStack() as stack:
        works: list[tuple[Plan, WorkDir]] = []
        for plan, work in zip(unfinished, _lock_all(unfinished, stack), strict=True):
            if _is_finished(plan, overwrite):  # by the process that had the lock before
                work.remove()
                existing.report_nothing_to_do(plan.options.output, reporter)
            else:
                works.append((plan, work))
        if not works:
            return False
        for plan, work in works:
            resume_work(plan, work, reporter, overwrite=overwrite, trust_store=trust_store)
        remaining = [
            (plan, work.paths, [unit for unit in plan.units if work.why_finished(unit) is None]) for plan, work in works
        ]
        require_disk(remaining, with_workers=with_workers)
        if executor is None:
            threads = fit_threads([plan for plan, _ in works], reporter)
        stop = StopFlag()
        stack.enter_context(stop.handle_signals())
        for _, work in works:
            stack.enter_context(record_run(work))
        if executor is None:
            assert threads is not None
            outputs = _schedule_threads(works, reporter, threads, stack)
        else:
            assert reopen is not None
            outputs = [
                _schedule_workers(
                    plan, work, reporter, ExecutorRunner(work, reporter, executor, reopen, threads), stack
                )
                for plan, work in works
            ]
        run_units(outputs, reporter, stop)
    return True


def _schedule_threads(
    works: Sequence[tuple[Plan, WorkDir]], reporter: Reporter, threads: int, stack: contextlib.ExitStack
) -> list[OutputSchedule]:
    """Schedule the remaining units of all outputs for threads of this process, which the stack ends."""
    remaining = [find_remaining(plan, work) for plan, work in works]
    units = sum(map(len, remaining))
    runners = stack.enter_context(open_thread_runners([work for _, work in works], reporter, threads, units))
    return [
        _schedule(plan, work, reporter, groups, runner)
        for (plan, work), groups, runner in zip(works, remaining, runners, strict=True)
    ]


def _schedule_workers(
    plan: Plan, work: WorkDir, reporter: Reporter, runner: ExecutorRunner, stack: contextlib.ExitStack
) -> OutputSchedule:
    """Schedule the remaining units of an output for an executor's workers.

    Units of a chain run here, and have their portions made by workers.
    """
    remaining, chain_runner = find_remaining(plan, work), None
    if any(stage.chain for stage in plan.stages):
        threads, units = fit_threads([plan], reporter), len(remaining)
        (chain_runner,) = stack.enter_context(
            open_thread_runners([work], reporter, threads, units, runner.make_portions)
        )
        chain_runner.limit = runner.limit  # one unit of the chain is in flight, in addition to units of workers
    return _schedule(plan, work, reporter, remaining, runner, chain_runner)


def _schedule(
    plan: Plan,
    work: WorkDir,
    reporter: Reporter,
    remaining: Remaining,
    runner: Runner,
    chain_runner: Runner | None = None,
) -> OutputSchedule:
    publish, finish = partial(publish_unit, plan, work, reporter), partial(_finish, plan, work, reporter)
    return OutputSchedule(plan, remaining, runner, publish, finish, chain_runner)


def require_possible(plans: Sequence[Plan], overwrite: bool, *, with_workers: bool = False) -> None:
    """Raise the errors that a run would raise, as far as they are known before work directories exist."""
    remaining = []
    for plan in plans:
        paths = plan.locate()
        states = existing.predict_states(plan, paths, overwrite)
        remaining.append((plan, paths, [state.unit for state in states if not state.done]))
    require_disk(remaining, with_workers=with_workers)


def _lock_all(plans: Sequence[Plan], stack: contextlib.ExitStack) -> list[WorkDir]:
    """Lock the work directories of all plans. If one is refused, the new ones are removed."""
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


def resume_work(plan: Plan, work: WorkDir, reporter: Reporter, *, overwrite: bool, trust_store: bool) -> None:
    """Compare the plan with the one that was begun here, if any, and adopt finished units."""
    _adopt_plan(plan, work, reporter, overwrite)
    require_free_side_output(plan, work.finished, work.may_replace)
    if work.may_replace and journal.find_assembled_inode(work.journal.records) is None:
        for replaced in existing.folders_to_replace(plan):
            reporter.note(f"--overwrite removes {replaced}")
    adopt_units(plan, work, reporter, trusted=trust_store)
    _report_death(work, plan, reporter)


def _finish(plan: Plan, work: WorkDir, reporter: Reporter) -> None:
    work.journal.append(journal.Start(unit="assemble"))
    assemble(plan, work)
    (done, seconds), output = reporter.rate(), plan.options.output
    out, peak = sum(unit.bytes_out for unit in plan.units if unit.in_output), machine.peak_rss()
    reporter.event("finished", output=str(output), bytes=out, seconds=round(seconds, 3), peak_rss=peak)
    rate = f"{size(done / max(seconds, 1e-9))}/s read, peak RSS {size(peak)}"
    reporter.say(f"{output}: {size(out)} in {duration(seconds)} ({rate})")


def _is_finished(plan: Plan, overwrite: bool) -> bool:
    """Return whether there is nothing to do. Raise OutputError if the side output of a finished output is missing."""
    if finished := existing.is_finished(plan, overwrite):
        require_side_output(plan)
    return finished


def _adopt_plan(plan: Plan, work: WorkDir, reporter: Reporter, overwrite: bool) -> None:
    """Compare the plan with the one that was begun here, or save it."""
    old = existing.read_plan(work.paths)
    afresh = existing.has_no_units(work.paths)
    dropped, touched = existing.compare_plans(plan, old, overwrite or afresh) if old is not None else (False, [])
    if dropped:
        if not afresh:
            reporter.note("--overwrite drops the unfinished conversion with different options or input")
        work.drop()
        old = None
    work.may_replace = overwrite or bool(old and old.overwrite)
    if touched:
        units = plan.units_reading(touched)
        for unit in units:
            work.forget(unit)
        reporter.note(f"{', '.join(touched[:3])} was modified; {len(units)} units that read it are converted again")
    if old != (document := plan.document(work.may_replace)):
        save_plan(work.paths, document)


def _report_death(work: WorkDir, plan: Plan, reporter: Reporter) -> None:
    last = journal.find_killed_run(work.journal.records)
    done = sum(work.why_finished(unit) is not None for unit in plan.units)
    if last is None:
        if done:
            reporter.say(f"resuming: {done} of {len(plan.units)} units are finished")
        return
    run, units = last
    died = f"the last run (process {run.process.pid}) died" + (f" in {', '.join(units)}" if units else "")
    if (kills := machine.oom_kills()) and run.oom_kills is not None and kills > run.oom_kills:
        died += "; the kernel has killed a process for memory since; lower --cpuinfer-threads or set --max-memory"
    reporter.note(f"{died}; {done} of {len(plan.units)} units are finished and kept")


def adopt_units(plan: Plan, work: WorkDir, reporter: Reporter, *, trusted: bool = False) -> None:
    """Adopt what earlier runs finished, after hashing every byte (trusted: by size); discard what is damaged.

    That is units in the store, and attempts that workers finished after the last coordinator had died, which are
    published and recorded.
    """
    missing = {unit.fingerprint: unit for unit in plan.units if work.why_finished(unit) is None}
    whole = [a for a in attempts.read(work.paths) if a.fingerprint in missing and a.is_whole(work.paths)]

    def discard(attempt: Attempt) -> None:
        attempts.forget(work.paths, attempt)
        work.journal.append(attempt.loss_record())

    if not trusted:
        finished = _list_store(plan, work) + [(a.unit, a.list_files(work.paths), partial(discard, a)) for a in whole]
        _discard_damaged(finished, plan.options.execution.threads, reporter)
    for attempt in whole:
        unit = missing[attempt.fingerprint]
        if attempt.is_whole(work.paths) and work.why_finished(unit) is None:
            publish_unit(plan, work, reporter, unit, as_finished_unit(work.paths, attempt))


# A finished unit to adopt: its name, its files, and a function to discard it.
_Finished = tuple[str, Sequence[FileRecord], Callable[[], None]]


def _discard_damaged(finished: Sequence[_Finished], threads: int, reporter: Reporter) -> None:
    total = sum(nbytes for _, files, _ in finished for _, nbytes, _ in files)
    if not any(files for _, files, _ in finished):
        return
    reporter.say(f"hashing finished files: {len(finished)} units, {size(total)}")

    def is_damaged(file: FileRecord) -> bool:
        good = has_content(*file)
        reporter.report_hash(file[1])
        return not good

    with ThreadPoolExecutor(threads, "hash", unbind_thread) as pool:
        checks = [
            pool.map(is_damaged, files) for _, files, _ in finished
        ]  # all together, since most units have one file
        damaged = [[*check] for check in checks]
    for (unit, files, discard), results in zip(finished, damaged, strict=True):
        if any(results):
            path = files[results.index(True)][0]
            reporter.warn(f"{unit} is converted again: the SHA-256 of {path} has changed; check the disk.")
            discard()


def _list_store(plan: Plan, work: WorkDir) -> list[_Finished]:
    store, finished = work.paths.store, list[_Finished]()
    for unit in plan.units:
        if (record := work.finished.get(unit.fingerprint)) is None:
            continue
        files = [(store / unit.stored_name / w.path, w.nbytes, w.sha256) for w in record.result.files]
        for w in record.chain_files:
            file = (store / w.path, w.nbytes, w.sha256)
            if w.path == unit.handover_name:  # without it the unit is kept, and the chain restarts before it
                finished.append((unit.name, [file], file[0].unlink))
            elif w.path == unit.side_name:
                files.append(file)
        finished.append((unit.name, files, partial(work.forget, unit)))
    # An assembly without hard links has moved its files from the store (why_finished).
    return [(name, [file for file in files if file[0].exists()], discard) for name, files, discard in finished]
