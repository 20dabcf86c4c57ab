"""The plan of `ktconvert gpu`: from options and a checkpoint's headers to stages, sizes, notes and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ktconvert.layouts import encodings
from ktconvert.layouts.checkpoints.arch_file import list_archs
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import (
    NonExpertTensors,
    find_non_expert_tensors,
)
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import UnsupportedError, UsageError
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs import Format, formats_by_option, kt_kernel, launch
from ktconvert.layouts.outputs.configs import CONFIG_FILES
from ktconvert.layouts.outputs.ignore import USUAL_PATTERNS, make_ignore_list
from ktconvert.layouts.outputs.linear_names import TEMPLATES, explain_not_rawint4, is_rawint4, make_name_templates
from ktconvert.layouts.outputs.whole_model import notes_on_loading
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.options.conversion_options import GpuOptions
from ktconvert.pipeline.plans import checkpoint, expert_plan

METADATA = ("method", "layout_version", "quant_method", "rounding", "functions")


def require_one_stack(model: MoeModel) -> None:
    """Raise UnsupportedError for a model with several stacks of experts, which no loader of an output knows."""
    problem = f"has several stacks of experts ({', '.join(model.stacks)}), and loaders of the output know one"
    if model.stacks:
        raise UnsupportedError(f"{model.source.root}: {problem}; use `ktconvert cpu`.")


def plan_gpu(options: GpuOptions) -> Plan:
    """Build the plan from headers; read no weights."""
    _require_supported(options)
    options = expert_plan.prepare_options(options)
    source = checkpoint.open_source(options)
    checkpoint.require_complete(source, "`ktconvert gpu`", "which loaders of the output need")
    if options.calibrated and options.engine == "oneshot":
        source.require_one_reading()
    options, length_notes = expert_plan.limit_length(options, source.config)
    model = recognize(source, list_archs(options.arch_row))
    fmt = formats_by_option("gpu")[options.quant_type].apply_settings(
        {"rounding": options.rounding, "group_size": options.group_size}
    )
    fmt = expert_plan.hold_function(fmt, model)
    require_one_stack(model)
    model = expert_plan.equalize_model(options, model, fmt)
    loading = notes_on_loading(fmt, model, sorted({*options.tp_size}))
    ignore = make_ignore_list(model, (*USUAL_PATTERNS, *options.ignore_patterns))
    non_experts = find_non_expert_tensors(source, model.expert_tensor_names(), model.quantization)
    facts = _make_facts(model, fmt, options)
    dropped_files = [name for name in source.companions() if name in CONFIG_FILES]
    notes = (*length_notes, *_make_rawint4_notes(facts))
    if options.max_shard_size and options.calibrated:
        notes = (*notes, "--max-shard-size applies only to copied tensors: a layer's experts are one shard")
    plan = expert_plan.build_expert_plan(
        options,
        model,
        expert_plan.ExpertConversion(fmt, model.layers),
        expert_plan.RestOfModel(non_experts.output_tensors(), ignore=ignore, dropped_files=dropped_files),
        facts,
        checkpoint.shard_metadata(facts, source, METADATA),
        _make_notes(model, non_experts, dropped_files, loading),
        notes,
    )
    return replace(plan, serving=_describe_serving(facts, options.output))


def _require_supported(options: GpuOptions) -> None:
    """Raise KTConvertError for unsupported values, and for --save-statistics without a run that gathers them."""
    if options.torch_dtype != "bfloat16":
        problem = "experts are rounded from BF16 and their scales are BF16"
        raise UnsupportedError(f"--torch-dtype {options.torch_dtype}: {problem}; leave out the option.")
    if options.gptq.save_statistics is not None and not (options.calibrated and options.engine == "stream"):
        remedy = "use both, or `ktconvert calibrate`"
        raise UsageError(f"--save-statistics needs --quant-method GPTQ and --engine stream; {remedy}.")


def _make_rawint4_notes(facts: OutputFacts) -> tuple[str, ...]:
    """Return a note with the reason if RAWINT4 should read the experts and cannot."""
    reason = explain_not_rawint4(facts)
    if not is_rawint4(facts) or reason is None:
        return ()
    return (f"kt-kernel's RAWINT4 cannot compute these experts on the CPU: {reason}; {kt_kernel.INSTEAD}",)


def _describe_serving(facts: OutputFacts, output: Path) -> str:
    """Return a sentence with the command that serves the output; "" if RAWINT4 should read the experts and cannot."""
    if _make_rawint4_notes(facts):
        return ""
    is_complete = explain_not_rawint4(facts) is None
    title = "one directory for CPU and GPU" if is_complete else "to serve it beside experts of `ktconvert cpu`"
    return f"{title}: {launch.join_command(launch.serve_whole_model(facts, str(output)))}"


def _make_facts(model: MoeModel, fmt: Format, options: GpuOptions) -> OutputFacts:
    return {
        "architecture": model.arch.name,
        "method": fmt.name,
        "layout_version": fmt.encoding.version,
        "quant_method": options.quant_method,
        "rounding": options.rounding,
        "bits": fmt.encoding.grid.bits,
        "group_size": fmt.encoding.grid.group,
        **checkpoint.shape_facts(model, model.layers),
        **expert_plan.calibration_facts(options),
        "packed_linears": sum(len(model.projections) * model.shape(layer)[0] for layer in model.layers),
        TEMPLATES: make_name_templates(model),
    }


def _make_notes(
    model: MoeModel, non_experts: NonExpertTensors, dropped_files: list[str], loading_notes: tuple[str, ...]
) -> list[str]:
    notes = [*model.common_notes, *non_experts.notes]
    decoded = [stored for stored in non_experts.tensors.values() if isinstance(stored, Weight)]
    for title in encodings.list_quantized_titles(model.dtypes):
        notes.append(
            f"{title} to integers rounds twice: if the model has a BF16 release, convert that for better accuracy"
        )
    if decoded:
        titles = sorted({weight.encoding.title for weight in decoded})
        notes.append(
            f"{len(decoded)} {' and '.join(titles)} non-expert tensors are written as BF16, multiplied by their "
            "scales, because loaders would ignore the scales"
        )
    if model.mtp_tensors:
        layers = f"layer {', '.join(map(str, model.mtp_layers))}" if model.mtp_layers else "blocks called mtp"
        notes.append(f"the experts of the MTP layers ({layers}) are not quantized, and named in the ignore list")
    if dropped_files:
        notes.append(f"{', '.join(dropped_files)} is not copied, because it describes the source's quantization")
    return [*notes, *loading_notes]
