"""Quantization of routed experts: read through memory maps, quantized and packed in one pass, written once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel, equalize
from ktconvert.layouts.encodings.encoding import Bytes, Encoding, RowSelection, error_bytes, error_sums
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs import Format, loose
from ktconvert.layouts.outputs.slices import LinearId, NumaSlice, PackedSlices, Slicing, TensorNames, allocate_slices
from ktconvert.layouts.statistics.folder import InputStatistics
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import Matrix, bf16_rows
from ktconvert.pipeline.engine.units import Stage, Unit
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.stages import expert_files
from ktconvert.pipeline.stages.expert_files import ExpertsToWrite, read_ahead, release_expert
from ktconvert.quantizers.equalizing import Exponents
from ktconvert.quantizers.quantizer import ABSMAX, Quantizer
from ktconvert.quantizers.reference import F32

NAME = "experts"
VERSION = 1
# Codes are chosen and packed for about CHUNK weights of a slice at a time, while these are in cache. A chunk has whole
# blocks of ROWS rows, so that the bytes of a chunk are contiguous in every encoding that packs chosen codes.
CHUNK, ROWS = 1 << 18, 128
EQUALIZED: Final = "equalized"  # key of the manifest: the equalized experts; absent without --equalize
MEASURED = 8  # experts per layer to measure


@dataclass(frozen=True)
class ExpertsWork(ExpertsToWrite):
    """The work of a unit: experts that are quantized.

    importance  (expert, projection) -> importance of the linear's columns, float32 [k] or [k, k], or None; for
                quantizers that use it
    """

    model: MoeModel
    quantizer: Quantizer
    importance: Callable[[int, str], F32 | None] | None = None

    @property
    def names(self) -> TensorNames:
        return self.fmt.make_names_for_source(self.model)

    def make_linear(self, item: LinearId, buffer: Bytes | None = None) -> PackedSlices:
        """Quantize a linear. Raise InputError, which names the position, for a value that is not finite."""
        expert, projection = item
        linear = self.model.linear(self.slicing.layer, expert, projection)
        importance = None if self.importance is None else self.importance(*item)
        packed = allocate_slices(self.fmt.encoding, self.slicing.slices(*item), buffer)
        write_biases(self.model, packed)
        for numa_slice, out in packed:
            matrix = numa_slice.cut_linear(linear)
            try:
                quantize_slice(self.fmt.encoding, self.quantizer, matrix, out, numa_slice.cut_columns(importance))
            except kernels.NonFinite as error:
                raise describe_non_finite(self.model, numa_slice, matrix, error) from error
        return packed

    def measure_linear_error(self, expert: int, projection: str) -> dict[str, float]:
        """Quantize a linear again and return its error_figures; those of an exact encoding are known."""
        if self.fmt.encoding.is_exact(self.model):
            return error_figures(np.array([1.0, 1.0, 1.0, 0.0]))
        linear = self.make_linear((expert, projection))
        slices = ((numa_slice, packed) for numa_slice, packed in linear if self.slicing.is_measured(numa_slice))
        return measure_error(self.model, self.fmt.encoding, slices)

    def iterate_items(self) -> Iterator[LinearId]:
        tensors = partial(self.model.expert_tensors, self.slicing.layer)
        experts = read_ahead(self.model.source, range(self.start, self.stop), tensors)
        return ((expert, projection) for expert in experts for projection in self.slicing.projections)

    def finish_item(self, item: LinearId, reporter: Reporter) -> None:
        # Released after its error has been measured, so that a source behind a network sends it only once.
        is_kept = item[0] == self.sampled_expert
        release_expert(self.model, self.slicing.layer, item, reporter, is_kept=is_kept)

    def scratch_bytes(self) -> tuple[int, int]:
        widest = max(self.slicing.hidden, self.slicing.intermediate)
        reading_bytes = self.model.memory_for_reading(self.slicing.layer, self.slicing.backward)
        choosing_bytes = 0
        if self.quantizer.choose_codes is not None:
            # BF16 and codes of a chunk; the codes of a whole linear, concatenated, and again while they are packed.
            choosing_bytes = 4 * max(ROWS * widest, CHUNK) + 3 * self.slicing.hidden * self.slicing.intermediate
        return 2 * ROWS * widest + reading_bytes + choosing_bytes, error_bytes(widest)

    def measure_errors(self) -> dict[str, object]:
        layer = self.slicing.layer
        expert = self.sampled_expert
        errors = {projection: self.measure_linear_error(expert, projection) for projection in self.slicing.projections}
        for info in self.model.expert_tensors(layer, expert):
            self.model.source.release(info)
        equalized = report_equalized(self.model, layer, self.start, self.stop)
        return {"layer": layer, "sampled_expert": expert, **errors, **equalized}


def describe_non_finite(model: MoeModel, numa_slice: NumaSlice, matrix: Matrix, error: kernels.NonFinite) -> InputError:
    """Return the error for a value of a slice that is not finite; its position is that in `matrix`."""
    position = matrix.origin[0] + error.row, matrix.origin[1] + error.column
    row, column = reversed(position) if numa_slice.backward else position
    layer, expert, projection = numa_slice.layer, numa_slice.expert, numa_slice.projection
    info = model.weight(layer, expert, projection).values_tensor
    return InputError(
        f"{model.source.path(info)}: tensor {info.name} (layer {layer}, expert {expert}, {projection}_proj) contains a "
        f"value that is not finite at row {row}, column {column}; download the file again or ask its publisher."
    )


def write_biases(model: MoeModel, packed: PackedSlices) -> None:
    """Write the biases of a linear to the last tensors of its slices, if experts have biases."""
    for numa_slice, out in packed if model.has_biases else ():
        bias = model.bias(numa_slice.layer, numa_slice.expert, numa_slice.projection)
        if bias is not None:
            out[-1].view(np.float32)[:] = numa_slice.cut_bias(bias)


def quantize_slice(
    encoding: Encoding, quantizer: Quantizer, matrix: Matrix, out: Sequence[Bytes], importance: F32 | None = None
) -> None:
    """Choose codes for a slice of a linear, and pack them into `out`.

    importance  as in `Choose`

    Raises kernels.NonFinite for a value that is not finite.
    """
    if quantizer.choose_codes is None:
        encoding.quantize(matrix, out)
        return
    assert encoding.pack is not None
    n, k = matrix.shape
    step = max(1, CHUNK // (ROWS * k)) * ROWS
    chosen: list[tuple[npt.NDArray[np.int8], npt.NDArray[Any]]] = []
    for first in range(0, n, step):
        stop = min(first + step, n)
        try:
            chosen.append(quantizer.choose_codes(bf16_rows(matrix.rows(first, stop)), encoding.grid, importance))
        except kernels.NonFinite as error:
            raise kernels.NonFinite(first + error.row, error.column) from None
    codes, scales = (chunks[0] if len(chunks) == 1 else np.concatenate(chunks) for chunks in zip(*chosen, strict=True))
    encoding.pack(codes, scales, out)  # all rows at once: some encodings have tensors that cannot be split by rows


def make_stage(
    model: MoeModel,
    fmt: Format,
    layers: Sequence[int],
    *,
    quantizer: Quantizer = ABSMAX,
    numa: int = 1,
    backward: bool = False,
    loose_files: bool = False,
    max_shard_size: int | None,
    metadata: Mapping[str, str],
    statistics: InputStatistics | None = None,
    options: tuple[tuple[str, Any], ...] = (),
) -> Stage[ExpertsWork]:
    """Return the stage that converts these layers.

    quantizer       chooses the codes of layers whose format supports it
    numa            number of NUMA slices
    backward        whether the matrices for fine-tuning are made, too
    loose_files     whether a unit makes a folder of loose files, not a shard
    max_shard_size  limit of a shard in bytes; None for the format's own limit
    metadata        metadata of all shards
    statistics      statistics of the experts' inputs, for quantizers that use them
    options         (name, value) of options that change bytes
    """
    names = fmt.make_names_for_source(model)
    units = []
    for layer in layers:
        layer_fmt = fmt.layer_format(layer)
        layer_quantizer = quantizer.select_for(layer_fmt.encoding.grid)
        importance = None if layer_quantizer == ABSMAX else make_importance_reader(model, statistics, layer)
        experts, hidden, intermediate = model.shape(layer)
        slicing = Slicing(layer, hidden, intermediate, numa, backward, layer_fmt.forward, gated=model.is_gated)
        limit = None if loose_files else max_shard_size or fmt.arrangement.shard_bytes
        shard_metadata = layer_metadata(layer_fmt, layer, model.shape(layer), metadata)
        for key, start, stop, nbytes in expert_files.split_layer(layer_fmt, slicing, experts, limit):
            tensors = [tensor for expert in range(start, stop) for tensor in model.expert_tensors(layer, expert)]
            slice_ids = [numa_slice.id for expert in (start, stop - 1) for numa_slice in slicing.all_slices([expert])]
            units.append(
                Unit(
                    stage=NAME,
                    key=key,
                    versions=(VERSION, layer_fmt.encoding.grid.version, layer_fmt.encoding.version),
                    params=(
                        ("format", layer_fmt.name),
                        ("reading", model.storage_identity(layer)),
                        ("metadata", tuple(sorted(shard_metadata.items()))),
                        ("options", options),
                        ("experts", (start, stop)),
                        ("names", tuple(names.tensor_name(slice_id, "") for slice_id in slice_ids)),
                        ("quantizer", (layer_quantizer.name, layer_quantizer.version)),
                    ),
                    inputs=tuple(map(model.source.identity, tensors)),
                    final=loose.layer_folder(layer) if loose_files else "",
                    bytes_in=sum(t.nbytes for t in tensors),
                    bytes_out=nbytes,
                    folder=loose_files,
                    work=ExpertsWork(
                        layer_fmt, slicing, start, stop, shard_metadata, model, layer_quantizer, importance
                    ),
                )
            )
    write = expert_files.write_experts_folder if loose_files else expert_files.write_experts_shard
    return Stage(NAME, f"write experts as {fmt.name}", tuple(units), write)


def layer_metadata(fmt: Format, layer: int, shape: tuple[int, int, int], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a layer's shards.

    shape     (E, H, I)
    metadata  metadata of all shards
    """
    experts, hidden, intermediate = shape
    return {
        **metadata,
        "method": fmt.name,
        "layout_version": str(fmt.encoding.version),
        "layer": str(layer),
        "num_experts": str(experts),
        "hidden_size": str(hidden),
        "moe_intermediate_size": str(intermediate),
    }


