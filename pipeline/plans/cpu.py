"""The plan of `ktconvert cpu`: from options and a checkpoint's headers to stages, sizes, notes and refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ktconvert.layouts import encodings
from ktconvert.layouts.checkpoints.arch_file import list_archs
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, UnsupportedError, UsageError
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs import (
    Format,
    backward_only_format,
    formats_by_option,
    has_all_loose_files,
    kt_kernel,
    launch,
    loose,
    mixed,
)
from ktconvert.layouts.outputs.format import choose_count, require_legal
from ktconvert.layouts.outputs.slices import Slicing
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import format_ranges, name_layers
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine.plan import CONFIG, Plan
from ktconvert.pipeline.options.conversion_options import UNSUPPORTED_METHODS, CpuOptions
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.types import MAX_INTEGER
from ktconvert.pipeline.plans import checkpoint, expert_plan, method_choice
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.stages import copy_tensors
from ktconvert.quantizers.quantizer import ABSMAX, MSE, QUANTIZERS, Quantizer

DECODED_BITS = 16  # every source can be decoded to BF16
FEW_BITS = 5  # bits per stored weight of 4-bit formats at most, scales included
METADATA = ("method", "layout_version", "numa", "functions")  # facts in every shard's metadata


def plan_cpu(options: CpuOptions, reporter: Reporter) -> Plan:
    """Build the plan from headers; read no weights, except a sample for `--method-map auto`, with progress."""
    fmt = _choose_format(options)
    layout = options.layout
    options = with_values(options, layout=fmt.arrangement.layout)
    options = expert_plan.prepare_options(options)
    source = checkpoint.open_source(options, options.config)
    if options.non_experts != "skip":
        checkpoint.require_whole(source, f"--non-experts {options.non_experts}")
    model = recognize(source, list_archs(options.arch_row), experts=options.experts)
    _require_input_type(options.input_type, model)
    options, length_notes = expert_plan.limit_length(options, source.config)
    map_notes = []
    if options.chooses_map:
        slices = options.numa or _choose_slices(fmt, model)
        options, map_note = method_choice.choose_map(options, fmt, model, slices, reporter)
        map_notes = [map_note]
        fmt = _choose_format(options)
    fmt = expert_plan.apply_method_map(options, fmt, model)
    fmt = expert_plan.hold_function(fmt, model, options.save_backward_weights)
    quantizer = _choose_quantizer(options, fmt, model)
    model = expert_plan.equalize_model(options, model, fmt)
    statistics = expert_plan.open_input_statistics(quantizer, options, model)
    slices = options.numa or _choose_slices(fmt, model)
    options = with_values(options, numa=slices)
    numa = slices if fmt.arrangement.sliced else 1
    recorded_values = _choose_layers(options, model, fmt, numa)
    if statistics is not None:
        recorded_values[f"{statistics.manifest_key}_sha256"] = statistics.sha256
    options = with_values(options, **recorded_values)
    layers = checkpoint.parse_layers(options.layers, model.layers)
    alternatives = formats_by_option("cpu", fmt.arrangement.layout if options.method_map else layout).values()
    comparable = [
        alternative for alternative in alternatives if alternative.backward or not options.save_backward_weights
    ]
    for layer in layers:
        require_legal(fmt.layer_format(layer), *model.shape(layer)[1:], slices, comparable)
    if quantizer.calibrated:
        _require_calibration_possible(source, options, layers == model.layers and not options.kept_layers)
    quantized_layers = [layer for layer in layers if quantizer.supports(fmt.layer_format(layer).encoding.grid)]
    facts: OutputFacts = {
        **_make_facts(model, fmt, numa, layers, options),
        **expert_plan.input_statistics_facts(statistics, quantized_layers),
    }
    code_facts = (name for name in checkpoint.CODE_FACTS if name in facts)
    metadata = checkpoint.shard_metadata(facts, source, (*METADATA, *code_facts))
    conversion = expert_plan.ExpertConversion(
        fmt,
        layers,
        quantizer,
        numa,
        backward=options.save_backward_weights,
        statistics=statistics,
        loose_files=options.no_merge_safetensor,
    )
    rest = expert_plan.RestOfModel(
        copy_tensors.select_non_experts(model, options.non_experts),
        options.non_experts,
        kept_layers=options.kept_layers,
    )
    wrong_number = cfg.explain_experts_per_token(source.config, model.shape(model.layers[0])[0])
    warnings = (
        *model.warnings,
        *([f"{CONFIG}: {wrong_number}"] if wrong_number else []),
        *kt_kernel.note_on_support(facts),
        *expert_plan.notes_by_format(fmt, lambda layer_fmt: _warn_of_few_bits(model, layer_fmt, options)),
    )
    card_notes = [
        *_make_notes(model, layers, options),
        *warnings,
        *expert_plan.notes_by_format(fmt, lambda layer_fmt: _make_format_notes(model, layer_fmt)),
        *fmt.notes,
        *expert_plan.mix_notes(fmt, layers, quantizer),
        *expert_plan.notes_on_unreached(facts),
    ]
    notes = (*length_notes, *map_notes, *_make_scale_notes(fmt, quantizer))
    plan = expert_plan.build_expert_plan(options, model, conversion, rest, facts, metadata, card_notes, notes)
    return replace(plan, warnings=warnings, serving=_describe_serving(fmt, facts, model, options))


def read_default_slices() -> int:
    """Return the default of --numa: KTCONVERT_NUMA, else the number of NUMA nodes that this process may use.

    Raises UsageError if the variable is no positive number.
    """
    text = os.environ.get("KTCONVERT_NUMA")
    if text is None:
        return machine.pool_count()
    if not (text.isdecimal() and 0 < int(text) < MAX_INTEGER):
        raise UsageError(f"KTCONVERT_NUMA: {text[:40]!r} is not a number of NUMA slices; set it to 1 or more.")
    return int(text)


def _choose_slices(fmt: Format, model: MoeModel) -> int:
    """Return the default number of NUMA slices, or the largest smaller one that the model allows."""
    layers = [(fmt.layer_format(layer), model.shape(layer)[1:]) for layer in model.layers]
    return choose_count(layers, read_default_slices())


def _require_calibration_possible(source: TensorSource, options: CpuOptions, has_all_layers: bool) -> None:
    """Raise UsageError, InputError or UnsupportedError if options or checkpoint rule out running the model."""
    scale_option = f"--scale {options.scale}"
    checkpoint.require_complete(source, scale_option, "which describes how the model computes")
    if not has_all_layers:
        raise UsageError(f"{scale_option} runs the whole model: leave out --layers and --resume-layer.")
    if options.save_backward_weights:
        raise UsageError(f"{scale_option} has no matrices for fine-tuning; leave out --save-backward-weights.")
    if options.max_shard_size:
        raise UsageError(f"{scale_option} makes one shard per layer; leave out --max-shard-size.")


def _choose_quantizer(options: CpuOptions, fmt: Format, model: MoeModel) -> Quantizer:
    """Return the quantizer of --scale. Raises UsageError if the format does not have it, or all numbers are kept."""
    quantizer = QUANTIZERS[options.scale]
    unsupported = [layer_fmt.name for layer_fmt in fmt.layer_formats if not quantizer.supports(layer_fmt.encoding.grid)]
    if len(unsupported) == len(fmt.layer_formats) or (quantizer.calibrated and unsupported):
        supported = ", ".join(
            name for name, other in formats_by_option("cpu").items() if quantizer.supports(other.encoding.grid)
        )
        reason = f"{unsupported[0]} has only one method to choose codes; leave out --scale"
        raise UsageError(f"--scale {quantizer.name} is for --quant-method {supported}; {reason}.")
    for layer_fmt in fmt.layer_formats:
        encoding = layer_fmt.encoding
        if quantizer != ABSMAX and quantizer.supports(encoding.grid) and encoding.is_exact(model):
            raise UsageError(
                f"--scale {quantizer.name} has no effect: the experts of {model.source.root} are "
                f"{' and '.join(model.dtypes)} already, and {layer_fmt.name} stores them unchanged; leave out --scale."
            )
    return quantizer


def _choose_format(options: CpuOptions) -> Format:
    """Return the format of the options.

    Raises UnsupportedError for methods that we do not write, UsageError for options that the format lacks.
    """
    method = options.quant_method
    loose_files = options.no_merge_safetensor
    backward = options.save_backward_weights
    formats = formats_by_option("cpu", options.layout)
    if method in UNSUPPORTED_METHODS and method not in formats:
        supported = ", ".join(f"{name} ({fmt.name})" for name, fmt in formats_by_option("cpu").items())
        raise UnsupportedError(f"--quant-method {method}: {UNSUPPORTED_METHODS[method]}; supported: {supported}.")
    if loose_files and options.non_experts != "skip":
        raise UsageError(f"--non-experts {options.non_experts} needs safetensors; leave out --no-merge-safetensor.")
    if loose_files and options.max_shard_size:
        raise UsageError("--max-shard-size is for safetensors; leave it out with --no-merge-safetensor.")
    if method not in formats:
        layout = formats_by_option("cpu")[method].arrangement.layout
        reason = f"{method} has the layout {layout}: leave out --layout"
        raise UsageError(f"--layout {options.layout} is for {', '.join(formats)}; {reason}.")
    fmt = formats[method]
    if not fmt.arrangement.sliced and options.non_experts != "skip":
        raise UsageError(
            f"--non-experts {options.non_experts}: --layout {options.layout} contains only experts; leave out one "
            "of them."
        )
    backward_only = backward_only_format(method) if fmt.arrangement.sliced else None
    if backward_only is not None and backward:
        if not loose_files:
            remedy = "add --no-merge-safetensor, or leave out --save-backward-weights"
            raise UsageError(f"{fmt.name} has backward matrices in loose files only, without the experts; {remedy}.")
        return backward_only
    if loose_files and fmt.loose is None:
        second_remedy = (
            "" if backward_only is None else ", or add --save-backward-weights for kt-kernel's backward files"
        )
        raise UsageError(f"{fmt.name} has no loose files; leave out --no-merge-safetensor{second_remedy}.")
    if backward and not fmt.backward:
        raise UsageError(f"{fmt.name} has no matrices for fine-tuning; leave out --save-backward-weights.")
    return fmt


def _choose_layers(options: CpuOptions, model: MoeModel, fmt: Format, numa: int) -> dict[str, Any]:
    """Return the layers to convert and the loose layers to keep; an earlier run's choice precedes --resume-layer."""
    first_layer = options.resume_layer
    if options.kept_layers is not None or not first_layer:
        return {}
    if (saved := checkpoint.read_saved_values(options, "layers", "kept_layers")) is not None:
        return saved
    selected = checkpoint.parse_layers(options.layers, model.layers)
    folders = loose.find_layers(options.output) if options.no_merge_safetensor and options.output.is_dir() else {}
    if not folders:
        remaining = [layer for layer in selected if layer >= first_layer]
        if not remaining:
            raise UsageError(
                f"--resume-layer {first_layer}: no MoE layer remains; the model has {format_ranges(model.layers)}."
            )
        return {"layers": _format_ranges(remaining)}
    kept = []
    for layer in selected:
        if layer < first_layer and layer in folders:
            count, hidden, intermediate = model.shape(layer)
            backward = options.save_backward_weights
            slicing = Slicing(layer, hidden, intermediate, numa, backward, fmt.forward, gated=model.is_gated)
            if has_all_loose_files(folders[layer], slicing, count, fmt):
                kept.append(layer)
    remaining = [layer for layer in selected if layer not in kept]
    if not remaining:
        raise UsageError(
            f"--resume-layer {first_layer}: {options.output} already contains every layer; leave out --resume-layer."
        )
    return {"layers": _format_ranges(remaining), "kept_layers": tuple(kept)}


