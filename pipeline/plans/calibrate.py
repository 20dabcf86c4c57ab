"""The plan of `ktconvert calibrate`: from options and a checkpoint's headers to a chain, sizes and refusals."""

from __future__ import annotations

from dataclasses import replace

from ktconvert.layouts.checkpoints.moe_model import recognise
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.output_tensors import decoded_others
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.statistics.folder import read_statistics
from ktconvert.pipeline.calibration import chain, gather_statistics, requirements
from ktconvert.pipeline.engine.plan import Plan, Request, tool_version
from ktconvert.pipeline.options.quantization import CalibrateOptions
from ktconvert.pipeline.plans import checkpoint, walking


def plan_calibrate(request: Request[CalibrateOptions]) -> Plan:
    """Of headers only, before any weight is read."""
    requirements.require_libraries("calibrate", requirements.CALIBRATE_MODULES)
    request = walking.on_one_machine(checkpoint.with_arch_row(request), requirements.CALIBRATE_PACKAGES)
    options = request.options
    source = open_checkpoint(request.input, options.hub.revision)
    checkpoint.require_complete(source, "`ktconvert calibrate`", "which tells how the model computes")
    model = recognise(source, checkpoint.rows_for(options.arch_row))
    chain.require_calibratable(model, gather_statistics.ALTERNATIVE)
    shape = replace(
        requirements.read_shape(model, options.samples),
        quantizes=False,
        calibrate="mixed" if options.second_moments else "routed",
        moments=options.second_moments,
    )
    shape = walking.with_group(shape, options)
    rest = decoded_others(other_tensors(source, model.expert_tensor_names(), model.quantization))
    about = walking.describe(model, request)
    notes = model.common_notes
    if model.mtp_tensors:
        which = f"layer {', '.join(map(str, model.mtp_layers))}" if model.mtp_layers else "blocks called mtp"
        notes = (*notes, f"the MTP part ({which}) is left out: it does not take part in the walk")
    plan = Plan(
        request=request,
        files=checkpoint.source_files(source),
        reads=(*source.paths(), *checkpoint.files_named(options)),
        stages=(
            gather_statistics.stage(
                model, options, {tensor.key: tensor for tensor in rest}, shape.experts_at_once, about
            ),
        ),
        facts={
            "architecture": model.arch.name,
            **checkpoint.shape_facts(model, model.layers),
            "data": dict(about["data"]),
        },
        notes=notes,
        loose=True,
        peak_memory=lambda threads: checkpoint.BASE_MEMORY,
        card=lambda stats: walking.card(about, list(stats), tool_version()),
        check=read_statistics,
    )
    return walking.with_walk(plan, request, shape, requirements.CALIBRATE_REMEDIES, requirements.CALIBRATE_PACKAGES)
