"""Experts of an output against their source: quantized again and compared, or judged if their codes were calibrated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel, equalize
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor, find_non_expert_tensors
from ktconvert.layouts.encodings.encoding import Bytes, Encoding, error_sums, unpack_float_scales
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant import kernels
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
from ktconvert.pipeline.verify.inputs import Inputs
from ktconvert.quantizers import Matrix
from ktconvert.quantizers.differences import sum_products
from ktconvert.quantizers.quantizer import ABSMAX, QUANTIZERS, Quantizer
from ktconvert.quantizers.reference import bf16_to_f32

# quant_method of the manifest -> whether the codes were calibrated. Calibrated codes are judged by their errors; only
# their shapes and scales must be the same.
METHODS: Mapping[str | None, bool] = {None: False, "RTN": False, "GPTQ": True}

# Error of calibrated codes over the error of rounding to nearest. GPTQ gives 1.0 to 1.3 at the usual dampening, 1.8 at
# a thousandth of that. The codes of a wrong expert give 13 (W4A16) to 200 (W8A16).
WORST_RATIO = 3.0
ROWS = 64  # rows to judge in a linear without measured error: enough to recognize a wrong linear
MOST_UNUSED = 0.5  # largest fraction of columns without inputs in calibration
CODE_TOLERANCE = 1.002  # a value may exceed that of the last code by less than half a code: its own rounding


class CalibratedLinear(NamedTuple):
    """Comparison of a linear with calibrated codes.

    ratio    its error over that of rounding to nearest
    rounded  whether its codes are those of rounding
    unused   whether it has columns of zeros, whose inputs calibration never saw
    """

    ratio: float
    rounded: bool
    unused: bool


@dataclass
class ExpertFindings:
    """Result of comparing one expert or several.

    equal       number of tensors that are equal
    sums        projection -> sums of error_sums, of measured experts
    calibrated  of linears with calibrated codes
    equalized   number of equalized experts
    """

    problems: list[str] = field(default_factory=list)
    equal: int = 0
    sums: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    calibrated: list[CalibratedLinear] = field(default_factory=list)
    equalized: int = 0


@dataclass(frozen=True)
class Comparison:
    """An output, its source, and the way to compare them.

    quantizer    quantizer of the output; if its codes are calibrated, the quantizer to judge them by
    calibrated   whether codes are judged, not compared
    same_scales  whether calibrated linears must have the scales of rounding to nearest
    """

    inputs: Inputs
    model: MoeModel
    fmt: Format
    quantizer: Quantizer
    calibrated: bool
    same_scales: bool

    @property
    def output(self) -> Output:
        return self.inputs.output

    @cached_property
    def non_experts(self) -> dict[str, OutputTensor]:
        """The expected non-expert tensors: all of a whole model; else those that the output has."""
        if self.output.is_whole_model:
            rest = find_non_expert_tensors(self.model.source, self.model.expert_tensor_names(), self.model.quantization)
            return {tensor.key: tensor for tensor in rest.output_tensors()}
        found = copy_tensors.select_non_experts(self.model, copy_tensors.infer_choice(self.output.non_expert_tensors))
        return {tensor.key: tensor for tensor in found if tensor.key in self.output.non_expert_tensors}

    @cached_property
    def resplit_from(self) -> list[int]:
        """The NUMA counts that the output had before each `ktconvert resplit`, in order."""
        return [] if self.output.is_whole_model else list(self.output.facts.get("resplit_from", []))

    def make_expected(self, work: ExpertsWork, item: tuple[int, str]) -> list[tuple[NumaSlice, list[Bytes]]]:
        """Return the expected NUMA slices of a projection: quantized from the source, and resplit as the output was."""
        first, *later = (replace(work.slicing, numa=numa) for numa in (*self.resplit_from, work.slicing.numa))
        slices = replace(work, slicing=first).make(item)
        for grid in later:
            slices = resplit(work.fmt.encoding, slices, grid, item)
        return slices


def create_comparison(inputs: Inputs) -> Comparison:
    """Return the way to compare an output with its source.

    Raises UnsupportedError if we cannot make these bytes or judge these codes.
    """
    root, facts, fmt, model = inputs.output.root, inputs.output.facts, inputs.measure.fmt, inputs.model
    assert model is not None
    method, scale = facts.get("quant_method"), facts.get("scale", ABSMAX.name)
    if fmt is None:
        raise UnsupportedError(
            f"{root}: {inputs.measure.method} weights cannot be made again; verify them without --against SOURCE."
        )
    if method not in METHODS or scale not in QUANTIZERS:
        unknown = method if method not in METHODS else scale
        raise UnsupportedError(f"{root}: {unknown} weights cannot be compared with a source; leave out --against.")
    quantizer = QUANTIZERS[scale]
    calibrated = METHODS[method] or quantizer.calibrated
    same_scales = not quantizer.calibrated
    return Comparison(inputs, model, fmt, quantizer if same_scales else ABSMAX, calibrated, same_scales)


def first_difference(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> tuple[int, int, int, int] | None:
    """Return the position of the first different byte, its values in a and b, and the number of different bytes.

    Returns None for equal bytes.
    """
    if np.array_equal(a, b):
        return None
    different = np.flatnonzero(a != b)
    return int(different[0]), int(a[different[0]]), int(b[different[0]]), different.size


def compare_expert(compared: Comparison, layer: int, expert: int) -> ExpertFindings:
    """Compare all tensors of an expert with those that its source gives, and measure its error if it is a sample."""
    count, hidden, intermediate = compared.model.shape(layer)
    fmt, measure, options = compared.fmt.layer_format(layer), compared.inputs.measure, compared.inputs.options
    quantizer = compared.quantizer.select_for(fmt.encoding.grid)
    is_sample = options.full or expert in sample_experts(count)
    grid = Slicing(layer, hidden, intermediate, measure.numa, measure.backward, fmt.forward)
    importance = None if quantizer == ABSMAX else importance_of(compared.model, compared.inputs.imatrix, layer)
    work = ExpertsWork(fmt, grid, expert, expert + 1, {}, compared.model, quantizer, importance)
    found = ExpertFindings()
    for projection in PROJECTIONS:
        for part, expected in compared.make_expected(work, (expert, projection)):
            stored = _compare_slice(compared, work, part, expected, found)
            if stored is None or not work.slicing.is_measured(part):
                continue
            encoding, matrix = unequalize(work.model, fmt.encoding, part)
            sums = np.zeros(4)
            if compared.calibrated:
                sums, linear, problem = judge_calibrated(
                    fmt.encoding, matrix, stored, expected, whole=is_sample, measured=encoding
                )
                found.calibrated.append(linear)
                codes = compared.output.tensors[part.id, fmt.encoding.tensors(part.n, part.k)[0].name]
                found.problems += [f"{codes.name} in {codes.file} {problem}"] if problem else []
            elif is_sample:
                sums = error_sums(encoding, matrix, stored)
            if is_sample:
                found.sums[projection] = found.sums.get(projection, np.zeros(4)) + sums
    if work.model.exponents(layer, expert) is not None:
        found.equalized = 1
        found.problems += [] if compared.calibrated else _check_equalized_codes(compared, work)
    for info in work.model.expert_tensors(layer, expert):
        work.model.source.release(info)
    return found


def _check_equalized_codes(compared: Comparison, work: ExpertsWork) -> list[str]:
    """Check that up of an equalized expert has the codes that it has without --equalize, and their scales times 2^e."""
    item, encoding = (work.start, "up"), work.fmt.encoding
    plain = compared.make_expected(replace(work, model=equalize(work.model, ())), item)
    for (part, scaled), (_, tensors) in zip(compared.make_expected(work, item), plain, strict=True):
        exponents = exponents_of(work.model, part)
        if part.backward or exponents is None:
            continue
        scales, plain_scales = (unpack_float_scales(encoding, each[-1], part.n, part.k) for each in (scaled, tensors))
        same = all(np.array_equal(a, b) for a, b in zip(scaled[:-1], tensors[:-1], strict=True))
        if not same or not np.array_equal(scales, np.ldexp(plain_scales, exponents[:, None])):
            return [f"up of expert {work.start} of layer {part.layer} has different codes with and without --equalize"]
    return []


def _compare_slice(
    compared: Comparison, work: ExpertsWork, part: NumaSlice, expected: list[Bytes], found: ExpertFindings
) -> list[Bytes] | None:
    """Return the stored tensors of a NUMA slice if all exist with the right sizes; add problems to `found`."""
    output, names, before = compared.output, compared.output.names, len(found.problems)
    stored: list[Bytes] = []
    tensors = work.fmt.encoding.tensors(part.n, part.k)
    for tensor, data in zip(tensors, expected, strict=True):
        info, description = output.tensors.get((part.id, tensor.name)), names.describe(part.id, tensor.name)
        if info is None:
            found.problems.append(f"{description} is missing ({names.tensor_name(part.id, tensor.name)})")
            continue
        where = f"{info.name} in {info.file}"
        if info.nbytes != data.size:
            found.problems.append(
                f"{description} has {info.nbytes} bytes, but quantizing the source gives {tensor.nbytes} ({where})"
            )
            continue
        stored.append(output.read(info))
        if compared.calibrated and (tensor == tensors[0] or not compared.same_scales):
            found.equal += 1  # judged, not compared
        elif (difference := first_difference(stored[-1], data)) is None:
            found.equal += 1
        else:
            at, actual, must, count = difference
            values = f"byte {at} is {actual:#04x}, but quantizing the source gives {must:#04x}"
            differ = "1 byte differs" if count == 1 else f"{count} bytes differ"
            found.problems.append(f"{description}: {values} ({differ}; {where})")
    # Codes with wrong scales are meaningless, so they are not judged.
    judged = not compared.calibrated or len(found.problems) == before
    return stored if len(stored) == len(tensors) and judged else None


# --- calibrated codes -----------------------------------------------------------------------------


def judge_calibrated(
    encoding: Encoding,
    matrix: Matrix,
    stored: Sequence[Bytes],
    rounded: Sequence[Bytes],
    *,
    whole: bool,
    measured: Encoding | None = None,
) -> tuple[npt.NDArray[np.float64], CalibratedLinear, str]:
    """Compare calibrated codes of a linear with those of rounding to nearest.

    stored    tensors of the linear
    rounded   its tensors as rounding to nearest makes them
    whole     whether to look at all rows, or at ROWS of them
    measured  encoding to measure the error with; None: encoding
    Columns that are all zeros, though rounding has codes there, were never seen in calibration: they do not count.
    Returns sums as of error_sums, the comparison, and what is wrong with the codes ("" if nothing is).
    """
    n, k = matrix.shape
    rows = np.arange(n) if whole else np.unique(np.linspace(0, n - 1, ROWS).astype(int))
    if problem := _find_out_of_range(encoding, stored, n, k):
        return np.zeros(4), CalibratedLinear(np.inf, False, False), problem
    x = bf16_to_f32(kernels.decode(matrix)[rows])
    ours, theirs = ((measured or encoding).decode(tensors, n, k, rows) for tensors in (stored, rounded))
    unused = np.asarray(theirs.any(axis=0) & ~ours.any(axis=0))
    if unused.mean() > MOST_UNUSED:
        problem = f"has zeros in {int(unused.sum())} of {unused.size} columns: calibration saw hardly any of its inputs"
        return np.zeros(4), CalibratedLinear(np.inf, False, True), problem
    same = bool(np.array_equal(ours, theirs))
    x[:, unused] = theirs[:, unused] = 0  # as in ours
    sums, rounding = sum_products(x, ours), sum_products(x, theirs)
    error, usual = (error_figures(figures)["relative_error"] for figures in (sums, rounding))
    ratio = error / usual if usual else 1.0 if error == 0 else np.inf
    linear = CalibratedLinear(ratio, same, bool(unused.any()))
    if ratio <= WORST_RATIO:
        return sums, linear, ""
    times = f"{ratio:.1f} times that of rounding to nearest ({usual:.4f}); at most {WORST_RATIO:g} times is plausible"
    return sums, linear, f"has an error of {error:.4f}, {times}"


def _find_out_of_range(encoding: Encoding, stored: Sequence[Bytes], n: int, k: int) -> str:
    """Return what is wrong with the scales and codes of a linear [n, k] by themselves; "" if nothing is."""
    grid = encoding.grid
    scales = unpack_float_scales(encoding, stored[-1], n, k)
    if not np.isfinite(scales).all():
        return "has a scale that is not finite"
    if grid.high - grid.low == (1 << grid.bits) - 1:
        return ""  # every bit pattern is a code
    values = encoding.decode(stored, n, k, slice(None)).reshape(n, scales.shape[1], -1)
    steps = scales[:, :, None] * np.float32(grid.step * CODE_TOLERANCE)
    if ((values < grid.low * steps) | (values > grid.high * steps)).any():
        return f"has a code outside {grid.low} to {grid.high}"
    return ""


def summarize_calibrated(linears: Sequence[CalibratedLinear], same_scales: bool = True) -> str:
    """Return what holds for all these linears; same_scales: whether their scales were compared, too."""
    worst = max((linear.ratio for linear in linears), default=0.0)
    rounded = sum(linear.rounded for linear in linears)
    scales = "with the scales of rounding to nearest and" if same_scales else "with codes in their range and"
    summary = f"{len(linears)} linears {scales} errors of at most {worst:.2f} times those of rounding"
    return summary + (f"; {rounded} of them are rounded to nearest" if rounded else "")
