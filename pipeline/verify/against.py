"""An output against its source (experts quantized again and compared, errors measured, all other bytes compared), and
against another output, merged or loose, ours or kt-kernel's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel, equalize
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.output_tensors import OtherTensor, bytes_of, decoded_others
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.encodings.encoding import Bytes, error_sums, scale_values
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import PROJECTIONS, Format
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.format import illegal_reason
from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.measuring import measure as measure_of
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.parts import ExpertGrid, Part
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.stages import copy_tensors
from ktconvert.pipeline.stages.quantize_experts import (
    ExpertsWork,
    error_figures,
    exponents_of,
    importance_of,
    sample_experts,
    unequalize,
)
from ktconvert.pipeline.stages.resplit_experts import resplit
from ktconvert.pipeline.verify import checks
from ktconvert.pipeline.verify.checks import CHUNK, Check, CheckItems, LinearError, ProjectionErrors
from ktconvert.pipeline.verify.inputs import Inputs
from ktconvert.pipeline.verify.structure import sizes_of
from ktconvert.quantizers.choice import ABSMAX, QUANTIZERS, Quantizer

# The manifest's quant_method -> whether codes were calibrated: then they are judged, and only shapes and scales must be
# the same.
METHODS: Mapping[str | None, bool] = {None: False, "RTN": False, "GPTQ": True}


@dataclass
class ExpertFindings:
    """What comparing experts gave. equal: how many tensors are; calibrated: what was seen of calibrated linears;
    equalized: how many experts are.
    """

    problems: list[str] = field(default_factory=list)
    equal: int = 0
    sums: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    calibrated: list[checks.Calibrated] = field(default_factory=list)
    equalized: int = 0


@dataclass(frozen=True)
class Comparison:
    """An output, its source and how they are compared.

    choice       how codes were chosen, or what calibrated ones are compared with
    calibrated   whether codes are judged, not compared
    same_scales  whether calibrated linears have the scales of rounding to nearest; else only how good they are counts
    """

    inputs: Inputs
    model: MoeModel
    fmt: Format
    choice: Quantizer
    calibrated: bool
    same_scales: bool

    @property
    def output(self) -> Output:
        return self.inputs.output

    @cached_property
    def other_tensors(self) -> dict[str, OtherTensor]:
        """What must be there besides experts: of a whole model all else; of others, what is there is the source's."""
        if self.output.whole:
            rest = other_tensors(self.model.source, self.model.expert_tensor_names(), self.model.quantization)
            return {tensor.key: tensor for tensor in decoded_others(rest)}
        found = copy_tensors.select_non_experts(self.model, copy_tensors.infer_choice(self.output.others))
        return {tensor.key: tensor for tensor in found if tensor.key in self.output.others}

    @cached_property
    def resplit_from(self) -> list[int]:
        """The numbers of NUMA parts that the output had before `ktconvert resplit`, in order."""
        return [] if self.output.whole else list(self.output.facts.get("resplit_from", []))

    def expected(self, work: ExpertsWork, item: tuple[int, str]) -> list[tuple[Part, list[Bytes]]]:
        """The parts of a projection as they must be: quantized from the source, and resplit as the output was."""
        first, *later = (replace(work.grid, numa=numa) for numa in (*self.resplit_from, work.grid.numa))
        parts = replace(work, grid=first).make(item)
        for grid in later:
            parts = resplit(work.fmt.encoding, parts, grid, item)
        return parts


def source_bytes(inputs: Inputs) -> int:
    """How many bytes comparing with the source will count: those of its experts, and of all else in the output."""
    model, tensors = inputs.model, inputs.output.others.values()
    layers = [] if model is None else [n for n in inputs.measure.shapes if n in model.moe_layers]
    experts = sum(t.nbytes for n in layers for t in model.layer_tensors(n)) if model else 0
    return experts + sum(stored.nbytes for stored in tensors)


def comparison(inputs: Inputs) -> Comparison:
    """How this output is compared. UnsupportedError where we cannot make these bytes or judge these codes."""
    root, facts, fmt, model = inputs.output.root, inputs.output.facts, inputs.measure.fmt, inputs.model
    assert model is not None
    method, scale = facts.get("quant_method"), facts.get("scale", ABSMAX.name)
    if fmt is None:
        raise UnsupportedError(
            f"{root}: {inputs.measure.method} weights cannot be made again here; verify them without --against SOURCE."
        )
    if method not in METHODS or scale not in QUANTIZERS:
        what = method if method not in METHODS else scale
        raise UnsupportedError(f"{root}: {what} weights cannot be held against a source here.")
    choice = QUANTIZERS[scale]
    calibrated = METHODS[method] or choice.calibrated
    rounded = ABSMAX if choice.calibrated else choice
    return Comparison(inputs, model, fmt, rounded, calibrated, same_scales=not choice.calibrated)


