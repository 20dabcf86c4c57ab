"""The plan of `ktconvert resplit`: an output rewritten for a different number of NUMA slices."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.arch_file import list_archs
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings.encoding import error_sums
from ktconvert.layouts.errors import InputError, UnsupportedError, UsageError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs import FORMATS, Format, cards, configs, mixed
from ktconvert.layouts.outputs.format import collapse_equal, require_legal
from ktconvert.layouts.outputs.measuring import Measure, measure_output
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.rearrange import requires_rounding
from ktconvert.layouts.outputs.slices import PackedSlices, Slicing
from ktconvert.layouts.sources.companions import companion_files
from ktconvert.layouts.sources.config import QUANT_METHOD
from ktconvert.layouts.sources.source import TensorSource, open_checkpoint
from ktconvert.layouts.statistics import expert_counts
from ktconvert.layouts.tensors import format_ranges
from ktconvert.pipeline.engine.plan import CARD, CONFIG, Hooks, Plan, tool_version
from ktconvert.pipeline.engine.threads import WAITING
from ktconvert.pipeline.engine.units import Stage, Unit
from ktconvert.pipeline.options.conversion_options import ResplitOptions
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.plans import checkpoint, expert_plan
from ktconvert.pipeline.plans.merge import inherit_facts, read_manifest_facts, require_sound
from ktconvert.pipeline.report.text import plural
from ktconvert.pipeline.stages import copy_tensors, expert_files, resplit_experts
from ktconvert.pipeline.stages.quantize_experts import (
    EQUALIZED,
    ExpertsWork,
    equalize_for_format,
    error_figures,
    unequalize,
)
from ktconvert.pipeline.stages.resplit_experts import ResplitWork
from ktconvert.quantizers.quantizer import ABSMAX, QUANTIZERS

# Metadata of shards that does not depend on the number of NUMA slices
KEPT_METADATA = ("functions", *checkpoint.CODE_FACTS, "source")
BETTER = 0.99  # converting again is recommended if its error is below this fraction of resplit's
SAMPLED = 3  # units to measure for the plan
TENSOR = 1600  # bytes of memory for the names and offsets of a tensor; many slices have many tensors


def plan_resplit(options: ResplitOptions) -> Plan:
    """Build the plan from names, sizes and headers; read only the weights of SAMPLED experts, to measure errors."""
    root = Path(options.input)
    numa = options.numa
    output, measured, fmt = _open_output(root)
    for layer, (_, hidden, intermediate) in measured.shapes.items():
        require_legal(fmt.layer_format(layer), hidden, intermediate, numa)
    if output.loose and options.max_shard_size:
        raise UsageError(f"--max-shard-size is for safetensors, but {root} has loose files; leave it out.")
    source = TensorSource(root, output.config, (), {}, root) if output.loose else open_checkpoint(root)
    facts = _make_facts(output, measured, fmt, numa)
    metadata = _make_metadata(output, fmt, numa)
    copied = [name for name in companion_files(root) if not (output.manifest and name in (CARD, manifest.NAME))]
    loose_files = sorted({stored.file for stored in output.tensors.values()}) if output.loose else []
    files = checkpoint.shard_files(source) | checkpoint.files_in(root, (*loose_files, *copied))
    options = with_values(options, **_inherit_settings(output, measured))
    rearranging = resplit_experts.make_stage(
        output,
        fmt,
        [
            (Slicing(n, h, i, measured.numa, measured.backward, gated=measured.gated), e)
            for n, (e, h, i) in measured.shapes.items()
        ],
        numa,
        {file.name: file for file in files.values()},
        max_shard_size=options.max_shard_size,
        metadata=metadata,
    )
    stages: list[Stage[Any]] = [rearranging]
    others = tuple(
        OutputTensor(name, info) for name, info in source.tensors.items() if name in output.non_expert_tensors
    )
    if others:
        stages.append(copy_tensors.make_stage(source, others, options.max_shard_size, metadata))
    entries = fmt.description.config_entries(fmt, facts, (), tool_version())
    by_format = {
        layer_fmt: [unit for unit in rearranging.units if unit.work.fmt == layer_fmt] for layer_fmt in fmt.layer_formats
    }
    notes = tuple(
        expert_plan.notes_by_format(fmt, lambda layer_fmt: _make_notes(by_format[layer_fmt], measured.numa, numa))
    )
    advice: list[str] = []
    compared_files: list[Path] = []
    if options.against is not None:
        sentence, compared_files = _compare_with_converting(
            options, facts, sample_units(rearranging.units), options.against
        )
        advice.append(sentence)
    copying_bytes = copy_tensors.peak_memory(others) if others else 0
    config = dict(output.config)
    old_quantization = output.config.get("quantization_config")
    if isinstance(old_quantization, dict) and old_quantization.get("quant_method") == QUANT_METHOD:
        del config["quantization_config"]
    base = checkpoint.base_model(source)
    non_experts = copy_tensors.infer_choice(output.non_expert_tensors)
    return Plan(
        options=options,
        files=files,
        reads=(*source.paths(), *files, *compared_files),
        stages=tuple(stages) if output.loose else checkpoint.number_shards(stages),
        facts=facts,
        notes=(*notes, *advice),
        companions=checkpoint.companions(root, copied),
        config=configs.config_json(config, entries, is_whole_model=False) if CONFIG in copied else None,
        has_index=not output.loose,
        hooks=Hooks(
            # The entry of each tensor, and the buffers of all threads, which do not grow with the model
            peak_memory=lambda threads: (
                checkpoint.BASE_MEMORY
                + TENSOR * len(output.tensors)
                + max(expert_files.peak_memory(rearranging.units, threads + WAITING), copying_bytes)
            ),
            render_card=lambda stats: cards.make_model_card(
                fmt.description.card,
                facts,
                base,
                notes,
                (),
                tool_version(),
                loose=output.loose,
                non_experts=non_experts,
                has_counts=expert_counts.NAME in copied,
            ),
        ),
    )


def _open_output(root: Path) -> tuple[Output, Measure, Format]:
    """Return the output, its sizes and its format. Raises KTConvertError if it cannot be rewritten."""
    from ktconvert.pipeline.verify.inputs import require_finished
    from ktconvert.pipeline.verify.tensor_checks import check_structure

    require_finished(root)
    output = open_output(root)
    measured = measure_output(output)
    problems = [problem for check in check_structure(output, measured) for problem in check.problems]
    fmt = measured.fmt
    if fmt is not None and fmt.forward and not fmt.arrangement.sliced:
        raise UnsupportedError(f"{root}: {fmt.name} weights have no NUMA slices; give an output of `ktconvert cpu`.")
    if (fmt is None or not fmt.can_resplit) and measured.method != "unknown":
        remedy = "convert the model again with --numa"
        raise UnsupportedError(f"{root}: {measured.method} weights cannot be rearranged; {remedy}.")
    if fmt is None:
        problems = problems or [f"its weights do not match any of {', '.join(output.methods)}"]
    require_sound(root, problems)
    assert fmt is not None
    return output, measured, fmt


def _make_facts(output: Output, measured: Measure, fmt: Format, numa: int) -> OutputFacts:
    """Return the facts of the new output.

    `resplit_from` is the list of the numbers of slices that it had before, in order.
    """
    experts, hidden, intermediate = map(collapse_equal, zip(*measured.shapes.values(), strict=True))
    recorded = read_manifest_facts(output.root)
    resplit_from = list(recorded.get("resplit_from", []))
    if measured.numa != numa:
        resplit_from.append(measured.numa)
    return {
        "architecture": "unknown",
        **mixed.manifest_facts(fmt, list(measured.shapes)),
        "numa": numa,
        "layers": sorted(measured.shapes),
        "experts": experts,
        "hidden": hidden,
        "intermediate": intermediate,
        "dtypes": ["not recorded"],
        "backward": measured.backward,
        **inherit_facts(recorded),
        **({"resplit_from": resplit_from} if resplit_from else {}),
    }


def _make_metadata(output: Output, fmt: Format, numa: int) -> dict[str, str]:
    """Return the metadata of every shard: ours, and that of the input's shards about their experts."""
    metadata = next(iter(output.metadata.values()), {})
    return {
        **checkpoint.FORMAT_METADATA,
        "method": fmt.name,
        "layout_version": str(fmt.encoding.version),
        "numa": str(numa),
        **{name: metadata[name] for name in KEPT_METADATA if name in metadata},
    }


