"""Options and plans of the commands that write an output, for one output or several."""

from __future__ import annotations

import gc
import importlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from ktconvert.layouts.errors import InputError, OutputError, UnsupportedError, UsageError, bad_file
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.manifest import NAME as MANIFEST
from ktconvert.layouts.files.manifest import SourceFile
from ktconvert.layouts.outputs.opening import TRAIN, is_output, require_checkpoint
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.layouts.statistics.second_moments import SecondMoments
from ktconvert.native_quant import machine, placement
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.pipeline.engine.comparisons import compare_files
from ktconvert.pipeline.engine.execute import execute_plans
from ktconvert.pipeline.engine.existing import read_plan
from ktconvert.pipeline.engine.lock import JobShare, unlock
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.plan import Plan, SavedPlan
from ktconvert.pipeline.engine.recorded_inputs import compare_inputs
from ktconvert.pipeline.options.conversion_options import (
    CONVERSION_OPTIONS,
    CalibrateOptions,
    CpuOptions,
    DequantizeOptions,
    QuantizationOptions,
)
from ktconvert.pipeline.options.declare import (
    PlannedOptions,
    convert_options,
    option_fields,
    with_values,
)
from ktconvert.pipeline.options.model_options import TrainOptions
from ktconvert.pipeline.options.option_groups import ConversionOptions
from ktconvert.pipeline.options.types import ChoiceList
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural

AnyOptions = TypeVar("AnyOptions", bound=PlannedOptions)

VERIFY = "ktconvert verify {output}"
# Command -> the command to run next
NEXT = {
    "cpu": f"{VERIFY} --against {{input}}",
    "gpu": f"{VERIFY} --against {{input}}",
    "dequantize": f"{VERIFY} --against {{input}}",
    "fetch": VERIFY,
    "merge": VERIFY,
    "merge-adapter": f"{VERIFY} --against {{input}}",
    "resplit": VERIFY,
    "calibrate": "ktconvert cpu {input} OUT --scale imatrix --statistics {output}",
    "train": "ktconvert run {input}{cpu_weights} --adapter {output} --prompt Hello",
}
# Commands for which --verify-inputs hashes the shards of the input
HASHING = (QuantizationOptions, CalibrateOptions, DequantizeOptions, TrainOptions)


def make_options(command: str, **values: Any) -> ConversionOptions:
    """Return the options of a command from values named as in --help, with underscores; UsageError for other names."""
    return convert_options(CONVERSION_OPTIONS[command], values)


def restore_options(output: Path, saved: SavedPlan) -> ConversionOptions:
    """Return the options that plan.json holds. Raises OutputError for unknown commands and damaged settings."""
    if saved.command == TRAIN:
        problem = "contains an unfinished training; see `ktconvert status`, or finish it with `ktconvert resume`"
        raise OutputError(f"{output}: {problem}.")
    if saved.command not in CONVERSION_OPTIONS:
        raise OutputError(
            f"{output}: was begun by `ktconvert {saved.command}`, which this version lacks; use that version."
        )
    return load_options(CONVERSION_OPTIONS[saved.command], output, saved, input=saved.input)


def load_options(cls: type[AnyOptions], output: Path, saved: SavedPlan, **more: Any) -> AnyOptions:
    """Return the options that plan.json holds. Raises OutputError for damaged ones.

    more  values of options that plan.json does not hold
    """
    settings = saved.settings
    tuning = saved.tuning
    try:
        options = convert_options(cls, {**more, "output": str(output), **settings, **tuning})
        if unexpected := sorted({*settings} - {*options.settings}) or sorted({*tuning} - {*options.tuning}):
            raise UsageError(f"{unexpected[0]} contradicts the other options")
        if missing := {*options.settings} - {*settings}:
            raise UsageError(f"{min(missing)} is missing")
    except UsageError as error:
        raise OutputError(f"{output}: its plan cannot be read ({error.text}); start over with --overwrite.") from error
    return options


def split_outputs(options: Any) -> list[Any]:
    """Return the options of each output OUT-WORD if an option lists several words, else these options.

    Each output can be resumed by itself. Raises UsageError if the outputs cannot be made together.
    """
    for option_field in option_fields(type(options)):
        if not isinstance(option_field.click_type, ChoiceList):
            continue
        words = option_field.get(options).split(",")
        if len(words) > 1:
            text = f"{option_field.flag} {','.join(words)}"
            _require_combinable(options, text, option_field.flag)
            if not options.output.name:
                raise UsageError(f"{text}: {options.output} has no name to append the method to; give a named folder.")
            outputs = [options.output.with_name(f"{options.output.name}-{word}") for word in words]
            if len({os.path.realpath(output) for output in outputs}) < len(outputs):
                raise UsageError(f"{text}: {outputs[0]} and a second output are the same folder; change --output.")
            return [
                with_values(options, **{"output": output, option_field.name: word})
                for word, output in zip(words, outputs, strict=True)
            ]
    return [options]


