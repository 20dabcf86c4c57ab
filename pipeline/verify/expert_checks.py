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
from ktconvert.layouts.encodings.encoding import BIAS, Bytes, Encoding, error_sums, unpack_float_scales
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.native_quant import kernels
from ktconvert.pipeline.stages import copy_tensors
from ktconvert.pipeline.stages.quantize_experts import (
    ExpertsWork,
    error_figures,
    make_importance_reader,
    sample_experts,
    slice_exponents,
    unequalize,
)
from ktconvert.pipeline.stages.resplit_experts import resplit_linear
from ktconvert.pipeline.verify.inputs import Inputs
from ktconvert.quantizers import Matrix
from ktconvert.quantizers.differences import sum_products
from ktconvert.quantizers.quantizer import ABSMAX, QUANTIZERS, Quantizer
from ktconvert.quantizers.reference import bf16_to_f32

# quant_method of the manifest -> whether the codes were calibrated. Calibrated codes are judged by their errors; only
# their shapes and scales must be the same.
QUANTIZED_METHODS: Mapping[str | None, bool] = {None: False, "RTN": False, "GPTQ": True}

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
    calibrated  comparisons of linears with calibrated codes
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
            others = find_non_expert_tensors(
                self.model.source, self.model.expert_tensor_names(), self.model.quantization
            )
            return {tensor.key: tensor for tensor in others.output_tensors()}
        selected = copy_tensors.select_non_experts(
            self.model, copy_tensors.infer_choice(self.output.non_expert_tensors)
        )
        return {tensor.key: tensor for tensor in selected if tensor.key in self.output.non_expert_tensors}

    @cached_property
    def resplit_from(self) -> list[int]:
        """The NUMA counts that the output had before each `ktconvert resplit`, in order."""
        return [] if self.output.is_whole_model else list(self.output.facts.get("resplit_from", []))

    def make_expected(self, work: ExpertsWork, item: tuple[int, str]) -> list[tuple[NumaSlice, list[Bytes]]]:
        """Return the expected NUMA slices of a projection: quantized from the source, and resplit as the output was."""
        first, *later = (replace(work.slicing, numa=numa) for numa in (*self.resplit_from, work.slicing.numa))
        slices = replace(work, slicing=first).make_linear(item)
        for slicing in later:
            slices = resplit_linear(work.fmt.encoding, slices, slicing, item)
        return slices


def create_comparison(inputs: Inputs) -> Comparison:
    """Return the way to compare an output with its source.

    Raises UnsupportedError if we cannot make these bytes or judge these codes.
    """
    root = inputs.output.root
    facts = inputs.output.facts
    fmt = inputs.measure.fmt
    model = inputs.model
    assert model is not None
    method = facts.get("quant_method")
    scale = facts.get("scale", ABSMAX.name)
    if fmt is None:
        raise UnsupportedError(
            f"{root}: {inputs.measure.method} weights cannot be made again; verify them without --against SOURCE."
        )
    if method not in QUANTIZED_METHODS or scale not in QUANTIZERS:
        unknown = method if method not in QUANTIZED_METHODS else scale
        raise UnsupportedError(f"{root}: {unknown} weights cannot be compared with a source; leave out --against.")
    quantizer = QUANTIZERS[scale]
    calibrated = QUANTIZED_METHODS[method] or quantizer.calibrated
    same_scales = not quantizer.calibrated
    return Comparison(inputs, model, fmt, quantizer if same_scales else ABSMAX, calibrated, same_scales)


