"""An output against its source: every expert quantized again, bytes compared, errors measured; all else compared byte
by byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.encoding import Bytes, error_sums
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import PROJECTIONS, Format
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.format import illegal_reason
from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.parts import ExpertGrid, Part
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.stages import carry_over
from ktconvert.pipeline.stages.experts import ExpertsWork, importance_of
from ktconvert.pipeline.stages.resplit import resplit
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.verify.asking import Ask
from ktconvert.pipeline.verify.calibrated import calibrated_notes, calibrated_summary, judge
from ktconvert.pipeline.verify.checks import Check, ExpertComparison, ProjectionErrors, first_difference, gather, sample
from ktconvert.quantizers.choice import ABSMAX, QUANTIZERS, Choice

# The manifest's quant_method -> whether codes were calibrated: then they are judged, and only shapes and scales must be
# the same.
METHODS: Mapping[str | None, bool] = {None: False, "RTN": False, "GPTQ": True}


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how.

    choice       how codes were chosen, or what calibrated ones are held against
    calibrated   whether codes are judged, not compared
    same_scales  whether calibrated linears have the scales of rounding to nearest; else only how good they are is asked
    full         whether the error of every expert is measured
    """

    output: Output
    measure: Measure
    model: MoeModel
    fmt: Format
    choice: Choice
    imatrix: Imatrix | None
    calibrated: bool
    same_scales: bool
    full: bool

    def expert(self, layer: int, expert: int) -> ExpertComparison:
        """One expert, quantized again."""
        count, hidden, intermediate = self.model.shape(layer)
        grid = ExpertGrid(layer, hidden, intermediate, self.measure.numa, self.measure.backward, self.fmt.forward)
        importance = importance_of(self.imatrix, layer)
        work = ExpertsWork(self.model, self.fmt, self.choice, grid, expert, expert + 1, {}, importance)
        return _compare_expert(self, work, measured=self.full or expert in sample(count))

    @cached_property
    def carried(self) -> dict[str, carry_over.OtherTensor]:
        """What must be there beside the experts: all else of a whole model; of others, what is there must be the
        source's.
        """
        if self.output.whole:
            rest = other_tensors(self.model.source, self.model.expert_tensor_names(), self.model.quantization)
            return {tensor.key: tensor for tensor in carry_over.carried(rest)}
        carried = carry_over.not_experts(self.model, carry_over.choice_of(self.output.others))
        return {tensor.key: tensor for tensor in carried if tensor.key in self.output.others}

    def wanted(self, work: ExpertsWork, item: tuple[int, str]) -> list[tuple[Part, list[Bytes]]]:
        """The parts of a projection as they must be: quantized from the source, and rearranged as often as the output
        was.
        """
        first, *later = (replace(work.grid, numa=numa) for numa in (*_before(self.output), work.grid.numa))
        parts = replace(work, grid=first).make(item)
        for grid in later:
            parts = resplit(work.fmt.encoding, parts, grid, item)
        return parts


def source_bytes(output: Output, measure: Measure, model: MoeModel) -> int:
    """How many bytes compare_source will count: those of the source's experts, and of all else in the output."""
    experts = sum(t.nbytes for n in measure.shapes if n in model.moe_layers for t in model.layer_tensors(n))
    return experts + sum(stored.nbytes for stored in output.others.values())


def comparison(output: Output, measure: Measure, model: MoeModel, *, imatrix: Imatrix | None, full: bool) -> Comparison:
    """How this output is held against its source.

    imatrix: that which the output was made with, where it was. Raises UnsupportedError where we cannot make these bytes
    or judge these codes.
    """
    fmt, facts = measure.fmt, output.facts
    method, scale = facts.get("quant_method"), facts.get("scale", ABSMAX.name)
    if fmt is None:
        raise UnsupportedError(
            f"{output.root}: {measure.method} weights cannot be made again here; verify them without --against SOURCE."
        )
    if method not in METHODS or scale not in QUANTIZERS:
        what = method if method not in METHODS else scale
        raise UnsupportedError(f"{output.root}: {what} weights cannot be held against a source here.")
    fmt, choice = fmt.configured(facts), QUANTIZERS[scale]
    held_against = ABSMAX if choice.calibrated else choice
    judged = METHODS[method] or choice.calibrated
    return Comparison(output, measure, model, fmt, held_against, imatrix, judged, not choice.calibrated, full)


