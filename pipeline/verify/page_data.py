"""Data of the page of `ktconvert verify` beyond the checks: worst rows of linears, all scales, use of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.archs import MOST_EXPERTS
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.encodings import fp8, pack_quantized
from ktconvert.layouts.encodings.encoding import Bytes, unpack_float_scales
from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.outputs.format import explain_illegal_count
from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.layouts.statistics.folder import COUNTS, read_folder_counts
from ktconvert.layouts.tensors import PROJECTIONS, format_ranges
from ktconvert.native_quant.arrays import I64
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.pipeline.engine.threads import run_in_order
from ktconvert.pipeline.stages.quantize_experts import unequalize
from ktconvert.pipeline.verify.checks import LinearError, ProjectionErrors, worst_linears
from ktconvert.pipeline.verify.inputs import Inputs
from ktconvert.quantizers import SIGNED_GRIDS
from ktconvert.quantizers.differences import source_values

LINEARS = 12  # number of linears with the largest errors, whose rows are measured
CHUNK_ROWS = 64  # rows in memory as float64 at a time
STEPS = 16  # bins of scales for each power of two
LOWEST = -150  # exponent of a power of two that is below every positive float32
BINS = STEPS * (128 - LOWEST)

# Encodings that keep codes which BF16 would round -> function that returns the source's exact numbers.
EXACT_VALUES = {"FP8": fp8.source_values, "RAWINT4": pack_quantized.source_values}

Linear = tuple[int, int, str]  # layer, expert, projection
F32 = npt.NDArray[np.float32]


class WorstRow(NamedTuple):
    """The row of a linear with the largest ||x-y||/||x||, of all its NUMA slices."""

    linear: LinearError
    numa: int
    row: int
    relative_error: float


class LinearScales(NamedTuple):
    """The positive scales of one projection of one expert, in all its NUMA slices.

    numa and row are those of the first row with the largest scale. NaN and -1 if there is no positive scale.
    """

    layer: int
    expert: int
    projection: str
    median: float
    largest: float
    numa: int
    row: int


@dataclass(frozen=True)
class Scales:
    """The scales of all experts.

    linears  scales of each linear, in the order of layers, experts and projections
    counts   projection -> number of positive scales in each bin; bin i begins at 2^(i / STEPS + LOWEST)
    zeros    number of scales that are zero
    others   number of scales that are negative, infinite or not a number
    """

    linears: list[LinearScales] = field(default_factory=list)
    counts: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    zeros: int = 0
    others: int = 0


@dataclass(frozen=True)
class PageData:
    """Data of the page.

    rows    worst rows of the linears with the largest errors, if errors were measured
    scales  None if the format has no scales
    counts  routed tokens, int64 [decoder layers, experts]; None without statistics
    """

    rows: tuple[WorstRow, ...] = ()
    scales: Scales | None = None
    counts: I64 | None = None


def collect_page_data(inputs: Inputs, errors: Sequence[ProjectionErrors], counts: I64 | None) -> PageData:
    """Collect the data of an output with all weight files. Raises VerificationError if the disk cannot be read."""
    output = inputs.output
    measure = inputs.measure
    model = inputs.model
    rows = () if model is None else tuple(_find_worst_rows(output, measure, model, worst_linears(errors, LINEARS)))
    return PageData(rows, _read_scales(output, measure, inputs.options.thread_count), counts)


def _find_slices(measure: Measure, fmt: Format, linear: Linear) -> Iterator[NumaSlice]:
    """Yield the NUMA slices of a linear that count for its error."""
    layer, expert, projection = linear
    _, hidden, intermediate = measure.shapes[layer]
    slicing = Slicing(layer, hidden, intermediate, measure.numa, measure.backward, fmt.forward, gated=measure.gated)
    return filter(slicing.is_measured, slicing.slices(expert, projection))


def _read(output: Output, fmt: Format, numa_slice: NumaSlice, tensors: slice = slice(None)) -> list[Bytes]:
    """Return some tensors of a NUMA slice; an empty list if one is missing or has a wrong size."""
    expected = fmt.encoding.tensors(numa_slice.n, numa_slice.k)[tensors]
    stored = [output.tensors.get((numa_slice.id, tensor.name)) for tensor in expected]
    if any(s is None or s.nbytes != tensor.nbytes for s, tensor in zip(stored, expected, strict=True)):
        return []
    return [output.read(s) for s in stored if s is not None]


# --- rows -----------------------------------------------------------------------------------------


def _find_worst_rows(
    output: Output, measure: Measure, model: MoeModel, linears: Iterable[LinearError]
) -> Iterator[WorstRow]:
    """Yield the worst row of each linear; one NUMA slice at a time is in memory, as float32."""
    assert measure.fmt is not None
    whole_fmt = measure.fmt
    for linear in linears:
        fmt = whole_fmt.layer_format(linear.layer)
        exact = EXACT_VALUES.get(fmt.encoding.name, source_values)
        read_source = exact if fmt.encoding.is_exact(model) else source_values
        rows = []
        for numa_slice in _find_slices(measure, fmt, linear[:3]):
            if not (stored := _read(output, fmt, numa_slice)):
                continue
            encoding, matrix = unequalize(model, fmt.encoding, numa_slice)
            values = encoding.decode(stored, numa_slice.n, numa_slice.k, slice(None))
            chunks = [
                slice(start, min(start + CHUNK_ROWS, numa_slice.n)) for start in range(0, numa_slice.n, CHUNK_ROWS)
            ]
            errors = np.concatenate(
                [_relative_errors(read_source(matrix.rows(chunk.start, chunk.stop)), values[chunk]) for chunk in chunks]
            )
            row = int(np.argmax(errors))
            rows.append(WorstRow(linear, numa_slice.node, row, float(errors[row])))
        if rows:
            yield max(rows, key=lambda row: row.relative_error)


def _relative_errors(x: F32, y: F32) -> npt.NDArray[np.float64]:
    """Return ||x-y||/||x|| of each row, float64 [rows]; 0 or 1 for a row of zeros, as for linears."""
    wide = x.astype(np.float64)
    norm, error = (np.sqrt(np.square(values).sum(axis=1)) for values in (wide, wide - y))
    errors: npt.NDArray[np.float64] = np.divide(error, norm, out=(error > 0).astype(np.float64), where=norm > 0)
    return errors


# --- scales ---------------------------------------------------------------------------------------


def _read_scales(output: Output, measure: Measure, threads: int) -> Scales | None:
    """Read the scales of every expert; return None if the format has none or is unknown.

    Memory holds one expert per thread.
    """
    if measure.fmt is None or all(fmt.encoding.unpack_scales is None for fmt in measure.fmt.layer_formats):
        return None
    formats = {
        layer: fmt
        for layer, shape in measure.shapes.items()
        if (fmt := measure.fmt.layer_format(layer)).encoding.unpack_scales
        and explain_illegal_count(fmt, [shape[1:]], measure.numa) is None
    }
    linears = {slice_id[:3] for slice_id, _ in output.tensors if slice_id.layer in formats}
    ordered = sorted(linears, key=lambda linear: (*linear[:2], PROJECTIONS.index(linear[2])))
    summaries = []
    zeros = 0
    others = 0
    counts = {projection: np.zeros(BINS, np.int64) for projection in PROJECTIONS}

    def read_linear(linear: Linear, _slot: int) -> list[tuple[NumaSlice, F32]]:
        fmt = formats[linear[0]]
        magnitude = np.abs if fmt.encoding.grid.name in SIGNED_GRIDS else np.asarray
        return [
            (numa_slice, magnitude(unpack_float_scales(fmt.encoding, stored[0], numa_slice.n, numa_slice.k)))
            for numa_slice in _find_slices(measure, fmt, linear)
            if (stored := _read(output, fmt, numa_slice, slice(index := fmt.encoding.scale_index, index + 1)))
        ]

    with ThreadPoolExecutor(threads, thread_name_prefix="scales", initializer=unbind_thread) as pool:
        for linear, _, slices in run_in_order(pool, ordered, list(range(2 * threads)), read_linear):
            if not slices:
                continue
            values = np.concatenate([scales.reshape(-1) for _, scales in slices])
            positive = values[np.isfinite(values) & (values > 0)]
            zero_count = int((values == 0).sum())
            zeros = zeros + zero_count
            others = others + values.size - positive.size - zero_count
            bins = (STEPS * (np.log2(positive.astype(np.float64)) - LOWEST)).astype(np.int64)
            counts[linear[2]] += np.bincount(bins, minlength=BINS)
            summaries.append(_summarize_scales(linear, positive, slices))
    return Scales(summaries, counts, zeros, others)


def _summarize_scales(linear: Linear, positive: F32, slices: Sequence[tuple[NumaSlice, F32]]) -> LinearScales:
    if not positive.size:
        return LinearScales(*linear, np.nan, np.nan, -1, -1)
    largest = positive.max()
    numa_slice, scales = next((numa_slice, scales) for numa_slice, scales in slices if (scales == largest).any())
    row = int(np.argmax((scales == largest).any(axis=1))) * (numa_slice.n // len(scales))
    return LinearScales(*linear, float(np.median(positive)), float(largest), numa_slice.node, row)


# --- use of experts -------------------------------------------------------------------------------


def read_counts(folder: Path, measure: Measure, output: Output) -> I64 | None:
    """Read the routed tokens of each expert, int64 [decoder layers, experts], from a folder of statistics.

    Returns None if it has only the importance matrix that the output was made with. Raises InputError if they are
    damaged or belong to a different model, UsageError for an output without layers of experts.
    """
    root = output.root
    if not measure.shapes:
        raise UsageError(f"--statistics {folder}: {root} has no layers of experts; leave it out.")
    path = folder / COUNTS
    if "imatrix" in output.facts and not path.exists():
        return None
    counts = read_folder_counts(folder)
    layers, experts = counts.shape
    counted_experts = {shape[0] for layer, shape in measure.shapes.items() if layer < layers and counts[layer].any()}
    if counted_experts != {experts} or experts > MOST_EXPERTS:
        expert_counts = format_ranges(sorted({shape[0] for shape in measure.shapes.values()}))
        raise InputError(
            f"{path}: has counts of {experts} experts in {layers} layers, but {root} has {expert_counts} experts in "
            f"layers {format_ranges(sorted(measure.shapes))}; use the statistics of this model."
        )
    return counts
