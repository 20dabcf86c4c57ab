"""Converts mixture-of-experts checkpoints into expert weights for the CPU and the GPU, and computes with them.

What `__all__` names is what programs may rely on: CHANGELOG.md says what changes, and before 1.0 only a new minor
version takes something away. Every other module is private, whatever its name. (This file is pipeline/api/__init__.py
in the repository, and nothing is imported before it is used: converting needs no torch.)

The command line's options are keyword arguments, with underscores; their defaults are the same:

>>> import ktconvert
>>> (plan,) = ktconvert.plan("cpu", input="model", output="model-int8", quant_method="int8", threadpool_count=1)
>>> plan.facts["method"], len(plan.units)
('AMXINT8', 2)
>>> ktconvert.convert("cpu", input="model", output="model-int8", quant_method="int8", threadpool_count=1, quiet=True)
[PosixPath('.../model-int8')]
>>> report = ktconvert.verify("model-int8", against="model")
>>> report.sentence is None, [check.name for check in report.checks][-2:]
(True, ['hashes', 'source'])

A failure that the command line explains in a sentence is a KtconvertError with that sentence and its exit code:

>>> ktconvert.plan("cpu", input="nowhere", output="out")
Traceback (most recent call last):
ktconvert.layouts.errors.InputError: ...

KTMoEWrapper computes one layer's experts with torch, in place of kt-kernel's class of that name:

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

KTConvertConfig puts converted experts into a model of transformers:

>>> from transformers import AutoModelForCausalLM
>>> config = ktconvert.KTConvertConfig(cpu_weights="model-int8", threads=1)
>>> model = AutoModelForCausalLM.from_pretrained("model", quantization_config=config, dtype="bfloat16")
>>> model(torch.tensor([[1, 2, 3]])).logits.shape[:2]
torch.Size([1, 3])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from os import PathLike
    from pathlib import Path

    from ktconvert.layouts.errors import KtconvertError
    from ktconvert.native_quant import KTConvertConfig, KTMoEWrapper
    from ktconvert.pipeline import __version__
    from ktconvert.pipeline.engine.plan import Plan
    from ktconvert.pipeline.verify.verify import Report

__all__ = ["KTConvertConfig", "KTMoEWrapper", "KtconvertError", "__version__", "convert", "plan", "verify"]

_MODULES = {
    "KTConvertConfig": "native_quant",
    "KTMoEWrapper": "native_quant",
    "KtconvertError": "layouts.errors",
    "__version__": "pipeline",
}


def plan(command: str, /, **options: Any) -> list[Plan]:
    """What `ktconvert COMMAND` would write, from headers alone; nothing is written.

    command  cpu, gpu, calibrate, dequantize, merge or resplit
    options  those of its --help: input, output, quant_method ...
    Returns a plan for each output. Its `facts` are what the output is (method, sizes, layers), `notes` what is worth
    knowing, `units` the files of weights.
    Raises ValueError for an option or value that the command does not have, KtconvertError for an input that cannot be
    converted so.
    """
    from ktconvert.pipeline.plans import commands

    if command not in commands.COMMANDS:
        raise ValueError(f"there is no command {command!r}: choose one of {', '.join(commands.COMMANDS)}")
    return commands.make_plans(commands.make_options(command, **options))


def convert(command: str, /, *, executor: Executor | None = None, **options: Any) -> list[Path]:
    """Do what `ktconvert COMMAND` does: plan, make what is missing, and let each output appear whole.

    executor  any concurrent.futures.Executor whose workers see input and output under the same paths; None: threads of
              this process
    options   as for plan; with quiet=True, warnings alone are printed
    Returns the directories of the outputs. Raises what plan raises, and KtconvertError where the work fails; the same
    call then goes on where it stopped.
    """
    from ktconvert.pipeline.plans import commands

    plans = plan(command, **options)
    chosen = plans[0].options
    commands.run(plans, executor, chosen.reporting.reporter, overwrite=chosen.existing.overwrite)
    return [each.options.output for each in plans]


def verify(
    output: str | PathLike[str],
    *,
    against: str | PathLike[str] | None = None,
    quant_method: str | None = None,
    numa: int | None = None,
    full: bool = False,
    threads: int | None = None,
) -> Report:
    """Check an output, as `ktconvert verify` does.

    against       the source (path or hub id), whose experts are quantized again, or another output
    quant_method  the method that it must have, and numa the number of NUMA parts; None: any
    full          measure the error of every expert, not of 8 per layer
    threads       None: the CPUs that this process may use
    Returns a report. Its `sentence` is None where all is well, else what is wrong and what to do; `problems` are all of
    them, `checks` what each check found, `notes` what is worth knowing.
    Raises KtconvertError for what is no output, and ValueError for a method that does not exist.
    """
    from pathlib import Path

    from ktconvert.pipeline.options.queries import METHODS, VerifyOptions
    from ktconvert.pipeline.report.progress import Reporter
    from ktconvert.pipeline.verify.verify import verify as verify_output

    if quant_method is not None and quant_method not in METHODS:
        raise ValueError(f"there is no method {quant_method!r}: choose one of {', '.join(METHODS)}")
    options = VerifyOptions(
        output=Path(output).expanduser().absolute(),
        against=None if against is None else str(against),
        numa=numa,
        quant_method=quant_method,
        full=full,
        cpuinfer_threads=threads,
    )
    return verify_output(options, Reporter(verbosity=-1))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"ktconvert.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
