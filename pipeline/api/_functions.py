"""The public functions `plan`, `convert` and `verify`. __init__.pyi lists their options, for editors and mypy."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from ktconvert._results import KTPlan, KTReport, describe_plan, describe_report
from ktconvert.layouts.errors import ArgumentError
from ktconvert.native_quant.runtime.arguments import check_calls
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
from ktconvert.pipeline.options.option_groups import ConversionOptions, Reporting
from ktconvert.pipeline.options.python_names import use_python_names
from ktconvert.pipeline.options.queries import VerifyOptions
from ktconvert.pipeline.options.types import ChoiceList, PathOrHubId, Size

if TYPE_CHECKING:
    from concurrent.futures import Executor

StrPath = str | PathLike[str]
PASS_EXECUTOR = "pass an Executor to ktconvert.convert"
# Options of the command line that Python lacks -> what to do instead
COMMAND_LINE_ONLY = {
    "dry_run": "call ktconvert.plan",
    **dict.fromkeys(("executor", "executor_timeout", "part"), PASS_EXECUTOR),
}
# `verify` returns its report, and prints nothing.
PRINTING = {"report", "run", *(each.name for each in option_fields(Reporting))}
# Commands that are no conversions -> what to do in Python
OTHER_COMMANDS = {
    "verify": "call ktconvert.verify",
    "resume": "call ktconvert.convert again with the same arguments",
}


def list_parameters(cls: type[Options]) -> dict[str, inspect.Parameter]:
    """Return the arguments of the functions that are options of a command, by their names."""
    excluded = {*COMMAND_LINE_ONLY, *(PRINTING if cls is VerifyOptions else ())}
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


@functools.cache
def list_names() -> dict[str, frozenset[str]]:
    """Return the names of the arguments of each command that Python can call."""
    commands: dict[str, type[Options]] = {**CONVERSION_OPTIONS, "verify": VerifyOptions}
    return {command: frozenset(list_parameters(cls)) for command, cls in commands.items()}


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


def write_type(annotation: Any) -> str:
    """Return the source of a type. Python's own functions write it differently in each version."""
    arguments = get_args(annotation)
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return " | ".join(map(write_type, arguments))
    if get_origin(annotation) is Literal:
        return f"Literal[{', '.join(map(json.dumps, arguments))}]"
    if arguments:
        origin: Any = get_origin(annotation)
        return f"{origin.__name__}[{', '.join(map(write_type, arguments))}]"
    return "None" if annotation is NoneType else str(annotation.__name__)


def write_parameter(parameter: inspect.Parameter) -> str:
    """Return the source of a parameter: name, type and default."""
    default = write_default(parameter)
    return f"{parameter.name}: {write_type(parameter.annotation)}{default and f' = {default}'}"


def write_default(parameter: inspect.Parameter) -> str:
    """Return the source of a parameter's default; empty if it has none."""
    if parameter.default is parameter.empty:
        return ""
    return json.dumps(parameter.default) if isinstance(parameter.default, str) else str(parameter.default)


@check_calls()
def plan(
    command: str, /, input: str | PathLike[str] | None = None, output: str | PathLike[str] | None = None, **options: Any
) -> list[KTPlan]:
    """Plan what `ktconvert COMMAND` would write; read only headers, write nothing.

    command  "cpu", "gpu", "calibrate", "dequantize", "fetch", "merge", "merge-adapter" or "resplit"
    input    path or hub id of the checkpoint; required
    output   path of the directory to write; required
    options  the other options, which `ktconvert COMMAND --help-all` lists, with underscores: quant_method, threads ...
    Returns a plan for each output. Raises UsageError, a ValueError, for unknown options, invalid values and options
    that do not go together, and another KTConvertError for an input that cannot be converted so. Only convert checks
    whether memory (max_memory) and disk suffice, and whether it may write to the output.
    """
    from ktconvert.pipeline.plans import commands

    cls = _find_options(command)
    with use_python_names(cls) as rename:
        plans = commands.make_plans(_make_options(cls, input, output, options))
        return [describe_plan(each, rename) for each in plans]


