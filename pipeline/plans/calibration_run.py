"""Calibration runs in plans: GPTQ's stage, memory and disk, and the machine on which a run was begun."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.errors import OutputError
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.sources.config import CONTEXT_LENGTH, find_number
from ktconvert.pipeline.calibration import chain, requirements
from ktconvert.pipeline.engine.plan import Needs
from ktconvert.pipeline.engine.units import Stage
from ktconvert.pipeline.models.text_datasets import describe_dataset, local_files
from ktconvert.pipeline.options.conversion_options import CalibrateOptions, QuantizationOptions
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.plans import checkpoint
from ktconvert.pipeline.stages import gptq_layers
from ktconvert.quantizers.quantizer import ABSMAX, Quantizer

ONESHOT = (
    "--engine oneshot is for comparison: it keeps the whole model in memory, cannot resume, and uses the library's "
    "mask, which is not causal for some models"
)
NO_GPU = "--max-gpu-memory has no effect: no GPU is used"
# Settings that are part of `data`, are paths, or do not change the statistics
LEFT_OUT = ("dataset", "arch_row", "max_shard_size", "with_statistics")
W = TypeVar("W", bound=QuantizationOptions | CalibrateOptions)


def make_gptq_stage(
    options: QuantizationOptions,
    model: MoeModel,
    fmt: Format,
    metadata: Mapping[str, str],
    *,
    quantizer: Quantizer = ABSMAX,
    numa: int = 1,
    loose_files: bool = False,
) -> Stage[Any]:
    """Return the stage that quantizes experts with GPTQ. Raises UnsupportedError if the model cannot be calibrated."""
    chain.require_calibratable(model, f"use {requirements.ALTERNATIVES[options.command]}")
    non_experts = find_non_expert_tensors(
        model.source, model.expert_tensor_names(), model.quantization
    ).output_tensors()
    return gptq_layers.make_stage(
        model,
        fmt,
        options,
        {tensor.key: tensor for tensor in non_experts},
        _read_gptq_shape(model, fmt, options).experts_at_once,
        metadata,
        quantizer=quantizer,
        numa=numa,
        loose_files=loose_files,
        document=describe_run(model, options) if options.gptq.save_statistics is not None else None,
    )


def _read_gptq_shape(model: MoeModel, fmt: Format, options: QuantizationOptions) -> requirements.CalibrationShape:
    gptq = options.gptq
    shape = replace(
        requirements.read_shape(model, options.samples),
        calibrate=gptq.calibrate,
        statistics=gptq.save_statistics is not None,
        bits=max(layer_fmt.encoding.grid.bits for layer_fmt in fmt.layer_formats),
        fisher=gptq.gptq_steps == "full",
    )
    return set_group_size(shape, options)


def set_group_size(
    shape: requirements.CalibrationShape, options: QuantizationOptions | CalibrateOptions
) -> requirements.CalibrationShape:
    """Return the shape of a run with the number of experts that the first run's machine holds at a time."""
    hardware = options.hardware
    group = requirements.max_experts_at_once(shape, hardware.first_machine["group_bytes"])
    return replace(shape, experts_at_once=group, on_gpu=hardware.on_gpu)


@dataclass(frozen=True)
class CalibrationRun:
    """The needs of a calibration run, for a plan.

    memory         bytes of host memory that the run needs, for any number of threads
    model_memory   additional bytes for a model that is in memory as a whole
    needs          its other needs
    notes          sentences for the plan
    require_ready  raises OutputError on a machine that differs from that of the first run
    """

    memory: int
    model_memory: int
    needs: Needs
    notes: tuple[str, ...]
    require_ready: Callable[[], None]

    def peak_memory(self, others: int) -> int:
        """Return the bytes for the run and for other units, which do not run at the same time."""
        return self.model_memory + max(self.memory, others)


