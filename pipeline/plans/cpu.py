"""The plan of `ktconvert cpu`: from options and a checkpoint's headers to stages, sizes, notes and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ktconvert.layouts import encodings
from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.errors import InputError, UnsupportedError, UsageError
from ktconvert.layouts.outputs import Format, backward_alone, formats_of, is_complete, loose, mixed
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.format import require_legal
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.engine.plan import Plan, Request
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.quantization import LATER, CpuOptions
from ktconvert.pipeline.plans import checkpoint, quantizing
from ktconvert.pipeline.stages import copy_tensors, quantize_experts
from ktconvert.quantizers.choice import ABSMAX, MSE, QUANTIZERS, Quantizer

BITS_DECODED = 16  # of the format that every source can be decoded to
FEW_BITS = 5  # per weight as it is stored, with its scales: a 4-bit format
ABOUT = ("method", "layout_version", "numa", "activation", "weights_on")  # facts for the metadata of every shard


def plan_cpu(request: Request[CpuOptions]) -> Plan:
    """Of headers only, before any weight is read."""
    fmt = _format(request.options)
    request = replace(request, options=with_values(request.options, layout=fmt.arrangement.layout))
    request = checkpoint.with_arch_row(request)
    if request.options.calibrated:
        from ktconvert.pipeline.calibration import requirements
        from ktconvert.pipeline.plans import walking

        requirements.require_libraries("--scale gptq")
        request = walking.on_one_machine(request, with_statistics=request.options.gptq.saves_statistics)
    options = request.options
    source = open_checkpoint(request.input, options.hub.revision, options.config)
    if options.non_experts != "skip":
        checkpoint.require_whole(source, f"--non-experts {options.non_experts}")
    model = recognise(source, checkpoint.rows_for(options.arch_row))
    _require_input_type(options.input_type, model)
    fmt = quantizing.mixed_of(options, fmt, model)
    choice = _choice(options, fmt, model)
    model = quantizing.equalized_for(options, model, fmt)
    inputs = quantizing.importance_for(choice, options, model)
    numa = options.threadpool_count if fmt.arrangement.parted else 1
    found = _choose_layers(request, model, fmt, numa)
    if inputs is not None:
        found[f"{inputs.manifest_key}_sha256"] = inputs.sha256
    request = replace(request, options=with_values(options, **found))
    options = request.options
    layers = checkpoint.parse_layers(options.layers, model.layers)
    others = formats_of("cpu", fmt.arrangement.layout).values()
    comparable = [other for other in others if other.backward or not options.save_backward_weights]
    for layer in layers:
        require_legal(fmt.of_layer(layer), *model.shape(layer)[1:], options.threadpool_count, comparable)
    measured = [layer for layer in layers if choice.serves(fmt.of_layer(layer).encoding.grid)]
    facts = _facts(model, fmt, numa, layers, options) | quantizing.facts_of_inputs(inputs, measured)
    metadata = checkpoint.shard_metadata(
        facts, source, (*ABOUT, *(name for name in checkpoint.ABOUT_CODES if name in facts))
    )
    loose_files = options.no_merge_safetensor
    if choice.calibrated:
        walking.require_whole_walk(source, options, layers == model.layers and not options.kept_layers)
        rest = other_tensors(source, model.expert_tensor_names(), model.quantization)
        stage: Stage[Any] = walking.gptq_stage(
            request, model, fmt, rest, metadata, choice=choice, numa=numa, loose_files=loose_files
        )
    else:
        stage = quantize_experts.stage(
            model,
            fmt,
            layers,
            choice=choice,
            numa=numa,
            backward=options.save_backward_weights,
            loose_files=loose_files,
            max_shard_size=options.max_shard_size,
            metadata=metadata,
            statistics=inputs,
            options=options.weights,
        )
    plan = quantizing.plan_of(
        request,
        model,
        fmt,
        stage,
        copy_tensors.select_non_experts(model, options.non_experts),
        facts,
        metadata,
        card_notes=[
            *_notes(model, layers, options),
            *quantizing.notes_of_each(fmt, lambda own: _notes_of(model, own, options)),
            *fmt.notes,
            *quantizing.notes_of_mix(fmt, layers, choice),
            *quantizing.notes_of_unreached(facts),
        ],
        notes=_gains(fmt, choice),
        non_experts=options.non_experts,
        loose_files=loose_files,
        kept_layers=options.kept_layers,
        statistics=inputs,
    )
    return walking.with_gptq(plan, request, model, fmt) if choice.calibrated else plan


def _choice(options: CpuOptions, fmt: Format, model: MoeModel) -> Quantizer:
    """How codes are chosen. Raises UsageError where the format has one way alone, or nothing is to be chosen."""
    choice = QUANTIZERS[options.scale]
    unserved = [own.name for own in fmt.formats if not choice.serves(own.encoding.grid)]
    if len(unserved) == len(fmt.formats) or (choice.calibrated and unserved):
        able = ", ".join(name for name, other in formats_of("cpu").items() if choice.serves(other.encoding.grid))
        why = f"{unserved[0]} has one way to choose codes: leave out --scale"
        raise UsageError(f"--scale {choice.name} is for --quant-method {able}; {why}.")
    for own in fmt.formats:
        if choice != ABSMAX and choice.serves(own.encoding.grid) and own.encoding.is_exact(model):
            raise UsageError(
                f"--scale {choice.name} chooses numbers, but the experts of {model.source.root} are "
                f"{' and '.join(model.dtypes)} already, and {own.name} keeps every number: leave out --scale."
            )
    return choice


def _format(options: CpuOptions) -> Format:
    """The format that the options ask for. Raises for one of kt-kernel's alone, and for what the format has not."""
    method, loose_files, backward = options.quant_method, options.no_merge_safetensor, options.save_backward_weights
    formats = formats_of("cpu", options.layout)
    if method in LATER and method not in formats:
        can = " and ".join(f"{name} ({fmt.name})" for name, fmt in formats_of("cpu").items())
        raise UnsupportedError(f"--quant-method {method}: {LATER[method]}; {can} can be made.")
    if loose_files and options.non_experts != "skip":
        raise UsageError(f"--non-experts {options.non_experts} needs safetensors; leave out --no-merge-safetensor.")
    if loose_files and options.max_shard_size:
        raise UsageError("--max-shard-size cuts safetensors; leave it out with --no-merge-safetensor.")
    if method not in formats:
        why = f"{method} has the layout {formats_of('cpu')[method].arrangement.layout}: leave out --layout"
        raise UsageError(f"--layout {options.layout} is for {', '.join(formats)}; {why}.")
    fmt = formats[method]
    if not fmt.arrangement.parted and options.non_experts != "skip":
        raise UsageError(
            f"--non-experts {options.non_experts}: --layout {options.layout} holds experts alone; leave it out."
        )
    alone = backward_alone(method) if fmt.arrangement.parted else None
    if alone is not None and backward:
        if not loose_files:
            remedy = "add --no-merge-safetensor, or leave out --save-backward-weights"
            raise UsageError(f"{fmt.name} has backward matrices in loose files only, without the experts; {remedy}.")
        return alone
    if loose_files and fmt.loose is None:
        others = "" if alone is None else ", or add --save-backward-weights for kt-kernel's backward files"
        raise UsageError(f"{fmt.name} has no loose files; leave out --no-merge-safetensor{others}.")
    if backward and not fmt.backward:
        raise UsageError(f"{fmt.name} has no matrices for fine-tuning; leave out --save-backward-weights.")
    return fmt


