"""The public functions `plan`, `convert` and `verify`. Their signatures follow from the options of the commands."""

from __future__ import annotations

import functools
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_type_hints, overload

from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.options import arguments as types_of_arguments
from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS
from ktconvert.pipeline.options.declare import REQUIRED, Options, convert_options, option_fields, with_values
from ktconvert.pipeline.options.queries import VerifyOptions

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from os import PathLike
    from pathlib import Path
    from typing import TypeAlias, Unpack

    from ktconvert.pipeline.engine.plan import Plan
    from ktconvert.pipeline.options.arguments import (
        CalibrateArguments,
        CpuArguments,
        DequantizeArguments,
        FetchArguments,
        GpuArguments,
        MergeAdapterArguments,
        MergeArguments,
        ResplitArguments,
        VerifyArguments,
    )
    from ktconvert.pipeline.verify.verify import Report

    Progress: TypeAlias = Callable[[int, int], object]

Function = TypeVar("Function", bound=Callable[..., Any])


def _describe_options(example: str, settings: Mapping[str, type[Options]]) -> Callable[[Function], Function]:
    """Return a decorator that puts the options of commands into the function's signature, for help() and editors.

    The function refuses positional arguments after the first, and names one: `example`.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if len(arguments) > 1:
                remedy = f"name the arguments after the first, as in {example}={arguments[1]!r}"
                raise TypeError(f"{function.__name__}: {remedy}")
            return function(*arguments, **options)

        signature = inspect.signature(function)
        *parameters, _ = signature.parameters.values()
        parameters += _list_option_parameters(settings)
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return cast(Function, call)

    return decorate


def _list_option_parameters(settings: Mapping[str, type[Options]]) -> Iterator[inspect.Parameter]:
    """Yield the options of commands as keyword arguments.

    A default that differs between the commands is a dictionary: command -> default.
    """
    types: dict[str, list[Any]] = defaultdict(list)
    defaults: dict[str, dict[str, Any]] = defaultdict(dict)
    for command, cls in settings.items():
        hints = _find_argument_types(cls)
        for option_field in option_fields(cls):
            if option_field.name in hints:
                types[option_field.name].append(hints[option_field.name])
                defaults[option_field.name][command] = option_field.default
    for name, by_command in defaults.items():
        known = {command: default for command, default in by_command.items() if default is not REQUIRED}
        first = next(iter(known.values()), inspect.Parameter.empty)
        default = first if all(other == first for other in by_command.values()) else known or first
        annotation = functools.reduce(operator.or_, types[name])
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _find_argument_types(cls: type[Options]) -> dict[str, Any]:
    """Return the types of a command's keyword arguments by their names."""
    return get_type_hints(getattr(types_of_arguments, f"{cls.__name__.removesuffix('Options')}Arguments"))


@overload
def plan(command: Literal["cpu"], /, **options: Unpack[CpuArguments]) -> list[Plan]: ...
@overload
def plan(command: Literal["gpu"], /, **options: Unpack[GpuArguments]) -> list[Plan]: ...
@overload
def plan(command: Literal["calibrate"], /, **options: Unpack[CalibrateArguments]) -> list[Plan]: ...
@overload
def plan(command: Literal["dequantize"], /, **options: Unpack[DequantizeArguments]) -> list[Plan]: ...
@overload
def plan(command: Literal["fetch"], /, **options: Unpack[FetchArguments]) -> list[Plan]: ...
@overload
def plan(command: Literal["merge"], /, **options: Unpack[MergeArguments]) -> list[Plan]: ...
@overload
def plan(command: Literal["merge-adapter"], /, **options: Unpack[MergeAdapterArguments]) -> list[Plan]: ...
@overload
def plan(command: Literal["resplit"], /, **options: Unpack[ResplitArguments]) -> list[Plan]: ...
@_describe_options("output", CONVERSION_OPTIONS)
def plan(command: str, /, **options: Any) -> list[Plan]:
    """Plan what `ktconvert COMMAND` would write; read only headers, write nothing.

    command  cpu, gpu, calibrate, dequantize, fetch, merge, merge-adapter or resplit
    options  the options of its --help: input, output, quant_method ...; a default that differs between commands is a
             dictionary in the signature
    Returns a plan for each output: `facts` describe the output (method, sizes, layers), `notes` are remarks, `units`
    are the files of weights.
    Raises KTConvertError for unknown options and values, and for an input that cannot be converted so.
    """
    from ktconvert.pipeline.plans import commands

    if command not in CONVERSION_OPTIONS:
        raise UsageError(f"unknown command {command!r}; choose one of {', '.join(CONVERSION_OPTIONS)}.")
    cls = CONVERSION_OPTIONS[command]
    return commands.make_plans(convert_options(cls, options, _find_argument_types(cls)))


