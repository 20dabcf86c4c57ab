"""Execution of plans: refusals, resuming, the run itself, and the assembly of each output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from ktconvert.layouts.errors import InputError, KTConvertError
from ktconvert.native_quant import machine
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.pipeline.engine import attempts, existing, journal
from ktconvert.pipeline.engine.assemble import assemble_output, require_free_side_output, require_side_output
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.disk_space import require_disk
from ktconvert.pipeline.engine.download import fetch_inputs
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
from ktconvert.pipeline.engine.workdir import WorkDir, has_no_units, save_plan
from ktconvert.pipeline.engine.worker import Reopen
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import duration, plural, size


def remove_work_directory(paths: Paths) -> None:
    """Remove the work directory of a finished output, whose last run ended after the output had appeared."""
    if paths.root.is_dir():
        with WorkDir(paths) as workdir:
            workdir.remove()


def execute_plans(
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

    trust_store  check files of earlier runs only by their sizes, without hashing them
    executor     its workers make units, and portions of units of a chain; None: threads of this process make all units
    reopen       opens a plan in a worker; required with an executor
    threads      packing threads of each worker (None: the CPUs that it may use), or without an executor of this
                 process (None: the number that the plans name)
    """
    finished = [_is_finished(plan, overwrite) for plan in plans]
    unfinished = [plan for plan, done in zip(plans, finished, strict=True) if not done]
    for plan in unfinished:
        plan.hooks.require_ready()
    with_workers = executor is not None
    if len(unfinished) > 1:
        require_possible(unfinished, overwrite, with_workers=with_workers)
        if executor is None:
            fit_threads(unfinished, requested=threads)
    for plan, done in zip(plans, finished, strict=True):
        if done:
            remove_work_directory(plan.locate())
            existing.report_nothing_to_do(plan.options.output, reporter, plan)
    if executor is None:  # workers prepare what they make
        for plan in unfinished:
            _prepare_stages(plan, reporter, overwrite)
    with contextlib.ExitStack() as resources:
        workdirs: list[tuple[Plan, WorkDir]] = []
        locked = [(plan, resources.enter_context(WorkDir(plan.locate()))) for plan in unfinished]
        for plan, workdir in locked:
            if _is_finished(plan, overwrite):  # the process that had the lock before has finished it
                workdir.remove()
                existing.report_nothing_to_do(plan.options.output, reporter, plan)
            else:
                workdirs.append((plan, workdir))
        if not workdirs:
            return False
        for plan, workdir in workdirs:
            resume_work(plan, workdir, reporter, overwrite=overwrite, trust_store=trust_store)
        remaining = [
            (plan, workdir.paths, [unit for unit in plan.units if workdir.why_finished(unit) is None])
            for plan, workdir in workdirs
        ]
        require_disk(remaining, with_workers=with_workers)
        if executor is None:
            threads = fit_threads([plan for plan, _ in workdirs], reporter, threads)
        stop = StopFlag([plan.options.output for plan, _ in workdirs])
        resources.enter_context(stop.handle_signals())
        for plan, workdir in workdirs:
            resources.enter_context(record_run(workdir))
            resources.enter_context(_report_kept_units(plan, workdir, reporter))
        if executor is None:
            assert threads is not None
            outputs = _schedule_threads(workdirs, reporter, threads, resources)
        else:
            assert reopen is not None
            outputs = [
                _schedule_workers(
                    plan, workdir, reporter, ExecutorRunner(workdir, reporter, executor, reopen, threads), resources
                )
                for plan, workdir in workdirs
            ]
        run_units(outputs, reporter, stop)
    return True


def _prepare_stages(plan: Plan, reporter: Reporter, overwrite: bool) -> None:
    """Prepare the stages whose first unit is missing."""
    for stage in plan.stages:
        if stage.prepare is None:
            continue
        paths = plan.locate()
        states = existing.predict_states(plan, paths, overwrite) if paths.root.is_dir() else []
        if not any(state.done and state.unit == stage.units[0] for state in states):
            stage.prepare(reporter)


def _schedule_threads(
    workdirs: Sequence[tuple[Plan, WorkDir]], reporter: Reporter, threads: int, resources: contextlib.ExitStack
) -> list[OutputSchedule]:
    """Schedule the remaining units of all outputs for threads of this process, which `resources` ends."""
    remaining = [find_remaining(plan, workdir) for plan, workdir in workdirs]
    for (plan, _), groups in zip(workdirs, remaining, strict=True):
        in_order = [unit for _, units in groups for unit in units]
        resources.enter_context(fetch_inputs(plan.download, in_order, reporter))
    units = sum(map(len, remaining))
    runners = resources.enter_context(
        open_thread_runners([workdir for _, workdir in workdirs], reporter, threads, units)
    )
    return [
        _schedule(plan, workdir, reporter, groups, runner)
        for (plan, workdir), groups, runner in zip(workdirs, remaining, runners, strict=True)
    ]