def compare_source(compared: Comparison, check_items: CheckItems) -> tuple[Check, list[ProjectionErrors]]:
    """Every expert against the source, all other tensors for equal bytes; the error of some experts is measured, or of
    all. Codes that rounding chose are chosen again and must be the same bytes. Calibrated ones must have the same
    scales, unless these were calibrated, too, lie in their range, and have an error that is plausible next to
    rounding's. Raises InputError for a source that holds NaN or Inf or cannot be read.
    """
    output, measure, model, before = compared.output, compared.inputs.measure, compared.model, compared.resplit_from
    problems, notes = _same_shapes(output, measure, model)
    layers = [n for n, (_, h, i) in measure.shapes.items() if n in model.moe_layers and (h, i) == model.shape(n)[1:]]
    for numa in (*before, measure.numa):
        wrong = {n: illegal_reason(compared.fmt.of_layer(n), [measure.shapes[n][1:]], numa) for n in layers}
        if numa in before and (reason := next(filter(None, wrong.values()), None)):
            problems.append(f"the manifest says that it was resplit from {numa} NUMA parts: {reason}")
        layers = [n for n in layers if wrong[n] is None]
    total, errors = _compare_experts(model, layers, check_items)
    problems += total.problems + compare_others(compared.inputs, compared.other_tensors, check_items)
    again = f"quantized again (T = {before[0]}) and resplit" if before else "quantized again"
    summary = f"{total.equal} tensors {again}: the same bytes"
    if compared.calibrated:
        summary = checks.calibrated_summary(total.calibrated, compared.same_scales)
        if unused := sum(linear.unused for linear in total.calibrated):
            notes.append(f"{unused} linears have columns that are all zeros: calibration never saw their inputs")
    if model.equalized:
        proved = "" if compared.calibrated else ", up with the codes that it has otherwise"
        summary += f"; {total.equalized} experts are equalized{proved}"
    summary += f"; {len(compared.other_tensors)} other tensors are the source's" if compared.other_tensors else ""
    return Check("source", summary, problems, notes), errors


def _compare_experts(
    model: MoeModel, layers: Iterable[int], check_items: CheckItems
) -> tuple[ExpertFindings, list[ProjectionErrors]]:
    total, errors = ExpertFindings(), dict[tuple[int, str], ProjectionErrors]()
    items = [(layer, expert) for layer in layers for expert in range(model.shape(layer)[0])]
    sizes = [sum(t.nbytes for t in model.expert_tensors(*item)) for item in items]
    for (layer, expert), found in check_items("experts", items, sizes):
        total.problems += found.problems
        total.equal += found.equal
        total.calibrated += found.calibrated
        total.equalized += found.equalized
        for projection, sums in found.sums.items():
            own = errors.setdefault((layer, projection), ProjectionErrors(layer, projection))
            own.sums += sums
            own.experts.append(LinearError(layer, expert, projection, **error_figures(sums)))
    return total, list(errors.values())


def _same_shapes(output: Output, measure: Measure, model: MoeModel) -> tuple[list[str], list[str]]:
    problems, root = [], model.source.root
    for layer, shape in measure.shapes.items():
        if layer not in model.moe_layers:
            problems.append(f"layer {layer} is here, but has no experts in {root}")
        elif shape != model.shape(layer):
            (experts, h, i), (e, own_h, own_i) = shape, model.shape(layer)
            problems.append(f"layer {layer} has {experts} experts of {h} x {i}, {root} has {e} of {own_h} x {own_i}")
    absent = [n for n in model.layers if n not in measure.shapes]
    if not absent:
        return problems, []
    if output.settings.get("layers", "all") != "all":
        return problems, [f"layers {ranges(absent)} of the source were left out by --layers"]
    return [*problems, f"layers {ranges(absent)} of {root} are missing here"], []


