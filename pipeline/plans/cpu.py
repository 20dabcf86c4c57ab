"""The plan of `ktconvert cpu`: from options and a checkpoint's headers to stages, sizes, notes and refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts import encodings
from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.outputs import Format, backward_alone, card, formats_of, is_complete, loose
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.format import require_legal
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.engine.existing import begun_with
from ktconvert.pipeline.engine.plan import Assembly, Plan, Request, tool_version
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.gptq import settings as of_gptq
from ktconvert.pipeline.plans import statistics
from ktconvert.pipeline.plans.checkpoint import (
    BASE_MEMORY,
    CheckpointFiles,
    base_model,
    collector_at_rest,
    companions,
    files_named,
    number_shards,
    parse_layers,
    require_whole,
    rows_for,
    shape_facts,
    shard_metadata,
    source_files,
)
from ktconvert.pipeline.plans.importance import facts_of, importance_for, notes_of
from ktconvert.pipeline.plans.quantizing import Quantizing, compensated, require_whole_walk, rounded
from ktconvert.pipeline.stages import copy_tensors, quantize_experts
from ktconvert.quantizers.choice import ABSMAX, MSE, QUANTIZERS, Quantizer

BITS_DECODED = 16  # of the format that every source can be decoded to
FEW_BITS = 5  # per weight as it is stored, with its scales: a 4-bit format


@collector_at_rest()
def plan_cpu(request: Request, hashed: Callable[[int], None] | None = None) -> Plan:
    """Plan the whole conversion from headers only. `hashed` is called with the number of bytes that --verify-inputs has
    read.

    Raises UnsupportedError, InputError or UsageError before any weight is read.
    """
    settings = dict(request.settings)
    source = open_checkpoint(request.input, request.tuning.get("revision"), settings.get("config"))
    if settings["non_experts"] != "skip":
        require_whole(source, f"--non-experts {settings['non_experts']}")
    model = recognise(source, rows_for(settings.get("arch_file")))
    _require_stated_dtype(request.tuning.get("input_type"), model)
    fmt = _format(settings)
    choice = QUANTIZERS[settings.get("scale", ABSMAX.name)]
    if not choice.serves(fmt.encoding.grid):
        able = " and ".join(name for name, other in formats_of("cpu").items() if choice.serves(other.encoding.grid))
        raise UsageError(
            f"--scale {choice.name} is for --quant-method {able}; {fmt.name} has one way to choose codes: leave out "
            "--scale."
        )
    imatrix = importance_for(choice, request, model)
    settings |= {} if imatrix is None else {"imatrix": imatrix.sha256}
    parts = int(settings["threadpool_count"])
    settings |= _choose_layers(request, settings, model, fmt, parts)
    layers = parse_layers(settings["layers"], model.layers)
    kept = parse_layers(settings["kept_layers"], model.layers) if settings["kept_layers"] not in (None, "none") else ()
    comparable = [
        other
        for other in formats_of("cpu", fmt.arrangement.layout).values()
        if other.backward or not settings["save_backward_weights"]
    ]
    for layer in layers:
        require_legal(fmt, *model.shape(layer)[1:], parts, comparable)

    merge = not settings["no_merge_safetensor"]
    if choice.calibrated:
        require_whole_walk(source, settings, layers == model.layers and not kept)
    facts = _facts(model, fmt, parts, layers, settings) | facts_of(imatrix, layers)
    stated = [name for name in ("scale", "imatrix", "calibration", "machine") if name in facts]
    about = ("method", "layout_version", "numa", "activation", "weights_on", *stated)
    metadata = shard_metadata(facts, source, about)
    if choice.calibrated:
        rest = other_tensors(source, model.expert_tensor_names(), model.quantization)
        walked = replace(request, settings=settings)
        quantizing = compensated(walked, model, fmt, rest, metadata, choice=choice, numa=parts, loose_files=not merge)
    else:
        stage = quantize_experts.stage(
            model,
            fmt,
            layers,
            choice=choice,
            numa=parts,
            backward=settings["save_backward_weights"],
            loose_files=not merge,
            max_shard_size=settings["max_shard_size"],
            metadata=metadata,
            imatrix=imatrix,
        )
        quantizing = rounded(stage)
    stages: list[Stage[Any]] = [quantizing.stage]
    others = copy_tensors.not_experts(model, settings["non_experts"])
    if others:
        stages.append(copy_tensors.stage(source, others, settings["max_shard_size"], metadata))
    notes = tuple(_notes(model, fmt, layers, settings))
    entries = fmt.description.config_entries(fmt, facts, (), tool_version())
    config = card.config_json(source.config, entries, whole=fmt.arrangement.whole) if source.has_config else None
    files = source_files(source, request, hashed)
    return Plan(
        request=replace(request, settings=settings),
        source=files,
        reads=(*source.paths(), *files_named(request)),
        stages=number_shards(stages) if merge else tuple(stages),
        facts=facts | ({"kept_layers": list(kept)} if kept else {}),
        notes=(*notes, *notes_of(facts), *quantizing.notes, *_gains(fmt, choice)),
        assembly=Assembly(
            companions=companions(source.companion_root, source.companions()),
            config=config,
            loose=not merge,
            kept_layers=kept,
            side_output=statistics.side_output(request),
        ),
        conversion=CpuConversion(CheckpointFiles(source, files), fmt, quantizing, others, facts, notes, settings),
        scratch_bytes=quantizing.scratch_bytes,
        advice=quantizing.advice,
        remedies=quantizing.remedies,
        found=of_gptq.found,
    )


@dataclass(frozen=True)
class CpuConversion:
    """`ktconvert cpu` of these layers; a Conversion."""

    files: CheckpointFiles
    fmt: Format
    quantizing: Quantizing
    others: tuple[copy_tensors.OtherTensor, ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...]
    settings: Mapping[str, Any]

    def peak_memory(self, threads: int) -> int:
        """The buffers of all packing threads, which do not grow with the model, or what a walk through it takes."""
        copying = copy_tensors.peak_memory(self.others) if self.others else 0
        return max(self.quantizing.peak_memory(threads), BASE_MEMORY + copying)

    def require_ready(self) -> None:
        """Calibration goes on only on the machine where it began; for all else any will do."""
        self.quantizing.require_ready()

    def card(self, stats: Sequence[Mapping[str, Any]]) -> bytes:
        """README.md of the output."""
        base, non_experts = base_model(self.files.source), self.settings["non_experts"]
        facts = {**self.facts, **of_gptq.found(stats)}
        about = self.fmt.description
        lines = about.card(facts, base, self.settings["no_merge_safetensor"], non_experts, about.numbers)
        return card.model_card(lines, base, facts, self.notes, stats, tool_version())

    def check(self, assembled: Path) -> None:
        """Sizes are known before the first byte is written: nothing to check."""


def _format(settings: Mapping[str, Any]) -> Format:
    """The format that the options ask for. Raises UsageError where it has no such layout, no loose files or no backward
    matrices.
    """
    option = settings["quant_method"]
    loose_files, backward = settings["no_merge_safetensor"], settings["save_backward_weights"]
    formats = formats_of("cpu", settings.get("layout"))
    if option not in formats:
        *first, last = formats
        raise UsageError(
            f"--layout kt is for {', '.join(first)} and {last}; {formats_of('cpu')[option].name} is for NUMA parts: "
            "leave out --layout."
        )
    fmt = formats[option]
    alone = backward_alone(option) if fmt.arrangement.parted else None
    if alone is not None and backward:
        if not loose_files:
            raise UsageError(
                f"{fmt.name} has backward matrices in loose files only, without the experts; add "
                "--no-merge-safetensor, or leave out --save-backward-weights."
            )
        return alone
    if loose_files and fmt.loose is None:
        others = "" if alone is None else ", or add --save-backward-weights for kt-kernel's backward files"
        raise UsageError(f"{fmt.name} has no loose files; leave out --no-merge-safetensor{others}.")
    if backward and not fmt.backward:
        raise UsageError(f"{fmt.name} has no matrices for fine-tuning; leave out --save-backward-weights.")
    return fmt


def _choose_layers(
    request: Request, settings: Mapping[str, Any], model: MoeModel, fmt: Format, parts: int
) -> dict[str, Any]:
    """Which layers to convert and which loose ones to keep; a journal of an earlier run takes precedence over
    --resume-layer.
    """
    first = int(request.tuning.get("resume_layer") or 0)
    begun = begun_with(request.output) if first else None
    if settings.get("kept_layers") is not None or not first:
        return {"layers": settings["layers"], "kept_layers": settings.get("kept_layers")}
    if begun is not None:
        return {"layers": begun.get("layers", settings["layers"]), "kept_layers": begun.get("kept_layers")}
    wanted = parse_layers(settings["layers"], model.layers)
    folders = loose.layers_in(request.output) if settings["no_merge_safetensor"] and request.output.is_dir() else {}
    if not folders:
        remaining = [n for n in wanted if n >= first]
        if not remaining:
            raise UsageError(f"--resume-layer {first}: no MoE layer is left; there are {ranges(model.layers)}.")
        return {"layers": ranges(remaining).replace(" ", ""), "kept_layers": None}
    kept = []
    for layer in (n for n in wanted if n < first and n in folders):
        count, hidden, intermediate = model.shape(layer)
        grid = ExpertGrid(layer, hidden, intermediate, parts, bool(settings["save_backward_weights"]), fmt.forward)
        if is_complete(folders[layer], grid, count, fmt):
            kept.append(layer)
    rest = [n for n in wanted if n not in kept]
    if not rest:
        raise UsageError(
            f"--resume-layer {first}: every layer below it lies in {request.output} already and none is left to "
            "convert."
        )
    return {"layers": ranges(rest).replace(" ", ""), "kept_layers": ranges(kept).replace(" ", "") or "none"}


def _require_stated_dtype(stated: str | None, model: MoeModel) -> None:
    if stated is None:
        return
    dtypes = model.dtypes
    if stated == model.source.container.input_type:
        return
    if not any(stated in row.input_types and row.name in dtypes for row in encodings.CHECKPOINT_ENCODINGS):
        raise InputError(
            f"{model.source.root}: --input-type {stated} was given, but the experts are {', '.join(dtypes)}; "
            "leave the option out or correct it."
        )


def _facts(
    model: MoeModel, fmt: Format, parts: int, layers: tuple[int, ...], settings: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "architecture": model.arch.name,
        "method": fmt.name,
        "layout_version": fmt.encoding.version,
        "bits": fmt.encoding.grid.bits,
        "numa": parts,
        **shape_facts(model, layers),
        "backward": settings["save_backward_weights"],
        **({"scale": settings["scale"]} if "scale" in settings else {}),
        **({**of_gptq.facts(settings), "machine": settings["machine"]} if "calibrate" in settings else {}),
    }


def _gains(fmt: Format, choice: Quantizer) -> tuple[str, ...]:
    """What other choices of codes would gain; said of a plan, but not in the model card."""
    if choice != ABSMAX or fmt.encoding.grid.bits != 4 or not MSE.serves(fmt.encoding.grid):
        return ()
    return (
        "--scale mse makes the same files with less error: of Gaussian rows of 2048 11 % instead of 15 %, with heavy "
        "tails 20 % instead of 31 %; imatrix weights that error by the inputs, and gptq, which runs the model on text, "
        "leaves about half of it in the outputs",
    )


def _notes(model: MoeModel, fmt: Format, layers: tuple[int, ...], settings: Mapping[str, Any]) -> list[str]:
    notes = list(model.notes)
    left = [n for n in model.layers if n not in layers]
    if left and not settings["kept_layers"]:
        notes.append(f"layers {ranges(left)} are left out, as asked")
    if settings["kept_layers"] not in (None, "none"):
        notes.append(f"layers {settings['kept_layers']} lay in the output already and are kept as they are")
    kept = fmt.encoding.is_exact(model)
    if kept:
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
        lost = "17 to 49 %" if "scale" not in settings else "13 to 27 %"
        notes.append(
            f"the experts have {model.bits:g} bits per weight already, and int4 with one scale per row loses more than "
            f"that: of Q4_K weights, int8 is 7.2 to 8.6 % off the original ones, int4 {lost}; "
            "--quant-method int8 is the better choice"
        )
    if model.source.container.experts_only and not model.source.has_config:
        notes.append(
            f"the output has no config.json and no tokenizer, which a {model.source.container.title} does not hold in "
            "the form that kt-kernel reads: --config MODEL takes them from the Hugging Face model (directory or id)"
        )
    return [*notes, *fmt.notes]
