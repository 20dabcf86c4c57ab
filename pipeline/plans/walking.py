"""What a plan with a walk through the model takes: GPTQ's stage, and the machine on which the walk was begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.other_tensors import OtherTensors
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.errors import UsageError
from ktconvert.layouts.outputs import Format
from ktconvert.pipeline.engine.plan import Request
from ktconvert.pipeline.gptq import settings as of_gptq
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.quantization import CpuOptions, QuantizationOptions
from ktconvert.pipeline.options.rewriting import CalibrateOptions
from ktconvert.pipeline.plans import statistics
from ktconvert.pipeline.plans.checkpoint import begun_values, require_complete
from ktconvert.pipeline.plans.quantizing import Quantizing
from ktconvert.pipeline.stages import chain, copy_tensors, gptq_layers
from ktconvert.pipeline.walk import environment, footprint
from ktconvert.pipeline.walk.calibration_data import local_files
from ktconvert.quantizers.choice import ABSMAX, Quantizer

ONESHOT = (
    "--engine oneshot holds the whole model in memory, cannot resume within it, and takes the library's own mask, "
    "which is not causal for some models; it is for comparison"
)
W = TypeVar("W", bound=QuantizationOptions | CalibrateOptions)


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
    """GPTQ; rest: the tensors beside the routed experts. UnsupportedError where the model cannot be calibrated."""
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


def on_one_machine(request: Request[W], packages: Sequence[str] = environment.PACKAGES, **found: Any) -> Request[W]:
    """The request with the machine where its walk began, else this one, and what else is found before the first run.

    packages  whose versions can change bytes
    Raises InputError where the data set is missing, OutputError where the machine of an earlier run is damaged.
    """
    options = request.options
    if options.machine.machine is not None:
        return request
    local_files(options.samples.dataset)
    afresh = options.existing.overwrite and not options.machine.allow_machine_change
    begun = None if afresh else (begun_values(request, "machine") or {}).get("machine")
    machine = begun or this_machine(options, packages)
    return replace(request, options=with_values(options, machine=machine, **found))


def this_machine(options: QuantizationOptions | CalibrateOptions, packages: Sequence[str]) -> dict[str, Any]:
    """The properties of this machine that can change sums."""
    limits = options.machine
    return environment.this_machine(options.execution.threads, limits.force_cpu, limits.max_gpu_memory, packages)


def require_same_machine(
    request: Request[QuantizationOptions] | Request[CalibrateOptions], packages: Sequence[str] = environment.PACKAGES
) -> None:
    """Raise OutputError where the walk was begun on another machine, unless the user allows that."""
    begun, allowed = request.options.machine.machine, request.options.machine.allow_machine_change
    assert begun is not None  # on_one_machine has recorded it
    environment.require_same(begun, this_machine(request.options, packages), request.output, allowed)


def require_whole_walk(source: TensorSource, options: CpuOptions, whole: bool) -> None:
    """UsageError, InputError or UnsupportedError where a walk is impossible, or does not do what options ask."""
    given = f"--scale {options.scale}"
    require_complete(source, given, "which tells how the model computes")
    if not whole:
        raise UsageError(f"{given} goes through the whole model: leave out --layers and --resume-layer.")
    if options.save_backward_weights:
        raise UsageError(f"{given} has no matrices for fine-tuning; leave out --save-backward-weights.")
    if options.max_shard_size:
        raise UsageError(f"{given} makes one shard of a layer; leave out --max-shard-size.")
