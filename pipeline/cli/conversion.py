"""The commands that make an output: planned, and shown or made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ktconvert.layouts.errors import OutputError, UsageError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.outputs.opening import TRAIN
from ktconvert.pipeline.cli import dry_run, preconditions
from ktconvert.pipeline.cli.command import SeveralValues, command, given
from ktconvert.pipeline.engine.execute import execute, tidy
from ktconvert.pipeline.engine.executors import DEFAULT, opened, require_known
from ktconvert.pipeline.engine.existing import nothing_to_do, saved_plan
from ktconvert.pipeline.engine.lock import ProcessPart, unlock
from ktconvert.pipeline.engine.part import make_part, parse, require_all_parts
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.plan import Plan, Request, require_parts
from ktconvert.pipeline.options import quantization
from ktconvert.pipeline.options.declare import Option, leaves, with_values
from ktconvert.pipeline.options.option_groups import ConversionOptions, Workers
from ktconvert.pipeline.plans import commands
from ktconvert.pipeline.report.progress import Reporter

IGNORED = "is accepted for kt-kernel's sake and changes nothing here"


@command("cpu", quantization.CpuOptions)
def cpu(options: quantization.CpuOptions) -> None:
    """Convert a checkpoint's routed experts to kt-kernel's AMX INT4/INT8 weights, or to MXFP4, FP8 or BF16.

    Safetensors in BF16, FP16, F32, FP8, MXFP8, MXFP4, NVFP4, packed INT4 or INT8, GPTQ, AWQ, and GGUF are read; no
    GPU is needed. Memory is bounded by a few experts (--scale gptq: by one layer), whatever the model's size.

    Examples:
      ktconvert cpu -i /models/Qwen3-30B-A3B -o /models/Qwen3-30B-A3B-INT4
      ktconvert cpu -i deepseek-ai/DeepSeek-V3.1 -o DeepSeek-V3.1-INT8 --quant-method int8 --threadpool-count 2
      ktconvert cpu -i Qwen3-30B-A3B-Q8_0.gguf --config Qwen/Qwen3-30B-A3B -o OUT --quant-method int8
      ktconvert cpu -i MODEL -o OUT --scale mse          INT4 of the same size with less error
      ktconvert cpu -i MODEL -o OUT --scale gptq --dataset texts.jsonl                  with the least
      ktconvert cpu -i MODEL -o OUT --quant-method int4,int8    OUT-int4 and OUT-int8, reading MODEL once
      ktconvert cpu -i MODEL -o OUT --dry-run            what would be done, from headers only
      ktconvert cpu -i MODEL -o OUT --layers 3-10        some layers only

    The same command again, or `ktconvert resume OUT`, finishes what was cut off.
    """
    convert("cpu", options)


@command("gpu", quantization.GpuOptions, SeveralValues)
def gpu(options: quantization.GpuOptions) -> None:
    """Quantize a checkpoint's routed experts to W4A16 or W8A16, for the GPU: SGLang, vLLM and transformers load the
    output.

    What `cpu` reads is read here too; memory is bounded by a few experts (RTN) or by one layer (GPTQ),
    whatever the model's size. All other tensors are copied as they are.

    Examples:
      ktconvert gpu -i /models/Qwen3-30B-A3B -o /models/Qwen3-30B-A3B-W4A16 --quant-type W4A16   GPTQ, on ultrachat_200k
      ktconvert gpu -i /models/Qwen3-30B-A3B -o OUT --dataset texts.jsonl --num-calibration-samples 128
      ktconvert gpu -i deepseek-ai/DeepSeek-V3.1 -o DeepSeek-V3.1-W8A16 --quant-method RTN       no calibration
      ktconvert gpu -i MODEL -o OUT --dry-run                     what would be done, and what it takes

    The same command again, or `ktconvert resume OUT`, finishes what was cut off.
    """
    convert("gpu", options)


@command("calibrate", quantization.CalibrateOptions)
def calibrate(options: quantization.CalibrateOptions) -> None:
    """Measure what a model's routed experts read: how often each is chosen, and how important each input is.

    MODEL is a directory, a .safetensors file, or a hub id (org/name). Its samples go through the model with one layer
    in memory, as for `gpu`'s GPTQ, and nothing is quantized. The folder gets imatrix.gguf, counts.safetensors and
    statistics.json.

    Examples:
      ktconvert calibrate /models/Qwen3-30B-A3B --output /models/Qwen3-30B-A3B-statistics       on ultrachat_200k
      ktconvert calibrate /models/Qwen3-30B-A3B --output DIR --dataset book.txt --max-sequence-length 512
      ktconvert calibrate deepseek-ai/DeepSeek-V3.1 --output DIR --dry-run                      what it takes

    The same command again, or `ktconvert resume DIR`, finishes what was cut off.
    """
    convert("calibrate", options)


@command("dequantize", quantization.DequantizeOptions)
def dequantize(options: quantization.DequantizeOptions) -> None:
    """Write a quantized checkpoint as a BF16 release: a whole model for any loader.

    SRC is a directory, a .safetensors file, or a hub id (org/name); OUT is the output directory. Every quantized weight
    becomes BF16, all other tensors stay as they are, and config.json no longer says that the model is quantized. Memory
    is bounded by some MiB, whatever the model's size.

    Examples:
      ktconvert dequantize /models/DeepSeek-V3.1 /models/DeepSeek-V3.1-BF16
      ktconvert dequantize moonshotai/Kimi-K2-Thinking Kimi-K2-Thinking-BF16 --dry-run

    The same command again, or `ktconvert resume OUT`, finishes what was cut off.
    """
    convert("dequantize", options)


@command("merge", quantization.MergeOptions)
def merge(options: quantization.MergeOptions) -> None:
    """Turn loose per-layer folders of .kt files, ours or kt-kernel's, into safetensors with an
    index. Can be resumed.

    Examples:
      ktconvert merge -i /models/loose -o /models/merged
      ktconvert merge -i /models/loose -o /models/merged -r /models/Qwen3-30B-A3B    with config and tokenizer
    """
    convert("merge", options)


@command("merge-adapter", quantization.MergeAdapterOptions)
def merge_adapter(options: quantization.MergeAdapterOptions) -> None:
    """Fold a LoRA adapter into its model: a checkpoint in BF16, which `cpu` and `gpu` convert and any loader reads.

    MODEL is a directory, a .safetensors file, or a hub id (org/name); what is quantized in it becomes BF16 first.
    W + scaling * B A is computed in float32 and rounded once. Memory is bounded by a few matrices. Can be resumed.

    Examples:
      ktconvert merge-adapter /models/Qwen3-30B-A3B --adapter ADAPTER -o /models/Qwen3-30B-A3B-tuned
      ktconvert cpu -i /models/Qwen3-30B-A3B-tuned -o /models/Qwen3-30B-A3B-tuned-INT4
    """
    convert("merge-adapter", options)


@command("resplit", quantization.ResplitOptions)
def resplit(options: quantization.ResplitOptions) -> None:
    """Rewrite OUTPUT, experts of `cpu` or `merge` or kt-kernel, as NEW, for another number of NUMA nodes.

    MXFP4, FP8 and BF16 keep every value, and so do gate and up projections of AMXINT4 and AMXINT8. So does their down
    projection where the new number is a multiple of the old one; else its columns are rounded once more where parts
    are put together, and the plan says by how much. Can be resumed.

    Examples:
      ktconvert resplit /models/Qwen3-30B-A3B-INT8 /models/Qwen3-30B-A3B-INT8-4 --threadpool-count 4
      ktconvert resplit OUT NEW --threadpool-count 1 --against MODEL --dry-run      or is converting again better?
    """
    convert("resplit", options)


@command("resume", quantization.ResumeOptions)
def resume(options: quantization.ResumeOptions) -> None:
    """Finish a conversion that was cut off. Its options need not be repeated: the plan is stored beside the output.

    Examples:
      ktconvert resume /models/Qwen3-30B-A3B-INT8 --dry-run    what is done, what is left, and why
      ktconvert resume /models/Qwen3-30B-A3B-INT8
    """
    go_on(options)


def convert(name: str, options: ConversionOptions) -> None:
    reporter = options.reporting.reporter
    options.existing.require_consistent()
    requests = commands.outputs_of(Request(name, options))
    for note in dict.fromkeys(note for each in requests for note in _notes_of_unused(each.options)):
        reporter.note(note)
    preconditions.check_kernels()
    threads = preconditions.lowered("--cpuinfer-threads", options.execution.threads, reporter)
    workers = options.execution.cpuinfer_threads
    part = None if options.part is None else parse(options.part, os.environ)
    request = Request(name, with_values(options, cpuinfer_threads=threads))
    plans = commands.plans_of(request, None if options.dry_run else reporter.hashed)
    for note in _notes(plans):
        reporter.note(note)
    if options.dry_run:
        shown = check(plans, options.workers, part)
        dry_run.show_plans(shown, as_json=options.reporting.json_events, overwrite=options.existing.overwrite)
        return
    if options.existing.force_unlock:
        for plan in plans:
            take_lock_away(plan.locate(), reporter, part)
    make(plans, reporter, options.workers, workers, part, trust_store=options.existing.trust_store)


def go_on(options: quantization.ResumeOptions) -> None:
    reporter = options.reporting.reporter
    paths = locate(options.output)
    if options.leftovers.force_unlock and not options.dry_run:
        take_lock_away(paths, reporter)
    if (old := saved_plan(paths)) is None:
        if options.output.is_dir() and manifest.read(options.output) is not None:
            if not options.dry_run:
                tidy(paths)
            return nothing_to_do(options.output, reporter)
        raise OutputError(
            f"{options.output}: no conversion into it was begun; start one with `ktconvert cpu`, `gpu`, `calibrate`, "
            "`dequantize`, `merge`, `resplit` or `train`."
        )
    if old.command == TRAIN:
        from ktconvert.pipeline.cli import train
        from ktconvert.pipeline.options.training_options import TrainOptions

        begun = commands.restored(TrainOptions, options.output, old, input=old.input)
        leftovers = {leaf.name: leaf.of(options.leftovers) for leaf in leaves(type(options.leftovers))}
        call = {"dry_run": options.dry_run, "verify_inputs": options.verify_inputs, **leftovers}
        return train.start(replace(with_values(begun, **call), reporting=options.reporting))
    preconditions.check_kernels()
    request = commands.saved_request(options.output, old)
    execution = options.execution
    threads = execution.cpuinfer_threads or request.options.execution.threads
    tuning = {
        "cpuinfer_threads": preconditions.lowered("--cpuinfer-threads", threads, reporter),
        **({"max_memory": execution.max_memory} if execution.max_memory else {}),
        **({"verify_inputs": True} if options.verify_inputs else {}),
        **({"allow_machine_change": True} if options.allow_machine_change else {}),
        # What parts have not made, is made now by the executor that is named.
        **({"part": None} if any(leaf.name == "executor" for leaf in given(quantization.ResumeOptions)) else {}),
    }
    request = replace(request, options=with_values(request.options, **tuning))
    plan = commands.plan_request(request, None if options.dry_run else reporter.hashed)
    if options.dry_run:
        dry_run.show_plans(check([plan], options.workers), as_json=options.reporting.json_events)
        return
    require_all_parts(plan, paths)
    make([plan], reporter, options.workers, execution.cpuinfer_threads, trust_store=options.leftovers.trust_store)


def _notes(plans: Sequence[Plan]) -> Iterable[str]:
    """The notes of all plans; those that do not hold for each with the output's name."""
    by_plan = [(plan.request.output.name, [*commands.numa_notes(plan), *plan.notes]) for plan in plans]
    common = [note for note in by_plan[0][1] if all(note in notes for _, notes in by_plan)]
    return (*common, *(f"{name}: {note}" for name, notes in by_plan for note in notes if note not in common))