def find_first_difference(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> tuple[int, int, int, int] | None:
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
    fmt = compared.fmt.layer_format(layer)
    measure = compared.inputs.measure
    quantizer = compared.quantizer.select_for(fmt.encoding.grid)
    is_sample = compared.inputs.options.full or expert in sample_experts(count)
    gated = compared.model.is_gated
    slicing = Slicing(layer, hidden, intermediate, measure.numa, measure.backward, fmt.forward, gated=gated)
    importance = None if quantizer == ABSMAX else make_importance_reader(compared.model, compared.inputs.imatrix, layer)
    work = ExpertsWork(fmt, slicing, expert, expert + 1, {}, compared.model, quantizer, importance)
    findings = ExpertFindings()
    for projection in slicing.projections:
        for numa_slice, expected in compared.make_expected(work, (expert, projection)):
            stored = _compare_slice(compared, work, numa_slice, expected, findings)
            if stored is None or not work.slicing.is_measured(numa_slice):
                continue
            encoding, matrix = unequalize(work.model, fmt.encoding, numa_slice)
            sums = np.zeros(4)
            if compared.calibrated:
                sums, linear, problem = judge_calibrated(
                    fmt.encoding, matrix, stored, expected, all_rows=is_sample, measured=encoding
                )
                findings.calibrated.append(linear)
                if problem:
                    first_tensor = fmt.encoding.tensors(numa_slice.n, numa_slice.k)[0]
                    codes = compared.output.tensors[numa_slice.id, first_tensor.name]
                    findings.problems.append(f"{codes.name} in {codes.file} {problem}")
            elif is_sample:
                sums = error_sums(encoding, matrix, stored)
            if is_sample:
                findings.sums[projection] = findings.sums.get(projection, np.zeros(4)) + sums
    if work.model.exponents(layer, expert) is not None:
        findings.equalized = 1
        if not compared.calibrated:
            findings.problems += _check_equalized_codes(compared, work)
    for info in work.model.expert_tensors(layer, expert):
        work.model.source.release(info)
    return findings


def _check_equalized_codes(compared: Comparison, work: ExpertsWork) -> list[str]:
    """Return a problem unless up of an equalized expert has the codes that it has without --equalize.

    Their scales must be those without --equalize times 2^e.
    """
    item = (work.start, "up")
    encoding = work.fmt.encoding
    plain_slices = compared.make_expected(replace(work, model=equalize(work.model, ())), item)
    slices = compared.make_expected(work, item)
    for (numa_slice, tensors), (_, plain_tensors) in zip(slices, plain_slices, strict=True):
        exponents = slice_exponents(work.model, numa_slice)
        if numa_slice.backward or exponents is None:
            continue
        scales = unpack_float_scales(encoding, tensors[-1], numa_slice.n, numa_slice.k)
        plain_scales = unpack_float_scales(encoding, plain_tensors[-1], numa_slice.n, numa_slice.k)
        same_codes = all(np.array_equal(a, b) for a, b in zip(tensors[:-1], plain_tensors[:-1], strict=True))
        if not same_codes or not np.array_equal(scales, np.ldexp(plain_scales, exponents[:, None])):
            expert = f"expert {work.start} of layer {numa_slice.layer}"
            return [f"up of {expert} has different codes with and without --equalize"]
    return []


def _compare_slice(
    compared: Comparison, work: ExpertsWork, numa_slice: NumaSlice, expected: list[Bytes], findings: ExpertFindings
) -> list[Bytes] | None:
    """Return the stored tensors of a NUMA slice if all exist with the right sizes; add problems to `findings`."""
    output = compared.output
    names = output.names
    old_problems = len(findings.problems)
    stored: list[Bytes] = []
    tensors = work.fmt.encoding.tensors(numa_slice.n, numa_slice.k)
    for tensor, data in zip(tensors, expected, strict=True):
        info = output.tensors.get((numa_slice.id, tensor.name))
        description = names.describe(numa_slice.id, tensor.name)
        if info is None:
            findings.problems.append(f"{description} is missing ({names.tensor_name(numa_slice.id, tensor.name)})")
            continue
        location = f"{info.name} in {info.file}"
        if info.nbytes != data.size:
            findings.problems.append(
                f"{description} has {info.nbytes} bytes, but quantizing the source gives {tensor.nbytes} ({location})"
            )
            continue
        stored.append(output.read(info))
        may_differ = tensor == tensors[0] or not (compared.same_scales or tensor.name == BIAS)
        if compared.calibrated and may_differ:
            findings.equal += 1  # judged, not compared
        elif (difference := find_first_difference(stored[-1], data)) is None:
            findings.equal += 1
        else:
            position, actual, expected_value, count = difference
            values = f"byte {position} is {actual:#04x}, but quantizing the source gives {expected_value:#04x}"
            differ = "1 byte differs" if count == 1 else f"{count} bytes differ"
            findings.problems.append(f"{description}: {values} ({differ}; {location})")
    # Codes with wrong scales are meaningless, so they are not judged.
    can_judge = not compared.calibrated or len(findings.problems) == old_problems
    return stored if len(stored) == len(tensors) and can_judge else None


# --- calibrated codes -----------------------------------------------------------------------------


def judge_calibrated(
    encoding: Encoding,
    matrix: Matrix,
    stored: Sequence[Bytes],
    rounded: Sequence[Bytes],
    *,
    all_rows: bool,
    measured: Encoding | None = None,
) -> tuple[npt.NDArray[np.float64], CalibratedLinear, str]:
    """Compare calibrated codes of a linear with those of rounding to nearest.

    stored    tensors of the linear
    rounded   its tensors as rounding to nearest makes them
    all_rows  whether to look at all rows, or at ROWS of them
    measured  encoding to measure the error with; None: encoding

    Columns that are all zeros, though rounding has codes there, were never seen in calibration: they do not count.
    Returns sums as error_sums does, the comparison, and the problem of the codes ("" if there is none).
    """
    n, k = matrix.shape
    rows = np.arange(n) if all_rows else np.unique(np.linspace(0, n - 1, ROWS).astype(int))
    if problem := _find_out_of_range(encoding, stored, n, k):
        return np.zeros(4), CalibratedLinear(np.inf, False, False), problem
    x = bf16_to_f32(kernels.decode(matrix)[rows])
    actual, expected = ((measured or encoding).decode(tensors, n, k, rows) for tensors in (stored, rounded))
    unused = np.asarray(expected.any(axis=0) & ~actual.any(axis=0))
    if unused.mean() > MOST_UNUSED:
        problem = f"has zeros in {int(unused.sum())} of {unused.size} columns: calibration saw hardly any of its inputs"
        return np.zeros(4), CalibratedLinear(np.inf, False, True), problem
    is_rounded = bool(np.array_equal(actual, expected))
    x[:, unused] = expected[:, unused] = 0  # actual has zeros there already
    sums = sum_products(x, actual)
    error = error_figures(sums)["relative_error"]
    rounding_error = error_figures(sum_products(x, expected))["relative_error"]
    ratio = error / rounding_error if rounding_error else 1.0 if error == 0 else np.inf
    linear = CalibratedLinear(ratio, is_rounded, bool(unused.any()))
    if ratio <= WORST_RATIO:
        return sums, linear, ""
    problem = (
        f"has an error of {error:.4f}, {ratio:.1f} times that of rounding to nearest ({rounding_error:.4f}); at most "
        f"{WORST_RATIO:g} times is plausible"
    )
    return sums, linear, problem


def _find_out_of_range(encoding: Encoding, stored: Sequence[Bytes], n: int, k: int) -> str:
    """Return the problem of the scales and codes of a linear [n, k], without a comparison; "" if there is none."""
    grid = encoding.grid
    scales = unpack_float_scales(encoding, stored[encoding.scale_index], n, k)
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
    """Return a sentence about all these linears.

    same_scales  whether their scales were compared, too
    """
    worst = max((linear.ratio for linear in linears), default=0.0)
    rounded = sum(linear.rounded for linear in linears)
    scales = "with the scales of rounding to nearest and" if same_scales else "with codes in their range and"
    summary = f"{len(linears)} linears {scales} errors of at most {worst:.2f} times those of rounding"
    return summary + (f"; {rounded} of them are rounded to nearest" if rounded else "")
