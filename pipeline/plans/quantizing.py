"""What `cpu` and `gpu` have in common: the stage that makes experts, by rounding or by GPTQ, and the plan around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.archs import ACTIVATIONS, UP_IS_A_FACTOR
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import UnsupportedError, UsageError
from ktconvert.layouts.outputs import Format, card
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.statistics.folder import InputStatistics
from ktconvert.pipeline.engine.plan import Assembly, Conversion, Plan, Request, SideOutput, tool_version
from ktconvert.pipeline.engine.threads import WAITING
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.options.quantization import QuantizationOptions
from ktconvert.pipeline.options.rewriting import CalibrateOptions
from ktconvert.pipeline.plans import checkpoint
from ktconvert.pipeline.stages import copy_tensors, quantize_experts
from ktconvert.pipeline.stages.expert_stream import FACT, equalized
from ktconvert.quantizers.equalizing import THRESHOLD


@dataclass(frozen=True)
class Quantizing:
    """The stage that makes the experts, and what it takes; fields as of Plan and Conversion."""

    stage: Stage[Any]
    peak_memory: Callable[[int], int]
    scratch_bytes: int = 0
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    remedies: str = "Give it more memory."
    require_ready: Callable[[], None] = lambda: None


def rounded(stage: Stage[quantize_experts.ExpertsWork], statistics: InputStatistics | None = None) -> Quantizing:
    """Rounding: any machine will do. statistics: of inputs, which are read besides."""

    def peak(threads: int) -> int:
        packing = threads + WAITING
        reading = 0 if statistics is None else statistics.memory(packing)
        return checkpoint.BASE_MEMORY + reading + quantize_experts.peak_memory(stage.units, packing)

    return Quantizing(stage, peak)


def machine_notes(options: QuantizationOptions | CalibrateOptions) -> tuple[str, ...]:
    on_cpu = (options.machine.machine or {}).get("device_type") == "cpu" and options.machine.max_gpu_memory is not None
    return ("--max-gpu-memory changes nothing here: no GPU is used",) if on_cpu else ()


def plan_of(
    request: Request[QuantizationOptions],
    model: MoeModel,
    fmt: Format,
    quantizing: Quantizing,
    others: Sequence[copy_tensors.OtherTensor],
    facts: dict[str, Any],
    metadata: Mapping[str, str],
    *,
    card_notes: Sequence[str] = (),
    notes: Sequence[str] = (),
    ignore: Sequence[str] = (),
    left_out: Sequence[str] = (),
    non_experts: str = "keep",
    loose_files: bool = False,
    kept_layers: tuple[int, ...] | None = None,
    reads: Sequence[Path] = (),
    hashed: Callable[[int], None] | None = None,
) -> Plan:
    """The plan of a command that makes experts.

    others      the tensors beside the experts that are copied
    card_notes  sentences for the plan and the model card; notes: for the plan alone
    ignore      patterns of modules that are not quantized
    left_out    files of the checkpoint that are not copied; reads: those that are read beside it and what options name
    """
    side_output = _side_output(request.options)
    source, options = model.source, request.options
    facts = facts | ({FACT: []} if model.equalized else {})
    stages: list[Stage[Any]] = [quantizing.stage]
    if others:
        stages.append(copy_tensors.stage(source, others, options.max_shard_size, metadata))
    entries = fmt.description.config_entries(fmt, facts, ignore, tool_version())
    config = card.config_json(source.config, entries, whole=fmt.arrangement.whole) if source.has_config else None
    files = checkpoint.source_files(source, options, hashed)
    copied = [name for name in source.companions() if name not in left_out]
    copying = copy_tensors.peak_memory(others) if others else 0

    def readme(stats: Sequence[Mapping[str, Any]]) -> bytes:
        base, all_facts, about = checkpoint.base_model(source), {**facts, **found(stats)}, fmt.description
        lines = about.card(all_facts, base, loose_files, non_experts, about.numbers)
        return card.model_card(lines, base, all_facts, card_notes, stats, tool_version())

    return Plan(
        request=request,
        source=files,
        reads=(*source.paths(), *checkpoint.files_named(options), *reads),
        stages=tuple(stages) if loose_files else checkpoint.number_shards(stages),
        facts=facts | ({"kept_layers": list(kept_layers)} if kept_layers else {}),
        notes=(*card_notes, *quantizing.notes, *machine_notes(options), *equalizing_notes(model), *notes),
        assembly=Assembly(
            companions=checkpoint.companions(source.companion_root, copied),
            config=config,
            loose=loose_files,
            kept_layers=kept_layers,
            side_output=side_output,
        ),
        conversion=Conversion(
            changed=lambda: checkpoint.changed_files_of(source, files),
            read_by=partial(checkpoint.shards_read_by, source),
            # The buffers of all packing threads, which do not grow with the model, or what a walk through it takes.
            peak_memory=lambda threads: max(quantizing.peak_memory(threads), checkpoint.BASE_MEMORY + copying),
            card=readme,
            require_ready=quantizing.require_ready,
            check=partial(_check, calibrated=options.calibrated) if fmt.arrangement.whole else lambda assembled: None,
        ),
        scratch_bytes=quantizing.scratch_bytes,
        advice=quantizing.advice,
        remedies=quantizing.remedies,
        found=found,
    )


def _side_output(options: QuantizationOptions) -> SideOutput | None:
    if not options.calibrated or options.gptq.save_statistics is None:
        return None
    from ktconvert.pipeline.stages.gather_statistics import KEYS

    return SideOutput(options.gptq.save_statistics, KEYS)


def found(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What figures of layers say that no plan could: `too_few_tokens`, experts that GPTQ left, and `equalized`."""
    few, equalized = (_by_layer(stats, name) for name in ("rounded_experts", "equalized_experts"))
    return {**({"too_few_tokens": few} if few else {}), **({FACT: equalized} if equalized else {})}