def _notes_of_unused(options: ConversionOptions) -> Iterator[str]:
    """A sentence for each option on the command line that changes nothing."""
    unused = options.unused()
    for leaf in given(type(options)):
        if isinstance(leaf.declared, Option) and leaf.declared.ignored:
            yield f"{leaf.flag} {IGNORED}: {leaf.declared.ignored}"
        elif leaf.name in unused:
            yield f"{leaf.flag} {unused[leaf.name]}"


def take_lock_away(paths: Paths, reporter: Reporter, part: ProcessPart | None = None) -> None:
    """--force-unlock: remove the lock of a process that left it, and say whose it was."""
    for taken in unlock(paths.root, paths.output, part):
        reporter.note(f"--force-unlock took away {taken}")


def check(plans: Sequence[Plan], workers: Workers, part: ProcessPart | None = None) -> Sequence[Plan]:
    """The plans as --executor has them made. Raises UsageError for --executor or --part that do not go with them."""
    name = workers.executor
    require_known(name)
    for plan in plans if part is not None else ():
        require_parts(plan)
    if part is not None and not name.startswith(DEFAULT):
        raise UsageError(f"--part and --executor {name} both share the work out; give one of them.")
    return plans if name.startswith(DEFAULT) else [plan.shared_out() for plan in plans]


def make(
    plans: Sequence[Plan],
    reporter: Reporter,
    workers: Workers,
    threads: int | None,
    part: ProcessPart | None = None,
    *,
    trust_store: bool,
) -> None:
    """Execute the plans, or a part of the only one, with the engine of --executor; threads: of each worker."""
    check(plans, workers, part)
    overwrite = plans[0].request.options.existing.overwrite
    with opened(workers.executor, reporter.note, workers.executor_timeout) as engine:
        if engine.executor is None and engine.threads is not None:
            lowered = preconditions.lowered("--executor threads", engine.threads, reporter)
            plans = [_tuned(plan, cpuinfer_threads=lowered) for plan in plans]
        if part is not None:
            (plan,) = plans
            make_part(_tuned(plan, part=str(part)), part, reporter, overwrite=overwrite)
            return
        execute(
            plans,
            reporter,
            overwrite=overwrite,
            trust_store=trust_store,
            executor=engine.executor,
            reopen=commands.reopened,
            threads=threads or engine.threads,
        )


def _tuned(plan: Plan, **tuning: Any) -> Plan:
    return replace(plan, request=replace(plan.request, options=with_values(plan.request.options, **tuning)))
