"""Routed experts in any format: read once through memory maps, quantized and packed in one pass, written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.encodings.encoding import Bytes, Encoding, error_bytes
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs import PROJECTIONS, Format, loose
from ktconvert.layouts.outputs.parts import ExpertGrid, Item, Names, Parts, empty_parts
from ktconvert.layouts.statistics.folder import InputStatistics
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import Matrix, bf16_rows
from ktconvert.pipeline.engine.units import Stage, Unit
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.stages import expert_files, expert_stream
from ktconvert.pipeline.stages.expert_files import ExpertsToWrite
from ktconvert.pipeline.stages.expert_stream import error_figures, read_ahead, taken
from ktconvert.quantizers.choice import ABSMAX, Quantizer
from ktconvert.quantizers.reference import F32

VERSION = 1
# Codes are chosen and packed for some rows of a part at a time, while they lie in cache: about so many weights, in
# whole blocks of rows of every encoding that packs chosen codes, so that their bytes lie together.
CHOSEN, ROWS = 1 << 18, 128
NAME = "experts"


@dataclass(frozen=True)
class ExpertsWork(ExpertsToWrite):
    """Experts that are quantized. importance: (expert, projection) -> of each column of the linear, float32 [k] or
    [k, k], or None, for a choice that asks.
    """

    model: MoeModel
    choice: Quantizer
    importance: Callable[[int, str], F32 | None] | None = None

    @property
    def names(self) -> Names:
        return self.fmt.names_in(self.model)

    def make(self, item: Item, place: Bytes | None = None) -> Parts:
        """Raises InputError, naming the place, for a value that is not finite."""
        expert, projection = item
        linear = self.model.linear(self.grid.layer, expert, projection)
        importance = None if self.importance is None else self.importance(*item)
        packed = empty_parts(self.fmt.encoding, self.grid.parts(*item), place)
        for part, out in packed:
            matrix = part.of(linear)
            try:
                quantize(self.fmt.encoding, self.choice, matrix, out, part.of_columns(importance))
            except kernels.NonFinite as error:
                at = matrix.origin[0] + error.row, matrix.origin[1] + error.column
                row, column = reversed(at) if part.backward else at
                info = self.model.weight(self.grid.layer, expert, projection).values
                raise InputError(
                    f"{self.model.source.path(info)}: tensor {info.name} (layer {self.grid.layer}, expert {expert}, "
                    f"{projection}_proj) holds a value that is not finite at row {row}, column {column}; download the "
                    "file again or ask its publisher."
                ) from error
        return packed

    def error(self, expert: int, projection: str) -> dict[str, float]:
        """error_figures of one projection, quantized again; what stays as it is, is equal."""
        if self.fmt.encoding.is_exact(self.model):
            return error_figures(np.array([1.0, 1.0, 1.0, 0.0]))
        made = self.make((expert, projection))
        measured = ((part, packed) for part, packed in made if self.grid.is_measured(part))
        return expert_stream.error_of(self.model, self.fmt.encoding, measured)

    def coming(self) -> Iterator[Item]:
        tensors = partial(self.model.expert_tensors, self.grid.layer)
        experts = read_ahead(self.model.source, range(self.start, self.stop), tensors)
        return ((expert, projection) for expert in experts for projection in PROJECTIONS)

    def made(self, item: Item, reporter: Reporter) -> None:
        taken(self.model, self.grid.layer, item, reporter)

    def scratch_bytes(self) -> tuple[int, int]:
        widest = max(self.grid.hidden, self.grid.intermediate)
        reading = self.model.reading_bytes(self.grid.layer, self.grid.backward)
        # BF16 and codes; the codes of a whole linear, put together, and once more as they are packed.
        chosen = 4 * max(ROWS * widest, CHOSEN) + 3 * self.grid.hidden * self.grid.intermediate
        chosen = 0 if self.choice.choose is None else chosen
        return 2 * ROWS * widest + reading + chosen, error_bytes(widest)

    def figures(self) -> dict[str, object]:
        layer, expert = self.grid.layer, self.sampled
        errors = {projection: self.error(expert, projection) for projection in PROJECTIONS}
        for info in self.model.expert_tensors(layer, expert):
            self.model.source.release(info)
        own = expert_stream.figures(self.model, layer, self.start, self.stop)
        return {"layer": layer, "sampled_expert": expert, **errors, **own}


def quantize(
    encoding: Encoding, choice: Quantizer, matrix: Matrix, out: Sequence[Bytes], importance: F32 | None = None
) -> None:
    """Choose codes and pack them into `out`. importance: as `Choose` takes it. Raises kernels.NonFinite."""
    if choice.choose is None:
        encoding.quantize(matrix, out)
        return
    assert encoding.pack is not None
    n, k = matrix.shape
    step = max(1, CHOSEN // (ROWS * k)) * ROWS
    chosen: list[tuple[npt.NDArray[np.int8], npt.NDArray[Any]]] = []
    for first in range(0, n, step):
        stop = min(first + step, n)
        try:
            chosen.append(choice.choose(bf16_rows(matrix.rows(first, stop)), encoding.grid, importance))
        except kernels.NonFinite as error:
            raise kernels.NonFinite(first + error.row, error.column) from None
    codes, scales = (each[0] if len(each) == 1 else np.concatenate(each) for each in zip(*chosen, strict=True))
    encoding.pack(codes, scales, out)  # at once: not every tensor of every encoding has its share for each row


def stage(
    model: MoeModel,
    fmt: Format,
    layers: Sequence[int],
    *,
    choice: Quantizer = ABSMAX,
    numa: int = 1,
    backward: bool = False,
    loose_files: bool = False,
    max_shard_size: int | None,
    metadata: Mapping[str, str],
    statistics: InputStatistics | None = None,
    options: tuple[tuple[str, Any], ...] = (),
) -> Stage[ExpertsWork]:
    """The stage that converts these layers. choice: where it serves a layer's format; options: what changes bytes."""
    names = fmt.names_in(model)
    units = []
    for layer in layers:
        own = fmt.of_layer(layer)
        chosen = choice.where_it_serves(own.encoding.grid)
        importance = None if chosen == ABSMAX else importance_of(model, statistics, layer)
        experts, hidden, intermediate = model.shape(layer)
        grid = ExpertGrid(layer, hidden, intermediate, numa, backward, own.forward)
        limit = None if loose_files else max_shard_size or fmt.arrangement.shard_bytes
        about = layer_metadata(own, layer, model.shape(layer), metadata)
        for key, start, stop, nbytes in expert_files.cuts(own, grid, experts, limit):
            tensors = [t for e in range(start, stop) for t in model.expert_tensors(layer, e)]
            ends = [part.place for expert in (start, stop - 1) for part in grid.all_parts([expert])]
            units.append(
                Unit(
                    stage=NAME,
                    key=key,
                    versions=(VERSION, own.encoding.grid.version, own.encoding.version),
                    params=(
                        ("format", own.name),
                        ("reading", model.reading(layer)),
                        ("metadata", tuple(sorted(about.items()))),
                        ("options", options),
                        ("experts", (start, stop)),
                        ("names", tuple(names.key(place, "") for place in ends)),
                        ("quantizer", (chosen.name, chosen.version)),
                    ),
                    inputs=tuple(map(model.source.identity, tensors)),
                    final=loose.layer_folder(layer) if loose_files else "",
                    bytes_in=sum(t.nbytes for t in tensors),
                    bytes_out=nbytes,
                    folder=loose_files,
                    work=ExpertsWork(own, grid, start, stop, about, model, chosen, importance),
                )
            )
    return Stage(NAME, f"write experts as {fmt.name}", tuple(units), expert_files.write)


def layer_metadata(fmt: Format, layer: int, shape: tuple[int, int, int], metadata: Mapping[str, str]) -> dict[str, str]:
    """What the shards of a layer of shape (E, H, I) in this format say of it, beside what all shards say."""
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


def importance_of(
    model: MoeModel, statistics: InputStatistics | None, layer: int
) -> Callable[[int, str], F32 | None] | None:
    """ExpertsWork.importance for the experts of a layer: an equalized down reads inputs that are 2^e times as large."""
    if statistics is None:
        return None

    def importance(expert: int, projection: str) -> F32 | None:
        known = statistics.importance(layer, expert, projection)
        exponents = model.exponents(layer, expert) if projection == "down" else None
        if known is None or exponents is None:
            return known
        ratios = exponents.astype(np.int32) - exponents.max()  # only these count; and nothing overflows
        scaled: F32 = np.ldexp(known, 2 * ratios if known.ndim == 1 else ratios + ratios[:, None])
        return scaled

    return importance