def _schedule_workers(
    plan: Plan, workdir: WorkDir, reporter: Reporter, runner: ExecutorRunner, resources: contextlib.ExitStack
) -> OutputSchedule:
    """Schedule the remaining units of an output for an executor's workers.

    Units of a chain run here, and have their portions made by workers.
    """
    remaining = find_remaining(plan, workdir)
    chain_runner: Runner | None = None
    if any(stage.chain for stage in plan.stages):
        threads = fit_threads([plan], reporter)
        units = len(remaining)
        (chain_runner,) = resources.enter_context(
            open_thread_runners([workdir], reporter, threads, units, runner.make_portions)
        )
        chain_runner.limit = runner.limit  # one unit of the chain is in flight, in addition to units of workers
    return _schedule(plan, workdir, reporter, remaining, runner, chain_runner)


def _schedule(
    plan: Plan,
    workdir: WorkDir,
    reporter: Reporter,
    remaining: Remaining,
    runner: Runner,
    chain_runner: Runner | None = None,
) -> OutputSchedule:
    publish = partial(publish_unit, plan, workdir, reporter)
    finish = partial(_finish_output, plan, workdir, reporter)
    return OutputSchedule(plan, remaining, runner, publish, finish, chain_runner)


def require_possible(plans: Sequence[Plan], overwrite: bool, *, with_workers: bool = False) -> None:
    """Raise the errors that a run would raise, as far as they are known before work directories exist."""
    remaining = []
    for plan in plans:
        paths = plan.locate()
        states = existing.predict_states(plan, paths, overwrite)
        remaining.append((plan, paths, [state.unit for state in states if not state.done]))
    require_disk(remaining, with_workers=with_workers)


def resume_work(plan: Plan, workdir: WorkDir, reporter: Reporter, *, overwrite: bool, trust_store: bool) -> None:
    """Compare the plan with the one that was begun here, if any, and adopt finished units."""
    _adopt_plan(plan, workdir, reporter, overwrite)
    require_free_side_output(plan, workdir.finished, workdir.may_replace)
    if workdir.may_replace and journal.find_assembled_inode(workdir.journal.records) is None:
        for replaced in existing.find_replaced_folders(plan):
            reporter.warn(f"--overwrite removes {replaced}")
    adopt_units(plan, workdir, reporter, trusted=trust_store)
    _report_death(workdir, plan, reporter)


@contextlib.contextmanager
def _report_kept_units(plan: Plan, workdir: WorkDir, reporter: Reporter) -> Iterator[None]:
    """Report the finished units of a run that fails."""
    try:
        yield
    except (KTConvertError, OSError) as error:
        if finished := existing.count_finished(plan, workdir.paths):
            kept = f"{finished} of {plural(len(plan.units), 'unit')} finished and kept in {workdir.paths.root}"
            is_replaceable = isinstance(error, InputError) and plan.download is None
            how = " (with --verify-inputs after you replace an input file)" if is_replaceable else ""
            reporter.note(f"{kept}; `ktconvert resume {plan.options.output}` continues{how}")
        raise


def _finish_output(plan: Plan, workdir: WorkDir, reporter: Reporter) -> None:
    workdir.journal.append(journal.Start(unit="assemble"))
    assemble_output(plan, workdir)
    bytes_read, seconds = reporter.rate()
    output = plan.options.output
    bytes_written = sum(unit.bytes_out for unit in plan.units if unit.in_output)
    peak_rss = machine.peak_rss()
    reporter.event("finished", output=str(output), bytes=bytes_written, seconds=round(seconds, 3), peak_rss=peak_rss)
    rate = f"{size(bytes_read / max(seconds, 1e-9))}/s read, peak RSS {size(peak_rss)}"
    reporter.conclude(f"{output}: {size(bytes_written)} in {duration(seconds)} ({rate})")


def _is_finished(plan: Plan, overwrite: bool) -> bool:
    """Return whether there is nothing to do. Raises KTConvertError if the output, or its side output, is refused."""
    existing.require_writable_output(plan, overwrite)
    finished = existing.is_finished(plan, overwrite)
    if finished:
        require_side_output(plan)
    return finished


def _adopt_plan(plan: Plan, workdir: WorkDir, reporter: Reporter, overwrite: bool) -> None:
    """Compare the plan with the one that was begun here, or save it."""
    saved = existing.read_plan(workdir.paths)
    is_empty = has_no_units(workdir.paths)
    dropped = False
    touched: list[str] = []
    if saved is not None:
        dropped, touched = existing.compare_plans(plan, saved, overwrite or is_empty)
    if dropped:
        if not is_empty:
            reporter.warn("--overwrite drops the unfinished conversion with different options or input")
        workdir.drop_all_units()
        saved = None
    workdir.may_replace = overwrite or bool(saved and saved.overwrite)
    if touched:
        units = plan.units_reading(touched)
        for unit in units:
            workdir.forget_unit(unit)
        reporter.warn(f"{', '.join(touched[:3])} was modified; {plural(len(units), 'unit')} to convert again")
    document = plan.document(workdir.may_replace)
    if saved != document:
        save_plan(workdir.paths, document)