def _require_combinable(options: ConversionOptions, text: str, flag: str) -> None:
    """Raise UsageError if the outputs of an option with several words cannot be made together.

    text  the option as it was given, for messages
    """
    remedy = f"give one {flag} at a time"
    if options.part is not None:
        raise UsageError(f"{text}: --part divides the files of one output; {remedy}.")
    if isinstance(options, CpuOptions) and options.chooses_map:
        raise UsageError(f"{text}: --method-map auto chooses the methods of one output; leave out {flag}.")
    if isinstance(options, QuantizationOptions) and options.calibrated:
        raise UsageError(f"{text}: GPTQ runs the model once per output, each with its own quantized layers; {remedy}.")
    if isinstance(options, QuantizationOptions) and options.streaming.stream:
        raise UsageError(f"{text}: --stream would fetch the weights once per output; {remedy}, or leave out --stream.")


def make_plans(options: Any, reporter: Reporter | None = None) -> list[Plan]:
    """Return the plans of all outputs that options ask for.

    reporter  as for build_output_plan
    """
    return [build_output_plan(output_options, reporter) for output_options in split_outputs(options)]


def make_plan(options: Any, reporter: Reporter | None = None) -> Plan:
    """Return the plan of one output. Raise UsageError if options ask for several.

    reporter  as for build_output_plan
    """
    if len(outputs := split_outputs(options)) > 1:
        raise UsageError(f"{options.output}: a plan describes one output, not {len(outputs)}; give one method.")
    return build_output_plan(options, reporter)


def build_output_plan(options: Any, reporter: Reporter | None = None) -> Plan:
    """Return the plan of one output that split_outputs has returned.

    reporter  shows how sampled weights are measured, and which files are hashed; None: files are not hashed
    """
    name = options.command.replace("-", "_")
    module = importlib.import_module(f"ktconvert.pipeline.plans.{name}")
    was_enabled = gc.isenabled()
    gc.disable()  # it would take a quarter of a large plan's time
    try:
        progress = (reporter or Reporter(verbosity=-2),) if isinstance(options, CpuOptions) else ()
        plan: Plan = getattr(module, f"plan_{name}")(options, *progress)
    except (InputError, UnsupportedError):
        _require_checkpoint(options)
        raise
    finally:
        if was_enabled:
            gc.enable()
    files = plan.files
    if reporter is not None and not options.dry_run and options.verify_inputs and isinstance(options, HASHING):
        files = _add_hashes(files, plan.options.execution.thread_count, reporter.report_hash)
    stages = plan.stages if plan.download is None else tuple(map(plan.download.fetch_before, plan.stages))
    stages = compare_inputs(files, stages)
    return replace(plan, files=files, stages=stages, next_command=_name_next_command(plan))


def _name_next_command(plan: Plan) -> str:
    """Return the command to run after a plan, with the input statistics that it needs."""
    options = plan.options
    text = NEXT[options.command].format(
        output=shlex.quote(str(options.output)),
        input=shlex.quote(options.input),
        cpu_weights=_name_cpu_weights(options) if isinstance(options, TrainOptions) else "",
    )
    if isinstance(options, CpuOptions) and {SecondMoments.manifest_key, Imatrix.manifest_key} & {*plan.facts}:
        for flag, path in (("--imatrix", options.importance.imatrix), ("--statistics", options.importance.statistics)):
            text += "" if path is None else f" {flag} {shlex.quote(str(path))}"
    return text


def _name_cpu_weights(options: TrainOptions) -> str:
    return "" if options.cpu_weights is None else f" --cpu-weights {shlex.quote(str(options.cpu_weights))}"


_hashes: dict[tuple[Path, int, int], str] = {}  # (path, size, ctime) -> sha256; programs cannot set ctime


