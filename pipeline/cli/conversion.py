"""The commands that make an output: `cpu`, `gpu`, `calibrate`, `dequantize`, `merge`, `resplit` and others."""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import ResourceError, UsageError, absent_path, bad_file
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.unfinished import WORK_SUFFIX
from ktconvert.layouts.outputs.opening import TRAIN
from ktconvert.pipeline.cli import dry_run, preconditions
from ktconvert.pipeline.cli.command import MultiValueCommand, command, find_given_options
from ktconvert.pipeline.engine.backends import THREADS, open_backend, require_backend
from ktconvert.pipeline.engine.execute import execute_plans, remove_work_directory, require_possible
from ktconvert.pipeline.engine.existing import (
    is_finished,
    read_plan,
    report_nothing_to_do,
    require_files,
    require_writable_output,
)
from ktconvert.pipeline.engine.job_share import make_share, parse_share, require_all_shares
from ktconvert.pipeline.engine.lock import JobShare
from ktconvert.pipeline.engine.loop import Interrupted
from ktconvert.pipeline.engine.paths import locate, require_no_work_directory
from ktconvert.pipeline.engine.plan import Plan, SavedPlan, require_independent_units
from ktconvert.pipeline.options.conversion_options import (
    CONVERSION_OPTIONS,
    CalibrateOptions,
    QuantizationOptions,
    ResumeOptions,
)
from ktconvert.pipeline.options.declare import Option, with_values
from ktconvert.pipeline.options.option_groups import ConversionOptions, Workers
from ktconvert.pipeline.plans import commands
from ktconvert.pipeline.report.progress import Reporter

IGNORED = "is accepted for compatibility with kt-kernel and has no effect"


@command("cpu", CONVERSION_OPTIONS["cpu"])
def cpu(options: ConversionOptions) -> None:
    """Convert a checkpoint's routed experts to AMXINT4, AMXINT8, RAWINT4, MXFP4, FP8 or BF16 weights for the CPU.

    Examples:
      ktconvert cpu Qwen3-30B-A3B Qwen3-INT8 --quant-method int8
      ktconvert cpu MODEL OUT --scale mse    same size, smaller error
      ktconvert cpu MODEL OUT --dry-run      print the plan
      ktconvert cpu X.gguf OUT --config Qwen/Qwen3-30B-A3B
      ktconvert resume OUT                   after an interruption
    """
    convert(options)


@command("gpu", CONVERSION_OPTIONS["gpu"], MultiValueCommand)
def gpu(options: ConversionOptions) -> None:
    """Quantize a checkpoint's routed experts to W4A16 or W8A16 for the GPU.

    SGLang, vLLM and transformers load the output; all other tensors are copied. Memory holds a few experts (RTN) or one
    layer (GPTQ), whatever the model's size.

    Examples:
      ktconvert gpu MODEL OUT --quant-type W4A16    GPTQ, on ultrachat
      ktconvert gpu MODEL OUT --dataset texts.jsonl
      ktconvert gpu MODEL OUT --quant-method RTN    no calibration
      ktconvert gpu MODEL OUT --dry-run             print the plan
      ktconvert resume OUT                          after an interruption
    """
    convert(options)


@command("calibrate", CONVERSION_OPTIONS["calibrate"])
def calibrate(options: ConversionOptions) -> None:
    """Measure the inputs of a model's routed experts: routing counts, and the importance of each column.

    The model reads the samples with one layer in memory, as for GPTQ; nothing is quantized. The output folder gets
    imatrix.gguf, counts.safetensors and statistics.json.

    Examples:
      ktconvert calibrate MODEL DIR              on ultrachat
      ktconvert calibrate MODEL DIR --dataset book.txt
      ktconvert calibrate MODEL DIR --dry-run    print the plan
      ktconvert resume DIR                       after an interruption
    """
    convert(options)


@command("dequantize", CONVERSION_OPTIONS["dequantize"])
def dequantize(options: ConversionOptions) -> None:
    """Write a quantized checkpoint as a BF16 release: a whole model for any loader.

    Quantized weights become BF16, all other tensors are copied, and config.json no longer declares a quantized model.
    Memory holds a few MiB, whatever the model's size.

    Examples:
      ktconvert dequantize DeepSeek-V3.1 DeepSeek-V3.1-BF16
      ktconvert dequantize moonshotai/Kimi-K2-Thinking OUT --dry-run
      ktconvert resume OUT    after an interruption
    """
    convert(options)


