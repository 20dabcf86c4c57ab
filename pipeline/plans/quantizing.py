"""What `cpu` and `gpu` have in common: the stage that makes experts, by rounding or by GPTQ, and the plan around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.other_tensors import OtherTensors
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import UsageError
from ktconvert.layouts.outputs import Format, card
from ktconvert.pipeline.engine.existing import begun_with
from ktconvert.pipeline.engine.plan import Assembly, Plan, Request, tool_version
from ktconvert.pipeline.engine.threads import WAITING
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.gptq import settings as of_gptq
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.quantization import CpuOptions, QuantizationOptions
from ktconvert.pipeline.options.rewriting import CalibrateOptions
from ktconvert.pipeline.plans import statistics
from ktconvert.pipeline.plans.checkpoint import (
    BASE_MEMORY,
    CheckpointFiles,
    base_model,
    companions,
    files_named,
    number_shards,
    require_complete,
    source_files,
)
from ktconvert.pipeline.stages import chain, copy_tensors, gptq_layers, quantize_experts
from ktconvert.pipeline.walk import environment, footprint
from ktconvert.pipeline.walk.dataset import local_files
from ktconvert.quantizers.choice import ABSMAX, Quantizer

ONESHOT = (
    "--engine oneshot holds the whole model in memory, cannot resume within it, and takes the library's own mask, "
    "which is not causal for some models; it is for comparison"
)
W = TypeVar("W", bound=QuantizationOptions | CalibrateOptions)


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


def compensated(
    request: Request[QuantizationOptions],
    model: MoeModel,
    fmt: Format,
    rest: OtherTensors,
    metadata: Mapping[str, str],
    *,
    choice: Quantizer = ABSMAX,
    numa: int = 1,
    loose_files: bool = False,
) -> Quantizing:
    """GPTQ; rest: the checkpoint's tensors beside the routed experts.

    Raises UnsupportedError for a model that cannot be calibrated.
    """
    options = request.options
    chain.require_calibratable(model, of_gptq.INSTEAD)
    settings = of_gptq.settings_of(model, options)
    shape = of_gptq.shape_of(model, fmt, settings, options)
    document = statistics.describe(model, request) if options.gptq.save_statistics is not None else None
    stream = settings.engine == "stream"
    return Quantizing(
        gptq_layers.stage(
            model,
            fmt,
            settings,
            {tensor.key: tensor for tensor in copy_tensors.decoded_others(rest)},
            metadata,
            choice=choice,
            numa=numa,
            loose_files=loose_files,
            document=document,
        ),
        lambda _: _peak(model, settings, shape),
        scratch_bytes=footprint.footprint(shape).disk if stream else 0,
        notes=() if stream else (ONESHOT,),
        advice=tuple(footprint.advice(shape)) if stream else (),
        remedies=footprint.REMEDIES,
        require_ready=lambda: require_same_machine(request),
    )


def _peak(model: MoeModel, settings: of_gptq.Settings, shape: footprint.WalkShape) -> int:
    whole = sum(info.nbytes for info in model.source.tensors.values()) if settings.engine == "oneshot" else 0
    return footprint.footprint(shape).host + whole


# ---- the machine of a walk ------------------------------------------------------------------------------------------


def on_one_machine(request: Request[W]) -> Request[W]:
    """The request with the machine on which its walk was begun, else this one; one that starts over takes this one.

    Raises InputError where the data set is missing.
    """
    options = request.options
    if options.machine.machine is not None:
        return request
    local_files(options.samples.dataset)
    afresh = options.existing.overwrite and not options.machine.allow_machine_change
    begun = None if afresh else (begun_with(request.output) or {}).get("machine")
    return replace(request, options=with_values(options, machine=begun or this_machine(options)))


def this_machine(options: QuantizationOptions | CalibrateOptions) -> dict[str, Any]:
    """The properties of this machine that can change sums."""
    packages = environment.PACKAGES if isinstance(options, QuantizationOptions) else environment.WALK_PACKAGES
    limits = options.machine
    return environment.this_machine(options.execution.threads, limits.force_cpu, limits.max_gpu_memory, packages)


def require_same_machine(request: Request[QuantizationOptions] | Request[CalibrateOptions]) -> None:
    """Raise OutputError where the walk was begun on another machine, unless the user allows that."""
    begun, allowed = request.options.machine.machine, request.options.machine.allow_machine_change
    assert begun is not None  # on_one_machine has recorded it
    environment.require_same(begun, this_machine(request.options), request.output, allowed)


def machine_notes(options: QuantizationOptions | CalibrateOptions) -> tuple[str, ...]:
    """Sentences on options that have no effect on this machine."""
    machine = options.machine
    if machine.max_gpu_memory is None or machine.machine is None or machine.machine["device_type"] != "cpu":
        return ()
    return ("--max-gpu-memory changes nothing here: no GPU is used",)


def require_whole_walk(source: TensorSource, options: CpuOptions, whole: bool) -> None:
    """Raise UsageError, InputError or UnsupportedError where a walk through the model is impossible, or does not make
    what the options ask for.
    """
    environment.require("--scale gptq")
    given = f"--scale {options.scale}"
    require_complete(source, given, "which tells how the model computes")
    if not whole:
        raise UsageError(f"{given} goes through the whole model: leave out --layers and --resume-layer.")
    if options.save_backward_weights:
        raise UsageError(f"{given} has no matrices for fine-tuning; leave out --save-backward-weights.")
    if options.max_shard_size:
        raise UsageError(f"{given} makes one shard of a layer; leave out --max-shard-size.")


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
    side_output = statistics.side_output(request.options)
    gathers = None if side_output is None else True
    request = replace(request, options=with_values(request.options, with_statistics=gathers))
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
        found=of_gptq.found,
    )


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
        facts = {**self.facts, **of_gptq.found(stats)}
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