def _inherit_settings(output: Output, measured: Measure) -> dict[str, Any]:
    """Return the options of the first conversion that hold for the new output: loose files, layers, --arch-file."""
    settings = output.settings
    layers = None
    if settings.get("layers", "all") not in ("all", None):
        layers = format_ranges(sorted(measured.shapes)).replace(" ", "")
    inherited = {"no_merge_safetensor": output.loose, "layers": layers, "arch_row": settings.get("arch_row")}
    return {name: value for name, value in inherited.items() if value is not None and value != ""}


def sample_units(units: Sequence[Unit[ResplitWork]]) -> list[ResplitWork]:
    """Return the work of evenly spread units, whose sampled experts are measured."""
    positions = sorted({i * (len(units) - 1) // max(1, SAMPLED - 1) for i in range(SAMPLED)})
    return [units[position].work for position in positions]


def _make_notes(units: Sequence[Unit[ResplitWork]], old: int, new: int) -> Iterator[str]:
    """Yield notes on the change from an old to a new number of NUMA slices, for layers of one format."""
    work = units[0].work
    matrices = "down_proj" + (" and the transposed gate_proj and up_proj" if work.slicing.backward else "")
    if old == new:
        yield f"the output has {plural(old, 'NUMA slice')} already; no tensor changes"
    elif not work.fmt.encoding.grid.has_row_scales:
        yield "weights and scales do not change; converting again would give the same bytes"
    elif not requires_rounding(work.fmt.encoding, old, new):
        yield (
            f"all weights keep their values; {matrices} keeps the scales of {plural(old, 'slice')}; converting again "
            "would choose one for each new slice"
        )
    else:
        samples = sample_units(units)
        sums = np.zeros(4)
        for sample in samples:
            for projection in sample.column_projections:
                sums = sums + sample.measure_change((sample.sampled_expert, projection))
        error = error_figures(sums)["relative_error"]
        yield (
            f"{matrices}: columns of several slices share a scale now, and are rounded again; this changes them by "
            f"{error:.4f} (relative, measured on {plural(len(samples), 'expert')}); all other values stay the same"
        )


def _compare_with_converting(
    options: ResplitOptions, facts: OutputFacts, samples: Sequence[ResplitWork], against: str
) -> tuple[str, list[Path]]:
    """Return a note on whether converting again is better, and the files that were read for it.

    The note compares errors of down_proj of the sampled experts.

    samples  units whose sampled experts are measured
    against  the checkpoint that the output was made from
    """
    scale = facts.get("scale", ABSMAX.name)
    if scale not in QUANTIZERS:
        raise UnsupportedError(f"{options.input}: {scale} weights cannot be converted again here.")
    if QUANTIZERS[scale].requires_importance or QUANTIZERS[scale].calibrated:
        needed = "a calibration run" if QUANTIZERS[scale].calibrated else "its statistics"
        raise UnsupportedError(
            f"{options.input}: was made with --scale {scale}, which needs {needed}; leave out --against."
        )
    # error_sums of the old output, the new output and a fresh conversion
    old_sums = np.zeros(4)
    new_sums = np.zeros(4)
    fresh_sums = np.zeros(4)
    with open_checkpoint(against, options.revision) as source:
        files_read = source.paths()
        model = recognize(source, list_archs(options.arch_row))
        for sample in samples:
            slicing = sample.slicing
            expert = sample.sampled_expert
            encoding = sample.fmt.encoding
            quantizer = QUANTIZERS[scale].select_for(encoding.grid)
            converted_model = equalize_for_format(model, sample.fmt) if EQUALIZED in facts else model
            fresh = ExpertsWork(sample.fmt, slicing, expert, expert + 1, {}, converted_model, quantizer)
            shape = model.shape(slicing.layer) if slicing.layer in model.moe_layers else (0, 0, 0)
            has_expert = shape[1:] == (slicing.hidden, slicing.intermediate) and expert < shape[0]
            up = (expert, "up")
            if not has_expert or not _have_equal_bytes(sample.make_linear(up), fresh.make_linear(up)):
                raise InputError(
                    f"{against}: expert {expert} of layer {slicing.layer} differs from that of {sample.output.root}; "
                    "set --against to the checkpoint of this output."
                )
            down = (expert, "down")
            _add_error_sums(old_sums, fresh, sample.read_linear(down))
            _add_error_sums(new_sums, fresh, sample.make_linear(down))
            _add_error_sums(fresh_sums, fresh, fresh.make_linear(down))
    old_error, new_error, fresh_error = (
        error_figures(sums)["relative_error"] for sums in (old_sums, new_sums, fresh_sums)
    )
    comparison = (
        f"down_proj of {plural(len(samples), 'expert')} has a relative error of {old_error:.4f} to {against}, "
        f"{new_error:.4f} after resplit, and {fresh_error:.4f} if converted again"
    )
    result = "resplit is as good"
    if fresh_error < BETTER * new_error:
        result = f"converting again is better: {_format_command(options, facts, samples[0], against)}"
    return f"{comparison}: {result}", files_read


def _add_error_sums(sums: npt.NDArray[np.float64], fresh: ExpertsWork, linear: PackedSlices) -> None:
    """Add the error_sums of a linear's forward slices against the checkpoint that a fresh conversion reads."""
    for numa_slice, tensors in linear:
        if not numa_slice.backward:
            sums += error_sums(*unequalize(fresh.model, fresh.fmt.encoding, numa_slice), tensors)


def _have_equal_bytes(linear: PackedSlices, other_linear: PackedSlices) -> bool:
    """Return whether the forward slices of two linears have the same bytes."""
    return all(
        np.array_equal(tensor, other_tensor)
        for (numa_slice, tensors), (_, other_tensors) in zip(linear, other_linear, strict=True)
        if not numa_slice.backward
        for tensor, other_tensor in zip(tensors, other_tensors, strict=True)
    )


def _format_command(options: ResplitOptions, facts: OutputFacts, work: ResplitWork, against: str) -> str:
    """Return the command that converts the source again, for this output."""
    settings = options.settings
    others = work.output.non_expert_tensors
    words = ["ktconvert", "cpu", "-i", against, "-o", str(options.output)]
    words += ["--quant-method", work.fmt.option, "--numa", str(facts["numa"])]
    for method, layers in facts.get("methods", {}).items():
        words += ["--method-map", f"{layers}={FORMATS[method].option}".replace(" ", "")]
    words += ["--scale", facts["scale"]] if "scale" in facts else []
    words += ["--equalize"] if EQUALIZED in facts else []
    words += ["--layers", settings["layers"]] if "layers" in settings else []
    words += ["--no-merge-safetensor"] if settings["no_merge_safetensor"] else []
    words += ["--save-backward-weights"] if facts["backward"] else []
    words += ["--non-experts", copy_tensors.infer_choice(others)] if others else []
    return shlex.join(words)
