"""Comparisons of an output with its source, and with a second output (merged or loose, ours or kt-kernel's)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ktconvert.layouts.checkpoints.adapter_merging import add_adapter
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor, find_non_expert_tensors, read_chunks
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.outputs import dequantized
from ktconvert.layouts.outputs.format import explain_illegal_count
from ktconvert.layouts.outputs.measuring import Measure, measure_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.slices import explain_name
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import TensorInfo, format_ranges
from ktconvert.native_quant.arrays import U8
from ktconvert.pipeline.engine.comparisons import describe_different_settings
from ktconvert.pipeline.options.conversion_options import CONVERSION_OPTIONS
from ktconvert.pipeline.options.declare import Effect, option_fields
from ktconvert.pipeline.report.text import plural
from ktconvert.pipeline.stages.quantize_experts import error_figures
from ktconvert.pipeline.verify.checks import (
    CHUNK_BYTES,
    CONVERT_AGAIN,
    Check,
    CheckItems,
    LinearError,
    ProjectionErrors,
)
from ktconvert.pipeline.verify.expert_checks import (
    Comparison,
    ExpertFindings,
    find_first_difference,
    summarize_calibrated,
)
from ktconvert.pipeline.verify.inputs import Inputs
from ktconvert.pipeline.verify.tensor_checks import model_sizes
from ktconvert.quantizers.reference import bf16_to_f32

SAME_OPTIONS = "compare outputs of the same model, made with the same options"
SOURCE_REMEDY = f"give the source that it was made from, or {CONVERT_AGAIN}"
# Cosine between weights that have nothing in common is near 0; between weights and their codes in 4 bits, it is 0.99.
UNRELATED_COSINE = 0.5
BF16_STEP = 2.0**-7  # largest distance of two neighbouring values in BF16, as a fraction of them
SUM_ERROR = 1e-6  # error of a sum in float32, as a fraction of the largest terms

Expert = tuple[int, int]  # layer, expert

# --- the source -----------------------------------------------------------------------------------


def source_bytes(inputs: Inputs) -> int:
    """Return the bytes that a comparison with the source counts: its experts, and the output's non-expert tensors."""
    model = inputs.model
    tensors = inputs.output.non_expert_tensors.values()
    layers = [] if model is None else [layer for layer in inputs.measure.shapes if layer in model.moe_layers]
    experts = sum(tensor.nbytes for layer in layers for tensor in model.layer_tensors(layer)) if model else 0
    return experts + sum(stored.nbytes for stored in tensors)


def compare_source(compared: Comparison, check_items: CheckItems) -> tuple[Check, list[ProjectionErrors]]:
    """Compare every expert and every non-expert tensor with the source, and measure the error of some or all experts.

    Rounded codes are chosen again and must be the same bytes. Calibrated codes must have the same scales (unless these
    were calibrated, too), be in their range, and have a plausible error compared with that of rounding. Raises
    InputError for a source that holds NaN or Inf or cannot be read.
    """
    output = compared.output
    measure = compared.inputs.measure
    model = compared.model
    resplit_from = compared.resplit_from
    problems, notes = _compare_shapes(output, measure, model)
    layers = [
        layer
        for layer, (_, hidden, width) in measure.shapes.items()
        if layer in model.moe_layers and (hidden, width) == model.shape(layer)[1:]
    ]
    ends = _check_experts(_list_ends(model, layers), check_items)
    if different := _explain_different_model(model, layers, problems, ends):
        return Check("source", "", [different], notes, "give the model that was converted"), []
    for numa in (*resplit_from, measure.numa):
        reasons = {
            layer: explain_illegal_count(compared.fmt.layer_format(layer), [measure.shapes[layer][1:]], numa)
            for layer in layers
        }
        if numa in resplit_from and (reason := next(filter(None, reasons.values()), None)):
            problems.append(f"impossible number of NUMA slices in the manifest's resplit_from, {numa}: {reason}")
        layers = [layer for layer in layers if reasons[layer] is None]
    experts = [(layer, expert) for layer in layers for expert in range(model.shape(layer)[0])]
    others = {item: _count_expert_bytes(model, item) for item in experts if item not in ends}
    checked = ends | _check_experts(others, check_items)
    total, errors = _gather_findings({item: checked[item] for item in experts})
    problems += total.problems + compare_non_experts(compared.inputs, compared.non_experts, check_items)
    method = f"quantized again (T = {resplit_from[0]}) and resplit" if resplit_from else "quantized again"
    summary = f"{total.equal} tensors {method}, same bytes"
    if compared.calibrated:
        summary = summarize_calibrated(total.calibrated, compared.same_scales)
        if unused := sum(linear.unused for linear in total.calibrated):
            notes.append(
                f"{plural(unused, 'linear')} with columns that are all zeros: calibration never saw their inputs"
            )
    if model.equalized:
        codes = "" if compared.calibrated else ", and up has the same codes as without --equalize"
        summary += f"; {total.equalized} experts are equalized{codes}"
    summary += f"; {len(compared.non_experts)} non-expert tensors equal" if compared.non_experts else ""
    return Check("source", summary, problems, notes, SOURCE_REMEDY), errors