@command("fetch", CONVERSION_OPTIONS["fetch"])
def fetch(options: ConversionOptions) -> None:
    """Download a model without its routed experts, which other weights replace on the CPU.

    MODEL is a hub id (org/name), or a directory from which the tensors are copied; OUT is the output directory. Only
    the tensors outside the routed experts are read (3 % of Qwen3-235B's bytes), with config, tokenizer and code files.
    SGLang, transformers and `ktconvert serve` load OUT as the model beside CPU weights.

    Examples:
      ktconvert fetch Qwen/Qwen3-235B-A22B TRUNK
      ktconvert fetch Qwen/Qwen3-235B-A22B TRUNK --dry-run    print the sizes
      ktconvert fetch MODEL TRUNK --gpu-experts-mask mask.safetensors
      ktconvert serve TRUNK --cpu-weights Qwen3-235B-INT8
      ktconvert resume TRUNK                                  continue
    """
    convert(options)


@command("merge", CONVERSION_OPTIONS["merge"])
def merge(options: ConversionOptions) -> None:
    """Merge loose per-layer folders of .kt files, ours or kt-kernel's, into safetensors with an index.

    Examples:
      ktconvert merge loose merged
      ktconvert merge loose merged -r MODEL    with config and tokenizer
      ktconvert resume merged                  after an interruption
    """
    convert(options)


@command("merge-adapter", CONVERSION_OPTIONS["merge-adapter"])
def merge_adapter(options: ConversionOptions) -> None:
    """Fold a LoRA adapter into its model: a BF16 checkpoint for `cpu`, `gpu` and any loader.

    Quantized weights become BF16 first. W + scaling * B A is computed in float32 and rounded once. Memory holds a few
    matrices.

    Examples:
      ktconvert merge-adapter MODEL TUNED --adapter ADAPTER
      ktconvert cpu TUNED TUNED-INT4
      ktconvert resume TUNED    after an interruption
    """
    convert(options)


@command("resplit", CONVERSION_OPTIONS["resplit"])
def resplit(options: ConversionOptions) -> None:
    """Rewrite OLD (from `cpu`, `merge` or kt-kernel) as NEW, for a different number of NUMA nodes.

    MXFP4, FP8 and BF16 keep every value, and so do the gate and up projections of AMXINT4 and AMXINT8. Their down
    projection keeps its values if the new number is a multiple of the old one; otherwise its columns are rounded again
    where slices are joined, and the plan states the error.

    Examples:
      ktconvert resplit OLD NEW --numa 4
      ktconvert resplit OLD NEW --numa 1 --against MODEL --dry-run
      ktconvert resume NEW    after an interruption
    """
    convert(options)


@command("resume", ResumeOptions)
def resume(options: ResumeOptions) -> None:
    """Finish an interrupted conversion or training. Its options are stored next to the output.

    Examples:
      ktconvert resume OUT
      ktconvert resume OUT --dry-run    list the remaining units
    """
    resume_conversion(options)


def convert(options: ConversionOptions) -> None:
    """Run a conversion command, or with --dry-run print its plan."""
    options.existing.require_consistent()
    outputs = commands.split_outputs(options)
    with _explain_interrupt([output.output for output in outputs]):
        _convert_outputs(options, outputs)


def _warn_of_small_disk(plans: Sequence[Plan], reporter: Reporter, overwrite: bool, with_workers: bool) -> None:
    """Print the error of a conversion for which there is too little space: the plan may be for another machine."""
    try:
        require_possible(plans, overwrite, with_workers=with_workers)
    except ResourceError as error:
        reporter.warn(f"here, the conversion would stop: {error}")