def _format_ranges(layers: Sequence[int]) -> str:
    return format_ranges(layers).replace(" ", "")


def _require_input_type(expected: str | None, model: MoeModel) -> None:
    dtypes = model.dtypes
    if expected in (None, model.source.container.input_type):
        return
    if not any(expected in row.input_types and row.name in dtypes for row in encodings.CHECKPOINT_ENCODINGS):
        problem = f"--input-type {expected} was given, but the experts are {', '.join(dtypes)}"
        raise InputError(f"{model.source.root}: {problem}; leave out the option or correct it.")


def _make_facts(model: MoeModel, fmt: Format, numa: int, layers: tuple[int, ...], options: CpuOptions) -> OutputFacts:
    return {
        "architecture": model.arch.name,
        **mixed.manifest_facts(fmt, layers),
        **({"layout": fmt.arrangement.layout} if fmt.arrangement.on_request else {}),
        "numa": numa,
        **checkpoint.shape_facts(model, layers),
        "backward": options.save_backward_weights,
        **({} if options.scale == ABSMAX.name else {"scale": options.scale}),
        **expert_plan.calibration_facts(options),
        **({"machine": options.hardware.first_machine} if options.calibrated else {}),
    }


def _make_scale_notes(fmt: Format, quantizer: Quantizer) -> tuple[str, ...]:
    """Return a note on the gain of other values of --scale; only for the plan, not for the model card."""
    grids = [layer_fmt.encoding.grid for layer_fmt in fmt.layer_formats]
    if quantizer != ABSMAX or not any(grid.bits == 4 and grid.has_row_scales and MSE.supports(grid) for grid in grids):
        return ()
    return (
        "--scale mse reduces the error in files of the same size: from 15 % to 11 % for Gaussian rows of 2048, and "
        "from 31 % to 20 % for rows with heavy tails; gptq, which runs the model on text, reduces the KL "
        "divergence to about a third",
    )