def _explain_different_model(
    model: MoeModel, layers: Sequence[int], problems: Sequence[str], ends: Mapping[Expert, ExpertFindings]
) -> str | None:
    """Return a sentence if the source is not the model that was converted; None if they have an expert in common.

    layers    layers with experts of the same sizes
    problems  differences of the sizes
    ends      findings of the first and last experts of the first and last of these layers
    """
    if not layers:
        return f"{problems[0]}, which is a different model" if problems else None
    _, errors = _gather_findings(ends)
    cosines = [error.figures["cosine"] for error in errors]
    if not cosines or max(cosines) > UNRELATED_COSINE:
        return None
    return f"its experts have nothing in common with those of {model.source.root}, which is a different model"


def _list_ends(model: MoeModel, layers: Sequence[int]) -> dict[Expert, int]:
    """Return the first and last experts of the first and last of these layers, with their bytes in the source."""
    numbers = sorted({*layers[:1], *layers[-1:]})
    ends = dict.fromkeys((layer, expert) for layer in numbers for expert in (0, model.shape(layer)[0] - 1))
    return {item: _count_expert_bytes(model, item) for item in ends}


def _count_expert_bytes(model: MoeModel, item: Expert) -> int:
    return sum(tensor.nbytes for tensor in model.expert_tensors(*item))


def _check_experts(experts: Mapping[Expert, int], check_items: CheckItems) -> dict[Expert, ExpertFindings]:
    """Return the findings of each expert.

    experts  their bytes in the source, to report as progress
    """
    return dict(check_items("experts", list(experts), list(experts.values())))


def _gather_findings(
    findings_by_expert: Mapping[Expert, ExpertFindings],
) -> tuple[ExpertFindings, list[ProjectionErrors]]:
    """Return the findings of all experts together, and the errors of each projection of each layer."""
    total = ExpertFindings()
    errors: dict[tuple[int, str], ProjectionErrors] = {}
    for (layer, expert), findings in findings_by_expert.items():
        total.problems += findings.problems
        total.equal += findings.equal
        total.calibrated += findings.calibrated
        total.equalized += findings.equalized
        for projection, sums in findings.sums.items():
            projection_errors = errors.setdefault((layer, projection), ProjectionErrors(layer, projection))
            projection_errors.sums += sums
            projection_errors.experts.append(LinearError(layer, expert, projection, **error_figures(sums)))
    return total, list(errors.values())


def _compare_shapes(output: Output, measure: Measure, model: MoeModel) -> tuple[list[str], list[str]]:
    """Return problems and notes about layers that the output or the source lacks, or whose shapes differ."""
    problems = []
    root = model.source.root
    for layer, shape in measure.shapes.items():
        if layer not in model.moe_layers:
            problems.append(f"layer {layer} has experts, but not in {root}")
        elif shape != model.shape(layer):
            experts, hidden, width = shape
            source_experts, source_hidden, source_width = model.shape(layer)
            problems.append(
                f"layer {layer} has {experts} experts of {hidden} x {width}, but {source_experts} of "
                f"{source_hidden} x {source_width} in {root}"
            )
    missing = [n for n in model.layers if n not in measure.shapes]
    if not missing:
        return problems, []
    if output.settings.get("layers", "all") != "all":
        return problems, [f"--layers excluded {plural(len(missing), 'layer')} of the source: {format_ranges(missing)}"]
    return [*problems, f"{root} has {plural(len(missing), 'more layer')}: {format_ranges(missing)}"], []


