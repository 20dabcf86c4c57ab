"""The commands that write an output: their settings, requests and plans, of one output or several."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from ktconvert.layouts.errors import InputError, OutputError, UsageError
from ktconvert.layouts.files import publish
from ktconvert.layouts.outputs.opening import TRAIN
from ktconvert.native_quant import machine, placement
from ktconvert.native_quant.own_cpus import use_own_cpus
from ktconvert.pipeline.engine.execute import execute
from ktconvert.pipeline.engine.existing import changed_files, saved_plan
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.engine.plan import Plan, Request, SavedPlan
from ktconvert.pipeline.engine.recorded_inputs import compare_inputs
from ktconvert.pipeline.options.declare import PlannedOptions, build, checked, leaves, plain, with_values
from ktconvert.pipeline.options.option_groups import ConversionOptions
from ktconvert.pipeline.options.quantization import (
    CalibrateOptions,
    CpuOptions,
    DequantizeOptions,
    GpuOptions,
    MergeAdapterOptions,
    MergeOptions,
    QuantizationOptions,
    ResplitOptions,
)
from ktconvert.pipeline.options.training_options import TrainOptions
from ktconvert.pipeline.options.types import OneOrMore
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural

AnyOptions = TypeVar("AnyOptions", bound=PlannedOptions)

# A command's plan is made by plan_NAME in the module of its name.
COMMANDS: Mapping[str, type[ConversionOptions]] = {
    "cpu": CpuOptions,
    "gpu": GpuOptions,
    "calibrate": CalibrateOptions,
    "dequantize": DequantizeOptions,
    "merge": MergeOptions,
    "merge-adapter": MergeAdapterOptions,
    "resplit": ResplitOptions,
}
# The commands whose shards --verify-inputs hashes.
HASHED = (QuantizationOptions, CalibrateOptions, DequantizeOptions, TrainOptions)


def request(command: str, **options: Any) -> Request[ConversionOptions]:
    """The request of a command with options by the names of --help with underscores; ValueError for others."""
    return Request(command, _options(COMMANDS[command], options))


def saved_request(output: Path, saved: SavedPlan) -> Request[ConversionOptions]:
    """The request of plan.json. Raises OutputError for another ktconvert's command, and for damaged settings."""
    if saved.command == TRAIN:
        what = "a training was begun there, which `ktconvert status` describes and `ktconvert resume` finishes"
        raise OutputError(f"{output}: {what}.")
    if saved.command not in COMMANDS:
        raise OutputError(f"{output}: was begun by `ktconvert {saved.command}`, which this one does not have.")
    return Request(saved.command, restored(COMMANDS[saved.command], output, saved, input=saved.input))


def restored(cls: type[AnyOptions], output: Path, saved: SavedPlan, **more: Any) -> AnyOptions:
    """The settings that plan.json has, and more of them. Raises OutputError for damaged ones."""
    settings, tuning = saved.settings, saved.tuning
    try:
        options = _options(cls, {**more, "output": str(output), **settings, **tuning})
        if wrong := sorted({*settings} - {*options.settings}) or sorted({*tuning} - {*options.tuning}):
            raise ValueError(f"{wrong[0]} goes with none of the other options")
        if missing := {*options.settings} - {*settings}:
            raise ValueError(f"{min(missing)} is missing")
    except ValueError as error:
        raise OutputError(f"{output}: its plan cannot be understood ({error}); start over with --overwrite.") from error
    return options


def _options(cls: type[AnyOptions], values: Mapping[str, Any]) -> AnyOptions:
    """Settings of values as JSON or a caller has them. Raises ValueError, naming the option."""
    known = {leaf.name: leaf for leaf in leaves(cls)}
    if unknown := sorted({*values} - {*known}):
        raise ValueError(f"there is no option {unknown[0]}")
    return build(cls, {name: checked(known[name], plain(value)) for name, value in values.items()})


def outputs_of(request: Request[Any]) -> list[Request[Any]]:
    """An ordinary request for each output OUT-WORD, where an option has several words, which resumes alone; else the
    request itself. Raises UsageError where they cannot be made together.
    """
    options: ConversionOptions = request.options
    for leaf in leaves(type(options)):
        words = leaf.of(options).split(",") if isinstance(leaf.type, OneOrMore) else []
        if len(words) > 1:
            given = f"{leaf.flag} {','.join(words)}"
            _require_together(options, given, leaf.flag)
            if not request.output.name:
                raise UsageError(f"{given} adds to the name of the output, and {request.output} has none.")
            outputs = [request.output.with_name(f"{request.output.name}-{word}") for word in words]
            if len({os.path.realpath(output) for output in outputs}) < len(outputs):
                raise UsageError(f"{given}: a link makes one folder of {outputs[0]} and others; give another --output.")
            values = ({"output": output, leaf.name: word} for word, output in zip(words, outputs, strict=True))
            return [replace(request, options=with_values(options, **each)) for each in values]
    return [request]