def _report_death(workdir: WorkDir, plan: Plan, reporter: Reporter) -> None:
    """Report a run that was killed, and the units that earlier runs have finished."""
    killed = journal.find_killed_run(workdir.journal.records)
    finished = existing.count_finished(plan, workdir.paths)
    if killed is None:
        if finished:
            reporter.say(f"resuming: {finished} of {plural(len(plan.units), 'unit')} finished")
        return
    run, units = killed
    report = reporter.note
    text = f"the last run (process {run.process.pid}) was stopped" + (f" in {', '.join(units)}" if units else "")
    if (kills := machine.oom_kills()) and run.oom_kills is not None and kills > run.oom_kills:
        text += "; the kernel has killed a process for memory since; lower --threads or set --max-memory"
        report = reporter.warn
    report(f"{text}; {finished} of {plural(len(plan.units), 'unit')} finished and kept")


def adopt_units(plan: Plan, workdir: WorkDir, reporter: Reporter, *, trusted: bool = False) -> None:
    """Adopt the units that earlier runs finished, and discard damaged ones.

    These are units in the store, and attempts that workers finished after the last coordinator had died. The attempts
    are published and recorded.

    trusted  whether files are checked only by their sizes, without hashing them
    """
    missing = {unit.fingerprint: unit for unit in plan.units if workdir.why_finished(unit) is None}
    finished_attempts = [
        attempt
        for attempt in attempts.read_attempts(workdir.paths)
        if attempt.fingerprint in missing and attempt.is_whole(workdir.paths)
    ]

    def discard(attempt: Attempt) -> None:
        attempts.remove_attempt(workdir.paths, attempt)
        workdir.journal.append(attempt.loss_record())

    if not trusted:
        finished = _list_store(plan, workdir)
        finished += [
            (attempt.unit, attempt.list_files(workdir.paths), partial(discard, attempt))
            for attempt in finished_attempts
        ]
        _discard_damaged(finished, plan.options.execution.thread_count, reporter)
    for attempt in finished_attempts:
        unit = missing[attempt.fingerprint]
        if attempt.is_whole(workdir.paths) and workdir.why_finished(unit) is None:
            publish_unit(plan, workdir, reporter, unit, as_finished_unit(workdir.paths, attempt))


# A finished unit to adopt: its name, its files, and a function to discard it.
_StoredItem = tuple[str, Sequence[FileRecord], Callable[[], None]]


def _discard_damaged(finished: Sequence[_StoredItem], threads: int, reporter: Reporter) -> None:
    """Hash the files of finished units with threads, and discard units whose files have changed."""
    total = sum(nbytes for _, files, _ in finished for _, nbytes, _ in files)
    if not finished:
        return
    reporter.say(f"hashing finished files: {plural(len(finished), 'unit')}, {size(total)}")

    def is_damaged(file: FileRecord) -> bool:
        path, nbytes, sha256 = file
        intact = has_content(path, nbytes, sha256)
        reporter.report_hash(nbytes)
        return not intact

    with ThreadPoolExecutor(threads, "hash", unbind_thread) as pool:
        # All units are submitted at once, since most of them have one file.
        checks = [pool.map(is_damaged, files) for _, files, _ in finished]
        damaged = [[*check] for check in checks]
    for (unit, files, discard), results in zip(finished, damaged, strict=True):
        if any(results):
            path = files[results.index(True)][0]
            reporter.warn(f"{unit} is converted again: the SHA-256 of {path} has changed; check the disk.")
            discard()


def _list_store(plan: Plan, workdir: WorkDir) -> list[_StoredItem]:
    """Return the finished units in the store, with the files that exist there."""
    store = workdir.paths.store
    finished: list[_StoredItem] = []
    for unit in plan.units:
        if (record := workdir.finished.get(unit.fingerprint)) is None:
            continue
        files = [(store / unit.stored_name / file.path, file.nbytes, file.sha256) for file in record.result.files]
        for file in record.chain_files:
            path = store / file.path
            file_record = (path, file.nbytes, file.sha256)
            if file.path == unit.handover_name:  # without it the unit is kept, and the chain restarts before it
                finished.append((unit.name, [file_record], path.unlink))
            elif file.path == unit.side_name:
                files.append(file_record)
        finished.append((unit.name, files, partial(workdir.forget_unit, unit)))
    # An assembly without hard links has moved its files from the store (why_finished).
    present = [(name, [file for file in files if file[0].exists()], discard) for name, files, discard in finished]
    return [(name, files, discard) for name, files, discard in present if files]
