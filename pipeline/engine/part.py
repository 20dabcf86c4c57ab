"""A conversion in parts: each process leaves its share of the units as finished attempts."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ktconvert.layouts.errors import InputError, KtconvertError, OutputError, UsageError
from ktconvert.layouts.files import documents, publish
from ktconvert.pipeline.engine import attempts, lock
from ktconvert.pipeline.engine.disk_space import fit_threads, require_disk
from ktconvert.pipeline.engine.existing import agree, already_finished, nothing_to_do, saved_plan, unit_states
from ktconvert.pipeline.engine.lock import ProcessPart
from ktconvert.pipeline.engine.loop import Share, StopFlag, run_units, tell_done
from ktconvert.pipeline.engine.paths import Paths
from ktconvert.pipeline.engine.plan import Plan, require_parts
from ktconvert.pipeline.engine.tasks import made_of
from ktconvert.pipeline.engine.threads import ThreadRunner, pools
from ktconvert.pipeline.engine.units import Made, Stage, Unit
from ktconvert.pipeline.engine.worker import Opened, make_attempt
from ktconvert.pipeline.report.progress import Reporter

# Environment variables that say which of how many processes this one is: number, count, first number, step.
ENVIRONMENT = (
    ("RANK", "WORLD_SIZE", None, None),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP"),
)
NAMED = 6  # units that a message names


def parse(text: str, environ: Mapping[str, str]) -> ProcessPart:
    """--part R/N, or `env`. Raises UsageError for what is none."""
    given = _of_environment(environ) if text == "env" else tuple(text.split("/"))
    if len(given) != 2 or not all(number.isdecimal() and len(number) < 10 for number in given):
        raise UsageError(f"--part {text}: give R/N, from 0/N to N-1/N, or env.")
    part = ProcessPart(int(given[0]), int(given[1]))
    if part.number >= part.count:
        raise UsageError(f"--part {text}: there is no part {part}; they count from 0/{part.count}.")
    return part


def _of_environment(environ: Mapping[str, str]) -> tuple[str, ...]:
    for number, count, first, step in ENVIRONMENT:
        if number in environ and count in environ:
            try:
                begin, every = (int(environ.get(name or "", default)) for name, default in ((first, "0"), (step, "1")))
                return str((int(environ[number]) - begin) // every), environ[count]
            except (ValueError, ZeroDivisionError):
                raise UsageError(f"--part env: {number}={environ[number]} of {count}={environ[count]}?") from None
    names = " or ".join(f"{number} and {count}" for number, count, *_ in ENVIRONMENT)
    raise UsageError(f"--part env: neither {names} is set; give R/N.")


def make_part(plan: Plan, part: ProcessPart, reporter: Reporter, *, overwrite: bool = False) -> None:
    """Make every N-th unit, as far as it is not there. Raises UsageError for a plan that is a chain."""
    require_parts(plan)
    if already_finished(plan, overwrite):
        return nothing_to_do(plan.request.output, reporter)
    plan.require_ready()
    paths = plan.locate()
    held = lock.acquire(paths.root, paths.output, part)
    try:
        for folder in (paths.partial, paths.attempts, paths.store):
            folder.mkdir(exist_ok=True)
        _agree_on_plan(plan, paths, overwrite)
        every = [(stage, unit) for stage in plan.stages for unit in stage.units]
        missing = set(missing_units(plan, paths))
        mine = [(stage, (unit,)) for stage, unit in every[part.number :: part.count] if unit in missing]
        attempts.free(paths)
        require_disk([(plan, paths, [unit for _, (unit,) in mine])])
        stop = StopFlag()
        with stop.installed(), _runner(plan, paths, reporter, len(mine)) as runner:
            run_units([Share(plan, mine, runner, partial(tell_done, plan.request.output, reporter))], reporter, stop)
        left, units = missing_units(plan, paths), len(plan.units)
        there = units - len(left)
        reporter.event("part", part=str(part), made=len(mine), there=there, units=units)
        then = "" if left else f": `ktconvert resume {paths.output}` puts the output together"
        reporter.say(f"part {part}: {len(mine)} units made; {there} of {units} units of all parts are there{then}")
    finally:
        held.release()


def missing_units(plan: Plan, paths: Paths) -> list[Unit[Any]]:
    return [state.unit for state in unit_states(plan, paths) if not state.done]


def require_all_parts(plan: Plan, paths: Paths) -> None:
    """Raise OutputError, naming what is missing, where a conversion in parts lacks units."""
    missing = missing_units(plan, paths)
    text = plan.request.options.part
    if not missing or text is None:
        return
    count = parse(text, {}).count
    numbers = sorted({number % count for number, unit in enumerate(plan.units) if unit in set(missing)})
    names = ", ".join(unit.key for unit in missing[:NAMED]) + (", ..." if len(missing) > NAMED else "")
    parts = ", ".join(f"{number}/{count}" for number in numbers)
    what = f"{len(missing)} of {len(plan.units)} units are missing ({names}), those of --part {parts}"
    remedy = f"let these be finished, or make them here with `ktconvert resume {paths.output} --executor threads`"
    raise OutputError(f"{paths.output}: {what}; {remedy}.")


def _agree_on_plan(plan: Plan, paths: Paths, overwrite: bool) -> None:
    if not paths.plan.exists():
        aside = paths.attempts / f".plan.{secrets.token_hex(8)}"
        publish.write_file(aside, documents.indented(plan.document(overwrite)))
        try:
            os.link(aside, paths.plan)
        except FileExistsError:
            pass
        except OSError:  # no hard links: all parts write the same settings
            aside.replace(paths.plan)
        publish.sync_folder(paths.root)
        aside.unlink(missing_ok=True)
    old = saved_plan(paths)
    assert old is not None
    dropped, touched = agree(plan, old, overwrite)
    if dropped:
        why = f"other parts may rely on them; remove {paths.root} to start over"
        raise OutputError(f"{paths.output}: was begun with other options or input, and {why}.")
    if touched:
        what = f"{', '.join(touched[:3])} was modified since the conversion began"
        remedy = f"remove {paths.root} to start over"
        raise InputError(f"{plan.request.input}: {what}; {remedy}.")


@contextlib.contextmanager
def _runner(plan: Plan, paths: Paths, reporter: Reporter, units: int) -> Iterator[ThreadRunner]:
    """Threads of this process that leave finished attempts."""
    with pools(fit_threads([plan], reporter), units) as (pool, window, runner, most):
        opened, run = Opened(plan, paths, pool, window), secrets.token_hex(8)

        def make(stage: Stage[Any], unit: Unit[Any]) -> Made:
            reporter.at(unit.key)
            reporter.event("start", output=str(paths.output), unit=unit.name)
            made = make_attempt(opened, stage, unit, run, reporter)
            if isinstance(made, KtconvertError):
                raise made
            return made_of(paths, made)

        yield ThreadRunner(runner, most, make)