def _require_together(options: ConversionOptions, given: str, flag: str) -> None:
    if options.part is not None:
        raise UsageError(f"{given}: --part shares out the files of one output; give one {flag} after the other.")
    if isinstance(options, QuantizationOptions) and options.calibrated:
        what = "GPTQ walks through the model once for each output, with what its own layers gave"
        remedy = f"give one {flag} after the other"
        raise UsageError(f"{given}: {what}; {remedy}.")


def plans_of(request: Request[Any], hashed: Callable[[int], None] | None = None) -> list[Plan]:
    """The plans of all outputs that a request asks for. hashed: is told how many bytes were hashed."""
    return [plan_request(each, hashed) for each in outputs_of(request)]


def plan_request(request: Request[Any], hashed: Callable[[int], None] | None = None) -> Plan:
    """The plan of a request for one output; UsageError for several. hashed: is told how many bytes were hashed."""
    if len(requests := outputs_of(request)) > 1:
        raise UsageError(f"{request.output}: one plan is for one output, and {len(requests)} are wanted.")
    name = request.command.replace("-", "_")
    module = importlib.import_module(f"ktconvert.pipeline.plans.{name}")
    collects = gc.isenabled()
    gc.disable()  # it takes a quarter of a large plan's time
    try:
        plan: Plan = getattr(module, f"plan_{name}")(request)
    finally:
        if collects:
            gc.enable()
    if hashed is not None and request.options.verify_inputs and isinstance(request.options, HASHED):
        plan = _with_hashes(plan, hashed)
    return compare_inputs(plan)


_hashed: dict[tuple[Path, int, int], str] = {}  # path, size and ctime, which nobody can set back -> sha256


def _with_hashes(plan: Plan, advance: Callable[[int], None]) -> Plan:
    """The plan with the sha256 of its shards; each is read once, however many outputs are made of it."""

    def one(path: Path) -> str:
        status = path.stat()
        key = (path, status.st_size, status.st_ctime_ns)
        if key not in _hashed:
            _hashed[key] = publish.sha256_file(path)
            advance(status.st_size)
        return _hashed[key]

    shards = [path for path, file in plan.files.items() if file.header_sha256 is not None]
    with ThreadPoolExecutor(plan.request.options.execution.threads, initializer=use_own_cpus) as pool:
        digests = dict(zip(shards, pool.map(one, shards), strict=True))
    files = {path: structs.replace(file, sha256=digests.get(path, file.sha256)) for path, file in plan.files.items()}
    return replace(plan, files=files)


def reopened(output: Path, tuning: Mapping[str, Any]) -> Plan:
    """The plan that was saved for an output, made again on another host or later, with other tuning; a walk with the
    threads with which it was begun, since sums depend on their number. Raises OutputError where there is none,
    InputError where its input is not what it was.
    """
    if (saved := saved_plan(locate(output))) is None:
        raise OutputError(f"{output}: no conversion into it was begun.")
    request = saved_request(output, saved)
    if isinstance(request.options, QuantizationOptions | CalibrateOptions) and request.options.machine.machine:
        tuning = {**tuning, "cpuinfer_threads": request.options.machine.machine["threads"]}
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
    """Make what a plan says, or those of several outputs of one input (plans_of), from wherever it stands: with threads
    of this process, or with the workers of any concurrent.futures.Executor, which see its input and output under the
    same paths and have this ktconvert. overwrite: as --overwrite.

    Returns False when there was nothing to do. Raises KtconvertError.
    """
    plans = [plan] if isinstance(plan, Plan) else plan
    return execute(plans, reporter or Reporter(), overwrite=overwrite, executor=executor, reopen=reopened)


def numa_notes(plan: Plan) -> Iterator[str]:
    """What to say of a plan of AMX weights where this machine's NUMA nodes or their memory do not suit it."""
    if "threadpool_count" not in plan.request.options.settings:
        return
    pools, parts, nodes = machine.pool_count(), plan.facts["numa"], machine.numa_nodes()
    if pools != parts:
        here = f"this machine has {plural(len(nodes), 'node')}"
        if pools < len(nodes):
            here = f"this process has CPU time for {plural(pools, 'thread')} (cgroup quota)"
        elif len(nodes) < (present := len(machine.machine_nodes())):
            here = f"this process may use {len(nodes)} of this machine's {present} nodes"
        yield f"the output is for {plural(parts, 'NUMA part')}; {here}: to run it here, pass --threadpool-count {pools}"
    size = sum(unit.bytes_out for unit in plan.units if unit.stage == plan.stages[0].name) // parts
    if shortages := placement.shortages([size] * parts, nodes, machine.node_memory_available()):
        yield f"run here, the output does not fit its NUMA nodes ({shortages}): some is read from another node, slowly"