def require_source(inputs: Inputs) -> TensorSource:
    """Return the source, which must have been given."""
    assert inputs.source is not None
    return inputs.source


def list_dequantized(inputs: Inputs) -> dict[str, OutputTensor]:
    """Return the tensors that `dequantize` or `merge-adapter` writes for a source, by name; of `fetch`, those it has.

    Raises InputError and UnsupportedError for a source or an adapter that these commands do not accept.
    """
    source = require_source(inputs)
    if inputs.measure.method == dequantized.FETCHED:
        fetched = inputs.output.non_expert_tensors
        return {name: OutputTensor(name, info) for name, info in source.tensors.items() if name in fetched}
    tensors: Sequence[OutputTensor] = find_non_expert_tensors(source, (), source.quantization).output_tensors()
    if inputs.adapter is not None:
        tensors, _ = add_adapter(inputs.adapter, "", source, tensors)
    return {tensor.key: tensor for tensor in tensors}


def compare_dequantized(inputs: Inputs, check_items: CheckItems) -> Check:
    """Compare every tensor of a checkpoint with the source: weights are decoded again, and the adapter added again."""
    tensors = list_dequantized(inputs)
    problems = compare_non_experts(inputs, tensors, check_items)
    changed = sum(tensor.deltas is not None for tensor in tensors.values())
    decoded = sum(isinstance(tensor.stored, Weight) for tensor in tensors.values())
    if inputs.adapter is None:
        result = f"{decoded} weights decoded again, same bytes; {len(tensors) - decoded} other tensors equal"
    else:
        result = f"the adapter added to {changed} weights again, same values; {len(tensors) - changed} others equal"
    return Check("source", result, problems, remedy=SOURCE_REMEDY)


def compare_non_experts(inputs: Inputs, expected: Mapping[str, OutputTensor], check_items: CheckItems) -> list[str]:
    """Return the problems of the non-expert tensors of an output.

    expected  the expected tensors, by name
    """
    others = inputs.output.non_expert_tensors
    root = require_source(inputs).root
    problems = [f"{name} in {others[name].file} is not in {root}" for name in others if name not in expected]
    sizes = [others[name].nbytes if name in others else 0 for name in expected]
    findings = check_items("non-expert tensors", list(expected), sizes)
    return problems + [problem for _, problem in findings if problem is not None]


def _find_different_sum(stored: U8, expected: U8) -> tuple[int] | None:
    """Return the first byte of the first BF16 value that differs by more than the sums of float32 of two CPUs do."""
    if np.array_equal(stored, expected):
        return None
    values, sums = (bf16_to_f32(data.view(np.uint16)) for data in (stored, expected))
    limit = BF16_STEP * np.abs(sums) + SUM_ERROR * np.abs(sums).max()
    different = np.flatnonzero(~(np.abs(values - sums) <= limit))
    return (2 * int(different[0]),) if different.size else None


def compare_non_expert(inputs: Inputs, tensor: OutputTensor) -> str | None:
    """Return the problem of a non-expert tensor; None if it equals the source's."""
    output = inputs.output
    source = require_source(inputs)
    stored_info = output.non_expert_tensors.get(tensor.key)
    entry = tensor.entry
    source_info = tensor.reads[0]
    if stored_info is None:
        return f"{tensor.key} is missing"
    if (stored_info.dtype, stored_info.shape) != (entry.dtype, entry.shape):
        stored_text = f"{stored_info.dtype} {list(stored_info.shape)}"
        expected_text = f"{entry.dtype} {list(entry.shape)}"
        return f"{tensor.key} in {stored_info.file} is {stored_text}, must be {expected_text} like {source_info.name}"
    find_difference = find_first_difference if tensor.deltas is None else _find_different_sum
    position = 0
    for chunk in read_chunks(source, tensor):
        difference = find_difference(output.read(stored_info, position, position + chunk.size), chunk)
        if difference is not None:
            with_adapter = "" if tensor.deltas is None else " with the adapter"
            return (
                f"{tensor.key} in {stored_info.file} differs from {source_info.name}{with_adapter} at byte "
                f"{position + difference[0]}"
            )
        position += chunk.size
    for read in tensor.reads:
        source.release(read)
    return None


# --- a second output ------------------------------------------------------------------------------