def _describe_serving(fmt: Format, facts: OutputFacts, model: MoeModel, options: CpuOptions) -> str:
    """Return a sentence with the command that serves the output; "" for a mix, and for files without the experts."""
    if fmt.by_layer or not fmt.forward:
        return ""
    rest = options.config or launch.ORIGINAL if model.source.container.experts_only else options.input
    command = launch.serve_cpu_experts(facts, str(options.output), rest, sliced=fmt.arrangement.sliced)
    engine = "SGLang" if kt_kernel.KT_METHODS.get(facts["method"]) else "SGLang and ktconvert's KTMoEWrapper"
    return f"to serve it with {engine}: {launch.join_command(command)}"


def _make_notes(model: MoeModel, layers: tuple[int, ...], options: CpuOptions) -> list[str]:
    notes = list(model.notes)
    skipped = [layer for layer in model.layers if layer not in layers]
    if skipped and options.kept_layers is None:
        notes.append(f"skipped because of --layers or --resume-layer: {name_layers(format_ranges(skipped))}")
    if options.kept_layers:
        notes.append(f"already in the output, and kept: {name_layers(format_ranges(options.kept_layers))}")
    if model.source.container.experts_only and not model.source.has_config:
        notes.append(
            f"the output has no config.json and no tokenizer, because a {model.source.container.title} has none; "
            "--config MODEL copies them from a directory or hub id"
        )
    return notes