def _choose_layers(request: Request[CpuOptions], model: MoeModel, fmt: Format, numa: int) -> dict[str, Any]:
    """Which layers to convert, and which loose ones to keep; an earlier run's choice precedes --resume-layer."""
    options = request.options
    first = options.resume_layer
    if options.kept_layers is not None or not first:
        return {}
    if (begun := checkpoint.begun_values(request, "layers", "kept_layers")) is not None:
        return begun
    selected = checkpoint.parse_layers(options.layers, model.layers)
    folders = loose.layers_in(options.output) if options.no_merge_safetensor and options.output.is_dir() else {}
    if not folders:
        remaining = [n for n in selected if n >= first]
        if not remaining:
            raise UsageError(f"--resume-layer {first}: no MoE layer is left; there are {ranges(model.layers)}.")
        return {"layers": _compact(remaining)}
    kept = []
    for layer in (n for n in selected if n < first and n in folders):
        count, hidden, intermediate = model.shape(layer)
        grid = ExpertGrid(layer, hidden, intermediate, numa, options.save_backward_weights, fmt.forward)
        if is_complete(folders[layer], grid, count, fmt):
            kept.append(layer)
    rest = [n for n in selected if n not in kept]
    if not rest:
        raise UsageError(
            f"--resume-layer {first}: every layer below it lies in {options.output} already and none is left to "
            "convert."
        )
    return {"layers": _compact(rest), "kept_layers": tuple(kept)}


