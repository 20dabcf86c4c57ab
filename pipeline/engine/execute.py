"""From a plan to an output: what lies there already, whether there is room, the run, the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial

from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.adopt import adopt
from ktconvert.pipeline.engine.assemble import assemble
from ktconvert.pipeline.engine.disk_space import fit_threads, require_disk
from ktconvert.pipeline.engine.existing import adopts, agree, already_finished, nothing_made, saved_plan, to_replace
from ktconvert.pipeline.engine.loop import StopFlag, left_to_do, publish_unit, recorded, run_units
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.plan import Plan, require_shareable
from ktconvert.pipeline.engine.runner import Runner
from ktconvert.pipeline.engine.side_output import require_delivered, require_free
from ktconvert.pipeline.engine.tasks import Tasks
from ktconvert.pipeline.engine.threads import thread_runner
from ktconvert.pipeline.engine.workdir import WorkDir, done_reason
from ktconvert.pipeline.engine.worker import Reopen
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.ui.text import duration, size


def tidy(paths: Paths) -> None:
    """Remove what is left beside a finished output: the last run was cut off after the output had appeared."""
    if paths.root.is_dir():
        with WorkDir(paths) as work:
            work.remove()


def execute(
    plan: Plan,
    reporter: Reporter,
    *,
    overwrite: bool = False,
    trust_store: bool = False,
    executor: Executor | None = None,
    reopen: Reopen | None = None,
    threads: int | None = None,
) -> bool:
    """Do what the plan says, from wherever it stands. Returns False when there was nothing to do.

    trust_store  files that an earlier run finished count by their sizes, and are not hashed
    executor     has the units made by its workers, which `reopen` the plan and pack with so many threads each (None:
                 the CPUs that they may use); None: threads of this process make them
    """
    if executor is not None:
        require_shareable(plan, "--executor")
    paths = locate(plan.request.output, adopt=adopts(plan))
    if _is_finished(plan, overwrite):
        tidy(paths)
        return _nothing_to_do(plan, reporter)
    plan.conversion.require_ready()
    with WorkDir(paths) as work:
        if _is_finished(plan, overwrite):  # by a process that had the lock until now
            work.remove()
            return _nothing_to_do(plan, reporter)
        _adopt_plan(plan, work, reporter, overwrite)
        require_free(plan, work.finished, work.may_replace)
        if work.may_replace and journal.assembled(work.journal.records) is None:
            for replaced in to_replace(plan):
                reporter.note(f"--overwrite removes {replaced}")
        adopt(plan, work, reporter, trusted=trust_store)
        _report_death(work, plan, reporter)
        to_make = [unit for unit in plan.units if done_reason(work.paths, work.finished, unit) is None]
        require_disk(plan, work.paths, to_make)
        threads = fit_threads(plan, reporter) if executor is None else threads
        stop = StopFlag()
        with stop.installed(), recorded(work):
            to_do = left_to_do(plan, work)
            with _runner(len(to_do), work, reporter, executor, reopen, threads) as runner:
                run_units(plan, to_do, runner, partial(publish_unit, plan, work, reporter), reporter, stop)
            work.journal.append(journal.Start(unit="assemble"))
            assemble(plan, work)
    _summary(plan, reporter)
    return True


def _is_finished(plan: Plan, overwrite: bool) -> bool:
    """Whether there is nothing to do. Raises OutputError where a part of the output is gone, which lay elsewhere."""
    finished = already_finished(plan, overwrite)
    if finished:
        require_delivered(plan)
    return finished


def _nothing_to_do(plan: Plan, reporter: Reporter) -> bool:
    reporter.event("finished", output=str(plan.request.output), nothing_to_do=True)
    reporter.say(f"{plan.request.output} is finished: nothing to do")
    return False


@contextlib.contextmanager
def _runner(
    units: int,
    work: WorkDir,
    reporter: Reporter,
    executor: Executor | None,
    reopen: Reopen | None,
    threads: int | None,
) -> Iterator[Runner]:
    if executor is None:
        assert threads is not None
        with thread_runner(work, reporter, threads, units) as runner:
            yield runner
    else:
        assert reopen is not None
        yield Tasks(work, reporter, executor, reopen, threads)


def _adopt_plan(plan: Plan, work: WorkDir, reporter: Reporter, overwrite: bool) -> None:
    """Agree with what was begun here before, or begin."""
    old = saved_plan(work.paths)
    afresh = nothing_made(work.paths)
    dropped, touched = agree(plan, old, overwrite or afresh) if old is not None else (False, [])
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
    document = plan.document(work.may_replace)
    if old != document:
        work.save_plan(document)


def _report_death(work: WorkDir, plan: Plan, reporter: Reporter) -> None:
    last = journal.last_run(work.journal.records)
    done = sum(done_reason(work.paths, work.finished, unit) is not None for unit in plan.units)
    if last is None:
        if done:
            reporter.say(f"resuming: {done} of {len(plan.units)} units are finished")
        return
    run, units = last
    where = f" in {', '.join(units)}" if units else ""
    kills, before = machine.oom_kills(), run.oom_kills
    memory = (
        "; the kernel has killed for memory since then: lower --cpuinfer-threads or set --max-memory"
        if kills and before is not None and kills > before
        else ""
    )
    reporter.note(
        f"the last run (process {run.process.pid}) died{where}{memory}; {done} of {len(plan.units)} units are finished "
        "and kept"
    )


def _summary(plan: Plan, reporter: Reporter) -> None:
    done, seconds = reporter.rate()
    out = sum(unit.bytes_out for unit in plan.units if unit.kept)
    reporter.event(
        "finished", output=str(plan.request.output), bytes=out, seconds=round(seconds, 3), peak_rss=machine.peak_rss()
    )
    reporter.say(
        f"{plan.request.output}: {size(out)} in {duration(seconds)} "
        f"({size(done / max(seconds, 1e-9))}/s read, peak RSS {size(machine.peak_rss())})"
    )