def _warn_of_few_bits(model: MoeModel, fmt: Format, options: CpuOptions) -> Iterator[str]:
    """Yield a warning for int4 of weights that have few bits already."""
    if fmt.encoding.grid.bits == 4 and fmt.encoding.grid.group is None and model.bits <= FEW_BITS:
        int4_error = "17 to 49 %" if options.scale == ABSMAX.name else "13 to 27 %"
        yield (
            f"the experts already have {model.bits:g} bits per weight, which int4 rounds again: compared with the "
            f"original, random weights in Q4_K have an error of {int4_error} in int4, and of 7.2 to 8.6 % in int8; "
            "--quant-method int8 is the better choice"
        )


def _make_format_notes(model: MoeModel, fmt: Format) -> list[str]:
    """Return the notes on one format of the layers."""
    notes = []
    is_exact = fmt.encoding.is_exact(model)
    if is_exact:
        titles = [] if fmt.encoding.grid.bits < DECODED_BITS else encodings.list_quantized_titles(model.dtypes)
        reason = f"the experts are {fmt.option.upper()} already"
        if titles:
            reason = f"{fmt.name} can represent all numbers of {titles[0]}"
        notes.append(f"{reason}, so every number stays the same")
    for title in () if is_exact else encodings.list_quantized_titles(model.dtypes):
        notes.append(
            f"{title} to {fmt.name} rounds twice: if the model has a BF16 release, convert that for better accuracy"
        )
    for name, other in () if is_exact else formats_by_option("cpu").items():
        if other.encoding.grid.bits < DECODED_BITS and other.encoding.is_exact(model):
            notes.append(f"--quant-method {name} keeps every number of these experts unchanged")
    return notes
