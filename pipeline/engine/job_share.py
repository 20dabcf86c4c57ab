"""Job shares (--part): each of several processes makes every N-th unit, and leaves it as a finished attempt."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ktconvert.layouts.errors import InputError, KTConvertError, OutputError, UsageError
from ktconvert.layouts.files import documents, publish
from ktconvert.pipeline.engine import attempts, lock
from ktconvert.pipeline.engine.disk_space import require_disk
from ktconvert.pipeline.engine.download import fetch_inputs
from ktconvert.pipeline.engine.existing import (
    compare_plans,
    find_unit_states,
    is_finished,
    read_plan,
    report_nothing_to_do,
    require_writable_output,
)
from ktconvert.pipeline.engine.lock import JobShare
from ktconvert.pipeline.engine.loop import OutputSchedule, StopFlag, run_units
from ktconvert.pipeline.engine.paths import Paths
from ktconvert.pipeline.engine.plan import Plan, require_independent_units
from ktconvert.pipeline.engine.runners import ThreadRunner, as_finished_unit, report_finished
from ktconvert.pipeline.engine.threads import fit_threads, open_pools
from ktconvert.pipeline.engine.units import FinishedUnit, Stage, Unit
from ktconvert.pipeline.engine.worker import OpenPlan, make_attempt
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural

# Environment variables with numbers of a job's processes: of this process, count, first number, step.
ENVIRONMENT = (
    ("RANK", "WORLD_SIZE", None, None),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP"),
)
MAX_NAMED = 6  # units to name in a message


def parse_share(text: str, environ: Mapping[str, str]) -> JobShare:
    """Parse the value of --part, R/N or `env`. Raises UsageError for any other."""
    given = _read_environment(environ) if text == "env" else tuple(text.split("/"))
    if len(given) != 2 or not all(number.isdecimal() and len(number) < 10 for number in given):
        raise UsageError(f"--part {text}: give R/N, from 0/N to N-1/N, or env.")
    share = JobShare(int(given[0]), int(given[1]))
    if not share.count:
        raise UsageError(f"--part {text}: give R/N with an N of at least 1.")
    if share.number >= share.count:
        raise UsageError(
            f"--part {text}: out of range; job shares are 0/{share.count} to {share.count - 1}/{share.count}."
        )
    return share


def _read_environment(environ: Mapping[str, str]) -> tuple[str, ...]:
    for number, count, first, step in ENVIRONMENT:
        if number in environ and count in environ:
            try:
                first_number = int(environ.get(first or "", "0"))
                step_size = int(environ.get(step or "", "1"))
                return str((int(environ[number]) - first_number) // step_size), environ[count]
            except (ValueError, ZeroDivisionError):
                raise UsageError(
                    f"--part env: {number}={environ[number]} is out of range for {count}={environ[count]}; correct "
                    "them."
                ) from None
    names = " nor ".join(f"{number} and {count}" for number, count, *_ in ENVIRONMENT)
    raise UsageError(f"--part env: neither {names} is set; give R/N.")


def make_share(
    plan: Plan, share: JobShare, reporter: Reporter, *, overwrite: bool = False, threads: int | None = None
) -> None:
    """Make every N-th unit that is missing. Raises UsageError for a plan with a chain.

    threads  packing threads; None: the number that the plan names
    """
    require_independent_units(plan)
    require_writable_output(plan, overwrite)
    if is_finished(plan, overwrite):
        report_nothing_to_do(plan.options.output, reporter, plan)
        return
    plan.hooks.require_ready()
    paths = plan.locate()
    share_lock = lock.acquire(paths.root, paths.output, share)
    try:
        for folder in (paths.partial, paths.attempts, paths.store):
            folder.mkdir(exist_ok=True)
        _agree_on_plan(plan, paths, overwrite)
        all_units = [(stage, unit) for stage in plan.stages for unit in stage.units]
        missing = set(find_missing_units(plan, paths))
        our_units = [(stage, (unit,)) for stage, unit in all_units[share.number :: share.count] if unit in missing]
        attempts.remove_dead_files(paths)
        in_order = [unit for _, (unit,) in our_units]
        require_disk([(plan, paths, in_order)])
        stop = StopFlag([plan.options.output])
        with (
            stop.handle_signals(),
            fetch_inputs(plan.download, in_order, reporter),
            _open_runner(plan, paths, reporter, len(our_units), threads) as runner,
        ):
            report = partial(report_finished, plan.options.output, reporter)
            run_units([OutputSchedule(plan, our_units, runner, report)], reporter, stop)
        remaining = find_missing_units(plan, paths)
        units = len(plan.units)
        finished = units - len(remaining)
        reporter.event("part", part=str(share), made=len(our_units), there=finished, units=units)
        next_step = "" if remaining else f"; run `ktconvert resume {paths.output}` to assemble the output"
        reporter.say(
            f"job share {share}: {plural(len(our_units), 'unit')} made; "
            f"{finished} of {units} units of all job shares are finished{next_step}"
        )
    finally:
        share_lock.release()


def find_missing_units(plan: Plan, paths: Paths) -> list[Unit[Any]]:
    return [state.unit for state in find_unit_states(plan, paths) if not state.done]


def require_all_shares(plan: Plan, paths: Paths) -> None:
    """Raise OutputError, naming the missing units, if job shares have not made all units."""
    missing = find_missing_units(plan, paths)
    text = plan.options.part
    if not missing or text is None:
        return
    count = parse_share(text, {}).count
    numbers = sorted({number % count for number, unit in enumerate(plan.units) if unit in set(missing)})
    names = ", ".join(unit.key for unit in missing[:MAX_NAMED]) + (", ..." if len(missing) > MAX_NAMED else "")
    parts = ", ".join(f"{number}/{count}" for number in numbers)
    problem = f"{len(missing)} of {len(plan.units)} units are missing ({names}), from --part {parts}"
    remedy = f"finish these, or make them here with `ktconvert resume {paths.output} --executor threads`"
    raise OutputError(f"{paths.output}: {problem}; {remedy}.")


def _agree_on_plan(plan: Plan, paths: Paths, overwrite: bool) -> None:
    """Save the plan, or compare it with the one that another process has saved.

    Raises OutputError or InputError if that plan differs.
    """
    if not paths.plan.exists():
        temporary = paths.attempts / f".plan.{secrets.token_hex(8)}"
        publish.write_file(temporary, documents.encode_indented(plan.document(overwrite)))
        try:
            os.link(temporary, paths.plan)
        except FileExistsError:
            pass
        except OSError:  # no hard links are needed: all processes write the same settings
            temporary.replace(paths.plan)
        publish.sync_folder(paths.root)
        temporary.unlink(missing_ok=True)
    saved = read_plan(paths)
    assert saved is not None
    dropped, touched = compare_plans(plan, saved, overwrite)
    if dropped:
        why = f"other job shares may depend on them; remove {paths.root} to start over"
        raise OutputError(f"{paths.output}: was begun with different options or input, and {why}.")
    if touched:
        problem = f"{', '.join(touched[:3])} was modified after the conversion began"
        remedy = f"remove {paths.root} to start over"
        raise InputError(f"{plan.options.input}: {problem}; {remedy}.")


@contextlib.contextmanager
def _open_runner(
    plan: Plan, paths: Paths, reporter: Reporter, units: int, threads: int | None
) -> Iterator[ThreadRunner]:
    """Start threads of this process that leave finished attempts."""
    with open_pools(fit_threads([plan], reporter, threads), units) as pools:
        open_plan = OpenPlan(plan, paths, pools.packing, pools.window)
        run = secrets.token_hex(8)

        def make_unit(stage: Stage[Any], unit: Unit[Any]) -> FinishedUnit:
            reporter.set_current(unit.key)
            reporter.event("start", output=str(paths.output), unit=unit.name)
            attempt = make_attempt(open_plan, stage, unit, run, reporter)
            if isinstance(attempt, KTConvertError):
                raise attempt
            return as_finished_unit(paths, attempt)

        yield ThreadRunner(pools.units, pools.count, make_unit)
