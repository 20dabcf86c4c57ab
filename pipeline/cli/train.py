"""ktconvert train."""

from __future__ import annotations

import click

from ktconvert.pipeline.cli import dry_run, preconditions
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.engine.execute import remove_work_directory
from ktconvert.pipeline.engine.existing import (
    is_finished,
    predict_states,
    report_nothing_to_do,
    require_writable_output,
)
from ktconvert.pipeline.options.model_options import TrainOptions
from ktconvert.pipeline.plans import commands


@command("train", TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a LoRA adapter for a model whose experts are computed from converted weights.

    The adapter is an ordinary PEFT adapter, for the converted and for the original model. It appears in one step at the
    end; until then, ADAPTER.work next to it holds checkpoints.

    Examples:
      ktconvert train MODEL ADAPTER --cpu-weights OUT --dataset chats.jsonl
      ktconvert run MODEL --cpu-weights OUT --adapter ADAPTER --prompt "Hello"
      ktconvert resume ADAPTER    after an interruption
    """
    start(options)


def start(options: TrainOptions) -> None:
    """Train, or with --dry-run print the plan and the memory that training needs."""
    from ktconvert.pipeline.models import fine_tuning, loading, trainer
    from ktconvert.pipeline.plans.commands import make_plan
    from ktconvert.pipeline.report.plots import require_matplotlib
    from ktconvert.pipeline.report.text import format_table, size

    reporter = options.reporting.reporter
    existing = options.existing
    existing.require_consistent()
    choice = preconditions.make_model_choice("train", options, reporter)
    if options.plot:
        require_matplotlib()
    choice = loading.with_own_experts(choice, reporter.warn)
    plan = make_plan(options, reporter)
    require_writable_output(plan, existing.overwrite)
    if is_finished(plan, existing.overwrite) and not options.dry_run:
        remove_work_directory(plan.locate())
        return report_nothing_to_do(options.output, reporter, plan)
    predict_states(plan, plan.locate(), existing.overwrite)
    memory = trainer.estimate_memory(options, choice)
    reporter.event("memory", bytes=memory)
    rows = [(purpose, size(nbytes)) for purpose, nbytes in memory.items()]
    data = fine_tuning.read_data(options, choice, reporter)
    plan = fine_tuning.with_stages(plan, options, data, memory)
    if options.dry_run:
        as_json = options.reporting.json_events
        dry_run.show_plans([plan], as_json=as_json, overwrite=existing.overwrite)
        if not as_json:
            click.echo("\n".join(["", "of this memory, besides libraries and converted experts", *format_table(rows)]))
        return
    if existing.force_unlock:
        commands.remove_lock(plan.locate(), reporter)
    reporter.say(f"memory besides the converted experts: {', '.join(map(' '.join, rows))}")
    if not fine_tuning.train(plan, options, choice, data, reporter):
        return report_nothing_to_do(options.output, reporter, plan)
    reporter.say(f"next: {plan.next_command}")