def _require_checkpoint(options: Any) -> None:
    """Raise InputError if a command that reads a checkpoint was given converted experts, an adapter, or OUT first."""
    path, output = Path(options.input), options.output
    if options.command in ("merge", "resplit"):
        return
    is_foreign_model = (output / "config.json").is_file() and not (output / MANIFEST).exists()
    if is_foreign_model and (not path.exists() or is_output(path)):
        raise bad_file(path, f"is not a model, but {output} is one", "give the model first, then the output")
    folder = path.parent if path.is_file() and path.suffix == ".safetensors" else path
    if folder.is_dir():
        resplit = "; `ktconvert resplit` changes the number of NUMA slices" if options.command == "cpu" else ""
        require_checkpoint(folder, f"give the model that they were made from{resplit}")


def _add_hashes(
    files: Mapping[Path, SourceFile], threads: int, advance: Callable[[int], None]
) -> Mapping[Path, SourceFile]:
    """Return the files with the sha256 of shards; each is read once, however many outputs are made from it."""

    def hash_shard(path: Path) -> str:
        status = path.stat()
        key = (path, status.st_size, status.st_ctime_ns)
        if key not in _hashes:
            _hashes[key] = publish.sha256_file(path)
            advance(status.st_size)
        return _hashes[key]

    shards = [path for path, file in files.items() if file.header_sha256 is not None]
    with ThreadPoolExecutor(threads, initializer=unbind_thread) as pool:
        digests = dict(zip(shards, pool.map(hash_shard, shards), strict=True))
    return {path: structs.replace(file, sha256=digests.get(path, file.sha256)) for path, file in files.items()}


def reopen_plan(output: Path, tuning: Mapping[str, Any]) -> Plan:
    """Make the saved plan of an output again, on a different host or later, with other tuning.

    A calibration keeps its number of threads, since its sums depend on it. Raises OutputError if no plan is saved, and
    InputError if the input has changed.
    """
    if (saved := read_plan(locate(output))) is None:
        raise OutputError(f"{output}: not an unfinished conversion.")
    options = restore_options(output, saved)
    if isinstance(options, QuantizationOptions | CalibrateOptions) and options.hardware.machine:
        tuning = {**tuning, "threads": options.hardware.first_machine["threads"]}
    plan = make_plan(with_values(options, **tuning))
    changed, touched = compare_files(saved.source, plan)
    if changed or touched:
        problems = changed or [f"{name} was modified" for name in touched]
        raise InputError(f"{options.input} is not the input of {output}: {'; '.join(problems[:5])}.")
    return plan


def run(
    plan: Plan | Sequence[Plan],
    executor: Executor | None = None,
    reporter: Reporter | None = None,
    *,
    overwrite: bool = False,
    trust_store: bool = False,
) -> bool:
    """Carry out a plan, or the plans of several outputs of one input (make_plans), from their current state.

    executor     any concurrent.futures.Executor whose workers see input and output under the same paths and have this
                 ktconvert; None: threads of this process
    overwrite    as --overwrite
    trust_store  as --trust-store

    Returns False if there was nothing to do. Raises KTConvertError.
    """
    plans = [plan] if isinstance(plan, Plan) else plan
    return execute_plans(
        plans,
        reporter or Reporter(),
        overwrite=overwrite,
        trust_store=trust_store,
        executor=executor,
        reopen=reopen_plan,
    )


def remove_lock(paths: Paths, reporter: Reporter, share: JobShare | None = None) -> None:
    """Remove a stale lock (--force-unlock), and report the process that held it."""
    for removed in unlock(paths.root, paths.output, share):
        reporter.warn(f"--force-unlock removed {removed}")


def numa_notes(plan: Plan) -> Iterator[str]:
    """Yield notes on a plan for NUMA slices that do not match this machine's nodes or their memory."""
    if "numa" not in plan.options.settings:
        return
    pools = machine.pool_count()
    slices = plan.facts["numa"]
    nodes = machine.numa_nodes()
    if pools != slices:
        reason = f"this machine has {plural(len(nodes), 'node')}"
        if pools < len(nodes):
            reason = f"this process has CPU time for {plural(pools, 'thread')} (cgroup quota)"
        elif len(nodes) < (node_count := len(machine.machine_nodes())):
            reason = f"this process may use {len(nodes)} of this machine's {node_count} nodes"
        yield f"the output has {plural(slices, 'NUMA slice')}; {reason}: for kt-kernel here, pass --numa {pools}"
    slice_bytes = sum(unit.bytes_out for unit in plan.units if unit.stage == plan.stages[0].name) // slices
    if shortages := placement.describe_shortages([slice_bytes] * slices, nodes, machine.node_memory_available()):
        yield f"the output does not fit this machine's NUMA nodes ({shortages}): some reads will cross nodes"