def first_difference(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> tuple[int, int, int, int] | None:
    """(position of the first differing byte, its value in a and in b, how many bytes differ); None for equal bytes."""
    if np.array_equal(a, b):
        return None
    at = np.flatnonzero(a != b)
    return int(at[0]), int(a[at[0]]), int(b[at[0]]), at.size


# --- experts --------------------------------------------------------------------------------------


def compare_expert(compared: Comparison, layer: int, expert: int) -> ExpertFindings:
    count, hidden, intermediate = compared.model.shape(layer)
    fmt, measure, options = compared.fmt.of_layer(layer), compared.inputs.measure, compared.inputs.options
    choice, measured = (
        compared.choice.where_it_serves(fmt.encoding.grid),
        options.full or expert in sample_experts(count),
    )
    grid = ExpertGrid(layer, hidden, intermediate, measure.numa, measure.backward, fmt.forward)
    importance = None if choice == ABSMAX else importance_of(compared.model, compared.inputs.imatrix, layer)
    work = ExpertsWork(fmt, grid, expert, expert + 1, {}, compared.model, choice, importance)
    found, of_codes = ExpertFindings(), fmt.encoding
    for projection in PROJECTIONS:
        for part, expected in compared.expected(work, (expert, projection)):
            stored = _compare_part(compared, work, part, expected, found)
            if stored is None or not work.grid.is_measured(part):
                continue
            encoding, matrix = unequalize(work.model, of_codes, part)
            sums = np.zeros(4)
            if compared.calibrated:
                sums, seen, problem = checks.judge(
                    of_codes, matrix, stored, expected, whole=measured, measured=encoding
                )
                found.calibrated.append(seen)
                here = compared.output.tensors[part.place, of_codes.tensors(part.n, part.k)[0].name]
                found.problems += [f"{here.name} in {here.file} {problem}"] if problem else []
            elif measured:
                sums = error_sums(encoding, matrix, stored)
            if measured:
                found.sums[projection] = found.sums.get(projection, np.zeros(4)) + sums
    if work.model.exponents(layer, expert) is not None:
        found.equalized = 1
        found.problems += [] if compared.calibrated else _other_codes(compared, work)
    for info in work.model.expert_tensors(layer, expert):
        work.model.source.release(info)
    return found


def _other_codes(compared: Comparison, work: ExpertsWork) -> list[str]:
    """What is wrong with up of an equalized expert: it has its codes without --equalize, and their scales times 2^e."""
    item, encoding = (work.start, "up"), work.fmt.encoding
    plain = compared.expected(replace(work, model=equalize(work.model, ())), item)
    for (part, scaled), (_, tensors) in zip(compared.expected(work, item), plain, strict=True):
        exponents = exponents_of(work.model, part)
        if part.backward or exponents is None:
            continue
        ours, theirs = (scale_values(encoding, each[-1], part.n, part.k) for each in (scaled, tensors))
        same = all(np.array_equal(a, b) for a, b in zip(scaled[:-1], tensors[:-1], strict=True))
        if not same or not np.array_equal(ours, np.ldexp(theirs, exponents[:, None])):
            return [f"up of expert {work.start} of layer {part.layer} has other codes than without --equalize"]
    return []


def _compare_part(
    compared: Comparison, work: ExpertsWork, part: Part, expected: list[Bytes], found: ExpertFindings
) -> list[Bytes] | None:
    """The stored tensors of a part, if all are there with the right sizes; what is wrong goes into `found`."""
    output, names, before = compared.output, compared.output.names, len(found.problems)
    stored: list[Bytes] = []
    tensors = work.fmt.encoding.tensors(part.n, part.k)
    for tensor, data in zip(tensors, expected, strict=True):
        here, what = output.tensors.get((part.place, tensor.name)), names.describe(part.place, tensor.name)
        if here is None:
            found.problems.append(f"{what} is missing ({names.key(part.place, tensor.name)})")
            continue
        where = f"{here.name} in {here.file}"
        if here.nbytes != data.size:
            found.problems.append(
                f"{what} has {here.nbytes} bytes, quantizing the source gives {tensor.nbytes} ({where})"
            )
            continue
        stored.append(output.read(here))
        if compared.calibrated and (tensor == tensors[0] or not compared.same_scales):
            found.equal += 1  # judged, not compared
        elif (difference := first_difference(stored[-1], data)) is None:
            found.equal += 1
        else:
            at, is_, should, count = difference
            differ = "1 byte differs" if count == 1 else f"{count} bytes differ"
            found.problems.append(
                f"{what}: byte {at} is {is_:#04x}, quantizing the source gives {should:#04x} ({differ}; {where})"
            )
    judged = not compared.calibrated or len(found.problems) == before  # codes with other scales mean nothing
    return stored if len(stored) == len(tensors) and judged else None


# --- all else -------------------------------------------------------------------------------------


def source_of(inputs: Inputs) -> TensorSource:
    assert inputs.source is not None
    return inputs.source


def decoded_tensors(inputs: Inputs) -> dict[str, OtherTensor]:
    """What `dequantize` makes of a source, by name. Raises InputError and UnsupportedError for what it cannot take."""
    source = source_of(inputs)
    tensors = other_tensors(source, (), source.quantization).tensors
    return {name: OtherTensor(name, stored) for name, stored in tensors.items()}


def compare_decoded(inputs: Inputs, check_items: CheckItems) -> Check:
    """Every tensor of a dequantized checkpoint: quantized weights are decoded again, all others are the source's."""
    tensors = decoded_tensors(inputs)
    problems = compare_others(inputs, tensors, check_items)
    count = sum(isinstance(tensor.stored, Weight) for tensor in tensors.values())
    result = f"{count} weights decoded again: the same bytes; {len(tensors) - count} other tensors are the source's"
    return Check("source", result, problems)


def compare_others(inputs: Inputs, expected: Mapping[str, OtherTensor], check_items: CheckItems) -> list[str]:
    """What is wrong with the tensors that are no routed experts, which are to be these, by name."""
    others, root = inputs.output.others, source_of(inputs).root
    problems = [f"{name} in {others[name].file} is not in {root}" for name in others if name not in expected]
    sizes = [others[name].nbytes if name in others else 0 for name in expected]
    found = check_items("other tensors", list(expected), sizes)
    return problems + [problem for _, problem in found if problem is not None]


def other_difference(inputs: Inputs, tensor: OtherTensor) -> str | None:
    """What is wrong with a tensor that is no routed expert; None where it is the source's."""
    output, source = inputs.output, source_of(inputs)
    stored, entry, info = output.others.get(tensor.key), tensor.entry, tensor.reads[0]
    if stored is None:
        return f"{tensor.key} is missing"
    if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
        here, there = f"{stored.dtype} {list(stored.shape)}", f"{entry.dtype} {list(entry.shape)}"
        return f"{tensor.key} in {stored.file} is {here}, must be {there}, as {info.name} is"
    at = 0
    for chunk in bytes_of(source, tensor):
        difference = first_difference(output.read(stored, at, at + chunk.size), chunk)
        if difference is not None:
            return f"{tensor.key} in {stored.file} differs from {info.name} at byte {at + difference[0]}"
        at += chunk.size
    for read in tensor.reads:
        source.release(read)
    return None


# --- another output -------------------------------------------------------------------------------


def compare_outputs(output: Output, measure: Measure, other: Output, check_items: CheckItems) -> Check:
    """Require the same expert tensors with the same bytes on both sides; other tensors count where both have them."""
    problems = [
        f"{name} is {value} here, {there} in {other.root}"
        for (name, value), there in zip(sizes_of(measure).items(), sizes_of(measure_of(other)).values(), strict=True)
        if value != there and not (0 in (value, there) and name in ("hidden", "intermediate"))  # 0: not known
    ]
    problems += [*_one_sided(output, other), *_one_sided(other, output)]
    found = pairs(output, other)
    compared = check_items("equal tensors", list(found), [stored.nbytes for stored, _ in found.values()])
    problems += [problem for _, problem in compared if problem is not None]
    lone = len(output.others.keys() ^ other.others.keys())
    notes = (f"{lone} tensors that are no routed experts are on one side only",) if lone else ()
    result = f"{len(found)} tensors, the same bytes in {other.root}"
    return Check("other", result, problems, notes, "convert the wrong one again")


def pairs(output: Output, other: Output) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """The tensors that both have, by name."""
    both = {
        output.names.key(*key): (stored, other.tensors[key])
        for key, stored in sorted(output.tensors.items())
        if key in other.tensors
    }
    shared = output.others.keys() & other.others.keys()
    return both | {name: (output.others[name], other.others[name]) for name in sorted(shared)}


def _one_sided(output: Output, other: Output) -> list[str]:
    """What `other` lacks; a layer that it lacks altogether counts as one."""
    lone = sorted(output.tensors.keys() - other.tensors.keys())
    layers = {place.layer for place, _ in other.tensors}
    whole = Counter(place.layer for place, _ in lone if place.layer not in layers)
    problems = [f"layer {layer} ({count} tensors) is missing in {other.root}" for layer, count in whole.items()]
    return problems + [
        f"{output.names.key(*key)} is missing in {other.root} ({output.names.describe(*key)})"
        for key in lone
        if key[0].layer in layers
    ]


def tensor_difference(output: Output, other: Output, name: str, a: TensorInfo, b: TensorInfo) -> str | None:
    """How a tensor differs; None where both are the same."""
    if a.nbytes != b.nbytes:
        return f"{name} has {a.nbytes} bytes, {b.nbytes} in {other.root}"
    for start in range(0, a.nbytes, CHUNK):
        stop = min(start + CHUNK, a.nbytes)
        difference = first_difference(output.read(a, start, stop), other.read(b, start, stop))
        if difference is not None:
            at, mine, theirs, _ = difference
            return f"{name} differs: byte {start + at} is {mine:#04x}, {theirs:#04x} in {other.root}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{name} is {a.dtype} {list(a.shape)}, {b.dtype} {list(b.shape)} in {other.root}"
    return None