def _find_options(command: object) -> type[ConversionOptions]:
    """Return the options of a conversion. Raises ArgumentError if there is none of this name."""
    if isinstance(command, str) and command in CONVERSION_OPTIONS:
        return CONVERSION_OPTIONS[command]
    word = str(command)
    if word in OTHER_COMMANDS:
        remedy = OTHER_COMMANDS[word]
    elif near := difflib.get_close_matches(word.lower(), CONVERSION_OPTIONS, 1, cutoff=0.7):
        remedy = f"did you mean {near[0]!r}?"
    else:
        remedy = f"plan and convert take one of {', '.join(map(repr, CONVERSION_OPTIONS))}"
    raise ArgumentError(f"{command!r} is not a conversion; {remedy}")


def _make_options(
    cls: type[ConversionOptions], input: StrPath | None, output: StrPath | None, options: Mapping[str, Any]
) -> ConversionOptions:
    """Return the options of a conversion. Raises ArgumentError, and UsageError if they contradict each other."""
    for name in options.keys() & COMMAND_LINE_ONLY.keys():
        raise ArgumentError(f"{name} is an option of the command line; {COMMAND_LINE_ONLY[name]}")
    if "progress" in options:
        raise ArgumentError("plan has no progress; give it to ktconvert.convert")
    paths = {name: path for name, path in (("input", input), ("output", output)) if path is not None}
    settings = convert_options(cls, {**paths, **options}, list_parameters(cls), list_names())
    settings.existing.require_consistent()
    return settings


