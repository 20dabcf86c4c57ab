"""The choice of `cpu --method-map auto`: a method for each layer, with the least loss within a budget of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import ResourceError, UsageError
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.outputs.format import explain_illegal_count, output_bytes, require_legal
from ktconvert.layouts.outputs.slices import NumaSlice, Slicing
from ktconvert.layouts.statistics.folder import open_model_imatrix, read_related_statistics
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.layouts.tensors import format_ranges
from ktconvert.native_quant import kernels
from ktconvert.native_quant.arrays import F32, F64, I64, Array
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.native_quant.matrix import Matrix, bf16_rows
from ktconvert.pipeline.options.conversion_options import CpuOptions, MapChoice
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.plans import checkpoint, expert_plan
from ktconvert.pipeline.plans.expert_plan import MAP
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import round_up_size, size
from ktconvert.pipeline.stages.quantize_experts import describe_non_finite, quantize_slice, sample_experts
from ktconvert.quantizers.quantizer import QUANTIZERS, Quantizer
from ktconvert.quantizers.reference import bf16_to_f32

CELLS = 1 << 18  # states of the dynamic programme for each layer
ROWS = 128  # rows to measure of each slice of a sampled linear
AUTO = f"{MAP} auto"
CHOSEN_FROM = ("map_choice", "layers", "scale", "numa")  # options that determine the choice


def choose_methods(sizes: I64, losses: F64, budget: int) -> list[int]:
    """Return the method of each layer with the least total loss within a budget; of equal losses, the fewest bytes.

    sizes   bytes of a layer in a method, int64 [layers, methods]
    losses  loss of a layer in a method, float64 [layers, methods], finite
    budget  bytes of all layers, at least the sum of each layer's smallest method

    A dynamic programme over bytes, in steps of the sizes' common divisor. It is exact if the budget has at most CELLS
    such steps, as it has for models whose layers are alike. Otherwise, steps are larger, and sizes are rounded up.
    """
    extra = sizes - sizes.min(axis=1, keepdims=True)
    available = budget - int(sizes.min(axis=1).sum())
    step = max(1, int(np.gcd.reduce(extra, axis=None)))
    step *= -(-(min(available, int(extra.max(axis=1).sum())) + 1) // (step * CELLS))
    weights = -(-extra // step)
    cells = min(available // step, int(weights.max(axis=1).sum())) + 1
    least = np.full(cells, np.inf)  # the least loss of the layers so far, by the steps that they use
    least[0] = 0
    chosen = np.zeros((len(sizes), cells), np.int8)
    for layer, layer_weights in enumerate(weights):
        before, least = least, np.full(cells, np.inf)
        for method in np.argsort(layer_weights, kind="stable"):
            weight = layer_weights[method]
            if weight < cells:
                totals = before[: cells - weight] + losses[layer, method]
                is_better = totals < least[weight:]
                least[weight:][is_better] = totals[is_better]
                chosen[layer, weight:][is_better] = method
    cell = int(np.argmin(least))
    methods = []
    for layer in reversed(range(len(sizes))):
        methods.append(int(chosen[layer, cell]))
        cell -= int(weights[layer, methods[-1]])
    return methods[::-1]


# --- measuring ------------------------------------------------------------------------------------


def measure_losses(
    model: MoeModel,
    layers: Sequence[int],
    formats: Sequence[Format],
    slices: int,
    quantizer: Quantizer,
    imatrix: Imatrix | None,
    threads: int,
    reporter: Reporter,
) -> F64:
    """Return the loss of each layer in each format, float64 [layers, formats] (numerics.md, section 11).

    slices    number of NUMA slices
    imatrix   sums of squares of the experts' inputs; None: all columns and all experts count the same
    reporter  shows the progress

    The error is relative to the layer's outputs if the folder of the importance matrix has their sensitivity, else to
    the outputs of its experts. Quantizes ROWS rows of each slice of a few experts; the result does not depend on the
    number of threads. Raises InputError for a value that is not finite.
    """
    samples = [_select_sample(model, imatrix, layer) for layer in layers]
    total = sum(_expert_bytes(model, sample.layer, expert) for sample in samples for expert in sample.tokens)
    reporter.begin(total, 0, units=(0, len(samples)))
    reporter.set_current("measure")
    measured = []
    try:
        with ThreadPoolExecutor(threads, initializer=unbind_thread) as pool:
            for result in pool.map(partial(_measure_layer, model, formats, slices, quantizer, reporter), samples):
                measured.append(result)
                reporter.finish_unit()
    finally:
        reporter.end()
    statistics = read_related_statistics(imatrix)
    if statistics is not None and statistics.document.sensitivity:
        document = statistics.document
        by_layer = dict(zip(document.model.layers, document.sensitivity, strict=True))
        return np.stack([errors * by_layer[layer] for layer, (errors, _) in zip(layers, measured, strict=True)])
    return np.stack([errors / (energy or 1.0) for errors, energy in measured])


class Sample(NamedTuple):
    """Some experts of a layer.

    tokens   expert -> its tokens; 1 for each expert if they are unknown
    imatrix  sums of squares of their inputs; None if they are unknown
    """

    layer: int
    tokens: dict[int, int]
    imatrix: Imatrix | None


def _select_sample(model: MoeModel, imatrix: Imatrix | None, layer: int) -> Sample:
    tokens = np.ones(model.shape(layer)[0], np.int64) if imatrix is None else imatrix.sums[layer, "down"].counts
    if not tokens.any():
        imatrix, tokens = None, np.ones_like(tokens)
    reached = np.flatnonzero(tokens)
    return Sample(layer, {int(n): int(tokens[n]) for n in reached[sample_experts(len(reached))]}, imatrix)


def _expert_bytes(model: MoeModel, layer: int, expert: int) -> int:
    return sum(info.nbytes for info in model.expert_tensors(layer, expert))


def _measure_layer(
    model: MoeModel,
    formats: Sequence[Format],
    slices: int,
    quantizer: Quantizer,
    reporter: Reporter,
    sample: Sample,
) -> tuple[F64, float]:
    """Return the squared error of an expert's output in each format, float64 [formats], and its square without error.

    Both are means over the tokens of the sampled experts.
    """
    layer, imatrix = sample.layer, sample.imatrix
    _, hidden, width = model.shape(layer)
    slicing = Slicing(layer, hidden, width, slices, gated=model.is_gated)
    sums, energies = np.zeros(len(formats)), 0.0
    for expert, tokens in sample.tokens.items():
        ratios, energy = np.zeros(len(formats)), 0.0
        for projection in slicing.projections:  # down is the last one: its outputs are those of the expert
            importance = None if imatrix is None else imatrix.read_importance(layer, expert, projection)
            errors, energy = _measure_linear(model, formats, slicing.slices(expert, projection), quantizer, importance)
            ratios += errors / (energy or 1.0)
        for info in model.expert_tensors(layer, expert):
            model.source.release(info)
        reporter.advance(_expert_bytes(model, layer, expert))
        sums += tokens * energy * ratios
        energies += tokens * energy
    total = sum(sample.tokens.values())
    return sums / total, energies / total


def _measure_linear(
    model: MoeModel,
    formats: Sequence[Format],
    slices: Sequence[NumaSlice],
    quantizer: Quantizer,
    importance: F32 | None,
) -> tuple[F64, float]:
    """Return the squared errors of a linear's outputs in each format, float64 [formats], and the outputs' energy."""
    layer, expert, projection = slices[0].layer, slices[0].expert, slices[0].projection
    linear = model.linear(layer, expert, projection)
    errors, energy = np.zeros(len(formats)), 0.0
    for numa_slice in slices:
        matrix = numa_slice.cut_linear(linear).rows(0, min(ROWS, numa_slice.n))
        columns = numa_slice.cut_columns(importance)
        values = bf16_to_f32(bf16_rows(matrix))
        share = numa_slice.n / len(values)
        energy += share * _weigh_squares(values, columns)
        for number, fmt in enumerate(formats):
            if fmt.encoding.is_exact(model):
                continue
            try:
                decoded = _round_trip(fmt, quantizer, matrix, columns)
            except kernels.NonFinite as error:
                raise describe_non_finite(model, numa_slice, matrix, error) from error
            errors[number] += share * _weigh_squares(values - decoded, columns)
    return errors, energy


def _round_trip(fmt: Format, quantizer: Quantizer, matrix: Matrix, importance: F32 | None) -> F32:
    """Return a matrix [n, k] after quantizing and decoding, float32 [n, k]."""
    n, k = matrix.shape
    stored = [np.empty(tensor.nbytes, np.uint8) for tensor in fmt.encoding.tensors(n, k)]
    quantize_slice(fmt.encoding, quantizer.select_for(fmt.encoding.grid), matrix, stored, importance)
    return fmt.encoding.decode(stored, n, k, slice(None))


def _weigh_squares(values: F32, importance: F32 | None) -> float:
    """Return the sum of squares of values [n, k], each times the importance of its column."""
    columns = np.einsum("nk,nk->k", values, values, dtype=np.float64)
    return float(columns.sum() if importance is None else columns @ importance.astype(np.float64))


# --- the map --------------------------------------------------------------------------------------


def choose_map(
    options: CpuOptions, fmt: Format, model: MoeModel, slices: int, reporter: Reporter
) -> tuple[CpuOptions, str]:
    """Return the options with a literal map in place of `auto`, and a note on it. Reads a sample of the weights.

    fmt       format of --quant-method
    slices    number of NUMA slices
    reporter  shows the progress

    A map that the output was begun or finished with is used again if it was chosen from the same. Raises UsageError
    for options that do not go together, ResourceError if no choice fits.
    """
    mixable = expert_plan.find_mixable(options, fmt)
    budget = _require_budget(options, model)
    path = options.importance.file
    imatrix = None if path is None else open_model_imatrix(path, model)
    digest = None if imatrix is None else imatrix.sha256
    choice = MapChoice(imatrix=digest, model=checkpoint.source_identity(model.source), ram=budget)
    options = with_values(options, numa=slices, map_choice=choice)
    saved = checkpoint.read_saved_values(options, "quant_method", "method_map", *CHOSEN_FROM) or {}
    if all(saved.get(name) == getattr(options, name) for name in CHOSEN_FROM):
        options = with_values(options, quant_method=saved["quant_method"], method_map=saved["method_map"])
        return options, f"{AUTO}, as chosen before: {_write_map(options)}"
    layers = checkpoint.parse_layers(options.layers, model.layers)
    quantizer = QUANTIZERS[options.scale]
    formats = _select_formats(mixable, fmt, [model.shape(layer)[1:] for layer in layers], slices, quantizer)
    sizes = np.array([[output_bytes(model, each, slices, [layer]) for each in formats.values()] for layer in layers])
    if (least := int(sizes.min(axis=1).sum())) > budget:
        remedy = f"give --ram {round_up_size(least)} or more"
        raise ResourceError(f"--ram is too small for the experts with any method; {remedy}.")
    threads = options.execution.thread_count
    losses = measure_losses(model, layers, [*formats.values()], slices, quantizer, imatrix, threads, reporter)
    chosen = choose_methods(sizes, losses, budget)
    options = with_values(options, **_describe_map(layers, [[*formats][method] for method in chosen]))
    uniform = ", ".join(f"{name} {loss:.2g}" for name, loss in zip(formats, losses.sum(axis=0), strict=True))
    inputs = "" if imatrix else "; without --statistics, all inputs and layers count the same"
    return options, (
        f"{AUTO}: {size(_sum_chosen(sizes, chosen))} of experts, expected loss {_sum_chosen(losses, chosen):.2g} "
        f"({uniform}){inputs}; the same choice: {_write_map(options)}"
    )


def _require_budget(options: CpuOptions, model: MoeModel) -> int:
    """Return the budget in bytes. Raises UsageError if there is none, or for options that `auto` does not support."""
    if len(options.method_map) > 1:
        raise UsageError(f"{AUTO} chooses the methods of all layers; leave out the other values of {MAP}.")
    if options.ram is None:
        raise UsageError(f"{AUTO} needs the memory for the experts; give --ram, such as --ram 400GB.")
    return options.ram


def _sum_chosen(values: Array, chosen: Sequence[int]) -> float:
    """Return the sum of values [layers, methods] over all layers, in the chosen methods."""
    return float(values[np.arange(len(chosen)), chosen].sum())


def _select_formats(
    mixable: Mapping[str, Format],
    fmt: Format,
    shapes: Sequence[tuple[int, int]],
    slices: int,
    quantizer: Quantizer,
) -> dict[str, Format]:
    """Return the formats that can hold experts of these sizes (H, I), and that a calibrated quantizer supports.

    Raises UnsupportedError if there are none.
    """
    formats = {
        name: each
        for name, each in mixable.items()
        if explain_illegal_count(each, shapes, slices) is None
        and (quantizer.supports(each.encoding.grid) or not quantizer.calibrated)
    }
    if not formats:
        for hidden, width in shapes:
            require_legal(fmt, hidden, width, slices, mixable.values())
    return formats


def _describe_map(layers: Sequence[int], methods: Sequence[str]) -> dict[str, Any]:
    """Return --quant-method, the most common method, and --method-map, the layers of each of the others."""
    ((common, _),) = Counter(methods).most_common(1)
    by_method: dict[str, list[int]] = {}
    for layer, method in zip(layers, methods, strict=True):
        by_method.setdefault(method, []).append(layer)
    others = (f"{format_ranges(numbers)}={method}" for method, numbers in by_method.items() if method != common)
    return {"quant_method": common, "method_map": tuple(text.replace(" ", "") for text in others)}


def _write_map(options: CpuOptions) -> str:
    """Return the options that make the same choice."""
    return " ".join(
        (
            f"--quant-method {options.quant_method}",
            *(f"{MAP} {text}" for text in options.method_map),
            f"--numa {options.numa}",
        )
    )
