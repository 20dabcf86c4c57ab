"""The table of commands that write an output: name -> its settings, and the function that makes its plan."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import InputError, OutputError, UsageError
from ktconvert.pipeline.engine.execute import execute
from ktconvert.pipeline.engine.existing import saved_plan
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.engine.plan import Plan, Request, SavedPlan, changed_files
from ktconvert.pipeline.options.declare import build, checked, leaves, plain, with_values
from ktconvert.pipeline.options.option_groups import ConversionOptions
from ktconvert.pipeline.options.quantization import CpuOptions, GpuOptions
from ktconvert.pipeline.options.rewriting import CalibrateOptions, DequantizeOptions, MergeOptions, ResplitOptions
from ktconvert.pipeline.plans.several import outputs_of
from ktconvert.pipeline.ui.progress import Reporter


@dataclass(frozen=True)
class ConversionCommand:
    """A command that writes an output. planner: its plan_* function, in the module of pipeline/plans."""

    options: type[ConversionOptions]
    module: str
    planner: str


COMMANDS: Mapping[str, ConversionCommand] = {
    "cpu": ConversionCommand(CpuOptions, "cpu", "plan_cpu"),
    "gpu": ConversionCommand(GpuOptions, "gpu", "plan_gpu"),
    "calibrate": ConversionCommand(CalibrateOptions, "calibrate", "plan_calibrate"),
    "dequantize": ConversionCommand(DequantizeOptions, "dequantize", "plan_dequantize"),
    "merge": ConversionCommand(MergeOptions, "merge", "plan_merge"),
    "resplit": ConversionCommand(ResplitOptions, "resplit_against", "plan_resplit_with_advice"),
}


def request(command: str, **options: Any) -> Request[ConversionOptions]:
    """The request of a command with options by the names of --help with underscores; ValueError for others."""
    return Request(command, _options(COMMANDS[command].options, options))


def saved_request(output: Path, saved: SavedPlan) -> Request[ConversionOptions]:
    """The request of plan.json. Raises OutputError for another ktconvert's command, and for damaged settings."""
    if saved.command not in COMMANDS:
        raise OutputError(f"{output}: was begun by `ktconvert {saved.command}`, which this one does not have.")
    settings, tuning = saved.settings, saved.tuning
    try:
        options = _options(
            COMMANDS[saved.command].options,
            {"input": saved.input, "output": str(output), **settings, **tuning},
        )
        missing = {*options.settings} - {*settings}
        if wrong := sorted({*settings} - {*options.settings}) or sorted({*tuning} - {*options.tuning}):
            raise ValueError(f"{wrong[0]} goes with none of the other options")
        if missing:
            raise ValueError(f"{min(missing)} is missing")
    except ValueError as error:
        raise OutputError(f"{output}: its plan cannot be understood ({error}); start over with --overwrite.") from error
    return Request(saved.command, options)


def _options(cls: type[ConversionOptions], values: Mapping[str, Any]) -> ConversionOptions:
    """Settings of values as JSON or a caller has them. Raises ValueError, naming the option."""
    known = {leaf.name: leaf for leaf in leaves(cls)}
    if unknown := sorted({*values} - {*known}):
        raise ValueError(f"there is no option {unknown[0]}")
    return build(cls, {name: checked(known[name], plain(value)) for name, value in values.items()})


def plans_of(request: Request[Any], hashed: Callable[[int], None] | None = None) -> list[Plan]:
    """The plans of all outputs that a request asks for. hashed: is told how many bytes were hashed."""
    return [plan_request(each, hashed) for each in outputs_of(request)]


def plan_request(request: Request[Any], hashed: Callable[[int], None] | None = None) -> Plan:
    """The plan of a request for one output. hashed: is told how many bytes were hashed. Raises UsageError where it asks
    for several: plans_of.
    """
    if len(requests := outputs_of(request)) > 1:
        raise UsageError(f"{request.output}: one plan is for one output, and {len(requests)} are wanted.")
    command = COMMANDS[request.command]
    module = importlib.import_module(f"ktconvert.pipeline.plans.{command.module}")
    plan: Plan = getattr(module, command.planner)(request, hashed)
    return plan


def reopened(output: Path, tuning: Mapping[str, Any]) -> Plan:
    """The plan that was saved for an output, made again on another host or later, with some of its tuning changed.

    Raises OutputError where there is none, InputError where its input is not what it was.
    """
    saved = saved_plan(locate(output))
    if saved is None:
        raise OutputError(f"{output}: no conversion into it was begun.")
    request = saved_request(output, saved)
    plan = plan_request(replace(request, options=with_values(request.options, **tuning)))
    other, touched = changed_files(saved.source, plan)
    if other or touched:
        wrong = other or [f"{name} was modified" for name in touched]
        raise InputError(f"{request.input} is not the input that {output} was begun with: {'; '.join(wrong[:5])}.")
    return plan


def run(
    plan: Plan | Sequence[Plan],
    executor: Executor | None = None,
    reporter: Reporter | None = None,
    *,
    overwrite: bool = False,
) -> bool:
    """Make what a plan says, from wherever it stands: with threads of this process, or with the workers of any
    concurrent.futures.Executor, which see its input and output under the same paths and have this ktconvert.

    plan       or those of several outputs of one input (plans_of), which is read once for all
    overwrite  as --overwrite
    Returns False when there was nothing to do. Raises KtconvertError.
    """
    plans = [plan] if isinstance(plan, Plan) else plan
    return execute(plans, reporter or Reporter(), overwrite=overwrite, executor=executor, reopen=reopened)