def compare_outputs(output: Output, measure: Measure, other_output: Output, check_items: CheckItems) -> Check:
    """Compare two outputs: they must have the same expert tensors with the same bytes.

    Non-expert tensors are compared if both have them.
    """
    sizes, other_sizes = model_sizes(measure), model_sizes(measure_output(other_output))
    differences = [
        f"{name} {value}, not {other_sizes[name]}"
        for name, value in sizes.items()
        if value != other_sizes.get(name, value)
        and not (0 in (value, other_sizes[name]) and name in ("hidden", "intermediate"))  # 0: unknown
    ]
    if differences:
        problem = f"is not the same conversion as {other_output.root}: it has {' and '.join(differences)}"
        return Check("other", "", [problem], remedy=SAME_OPTIONS)
    problems = [*_find_missing(output, other_output), *_find_missing(other_output, output)]
    pairs = tensor_pairs(output, other_output)
    compared = check_items("equal tensors", list(pairs), [stored.nbytes for stored, _ in pairs.values()])
    problems += [problem for _, problem in compared if problem is not None]
    unpaired = len(output.non_expert_tensors.keys() ^ other_output.non_expert_tensors.keys())
    notes = (f"{unpaired} non-expert tensors exist only in one output",) if unpaired else ()
    result = f"{len(pairs)} tensors, same bytes in {other_output.root}"
    if problems and (different := _describe_different_options(output, other_output)):
        return Check("other", result, [different], notes, SAME_OPTIONS)
    return Check("other", result, problems, notes, "convert the wrong one again")


def _describe_different_options(output: Output, other_output: Output) -> str | None:
    """Return a sentence on options that change the bytes of experts, if the manifests have different ones."""
    first, second = output.manifest, other_output.manifest
    if first is None or second is None or first.command != second.command or first.command not in CONVERSION_OPTIONS:
        return None
    cls = CONVERSION_OPTIONS[first.command]
    names = {
        option_field.name for option_field in option_fields(cls) if option_field.declaration.effect is Effect.WEIGHTS
    }
    mine, others = ({name: each.settings[name] for name in names & each.settings.keys()} for each in (first, second))
    different = describe_different_settings(mine, others, cls, "{} {}, not {}")
    return f"was not made like {other_output.root}: {'; '.join(different)}" if different else None


def tensor_pairs(output: Output, other_output: Output) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """Return the tensors that both outputs have, by name."""
    experts = {
        output.names.tensor_name(*key): (stored, other_output.tensors[key])
        for key, stored in sorted(output.tensors.items())
        if key in other_output.tensors
    }
    shared = output.non_expert_tensors.keys() & other_output.non_expert_tensors.keys()
    return experts | {
        name: (output.non_expert_tensors[name], other_output.non_expert_tensors[name]) for name in sorted(shared)
    }


def _find_missing(output: Output, other_output: Output) -> list[str]:
    """Return the expert tensors that only `output` has; a layer that `other` lacks completely counts as one."""
    missing = sorted(output.tensors.keys() - other_output.tensors.keys())
    layers = {slice_id.layer for slice_id, _ in other_output.tensors}
    missing_layers = Counter(slice_id.layer for slice_id, _ in missing if slice_id.layer not in layers)
    problems = [
        f"layer {layer} ({count} tensors) is missing in {other_output.root}" for layer, count in missing_layers.items()
    ]
    return problems + [
        f"{output.names.tensor_name(*key)} is missing in {other_output.root} ({output.names.describe(*key)})"
        for key in missing
        if key[0].layer in layers
    ]


def compare_tensor(
    output: Output, other_output: Output, name: str, info: TensorInfo, other_info: TensorInfo
) -> str | None:
    """Return how a tensor differs between two outputs; None if it does not."""
    name += explain_name(output.names, name)
    if info.nbytes != other_info.nbytes:
        return f"{name} has {info.nbytes} bytes, {other_info.nbytes} in {other_output.root}"
    for start in range(0, info.nbytes, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, info.nbytes)
        difference = find_first_difference(output.read(info, start, stop), other_output.read(other_info, start, stop))
        if difference is not None:
            position, value, other_value, _ = difference
            return f"{name} differs: byte {start + position} is {value:#04x}, {other_value:#04x} in {other_output.root}"
    if info.dtype != other_info.dtype or info.shape != other_info.shape:
        other_text = f"{other_info.dtype} {list(other_info.shape)} in {other_output.root}"
        return f"{name} is {info.dtype} {list(info.shape)}, {other_text}"
    return None