def make_importance_reader(
    model: MoeModel, statistics: InputStatistics | None, layer: int
) -> Callable[[int, str], F32 | None] | None:
    """Return ExpertsWork.importance for a layer's experts. Inputs of an equalized down are 2^e times as large."""
    if statistics is None:
        return None

    def read_importance(expert: int, projection: str) -> F32 | None:
        importance = statistics.read_importance(layer, expert, projection)
        exponents = model.exponents(layer, expert) if projection == "down" else None
        if importance is None or exponents is None:
            return importance
        ratios = exponents.astype(np.int32) - exponents.max()  # ratios are enough, and do not overflow
        scaled: F32 = np.ldexp(importance, 2 * ratios if importance.ndim == 1 else ratios + ratios[:, None])
        return scaled

    return read_importance


# --- errors of written experts, and equalized experts ----------------------------------------------


def sample_experts(count: int) -> Sequence[int]:
    """Return some of a layer's experts, evenly spread; all if they are few."""
    return range(count) if count <= MEASURED else [i * count // MEASURED for i in range(MEASURED)]


def error_figures(sums: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the figures for sums of x*x, y*y, x*y and (x-y)^2; an all-zero source matches exactly or not at all."""
    xx, yy, xy, dd = (float(v) for v in sums)
    relative = (dd / xx) ** 0.5 if xx else float(dd > 0)
    cosine = xy / (xx * yy) ** 0.5 if xx and yy else float(xx == yy)
    return {"relative_error": round(relative, 6), "cosine": round(cosine, 6)}


def measure_error(
    model: MoeModel, encoding: Encoding, slices: Iterable[tuple[NumaSlice, Sequence[Bytes]]]
) -> dict[str, float]:
    """Return the error_figures of these slices of a linear against the checkpoint."""
    sums = (error_sums(*unequalize(model, encoding, numa_slice), tensors) for numa_slice, tensors in slices)
    return error_figures(sum(sums, np.zeros(4)))


def equalize_for_format(model: MoeModel, fmt: Format) -> MoeModel:
    """Return the model as --equalize reads it: equalized in layers that are rounded to scales per row."""
    encodings = {layer: fmt.layer_format(layer).encoding for layer in model.layers}
    rounded_layers = (
        layer for layer, encoding in encodings.items() if encoding.pack is not None and not encoding.is_exact(model)
    )
    return equalize(model, rounded_layers)


def report_equalized(model: MoeModel, layer: int, start: int, stop: int) -> dict[str, Any]:
    """Return which of these experts are equalized, for the journal; {} without --equalize."""
    if layer not in model.equalized:
        return {}
    return {"equalized_experts": [e for e in range(start, stop) if model.exponents(layer, e) is not None]}


def slice_exponents(model: MoeModel, numa_slice: NumaSlice) -> Exponents | None:
    """Return the exponents of an equalized slice, for each row of up or column of down; None if it is not scaled."""
    if numa_slice.projection == "gate":
        return None
    exponents = model.exponents(numa_slice.layer, numa_slice.expert)
    width = numa_slice.k if numa_slice.projection == "down" else numa_slice.n
    return None if exponents is None else exponents[numa_slice.start : numa_slice.start + width]


def unequalize(model: MoeModel, encoding: Encoding, numa_slice: NumaSlice) -> tuple[Encoding, Matrix]:
    """Return a slice as the checkpoint has it, and the encoding that decodes an equalized slice to it."""
    linear = numa_slice.cut_linear(
        model.linear(numa_slice.layer, numa_slice.expert, numa_slice.projection, equalized=False)
    )
    if (exponents := slice_exponents(model, numa_slice)) is None:
        return encoding, linear

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: RowSelection) -> F32:
        shifts = -exponents[rows, None] if numa_slice.projection == "up" else exponents
        values: F32 = np.ldexp(encoding.decode(stored, n, k, rows), shifts)
        return values

    return replace(encoding, decode=decode, error_sums=None), linear
