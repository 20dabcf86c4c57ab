"""From the settings of a command to its outputs: plan them, and show the plans or have them made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ktconvert.layouts.errors import OutputError, UsageError
from ktconvert.layouts.files import manifest
from ktconvert.pipeline.cli import preconditions
from ktconvert.pipeline.cli.command import given, notes_of_ignored
from ktconvert.pipeline.engine.execute import execute, tidy
from ktconvert.pipeline.engine.executors import DEFAULT, opened, require_known
from ktconvert.pipeline.engine.existing import adopts, nothing_to_do, saved_plan
from ktconvert.pipeline.engine.lock import ProcessPart, unlock
from ktconvert.pipeline.engine.part import make_part, parse, require_all_parts
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.plan import Plan, Request, require_shareable
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.option_groups import ConversionOptions, Workers
from ktconvert.pipeline.options.quantization import ResumeOptions
from ktconvert.pipeline.plans import commands
from ktconvert.pipeline.ui import dry_run
from ktconvert.pipeline.ui.progress import Reporter


def convert(name: str, options: ConversionOptions) -> None:
    reporter = options.reporting.reporter
    if options.existing.delete_others and not options.existing.overwrite:
        raise UsageError("--delete-others goes with --overwrite; add it, or leave it out.")
    requests = commands.outputs_of(Request(name, options))
    unused = dict.fromkeys(note for each in requests for note in _notes_of_unused(each.options))
    for note in (*notes_of_ignored(type(options)), *unused):
        reporter.note(note)
    preconditions.check_kernels()
    threads = preconditions.threads(options.execution.cpuinfer_threads, reporter)
    workers = options.execution.cpuinfer_threads
    part = None if options.part is None else parse(options.part, os.environ)
    request = Request(name, with_values(options, cpuinfer_threads=threads))
    plans = commands.plans_of(request, None if options.dry_run else reporter.hashed)
    for note in _notes(plans):
        reporter.note(note)
    if options.dry_run:
        check(plans, options.workers, part)
        dry_run.show_plans(plans, as_json=options.reporting.json_events, overwrite=options.existing.overwrite)
        return
    if options.existing.force_unlock:
        for plan in plans:
            take_lock_away(locate(plan.request.output, adopt=adopts(plan)), reporter, part)
    make(plans, reporter, options.workers, workers, part, trust_store=options.existing.trust_store)


def go_on(options: ResumeOptions) -> None:
    reporter = options.reporting.reporter
    paths = locate(options.output)
    if options.leftovers.force_unlock and not options.dry_run:
        take_lock_away(paths, reporter)
    if (old := saved_plan(paths)) is None:
        if options.output.is_dir() and manifest.read(options.output) is not None:
            if not options.dry_run:
                tidy(paths)
            return nothing_to_do(options.output, reporter)
        raise OutputError(
            f"{options.output}: no conversion into it was begun; start one with `ktconvert cpu`, `gpu`, `calibrate`, "
            "`dequantize`, `merge` or `resplit`."
        )
    if old.command == "train":
        from ktconvert.pipeline.cli import train
        from ktconvert.pipeline.models.fine_tuning import saved_options

        if (begun := saved_options(options.output)) is not None:
            train.go_on(begun, options)
        return
    preconditions.check_kernels()
    request = commands.saved_request(options.output, old)
    execution = options.execution
    before = request.options.execution.cpuinfer_threads
    tuning = {
        "cpuinfer_threads": preconditions.threads(execution.cpuinfer_threads or before, reporter),
        **({"max_memory": execution.max_memory} if execution.max_memory else {}),
        **({"verify_inputs": True} if options.verify_inputs else {}),
        **({"allow_machine_change": True} if options.allow_machine_change else {}),
        # What parts have not made, is made now by the executor that is named.
        **({"part": None} if any(leaf.name == "executor" for leaf in given(ResumeOptions)) else {}),
    }
    request = replace(request, options=with_values(request.options, **tuning))
    plan = commands.plan_request(request, None if options.dry_run else reporter.hashed)
    if options.dry_run:
        check([plan], options.workers)
        dry_run.show_plans([plan], as_json=options.reporting.json_events)
        return
    require_all_parts(plan, paths)
    make([plan], reporter, options.workers, execution.cpuinfer_threads, trust_store=options.leftovers.trust_store)


def _notes(plans: Sequence[Plan]) -> Iterable[str]:
    """The notes of all plans; those that do not hold for each with the output's name."""
    by_plan = [(plan.request.output.name, [*commands.numa_notes(plan), *plan.notes]) for plan in plans]
    common = [note for note in by_plan[0][1] if all(note in notes for _, notes in by_plan)]
    return (*common, *(f"{name}: {note}" for name, notes in by_plan for note in notes if note not in common))


def _notes_of_unused(options: ConversionOptions) -> Iterable[str]:
    unused = options.unused()
    return (f"{leaf.flag} {unused[leaf.name]}" for leaf in given(type(options)) if leaf.name in unused)


def take_lock_away(paths: Paths, reporter: Reporter, part: ProcessPart | None = None) -> None:
    """--force-unlock: remove the lock of a process that left it, and say whose it was."""
    for taken in unlock(paths.root, paths.output, part):
        reporter.note(f"--force-unlock took away {taken}")


def check(plans: Sequence[Plan], workers: Workers, part: ProcessPart | None = None) -> None:
    """Raise UsageError where --executor or --part cannot be understood, or do not go with the plans or each other."""
    name = workers.executor
    require_known(name)
    for plan in plans:
        if part is not None:
            require_shareable(plan, "--part")
        if not name.startswith(DEFAULT):
            require_shareable(plan, "--executor")
    if part is not None and not name.startswith(DEFAULT):
        raise UsageError(f"--part and --executor {name} both share the work out; give one of them.")


def make(
    plans: Sequence[Plan],
    reporter: Reporter,
    workers: Workers,
    threads: int | None,
    part: ProcessPart | None = None,
    *,
    trust_store: bool,
) -> None:
    """Execute the plans, or a part of the only one, with the engine of --executor; threads: of each worker."""
    check(plans, workers, part)
    overwrite = plans[0].request.options.existing.overwrite
    with opened(workers.executor, reporter.note, workers.executor_timeout) as engine:
        if engine.executor is None and engine.threads is not None:
            lowered = preconditions.lowered("--executor threads", engine.threads, reporter)
            plans = [_tuned(plan, cpuinfer_threads=lowered) for plan in plans]
        if part is not None:
            (plan,) = plans
            make_part(_tuned(plan, part=str(part)), part, reporter, overwrite=overwrite)
            return
        execute(
            plans,
            reporter,
            overwrite=overwrite,
            trust_store=trust_store,
            executor=engine.executor,
            reopen=commands.reopened,
            threads=threads or engine.threads,
        )


def _tuned(plan: Plan, **tuning: Any) -> Plan:
    return replace(plan, request=replace(plan.request, options=with_values(plan.request.options, **tuning)))
