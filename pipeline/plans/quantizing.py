"""The stage of a plan that makes the experts, and what it takes: rounding, or GPTQ along a walk through the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.other_tensors import OtherTensors
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.outputs import Format
from ktconvert.pipeline.engine.plan import CONFIG, Request
from ktconvert.pipeline.engine.threads import WAITING
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.gptq import settings as of_gptq
from ktconvert.pipeline.plans import statistics
from ktconvert.pipeline.plans.checkpoint import BASE_MEMORY, require_whole
from ktconvert.pipeline.stages import chain, copy_tensors, gptq_layers, quantize_experts
from ktconvert.pipeline.walk import environment as machine
from ktconvert.pipeline.walk import needs
from ktconvert.quantizers.choice import ABSMAX, Quantizer

ONESHOT = (
    "--engine oneshot holds the whole model in memory, cannot resume within it, and takes the library's own mask, "
    "which is not causal for some models; it is for comparison"
)


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
    request: Request,
    model: MoeModel,
    fmt: Format,
    rest: OtherTensors,
    metadata: Mapping[str, str],
    *,
    choice: Quantizer = ABSMAX,
    numa: int = 1,
    loose_files: bool = False,
) -> Quantizing:
    """GPTQ, with the settings of the request; rest: the checkpoint's tensors beside the routed experts.

    Raises UnsupportedError for a model that cannot be calibrated.
    """
    chosen, tuning = request.settings, request.tuning
    chain.require_calibratable(model, of_gptq.INSTEAD)
    settings = of_gptq.settings_of(model, chosen)
    shape = of_gptq.shape_of(model, fmt, settings, chosen)
    document = statistics.describe(model, request) if chosen.get("save_statistics") else None
    tensors_of_layer = {carried.key: carried for carried in copy_tensors.decoded_others(rest)}

    def require_ready() -> None:
        now = machine.this_machine(tuning["cpuinfer_threads"], tuning["force_cpu"], tuning["max_gpu_memory"])
        machine.require_same(chosen["machine"], now, request.output, tuning["allow_machine_change"])

    stream = settings.engine == "stream"
    return Quantizing(
        gptq_layers.stage(
            model,
            fmt,
            settings,
            tensors_of_layer,
            metadata,
            choice=choice,
            numa=numa,
            loose_files=loose_files,
            document=document,
        ),
        lambda _: _peak(model, settings, shape),
        scratch_bytes=needs.needs(shape).disk if stream else 0,
        notes=() if stream else (ONESHOT,),
        advice=tuple(needs.advice(shape)) if stream else (),
        remedies=needs.REMEDIES,
        require_ready=require_ready,
    )


def require_whole_walk(source: TensorSource, settings: Mapping[str, Any], whole: bool) -> None:
    """Raise UsageError, InputError or UnsupportedError where a walk through the model is impossible, or does not make
    what the options ask for.
    """
    machine.require("--scale gptq")
    given = f"--scale {settings['scale']}"
    require_whole(source, given)
    if not (source.root / CONFIG).is_file():
        raise InputError(f"{source.root}: has no {CONFIG}, which tells how the model computes; download it too.")
    if not whole:
        raise UsageError(f"{given} goes through the whole model: leave out --layers and --resume-layer.")
    if settings["save_backward_weights"]:
        raise UsageError(f"{given} has no matrices for fine-tuning; leave out --save-backward-weights.")
    if settings["max_shard_size"]:
        raise UsageError(f"{given} makes one shard of a layer; leave out --max-shard-size.")


def _peak(model: MoeModel, settings: of_gptq.Settings, shape: needs.Shape) -> int:
    whole = sum(info.nbytes for info in model.source.tensors.values()) if settings.engine == "oneshot" else 0
    return needs.needs(shape).host + whole