@check_calls()
def convert(
    command: str,
    /,
    input: str | PathLike[str] | None = None,
    output: str | PathLike[str] | None = None,
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
    progress  function that is called with the bytes of input that are done, and all of them, from any thread; it is not
              called if the output is finished already. An error that it raises stops the work
    Returns the directories of the outputs. Raises the errors of plan, KTConvertError if the work fails, and
    KeyboardInterrupt after Ctrl-C or SIGTERM, when the running units are finished (a second signal ends the process).
    The same call then resumes the work.
    """
    from ktconvert.pipeline.plans import commands
    from ktconvert.pipeline.report.progress import Reporter

    if executor is not None and not hasattr(executor, "submit"):
        raise ArgumentError(f"executor must be a concurrent.futures.Executor, not {executor!r}")
    if progress is not None and not _takes_two(progress):
        raise ArgumentError(f"progress must be a function of two numbers of bytes, not {progress!r}")
    cls = _find_options(command)
    with use_python_names(cls) as rename:
        settings = _make_options(cls, input, output, options)
        reporting, existing = settings.reporting, settings.existing
        reporter = Reporter(
            json_events=reporting.json_events,
            verbosity=1 if reporting.verbose else -1,
            on_progress=progress,
            rename=rename,
        )
        plans = commands.make_plans(settings, reporter)
        for output_plan in plans if existing.force_unlock else ():
            commands.remove_lock(output_plan.locate(), reporter)
        commands.run(plans, executor, reporter, overwrite=existing.overwrite, trust_store=existing.trust_store)
    return [output_plan.options.output for output_plan in plans]


def _takes_two(function: Callable[..., object]) -> bool:
    """Return whether an object is a function that can be called with two arguments."""
    try:
        inspect.signature(function).bind(0, 0)
    except TypeError:
        return False
    except ValueError:  # a function in C without a signature may take them
        pass
    return True


@check_calls()
def verify(output: str | PathLike[str], against: str | PathLike[str] | None = None, **options: Any) -> KTReport:
    """Check an output, as `ktconvert verify` does.

    output   path of the output
    against  the source checkpoint (a path or a hub id), or a different output, to compare with
    options  the other options of `ktconvert verify --help-all`, with underscores: quant_method, numa, full ...
    Returns a report, which is true if no check failed. Raises UsageError, a ValueError, for unknown options, invalid
    values and options that do not go together, and another KTConvertError for a path that holds no output.
    """
    from ktconvert.pipeline.report.progress import Reporter
    from ktconvert.pipeline.verify.verify import verify as verify_output

    for name in sorted(options.keys() & PRINTING):
        raise ArgumentError(f"{name} is an option of the command line; verify returns its report and prints nothing")
    given = {"output": output, "against": against, **options}
    with use_python_names(VerifyOptions) as rename:
        settings = convert_options(VerifyOptions, given, list_parameters(VerifyOptions), list_names())
        report = verify_output(
            with_values(settings, arch_row=settings.arch.load_text()), Reporter(verbosity=-1, rename=rename)
        )
        return describe_report(report, rename)


def describe_options(cls: type[Options]) -> dict[str, tuple[inspect.Parameter, str]]:
    """Return name -> (parameter, meaning) of the options of a command, without its paths."""
    parameters = list_parameters(cls)
    rows = {}
    with use_python_names(cls) as rename:
        for each in option_fields(cls):
            if each.name in parameters and each.name not in ("input", "output"):
                option: Any = each.declaration
                meaning = f"Accepted and ignored: {option.ignored}." if option.ignored else option.help
                rows[each.name] = parameters[each.name], rename(meaning)
    return rows


def group_options(commands: Mapping[str, type[Options]]) -> dict[str, dict[str, tuple[inspect.Parameter, str]]]:
    """Return title -> options: those of each command, and those that all conversions share."""
    rows = {command: describe_options(cls) for command, cls in commands.items()}
    first, *others = rows.values()
    shared = {name: row for name, row in first.items() if others and all(own.get(name) == row for own in others)}
    own_rows = {
        command: {name: row for name, row in own.items() if name not in shared} for command, own in rows.items()
    }
    return own_rows | ({"all conversions": shared} if shared else {})


def _list_options(commands: Mapping[str, type[Options]]) -> str:
    """Return a paragraph for help(), with the meaning, values and default of each option of one or several commands."""
    meanings: dict[str, str] = {}
    values: dict[str, dict[str, str]] = {}  # name -> values and default, by command
    for command, cls in commands.items():
        for name, (parameter, meaning) in describe_options(cls).items():
            meanings.setdefault(name, meaning)
            values.setdefault(name, {})[command] = _describe_values(parameter)
    width = max(map(len, meanings)) + 2
    lines = []
    for name, meaning in meanings.items():
        by_command = values[name]
        texts = {*by_command.values()}
        if len(texts) > 1:
            texts = {f"{command}: {text}" for command, text in by_command.items() if text}
        line = f"{name:{width}}{meaning} {' '.join(f'[{text}]' for text in sorted(texts) if text)}"
        lines += textwrap.wrap(line, 112, subsequent_indent=" " * width, break_on_hyphens=False)
    heading = "Options (docs/reference/python.md lists those of each command):"
    return textwrap.indent("\n".join(["", heading, *lines, ""]), "    ")


def _describe_values(parameter: inspect.Parameter) -> str:
    """Return the values of an option that has a list of them, and its default or "required"; "" for neither."""
    kinds = [parameter.annotation, *get_args(parameter.annotation)]
    words = dict.fromkeys(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))
    default = f"default {write_default(parameter)}"
    if parameter.default is parameter.empty:
        default = "required"
    elif parameter.default in (None, False, ()):
        default = ""
    return "; ".join(filter(None, (", ".join(map(repr, words)), default)))


for _functions, _commands in (((plan, convert), CONVERSION_OPTIONS), ((verify,), {"verify": VerifyOptions})):
    _options = _list_options(_commands)
    for _function in _functions:
        _function.__doc__ = f"{_function.__doc__}{_options}"