@contextlib.contextmanager
def _explain_interrupt(outputs: Sequence[Path]) -> Iterator[None]:
    """Raise KeyboardInterrupt with the command that continues, for a Ctrl-C before the engine handles it."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        if begun := [output for output in outputs if locate(output).plan.exists()]:
            raise Interrupted(signal.SIGINT, begun) from None
        raise KeyboardInterrupt("interrupted before the output was begun; run the same command again.") from None


def _convert_outputs(options: ConversionOptions, outputs: Sequence[ConversionOptions]) -> None:
    reporter = options.reporting.reporter
    always_shown = [note for output in outputs for note in (*_list_unused(output), *_list_ignored(output))]
    preconditions.check_kernels()
    threads = preconditions.limit_threads("--threads", options.execution.threads, always_shown.append)
    worker_threads = options.execution.threads
    share = None if options.part is None else parse_share(options.part, os.environ)
    part = None if share is None else str(share)
    outputs = [with_values(output_options, threads=threads, part=part) for output_options in outputs]
    plans = [commands.build_output_plan(output_options, reporter) for output_options in outputs]
    require_compatible(plans, options.workers, share)
    overwrite = options.existing.overwrite
    for plan in plans:
        require_writable_output(plan, overwrite)
    for note in dict.fromkeys(always_shown):
        reporter.announce(note)
    for note, is_warning in dict(_make_plan_notes(plans)).items():
        (reporter.warn if is_warning else reporter.announce if options.dry_run else reporter.note)(note)
    if options.dry_run:
        _report_serving(plans, reporter.announce)
        as_json = options.reporting.json_events
        with_workers = uses_workers(options.workers)
        if share is None:  # a job share needs only a part of the space
            unfinished = [plan for plan in plans if not is_finished(plan, overwrite)]
            _warn_of_small_disk(unfinished, reporter, overwrite, with_workers)
        dry_run.show_plans(plans, as_json=as_json, overwrite=overwrite, with_workers=with_workers)
        return
    if options.existing.force_unlock:
        for plan in plans:
            commands.remove_lock(plan.locate(), reporter, share)
    run_plans(plans, reporter, options.workers, worker_threads, share, trust_store=options.existing.trust_store)


def resume_conversion(options: ResumeOptions) -> None:
    """Finish an interrupted conversion or training, or with --dry-run print the remaining work."""
    reporter = options.reporting.reporter
    paths = locate(options.output)
    if options.earlier_run.force_unlock and not options.dry_run:
        commands.remove_lock(paths, reporter)
    if (saved := read_plan(paths)) is None:
        if options.output.is_dir() and (finished := manifest.read_manifest(options.output)) is not None:
            require_files(options.output, finished)
            if not options.dry_run:
                remove_work_directory(paths)
            return report_nothing_to_do(options.output, reporter)
        if not options.output.exists():
            raise absent_path(options.output, _suggest_outputs(options.output))
        require_no_work_directory(options.output)
        remedy = f"start one with `ktconvert {'`, `'.join(CONVERSION_OPTIONS)}` or `train`"
        raise bad_file(options.output, "not an unfinished conversion", remedy)
    if saved.command == TRAIN:
        return _resume_training(options, saved)
    preconditions.check_kernels()
    saved_options = commands.restore_options(options.output, saved)
    execution = options.execution
    threads = execution.threads or saved_options.execution.threads
    changes: dict[str, Any] = {
        "threads": preconditions.limit_threads("--threads", threads, reporter.announce),
        **({"max_memory": execution.max_memory} if execution.max_memory else {}),
        **({"verify_inputs": True} if options.verify_inputs else {}),
    }
    if options.allow_machine_change and isinstance(saved_options, QuantizationOptions | CalibrateOptions):
        changes["allow_machine_change"] = True
    if any(option_field.name == "executor" for option_field in find_given_options(ResumeOptions)):
        changes["part"] = None  # the given backend finishes the missing job shares
    with _explain_interrupt([options.output]):
        plan = commands.make_plan(with_values(saved_options, **changes, dry_run=options.dry_run), reporter)
        require_compatible([plan], options.workers)
        if options.dry_run:
            as_json = options.reporting.json_events
            with_workers = uses_workers(options.workers)
            _warn_of_small_disk([plan], reporter, False, with_workers)
            dry_run.show_plans([plan], as_json=as_json, with_workers=with_workers)
            return
        require_all_shares(plan, paths)
        trust_store = options.earlier_run.trust_store
        run_plans([plan], reporter, options.workers, execution.threads, trust_store=trust_store)


def _suggest_outputs(output: Path) -> str:
    """Return the remedy for a path to resume that does not exist: it may stand for the outputs of several methods."""
    pattern = f"{glob.escape(output.name)}-*{WORK_SUFFIX}"
    names = [path.with_name(path.name.removesuffix(WORK_SUFFIX)) for path in sorted(output.parent.glob(pattern))]
    commands = [f"`ktconvert resume {shlex.quote(str(name))}`" for name in names if locate(name).plan.exists()]
    return f"run {' and '.join(commands)}" if commands else "check the path"


def _resume_training(options: ResumeOptions, saved: SavedPlan) -> None:
    from ktconvert.pipeline.cli import train
    from ktconvert.pipeline.options.model_options import TrainOptions

    training = commands.load_options(TrainOptions, options.output, saved, input=saved.input)
    training = with_values(
        training,
        dry_run=options.dry_run,
        verify_inputs=options.verify_inputs,
        force_unlock=options.earlier_run.force_unlock,
        trust_store=options.earlier_run.trust_store,
    )
    train.start(replace(training, reporting=options.reporting))


def _make_plan_notes(plans: Sequence[Plan]) -> Iterator[tuple[str, bool]]:
    """Yield the notes of all plans, and whether each is a warning; those of some plans begin with the output's name.

    The first one is printed without -v. A wrong number of NUMA slices comes first, as kt-kernel then computes garbage.
    """
    by_plan = [(plan.options.output.name, [*commands.numa_notes(plan), *plan.notes]) for plan in plans]
    warnings = {note for plan in plans for note in plan.warnings}
    common = [note for note in by_plan[0][1] if all(note in notes for _, notes in by_plan)]
    yield from ((note, note in warnings) for note in common)
    for name, notes in by_plan:
        yield from ((f"{name}: {note}", note in warnings) for note in notes if note not in common)


def _list_ignored(options: ConversionOptions) -> Iterator[str]:
    """Yield a sentence for each option on the command line that is accepted only for kt-kernel."""
    for option_field in find_given_options(type(options)):
        if isinstance(option_field.declaration, Option) and option_field.declaration.ignored:
            yield f"{option_field.flag} {IGNORED}: {option_field.declaration.ignored}"


def _list_unused(options: ConversionOptions) -> Iterator[str]:
    """Yield a sentence for each option on the command line that has no effect with the others."""
    unused = options.find_unused()
    if Path(options.input).exists():
        unused["stream"] = f"has no effect: {options.input} is local"
    for option_field in find_given_options(type(options)):
        if option_field.name in unused:
            yield f"{option_field.flag} {unused[option_field.name]}"


def uses_workers(workers: Workers) -> bool:
    """Return whether --executor selects a backend with workers."""
    return not workers.executor.startswith(THREADS)


def require_compatible(plans: Sequence[Plan], workers: Workers, share: JobShare | None = None) -> None:
    """Raise UsageError for an unknown --executor, or for --executor or --part that does not fit the plans."""
    require_backend(workers.executor)
    for plan in plans if share is not None else ():
        require_independent_units(plan)
    if share is not None and uses_workers(workers):
        raise UsageError(f"--part and --executor {workers.executor} both divide the work; give one of them.")


def run_plans(
    plans: Sequence[Plan],
    reporter: Reporter,
    workers: Workers,
    threads: int | None,
    share: JobShare | None = None,
    *,
    trust_store: bool,
) -> None:
    """Run the plans, or one job share of a single plan, on the backend of --executor.

    threads  threads of each worker, if there are workers; None for the number of the backend
    """
    if reporter.json_events:  # the last event is `finished`
        _report_serving(plans, reporter.detail)
    overwrite = plans[0].options.existing.overwrite
    with open_backend(workers.executor, reporter.warn, workers.executor_timeout) as backend:
        if backend.executor is not None:
            threads = threads or backend.threads
        elif backend.threads is not None:
            threads = preconditions.limit_threads("--executor threads", backend.threads, reporter.announce)
        else:
            threads = None
        if share is not None:
            (plan,) = plans
            make_share(plan, share, reporter, overwrite=overwrite, threads=threads)
            return
        has_worked = execute_plans(
            plans,
            reporter,
            overwrite=overwrite,
            trust_store=trust_store,
            executor=backend.executor,
            reopen=commands.reopen_plan,
            threads=threads,
        )
    for plan in plans if has_worked else ():
        reporter.say(f"next: {plan.next_command}")
    if has_worked and not reporter.json_events:
        _report_serving(plans, reporter.detail)


def _report_serving(plans: Sequence[Plan], report: Callable[[str], None]) -> None:
    for plan in plans:
        if plan.serving:
            report(plan.serving)