@overload
def convert(
    command: Literal["cpu"],
    /,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    **options: Unpack[CpuArguments],
) -> list[Path]: ...
@overload
def convert(
    command: Literal["gpu"],
    /,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    **options: Unpack[GpuArguments],
) -> list[Path]: ...
@overload
def convert(
    command: Literal["calibrate"],
    /,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    **options: Unpack[CalibrateArguments],
) -> list[Path]: ...
@overload
def convert(
    command: Literal["dequantize"],
    /,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    **options: Unpack[DequantizeArguments],
) -> list[Path]: ...
@overload
def convert(
    command: Literal["fetch"],
    /,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    **options: Unpack[FetchArguments],
) -> list[Path]: ...
@overload
def convert(
    command: Literal["merge"],
    /,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    **options: Unpack[MergeArguments],
) -> list[Path]: ...
@overload
def convert(
    command: Literal["merge-adapter"],
    /,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    **options: Unpack[MergeAdapterArguments],
) -> list[Path]: ...
@overload
def convert(
    command: Literal["resplit"],
    /,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    **options: Unpack[ResplitArguments],
) -> list[Path]: ...
@_describe_options("output", CONVERSION_OPTIONS)
def convert(
    command: str, /, *, executor: Executor | None = None, progress: Progress | None = None, **options: Any
) -> list[Path]:
    """Run `ktconvert COMMAND`: plan, make missing units, and publish each output in one step.

    executor  any concurrent.futures.Executor whose workers see input and output under the same paths; None: threads of
              this process
    progress  is called with the bytes of input that are done, and all of them, from any thread
    options   as for plan; only warnings are printed, with verbose=True also the progress
    Returns the directories of the outputs. Raises the errors of plan, and KTConvertError if the work fails; the same
    call then resumes it.
    """
    from ktconvert.pipeline.plans import commands
    from ktconvert.pipeline.report.progress import Reporter

    plans: list[Plan] = plan(command, **options)  # type: ignore[call-overload]  # any command and options
    first_options = plans[0].options
    reporting = first_options.reporting
    reporter = Reporter(
        json_events=reporting.json_events, verbosity=1 if reporting.verbose else -1, on_progress=progress
    )
    commands.run(plans, executor, reporter, overwrite=first_options.existing.overwrite)
    return [output_plan.options.output for output_plan in plans]


@_describe_options("against", {"verify": VerifyOptions})
def verify(output: str | PathLike[str], **options: Unpack[VerifyArguments]) -> Report:
    """Check an output, as `ktconvert verify` does.

    output   path of the output
    options  the options of its --help: against, quant_method, numa, full ...
    Returns a report, which is true if no check failed (`ok`). `sentence` is None then, else the first problem and its
    remedy; `problems` lists all problems, `checks` the result of each check, `notes` remarks.
    Raises KTConvertError for unknown options and values, and if the path holds no output.
    """
    from ktconvert.pipeline.report.progress import Reporter
    from ktconvert.pipeline.verify.verify import verify as verify_output

    names = ("output", *_find_argument_types(VerifyOptions))
    settings = convert_options(VerifyOptions, {"output": output, **options}, names)
    return verify_output(with_values(settings, arch_row=settings.arch.load_text()), Reporter(verbosity=-1))