def compare_source(compared: Comparison, ask: Ask, reporter: Reporter) -> tuple[Check, list[ProjectionErrors]]:
    """Every expert against the source, all other tensors for equal bytes; the error of some experts is measured, or of
    all.

    Codes that rounding chose are chosen again and must be the same bytes. Calibrated ones must have the same scales,
    unless these were calibrated, too, lie in their range, and have an error that is plausible beside rounding's. Raises
    InputError for a source that holds NaN or Inf or cannot be read.
    """
    output, measure, model = compared.output, compared.measure, compared.model
    problems, notes = _same_shapes(output, measure, model)
    layers = [n for n, (_, h, i) in measure.shapes.items() if n in model.moe_layers and (h, i) == model.shape(n)[1:]]
    before = _before(output)
    for numa in (*before, measure.numa):
        wrong = illegal_reason(compared.fmt, (measure.shapes[n][1:] for n in layers), numa)
        if wrong is not None and numa in before:
            problems.append(f"the manifest says that it was resplit from {numa} NUMA parts: {wrong}")
        layers = [n for n in layers if illegal_reason(compared.fmt, [measure.shapes[n][1:]], numa) is None]
    gathered = gather(model, layers, ask, reporter)
    problems += [*gathered.problems, *compare_carried(output, model.source, compared.carried, ask, reporter)]
    again = f"quantized again (T = {before[0]}) and resplit" if before else "quantized again"
    summary = f"{gathered.equal} tensors {again}: the same bytes"
    if compared.calibrated:
        summary = calibrated_summary(gathered.calibrated, compared.same_scales)
        notes += calibrated_notes(gathered.calibrated)
    summary += f"; {len(compared.carried)} other tensors are the source's" if compared.carried else ""
    return Check("source", summary, tuple(problems), tuple(notes)), gathered.errors


def _before(output: Output) -> list[int]:
    """The numbers of NUMA parts that the output had before `ktconvert resplit`, in order."""
    return list(output.facts.get("resplit_from", [])) if not output.whole else []


def _same_shapes(output: Output, measure: Measure, model: MoeModel) -> tuple[list[str], list[str]]:
    problems: list[str] = []
    for layer, shape in measure.shapes.items():
        if layer not in model.moe_layers:
            problems.append(f"layer {layer} is here, but has no experts in {model.source.root}")
        elif shape != model.shape(layer):
            e, h, i = model.shape(layer)
            problems.append(
                f"layer {layer} has {shape[0]} experts of {shape[1]} x {shape[2]}, "
                f"{model.source.root} has {e} of {h} x {i}"
            )
    absent = [n for n in model.layers if n not in measure.shapes]
    if not absent:
        return problems, []
    asked = output.settings.get("layers", "all") != "all"
    if asked:
        return problems, [f"layers {ranges(absent)} of the source were left out, as asked"]
    return [*problems, f"layers {ranges(absent)} of {model.source.root} are missing here"], []


# --- experts --------------------------------------------------------------------------------------


def _compare_expert(compared: Comparison, work: ExpertsWork, *, measured: bool) -> ExpertComparison:
    comparison = ExpertComparison()
    for projection in PROJECTIONS:
        for part, wanted in compared.wanted(work, (work.start, projection)):
            stored = _compare_part(compared, work, part, wanted, comparison)
            if stored is None or not work.grid.is_measured(part):
                continue
            matrix = part.of(work.model.linear(work.grid.layer, work.start, projection), work.grid.numa)
            sums = np.zeros(4)
            if compared.calibrated:
                sums, seen, problem = judge(work.fmt.encoding, matrix, stored, wanted, whole=measured)
                comparison.calibrated.append(seen)
                here = compared.output.tensors[part.place, work.fmt.encoding.tensors(part.n, part.k)[0].name]
                comparison.problems += [f"{here.name} in {here.file} {problem}"] if problem else []
            elif measured:
                sums = error_sums(work.fmt.encoding, matrix, stored)
            if measured:
                comparison.sums[projection] = comparison.sums.get(projection, np.zeros(4)) + sums
    for info in work.model.expert_tensors(work.grid.layer, work.start):
        work.model.source.release(info)
    return comparison