def _compact(layers: Sequence[int]) -> str:
    return ranges(layers).replace(" ", "")


def _require_input_type(expected: str | None, model: MoeModel) -> None:
    dtypes = model.dtypes
    if expected in (None, model.source.container.input_type):
        return
    if not any(expected in row.input_types and row.name in dtypes for row in encodings.CHECKPOINT_ENCODINGS):
        what = f"--input-type {expected} was given, but the experts are {', '.join(dtypes)}"
        remedy = "leave the option out or correct it"
        raise InputError(f"{model.source.root}: {what}; {remedy}.")


def _facts(model: MoeModel, fmt: Format, numa: int, layers: tuple[int, ...], options: CpuOptions) -> dict[str, Any]:
    return {
        "architecture": model.arch.name,
        **mixed.facts_of(fmt, layers),
        **({"layout": fmt.arrangement.layout} if fmt.arrangement.on_request else {}),
        "numa": numa,
        **checkpoint.shape_facts(model, layers),
        "backward": options.save_backward_weights,
        **({} if options.scale == ABSMAX.name else {"scale": options.scale}),
        **quantizing.calibration_facts(options),
        **({"machine": options.machine.machine} if options.calibrated else {}),
    }


def _gains(fmt: Format, choice: Quantizer) -> tuple[str, ...]:
    """What other choices of codes would gain; said of a plan, but not in the model card."""
    grids = [own.encoding.grid for own in fmt.formats]
    if choice != ABSMAX or not any(grid.bits == 4 and grid.per_row and MSE.serves(grid) for grid in grids):
        return ()
    return (
        "--scale mse makes the same files with less error: of Gaussian rows of 2048 11 % instead of 15 %, with heavy "
        "tails 20 % instead of 31 %; imatrix weights that error by the inputs, and gptq, which runs the model on text, "
        "leaves about half of it in the outputs",
    )


def _notes(model: MoeModel, layers: tuple[int, ...], options: CpuOptions) -> list[str]:
    notes = list(model.notes)
    left = [n for n in model.layers if n not in layers]
    if left and options.kept_layers is None:
        notes.append(f"layers {ranges(left)} are left out, as --layers or --resume-layer says")
    if options.kept_layers:
        notes.append(f"layers {_compact(options.kept_layers)} were in the output already and are kept as they are")
    if model.source.container.experts_only and not model.source.has_config:
        notes.append(
            f"the output has no config.json and no tokenizer, which a {model.source.container.title} does not hold in "
            "the form that kt-kernel reads: --config MODEL takes them from the Hugging Face model (directory or id)"
        )
    return notes


def _notes_of(model: MoeModel, fmt: Format, options: CpuOptions) -> list[str]:
    notes = []
    if kept := fmt.encoding.is_exact(model):
        stored = [] if fmt.encoding.grid.bits < BITS_DECODED else encodings.quantized(model.dtypes)
        holds = (
            f"{fmt.name} holds all numbers of {stored[0]}"
            if stored
            else f"the experts are {fmt.option.upper()} already"
        )
        notes.append(f"{holds}: every number stays what it is")
    for title in () if kept else encodings.quantized(model.dtypes):
        notes.append(
            f"{title} to {fmt.name} rounds twice: where there is a BF16 release, convert that for better accuracy"
        )
    if fmt.encoding.grid.bits == 4 and fmt.encoding.grid.group is None and model.bits <= FEW_BITS:
        lost = "17 to 49 %" if options.scale == ABSMAX.name else "13 to 27 %"
        notes.append(
            f"the experts have {model.bits:g} bits per weight already, and int4 with one scale per row loses more than "
            f"that: of Q4_K weights, int8 is 7.2 to 8.6 % off the original ones, int4 {lost}; "
            "--quant-method int8 is the better choice"
        )
    for name, other in () if kept else formats_of("cpu").items():
        if other.encoding.grid.bits < BITS_DECODED and other.encoding.is_exact(model):
            notes.append(f"--quant-method {name} keeps every number of these experts as it is")
    return notes
