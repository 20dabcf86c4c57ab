"""The plan of `ktconvert calibrate`, which gathers statistics of the experts' inputs in a calibration run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ktconvert.layouts.checkpoints.arch_file import list_archs
from ktconvert.layouts.checkpoints.non_expert_tensors import find_non_expert_tensors
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.layouts.statistics.folder import read_statistics
from ktconvert.pipeline.calibration import chain, gather_statistics, requirements
from ktconvert.pipeline.engine.plan import Hooks, Plan, tool_version
from ktconvert.pipeline.options.conversion_options import CalibrateOptions
from ktconvert.pipeline.plans import calibration_run, checkpoint

MOMENTS = (
    "- `second-moments-NNN.safetensors`: for layer NNN, the sums of x xT over the inputs of gate and up (all "
    "tokens), and over the inputs of each expert's down (its tokens); for `ktconvert cpu --scale mse --statistics`."
)


def plan_calibrate(options: CalibrateOptions) -> Plan:
    """Build the plan from headers; read no weights."""
    requirements.require_libraries("`ktconvert calibrate`", requirements.CALIBRATE_MODULES)
    options = calibration_run.record_machine(checkpoint.with_arch_row(options), requirements.CALIBRATE_PACKAGES)
    source = open_checkpoint(options.input, options.hub.revision)
    checkpoint.require_complete(source, "`ktconvert calibrate`", "which describes how the model computes")
    model = recognize(source, list_archs(options.arch_row), experts=options.experts)
    chain.require_calibratable(model, gather_statistics.ALTERNATIVE)
    options, length_notes = calibration_run.limit_length(options, source.config)
    shape = replace(
        requirements.read_shape(model, options.samples),
        quantizes=False,
        calibrate="mixed" if options.second_moments else "routed",
        moments=options.second_moments,
    )
    shape = calibration_run.set_group_size(shape, options)
    non_experts = find_non_expert_tensors(source, model.expert_tensor_names(), model.quantization).output_tensors()
    document = calibration_run.describe_run(model, options)
    notes = model.common_notes
    if model.mtp_tensors:
        layers = f"layer {', '.join(map(str, model.mtp_layers))}" if model.mtp_layers else "blocks called mtp"
        notes = (*notes, f"the MTP layers ({layers}) are skipped: the calibration run does not compute them")
    run = calibration_run.plan_run(options, shape, requirements.CALIBRATE_PACKAGES)
    return Plan(
        options=options,
        files=checkpoint.source_files(source),
        reads=(*source.paths(), *checkpoint.option_files(options)),
        stages=(
            gather_statistics.make_stage(
                model, options, {tensor.key: tensor for tensor in non_experts}, shape.experts_at_once, document
            ),
        ),
        facts={
            "architecture": model.arch.name,
            **checkpoint.shape_facts(model, model.layers),
            "data": document["data"],
        },
        notes=(*length_notes, *notes, *run.notes),
        has_index=False,
        needs=run.needs,
        hooks=Hooks(
            peak_memory=lambda threads: run.peak_memory(checkpoint.BASE_MEMORY),
            render_card=lambda stats: _render_card(document, stats),
            require_ready=run.require_ready,
            check=read_statistics,
        ),
    )


def _render_card(document: Mapping[str, Any], stats: Sequence[Mapping[str, Any]]) -> bytes:
    """Return README.md of a folder of statistics."""
    model = document["model"]
    data = document["data"]
    name = model["name"] or model["architecture"]
    counts: Mapping[str, Any] = next((figures for figures in stats if "calibration_tokens" in figures), {})
    lines = [
        "---",
        *([f"base_model: {model['name']}"] if model["name"] else []),
        "tags:",
        "- ktconvert",
        "- imatrix",
        "---",
        "",
        f"# Statistics of the experts of {name}",
        "",
        f"{counts.get('samples', data['samples'])} samples of {data['dataset']}, at most {data['max_length']} tokens "
        f"each (seed {data['seed']}), {counts.get('calibration_tokens', 'unknown')} tokens in total, went through "
        "the model.",
        "",
        "- `imatrix.gguf`: for each input column of an expert's linears, the sum of its squares over the tokens "
        "routed to the expert, and their number; in llama.cpp's format, only for routed experts.",
        "- `counts.safetensors`: `counts`, int64 [decoder layers, experts]: how often each expert was chosen.",
        *([MOMENTS] if document["settings"].get("second_moments") else []),
        "- `statistics.json`: the model and the data, and the hashes of these files.",
        "",
        "| layer | tokens routed to an expert: least | median | most | experts without tokens |",
        "|---|---|---|---|---|",
    ]
    for figures in stats:
        if tokens := figures.get("routed_tokens"):
            cells = (figures["layer"], tokens["least"], tokens["median"], tokens["most"], tokens["none"])
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return ("\n".join([*lines, "", f"Made by ktconvert {tool_version()}."]) + "\n").encode()