def _compare_part(
    compared: Comparison, work: ExpertsWork, part: Part, wanted: list[Bytes], comparison: ExpertComparison
) -> list[Bytes] | None:
    """The stored tensors of a part, if all are there with the right sizes; what is wrong with them goes into
    `comparison`.
    """
    output, before = compared.output, len(comparison.problems)
    stored: list[Bytes] = []
    tensors = work.fmt.encoding.tensors(part.n, part.k)
    for tensor, data in zip(tensors, wanted, strict=True):
        here = output.tensors.get((part.place, tensor.name))
        if here is None or here.nbytes != data.size:
            comparison.problems.append(_absent(output, part, tensor, here))
            continue
        stored.append(output.read(here))
        if compared.calibrated and (tensor == tensors[0] or not compared.same_scales):
            comparison.equal += 1  # judged, not compared
            continue
        difference = first_difference(stored[-1], data)
        if difference is None:
            comparison.equal += 1
        else:
            comparison.problems.append(_differs(output, part, tensor, here, difference))
    complete = len(stored) == len(tensors)
    judged = not compared.calibrated or len(comparison.problems) == before  # codes with other scales mean nothing
    return stored if complete and judged else None


def _differs(
    output: Output, part: Part, tensor: TensorInfo, stored: TensorInfo, difference: tuple[int, int, int, int]
) -> str:
    at, is_, should, count = difference
    return (
        f"{output.names.describe(part.place, tensor.name)}: byte {at} is {is_:#04x}, quantizing the source gives "
        f"{should:#04x} ({count} byte{'s' if count != 1 else ''} differ{'s' if count == 1 else ''}; "
        f"{stored.name} in {stored.file})"
    )


def _absent(output: Output, part: Part, tensor: TensorInfo, stored: TensorInfo | None) -> str:
    what = output.names.describe(part.place, tensor.name)
    if stored is None:
        return f"{what} is missing ({output.names.key(part.place, tensor.name)})"
    return (
        f"{what} has {stored.nbytes} bytes, quantizing the source gives {tensor.nbytes} "
        f"({stored.name} in {stored.file})"
    )


# --- all else -------------------------------------------------------------------------------------


def compare_carried(
    output: Output, source: TensorSource, carried: Mapping[str, carry_over.OtherTensor], ask: Ask, reporter: Reporter
) -> list[str]:
    """What is wrong with the tensors that are no routed experts, which are to be these, by name."""
    problems = [
        f"{name} in {stored.file} is not in {source.root}"
        for name, stored in output.others.items()
        if name not in carried
    ]
    sizes = [0 if (stored := output.others.get(name)) is None else stored.nbytes for name in carried]
    for nbytes, (_, problem) in zip(sizes, ask("other tensors", list(carried), sizes), strict=True):
        problems += [] if problem is None else [problem]
        reporter.advance(nbytes)
    return problems


def carried_difference(output: Output, source: TensorSource, tensor: carry_over.OtherTensor) -> str | None:
    """What is wrong with a tensor that is no routed expert; None where it is the source's."""
    stored, entry, info = output.others.get(tensor.key), tensor.entry, tensor.reads[0]
    if stored is None:
        return f"{tensor.key} is missing"
    if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
        here, there = f"{stored.dtype} {list(stored.shape)}", f"{entry.dtype} {list(entry.shape)}"
        return f"{tensor.key} in {stored.file} is {here}, must be {there}, as {info.name} is"
    at = 0
    for piece in carry_over.pieces(source, tensor):
        difference = first_difference(output.read(stored, at, at + piece.size), piece)
        if difference is not None:
            return f"{tensor.key} in {stored.file} differs from {info.name} at byte {at + difference[0]}"
        at += piece.size
    for read in tensor.reads:
        source.release(read)
    return None
