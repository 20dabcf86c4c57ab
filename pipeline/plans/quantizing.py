"""What `cpu` and `gpu` have in common: the stage that makes experts, by rounding or by GPTQ, and the plan around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.outputs import Format, card
from ktconvert.layouts.outputs.card import ranges
from ktconvert.pipeline.engine.plan import Assembly, Plan, Request, SideOutput, tool_version
from ktconvert.pipeline.engine.threads import WAITING
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.options.quantization import QuantizationOptions
from ktconvert.pipeline.options.rewriting import CalibrateOptions
from ktconvert.pipeline.plans.checkpoint import (
    BASE_MEMORY,
    CheckpointFiles,
    base_model,
    companions,
    files_named,
    number_shards,
    source_files,
)
from ktconvert.pipeline.stages import copy_tensors, quantize_experts


@dataclass(frozen=True)
class Quantizing:
    """The stage that makes the experts, and what it takes.

    peak_memory    threads -> bytes
    scratch_bytes  of disk, while it runs
    require_ready  raises where this machine must not go on with it
    """

    stage: Stage[Any]
    peak_memory: Callable[[int], int]
    scratch_bytes: int = 0
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    remedies: str = "Give it more memory."
    require_ready: Callable[[], None] = lambda: None


def rounded(stage: Stage[quantize_experts.ExpertsWork]) -> Quantizing:
    """Rounding: any machine will do."""
    return Quantizing(stage, lambda threads: BASE_MEMORY + quantize_experts.peak_memory(stage.units, threads + WAITING))


def machine_notes(options: QuantizationOptions | CalibrateOptions) -> tuple[str, ...]:
    """Sentences on options that have no effect on this machine."""
    machine = options.machine
    if machine.max_gpu_memory is None or machine.machine is None or machine.machine["device_type"] != "cpu":
        return ()
    return ("--max-gpu-memory changes nothing here: no GPU is used",)


# ---- the plan -------------------------------------------------------------------------------------------------------


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
    left_out    files of the checkpoint that are not copied
    reads       files that are read beside the checkpoint and those that options name
    """
    side_output = _side_output(request.options)
    source, options = model.source, request.options
    stages: list[Stage[Any]] = [quantizing.stage]
    if others:
        stages.append(copy_tensors.stage(source, others, options.max_shard_size, metadata))
    entries = fmt.description.config_entries(fmt, facts, ignore, tool_version())
    config = card.config_json(source.config, entries, whole=fmt.arrangement.whole) if source.has_config else None
    files = source_files(source, options, hashed)
    copied = [name for name in source.companions() if name not in left_out]
    return Plan(
        request=request,
        source=files,
        reads=(*source.paths(), *files_named(options), *reads),
        stages=tuple(stages) if loose_files else number_shards(stages),
        facts=facts | ({"kept_layers": list(kept_layers)} if kept_layers else {}),
        notes=(*card_notes, *quantizing.notes, *machine_notes(options), *notes),
        assembly=Assembly(
            companions=companions(source.companion_root, copied),
            config=config,
            loose=loose_files,
            kept_layers=kept_layers,
            side_output=side_output,
        ),
        conversion=ExpertsConversion(
            CheckpointFiles(source, files),
            fmt,
            quantizing,
            tuple(others),
            facts,
            tuple(card_notes),
            options.calibrated,
            (loose_files, non_experts),
        ),
        scratch_bytes=quantizing.scratch_bytes,
        advice=quantizing.advice,
        remedies=quantizing.remedies,
        found=found,
    )


def _side_output(options: QuantizationOptions) -> SideOutput | None:
    """Where --save-statistics puts them; None without it."""
    if not options.calibrated or options.gptq.save_statistics is None:
        return None
    from ktconvert.pipeline.stages.gather_statistics import KEYS

    return SideOutput(options.gptq.save_statistics, KEYS)


def found(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the figures of the layers say that no plan could, for the manifest and the model card: `too_few_tokens`, the
    experts that GPTQ did not compensate since too few tokens were routed to them.
    """
    listed = [f"layer {s['layer']}: {ranges(s['rounded_experts'])}" for s in stats if s.get("rounded_experts")]
    return {"too_few_tokens": listed} if listed else {}


@dataclass(frozen=True)
class ExpertsConversion:
    """`ktconvert cpu` and `ktconvert gpu`; a Conversion."""

    files: CheckpointFiles
    fmt: Format
    quantizing: Quantizing
    others: tuple[copy_tensors.OtherTensor, ...]
    facts: Mapping[str, Any]
    notes: tuple[str, ...]
    calibrated: bool
    shown: tuple[bool, str]  # of the card: whether files are loose, and what became of other tensors

    def peak_memory(self, threads: int) -> int:
        """The buffers of all packing threads, which do not grow with the model, or what a walk through it takes."""
        copying = copy_tensors.peak_memory(self.others) if self.others else 0
        return max(self.quantizing.peak_memory(threads), BASE_MEMORY + copying)

    def require_ready(self) -> None:
        """Calibration goes on only on the machine where it began; for all else any will do."""
        self.quantizing.require_ready()

    def card(self, stats: Sequence[Mapping[str, Any]]) -> bytes:
        """README.md of the output."""
        base = base_model(self.files.source)
        facts = {**self.facts, **found(stats)}
        about = self.fmt.description
        lines = about.card(facts, base, *self.shown, about.numbers)
        return card.model_card(lines, base, facts, self.notes, stats, tool_version())

    def check(self, assembled: Path) -> None:
        """Raise VerificationError for a whole model that is not what its manifest and loaders expect. Whether
        transformers finds a name for every expert is asked only where it is in memory already.
        """
        if self.fmt.arrangement.whole:
            from ktconvert.pipeline.verify.verify import require_sound

            require_sound(assembled, load=self.calibrated)
