"""The plan of `ktconvert calibrate`: from options and a checkpoint's headers to a chain, sizes and refusals."""

from __future__ import annotations

from collections.abc import Callable

from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.statistics.folder import read_statistics
from ktconvert.pipeline.engine.plan import Plan, Request, tool_version
from ktconvert.pipeline.options.quantization import CalibrateOptions
from ktconvert.pipeline.plans import checkpoint, walking
from ktconvert.pipeline.plans.quantizing import machine_notes
from ktconvert.pipeline.stages import chain, copy_tensors, gather_statistics
from ktconvert.pipeline.walk import environment, footprint
from ktconvert.pipeline.walk.calibration_data import Calibration, WalkSettings


def plan_calibrate(request: Request[CalibrateOptions], hashed: Callable[[int], None] | None = None) -> Plan:
    """Read headers only, and say everything that will happen. hashed is called with the number of bytes as
    --verify-inputs reads them. Raises UnsupportedError, InputError or KtconvertError before any weight is read.
    """
    environment.require("calibrate", environment.WALK)
    request = walking.on_one_machine(checkpoint.with_arch_row(request), environment.WALK_PACKAGES)
    options, machine = request.options, request.options.machine.machine
    assert machine is not None
    source = open_checkpoint(request.input, options.hub.revision)
    checkpoint.require_complete(source, "`ktconvert calibrate`", "which tells how the model computes")
    model = recognise(source, checkpoint.rows_for(options.arch_row))
    chain.require_calibratable(model, gather_statistics.INSTEAD)
    bytes_of = footprint.moments_bytes if options.second_moments else footprint.squares_bytes
    group = footprint.experts_at_a_time(model, int(machine["group_bytes"]), bytes_of)
    calibration = Calibration.of(options.samples)
    walk = WalkSettings(calibration, group, options.machine.trust_remote_code, machine, options.weights)
    on_gpu = machine["device_type"] != "cpu"
    shape = footprint.shape_of(
        model, options.samples, quantizes=False, moments=options.second_moments, group=group, on_gpu=on_gpu
    )
    rest = copy_tensors.decoded_others(other_tensors(source, model.expert_tensor_names(), model.quantization))
    about = walking.describe(model, request)
    return Plan(
        request=request,
        files=checkpoint.source_files(source, options, hashed),
        reads=(*source.paths(), *checkpoint.files_named(options)),
        stages=(
            gather_statistics.stage(
                model, walk, {tensor.key: tensor for tensor in rest}, about, options.second_moments
            ),
        ),
        facts={
            "architecture": model.arch.name,
            **checkpoint.shape_facts(model, model.layers),
            "data": dict(about["data"]),
        },
        notes=(*_notes(model), *machine_notes(options)),
        loose=True,
        peak_memory=lambda threads: footprint.footprint(shape).host,
        card=lambda stats: walking.card(about, list(stats), tool_version()),
        require_ready=lambda: walking.require_same_machine(request, environment.WALK_PACKAGES),
        check=read_statistics,
        scratch_bytes=footprint.footprint(shape).disk,
        portion_bytes=footprint.footprint(shape).portions,
        advice=tuple(footprint.advice(shape)),
        remedies=footprint.REMEDIES_TO_CALIBRATE,
    )


def _notes(model: MoeModel) -> list[str]:
    notes = list(model.common_notes)
    if model.mtp_tensors:
        which = f"layer {', '.join(map(str, model.mtp_layers))}" if model.mtp_layers else "blocks called mtp"
        notes.append(f"the MTP part ({which}) is left out: it does not take part in the walk")
    return notes