def plan_gptq_run(options: QuantizationOptions, model: MoeModel, fmt: Format) -> CalibrationRun:
    """Return the run of make_gptq_stage."""
    run = plan_run(options, _read_gptq_shape(model, fmt, options), requirements.GPTQ_PACKAGES)
    if options.engine == "stream":
        return run
    model_bytes = sum(info.nbytes for info in model.source.tensors.values())
    needs = replace(run.needs, scratch_bytes=0, portion_bytes=0, advice=())
    return replace(run, model_memory=model_bytes, needs=needs, notes=(*run.notes, ONESHOT))


def plan_run(
    options: QuantizationOptions | CalibrateOptions,
    shape: requirements.CalibrationShape,
    packages: Sequence[str],
) -> CalibrationRun:
    """Return a run of this shape, with its needs and notes."""
    needed = requirements.estimate_footprint(shape)
    remedies = requirements.list_remedies(options)
    return CalibrationRun(
        memory=needed.host,
        model_memory=0,
        needs=Needs(needed.disk, needed.portions, tuple(requirements.describe_footprint(shape, remedies)), remedies),
        notes=() if shape.on_gpu or options.hardware.max_gpu_memory is None else (NO_GPU,),
        require_ready=lambda: _require_same_machine(options, packages),
    )


def _require_same_machine(options: QuantizationOptions | CalibrateOptions, packages: Sequence[str]) -> None:
    """Raise OutputError if the run was begun on a different machine, unless the user allows that."""
    hardware = options.hardware
    was = hardware.machine or {}
    now = requirements.read_machine_properties(hardware, options.execution.thread_count, packages)
    differences = [
        f"{key} was {was.get(key)}, is {now.get(key)}" for key in sorted({*was, *now}) if was.get(key) != now.get(key)
    ]
    if differences and not hardware.allow_machine_change:
        raise OutputError(
            f"{options.output}: was begun on a different machine, which rounds differently ("
            f"{'; '.join(differences)}); finish it there or with those values, finish it here with "
            "--allow-machine-change, or start over with --overwrite."
        )


def record_machine(options: W, packages: Sequence[str] = requirements.GPTQ_PACKAGES, **more: Any) -> W:
    """Return the options with the properties of the machine of the first run, or of this one if there was none.

    more  other values to record with them
    """
    if options.hardware.machine is not None:
        return options
    local_files(options.samples.dataset)
    start_over = options.existing.overwrite and not options.hardware.allow_machine_change
    first = None if start_over else (checkpoint.read_saved_values(options, "machine") or {}).get("machine")
    machine = first or requirements.read_machine_properties(options.hardware, options.execution.thread_count, packages)
    return with_values(options, machine=machine, **more)


def limit_length(options: W, config: Mapping[str, Any]) -> tuple[W, tuple[str, ...]]:
    """Return the options with samples that are no longer than the model's context, and a note if they were.

    config  the model's config.json
    """
    named = find_number(dict(config), (CONTEXT_LENGTH,))
    length = options.samples.sequence_length
    if named is None or not 1 < named[1] < length:
        return options, ()
    note = f"samples are cut at {named[1]} tokens, the context of the model ({named[0]}), not at {length}"
    return with_values(options, sequence_length=named[1]), (note,)


def describe_run(model: MoeModel, options: QuantizationOptions | CalibrateOptions) -> dict[str, Any]:
    """Return the entries of layouts.statistics.folder.STATISTICS that are known before the run."""
    facts = checkpoint.shape_facts(model, model.layers)
    settings = {key: value for key, value in options.settings.items() if key not in LEFT_OUT}
    return {
        "command": options.command,
        "model": {
            "architecture": model.arch.name,
            "name": checkpoint.base_model(model.source),
            "source": checkpoint.source_identity(model.source),
            "decoder_layers": model.decoder_layers,
            "layers": facts["layers"],
            "experts": facts["experts"],
            "hidden": facts["hidden"],
            "intermediate": facts["intermediate"],
        },
        "data": describe_dataset(options.samples),
        "settings": dict(sorted(settings.items())),
    }
