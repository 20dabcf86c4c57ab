"""What a command does with its plan: show it, or have it made, here or by the engine that --executor names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.cli import options
from ktconvert.pipeline.engine.execute import execute
from ktconvert.pipeline.engine.executors import DEFAULT, opened, require_known
from ktconvert.pipeline.engine.existing import adopts
from ktconvert.pipeline.engine.lock import ProcessPart, unlock
from ktconvert.pipeline.engine.part import make_part, parse
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.plan import Plan, require_shareable
from ktconvert.pipeline.plans.commands import reopened
from ktconvert.pipeline.ui import dry_run
from ktconvert.pipeline.ui.progress import Reporter


def part_of(params: Mapping[str, Any]) -> ProcessPart | None:
    """Which part --part asks for."""
    return None if params.get("part") is None else parse(params["part"], os.environ)


def take_lock_away(paths: Paths, reporter: Reporter, part: ProcessPart | None = None) -> None:
    """--force-unlock: remove the lock of a process that left it, and say whose it was."""
    for taken in unlock(paths.root, paths.output, part):
        reporter.note(f"--force-unlock took away {taken}")


def carry_out(plan: Plan, reporter: Reporter, params: Mapping[str, Any]) -> None:
    """Show a plan with --dry-run, else execute it; with its notes first."""
    if params["delete_others"]:
        if not params["overwrite"]:
            raise UsageError("--delete-others goes with --overwrite; add it, or leave it out.")
        plan = _tuned(plan, delete_others=True)
    for note in plan.notes:
        reporter.note(note)
    if params["dry_run"]:
        check(plan, params)
        dry_run.show_plan(plan, as_json=params["json_events"], overwrite=params["overwrite"])
    else:
        if params["force_unlock"]:
            take_lock_away(locate(plan.request.output, adopt=adopts(plan)), reporter, part_of(params))
        make(plan, reporter, params)


def check(plan: Plan, params: Mapping[str, Any]) -> None:
    """Raise UsageError where --executor or --part cannot be understood, or do not go with the plan or each other."""
    name, part = params.get("executor", DEFAULT), part_of(params)
    require_known(name)
    if part is not None:
        require_shareable(plan, "--part")
    if not name.startswith(DEFAULT):
        require_shareable(plan, "--executor")
        if part is not None:
            raise UsageError(f"--part and --executor {name} both share the work out; give one of them.")


def make(plan: Plan, reporter: Reporter, params: Mapping[str, Any]) -> None:
    """Execute a plan with the engine that --executor names."""
    check(plan, params)
    name, overwrite, part = params.get("executor", DEFAULT), params.get("overwrite", False), part_of(params)
    with opened(name, reporter.note, params.get("executor_timeout")) as engine:
        if engine.executor is None and engine.threads is not None:
            plan = _tuned(plan, cpuinfer_threads=options.lowered("--executor threads", engine.threads, reporter))
        if part is not None:
            make_part(_tuned(plan, part=str(part)), part, reporter, overwrite=overwrite)
            return
        execute(
            plan,
            reporter,
            overwrite=overwrite,
            trust_store=params["trust_store"],
            executor=engine.executor,
            reopen=reopened,
            threads=params["cpuinfer_threads"] or engine.threads,
        )


def _tuned(plan: Plan, **tuning: Any) -> Plan:
    """A plan with some of its tuning changed."""
    return replace(plan, request=replace(plan.request, tuning={**plan.request.tuning, **tuning}))
