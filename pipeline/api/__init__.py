"""Conversion of mixture-of-experts checkpoints into expert weights for the CPU and the GPU, and inference with them.

Only the names in `__all__` are public: CHANGELOG.md lists changes, and before 1.0 only a new minor version removes
names. Every other module is private. (In the repository, this file is pipeline/api/__init__.py. Modules are imported
when they are used: converting needs no torch.)

Options of the command line are keyword arguments with underscores, and have the same defaults:

>>> import ktconvert
>>> (plan,) = ktconvert.plan("cpu", input="model", output="model-int8", quant_method="int8", numa=1)
>>> plan.facts["method"], len(plan.units)
('AMXINT8', 2)
>>> ktconvert.convert("cpu", input="model", output="model-int8", quant_method="int8", numa=1)
[PosixPath('.../model-int8')]
>>> report = ktconvert.verify("model-int8", against="model")
>>> report.sentence is None, [check.name for check in report.checks][-2:]
(True, ['hashes', 'source'])

Failures raise KTConvertError with the sentence and the exit code of the command line:

>>> ktconvert.plan("cpu", input="nowhere", output="out")
Traceback (most recent call last):
ktconvert.layouts.errors.InputError: ...

KTMoEWrapper computes one layer's experts with torch, as kt-kernel's class of the same name does:

>>> import torch
>>> experts = ktconvert.KTMoEWrapper(
...     layer_idx=0, num_experts=8, num_experts_per_tok=2, hidden_size=256, moe_intermediate_size=256,
...     gpu_experts_mask=None, cpuinfer_threads=1, threadpool_count=1, weight_path="model-int8",
...     chunked_prefill_size=512, method="AMXINT8",
... )
>>> experts.load_weights(torch.arange(8))
>>> hidden, ids = torch.ones(3, 256, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3)
>>> experts.forward(hidden, ids, torch.full((3, 2), 0.5), None).shape
torch.Size([3, 256])

KTExperts computes the same with NumPy arrays of BF16 bits, and without torch:

>>> import numpy as np
>>> experts = ktconvert.KTExperts.load("model-int8", layer=0)
>>> ids, weights = np.array([[0, 1]] * 3), np.full((3, 2), 0.5, np.float32)
>>> experts.forward(np.zeros((3, experts.hidden), np.uint16), ids, weights).shape
(3, 256)

KTConvertConfig loads converted experts into a model of transformers:

>>> from transformers import AutoModelForCausalLM
>>> config = ktconvert.KTConvertConfig(cpu_weights="model-int8", threads=1)
>>> model = AutoModelForCausalLM.from_pretrained("model", quantization_config=config, dtype="bfloat16")
>>> model(torch.tensor([[1, 2, 3]])).logits.shape[:2]
torch.Size([1, 3])
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from os import PathLike
    from pathlib import Path
    from typing import TypeAlias, Unpack

    from ktconvert.layouts.errors import KTConvertError
    from ktconvert.native_quant import Experts as KTExperts
    from ktconvert.native_quant import KTConvertConfig, KTMoEWrapper
    from ktconvert.pipeline import __version__
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

__all__ = ["KTConvertConfig", "KTConvertError", "KTExperts", "KTMoEWrapper", "__version__", "convert", "plan", "verify"]

Function = TypeVar("Function", bound="Callable[..., Any]")

_MODULES = {
    "KTConvertConfig": ("native_quant", "KTConvertConfig"),
    "KTConvertError": ("layouts.errors", "KTConvertError"),
    "KTExperts": ("native_quant", "Experts"),
    "KTMoEWrapper": ("native_quant", "KTMoEWrapper"),
    "__version__": ("pipeline", "__version__"),
}


def _require_names(example: str) -> Callable[[Function], Function]:
    """Return a decorator that refuses positional arguments after the first, and names one: `example`."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if len(arguments) > 1:
                remedy = f"name the arguments after the first, as in {example}={arguments[1]!r}"
                raise TypeError(f"{function.__name__}: {remedy}")
            return function(*arguments, **options)

        return cast(Function, call)

    return decorate


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
@_require_names("output")
def plan(command: str, /, **options: Any) -> list[Plan]:
    """Plan what `ktconvert COMMAND` would write; read only headers, write nothing.

    command  cpu, gpu, calibrate, dequantize, fetch, merge, merge-adapter or resplit
    options  the options of its --help: input, output, quant_method ...
    Returns a plan for each output: `facts` describe the output (method, sizes, layers), `notes` are remarks, `units`
    are the files of weights.
    Raises ValueError for unknown options and values, KTConvertError for an input that cannot be converted so.
    """
    from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS
    from ktconvert.pipeline.plans import commands

    if command not in CONVERSION_OPTIONS:
        raise ValueError(f"unknown command {command!r}; choose one of {', '.join(CONVERSION_OPTIONS)}")
    return commands.make_plans(commands.make_options(command, **options))


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
@_require_names("output")
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


@_require_names("against")
def verify(output: str | PathLike[str], **options: Unpack[VerifyArguments]) -> Report:
    """Check an output, as `ktconvert verify` does.

    output   path of the output
    options  the options of its --help: against, quant_method, numa, full ...
    Returns a report. `sentence` is None if no check failed, else the first problem and its remedy; `problems` lists all
    problems, `checks` the result of each check, `notes` remarks.
    Raises KTConvertError if the path holds no output, ValueError for unknown options and values.
    """
    from ktconvert.pipeline.options.arguments import VerifyArguments
    from ktconvert.pipeline.options.declare import convert_options, with_values
    from ktconvert.pipeline.options.queries import VerifyOptions
    from ktconvert.pipeline.report.progress import Reporter
    from ktconvert.pipeline.verify.verify import verify as verify_output

    names = ("output", *VerifyArguments.__annotations__)
    settings = convert_options(VerifyOptions, {"output": output, **options}, names)
    return verify_output(with_values(settings, arch_row=settings.arch.load_text()), Reporter(verbosity=-1))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        module, attribute = _MODULES[name]
        return getattr(importlib.import_module(f"ktconvert.{module}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
