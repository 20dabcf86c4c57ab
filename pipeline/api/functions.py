"""The public functions `plan`, `convert` and `verify`. __init__.pyi lists their options, for editors and mypy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS
from ktconvert.pipeline.options.declare import (
    REQUIRED,
    Option,
    OptionField,
    Options,
    convert_options,
    option_fields,
    with_values,
)
from ktconvert.pipeline.options.option_groups import Reporting
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.options.types import ChoiceList, PathOrHubId, Size

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ktconvert.pipeline.engine.plan import Plan
    from ktconvert.pipeline.verify.verify import Report

Function = TypeVar("Function", bound=Callable[..., Any])
StrPath = str | PathLike[str]
# Python passes an Executor to `convert`, and `plan` is a dry run.
COMMAND_LINE_ONLY = {"executor", "executor_timeout", "dry_run"}
# `verify` returns its report, and prints nothing.
PRINTING = {"report", "run", *(each.name for each in option_fields(Reporting))}


def list_parameters(cls: type[Options]) -> dict[str, inspect.Parameter]:
    """Return the arguments of the functions that are options of a command, by their names."""
    excluded = COMMAND_LINE_ONLY | PRINTING if cls is VerifyOptions else COMMAND_LINE_ONLY
    return {
        each.name: inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is REQUIRED else each.default,
            annotation=find_argument_type(each),
        )
        for each in option_fields(cls)
        if isinstance(each.declaration, Option) and each.name not in excluded
    }


def find_argument_type(option_field: OptionField) -> Any:
    """Return the type of an option's argument."""
    value_type = option_field.value_type
    annotation: Any = value_type
    if words := getattr(option_field.click_type, "choices", ()):
        annotation = Literal[tuple(map(value_type if value_type is int else str, words))]
        if isinstance(option_field.click_type, ChoiceList):
            annotation |= Sequence[annotation]  # several words make several outputs
    elif value_type is Path or isinstance(option_field.click_type, PathOrHubId):
        annotation = StrPath
    elif value_type is tuple:
        item: Any = get_args(option_field.annotation)[0]
        annotation = Sequence[item]
    if isinstance(option_field.click_type, Size):
        annotation |= str
    return annotation | None if option_field.default is None else annotation


def plan(command: str, /, input: StrPath | None = None, output: StrPath | None = None, **options: Any) -> list[Plan]:
    """Plan what `ktconvert COMMAND` would write; read only headers, write nothing.

    command  "cpu", "gpu", "calibrate", "dequantize", "fetch", "merge", "merge-adapter" or "resplit"
    input    path or hub id of the checkpoint; required
    output   path of the directory to write; required
    options  the other options, which `ktconvert COMMAND --help-all` lists, with underscores: quant_method, threads ...
    Returns a plan for each output: `facts` describe the output (method, sizes, layers), `notes` are remarks, `units`
    are the files of weights.
    Raises UsageError for unknown options and invalid values, and the KTConvertError of an input that cannot be
    converted so.
    """
    from ktconvert.pipeline.plans import commands

    if not isinstance(command, str) or command not in CONVERSION_OPTIONS:
        raise UsageError(f"{command!r} is not a conversion{_suggest_command(command)}")
    cls = CONVERSION_OPTIONS[command]
    paths = {name: path for name, path in (("input", input), ("output", output)) if path is not None}
    return commands.make_plans(convert_options(cls, {**paths, **options}, list_parameters(cls)))


def _suggest_command(word: object) -> str:
    """Return what to do about a wrong command, for a message."""
    if word == "verify":
        return "; call ktconvert.verify"
    if near := difflib.get_close_matches(str(word), CONVERSION_OPTIONS, 1):
        return f"; did you mean {near[0]!r}?"
    return f"; begin with one of {', '.join(map(repr, CONVERSION_OPTIONS))}"


def convert(
    command: str,
    /,
    input: StrPath | None = None,
    output: StrPath | None = None,
    *,
    executor: Executor | None = None,
    progress: Callable[[int, int], object] | None = None,
    **options: Any,
) -> list[Path]:
    """Run `ktconvert COMMAND`: plan, make missing units, and publish each output in one step.

    command, input, output, options
              as for plan; only warnings are printed, with verbose=True also the progress
    executor  any concurrent.futures.Executor whose workers see input and output under the same paths; None: threads of
              this process
    progress  function that is called with the bytes of input that are done, and all of them, from any thread
    Returns the directories of the outputs. Raises the errors of plan, and KTConvertError if the work fails; the same
    call then resumes it.
    """
    from ktconvert.pipeline.plans import commands
    from ktconvert.pipeline.report.progress import Reporter

    if executor is not None and not hasattr(executor, "submit"):
        raise UsageError(f"executor must be a concurrent.futures.Executor, not {executor!r}")
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function of two numbers of bytes, not {progress!r}")
    plans = plan(command, input, output, **options)
    first_options = plans[0].options
    reporting = first_options.reporting
    reporter = Reporter(
        json_events=reporting.json_events, verbosity=1 if reporting.verbose else -1, on_progress=progress
    )
    commands.run(plans, executor, reporter, overwrite=first_options.existing.overwrite)
    return [output_plan.options.output for output_plan in plans]


def verify(output: StrPath, against: StrPath | None = None, **options: Any) -> Report:
    """Check an output, as `ktconvert verify` does.

    output   path of the output
    against  the source checkpoint (a path or a hub id), or a different output, to compare with
    options  the other options of `ktconvert verify --help-all`, with underscores: quant_method, numa, full ...
    Returns a report, which is true if no check failed (`ok`). `sentence` is None then, else the first problem and its
    remedy; `problems` lists all problems, `checks` the result of each check, `notes` remarks.
    Raises UsageError for unknown options and invalid values, and the KTConvertError of a path that holds no output.
    """
    from ktconvert.pipeline.report.progress import Reporter
    from ktconvert.pipeline.verify.verify import verify as verify_output

    given = {"output": output, "against": against, **options}
    settings = convert_options(VerifyOptions, given, list_parameters(VerifyOptions))
    return verify_output(with_values(settings, arch_row=settings.arch.load_text()), Reporter(verbosity=-1))