def _by_layer(stats: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """As "layer 3: 0-5, 7"."""
    experts: dict[int, list[int]] = {}
    for s in stats:
        if s.get(name):
            experts.setdefault(s["layer"], []).extend(s[name])
    return [f"layer {layer}: {ranges(experts[layer])}" for layer in sorted(experts)]


def equalized_for(options: QuantizationOptions, model: MoeModel, fmt: Format) -> MoeModel:
    """The model as --equalize asks for it. Raises UnsupportedError where equalized experts would compute something
    else, UsageError where no layer is rounded to a format that gains, and for options that need the experts as they
    are.
    """
    if not options.equalize:
        return model
    if model.activation not in UP_IS_A_FACTOR:
        raise UnsupportedError(
            f"--equalize: the experts of {model.arch.name} compute {ACTIVATIONS[model.activation]}, which is another "
            "function of a scaled up; leave out --equalize."
        )
    if options.calibrated and options.engine == "oneshot":
        raise UsageError("--equalize: --engine oneshot reads the checkpoint as it is; leave out one of them.")
    if options.gptq.save_statistics is not None and options.calibrated:
        raise UsageError(
            "--equalize: --save-statistics would describe the equalized experts; leave out one of them, or gather "
            "statistics with `ktconvert calibrate`."
        )
    found = equalized(model, fmt)
    if not found.equalized:
        raise UsageError(
            f"--equalize is for integers and MXFP4 that experts are rounded to: here {fmt.name} keeps every number, or "
            "scales rows and columns together; leave out --equalize."
        )
    return found


def equalizing_notes(model: MoeModel) -> tuple[str, ...]:
    if not model.equalized:
        return ()
    return (
        f"experts whose columns of down_proj differ by more than {THRESHOLD:g} (`inspect --columns`) are equalized; "
        "which, manifest and model card will say",
    )


def _check(assembled: Path, calibrated: bool) -> None:
    """Raise VerificationError for a whole model that is not what its manifest and loaders expect, by transformers where
    it is in memory already.
    """
    from ktconvert.pipeline.verify.verify import require_sound

    require_sound(assembled, load=calibrated)
