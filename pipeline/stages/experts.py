"""Routed experts of any form: read once through memory maps, quantized and packed in one pass, written once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.shards import ALIGNMENT, Entry, ShardPlan, group_by_limit, plan_shard
from ktconvert.layouts.outputs import PROJECTIONS, Form, loose
from ktconvert.layouts.outputs.form import Extent, expert_bytes
from ktconvert.layouts.outputs.names import Names
from ktconvert.layouts.outputs.output import Bytes
from ktconvert.layouts.outputs.parts import ExpertGrid, Part
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import Matrix
from ktconvert.pipeline.engine.loop import LANES
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written
from ktconvert.pipeline.stages.expert_stream import error_figures, items, non_finite, read_ahead, sampled_error, taken
from ktconvert.pipeline.stages.ordered import in_order
from ktconvert.quantizers.choice import ABSMAX, Choice
from ktconvert.quantizers.errors import decode_finite

VERSION = 1
STRIP = 32  # rows that a kernel decodes at a time

Item = tuple[int, str]
Packed = list[Bytes]  # the tensors of one part, in the form's order


@dataclass(frozen=True)
class ExpertsWork:
    """What one unit converts: experts [start, stop) of one layer."""

    model: MoeModel
    form: Form
    choice: Choice
    grid: ExpertGrid
    start: int
    stop: int
    metadata: Mapping[str, str]

    def quantize(self, item: Item, place: Bytes | None = None) -> list[tuple[Part, Packed]]:
        """All parts of one projection of one expert; the first tensor of each part goes into `place`, one after the
        other.

        Raises InputError, naming the place, for a value that is not finite.
        """
        expert, projection = item
        linear = self.model.linear(self.grid.layer, expert, projection)
        packed = []
        at = 0
        for part in self.grid.parts(expert, projection):
            out = room(self.form, part, None if place is None else place[at:])
            at += out[0].size
            matrix = part.of(linear, self.grid.numa)
            try:
                quantize(self.form, self.choice, matrix, out)
            except kernels.NonFinite as error:
                row, column = matrix.origin[0] + error.row, matrix.origin[1] + error.column
                where = (column, row) if part.backward else (row, column)
                raise non_finite(self.model, self.grid.layer, expert, projection, where) from error
            packed.append((part, out))
        return packed

    def error(self, expert: int, projection: str) -> dict[str, float]:
        """Quantize one projection again and compare with the source, as error_figures says."""
        linear = self.model.linear(self.grid.layer, expert, projection)
        sums = np.zeros(4)
        for part, packed in self.quantize((expert, projection)):
            if not part.backward:
                sums += self.form.error_sums(part.of(linear, self.grid.numa), packed)
        return error_figures(sums)


def quantize(form: Form, choice: Choice, matrix: Matrix, out: Sequence[Bytes]) -> None:
    """Choose codes for a part and pack them into `out`. Raises kernels.NonFinite for NaN and Inf."""
    if choice.choose is None:
        form.quantize(matrix, out)
    else:
        form.pack(*choice.choose(decode_finite(matrix), form.grid), out)


def room(form: Form, part: Part, place: Bytes | None = None) -> Packed:
    """Memory for the tensors of a part; the first tensor lies at the start of `place`, if that is not None."""
    first, *others = (tensor.nbytes for tensor in form.tensors(part.n, part.k))
    own = np.empty(first, np.uint8) if place is None else place[:first]
    return [own, *(np.empty(nbytes, np.uint8) for nbytes in others)]


# --- the stage ------------------------------------------------------------------------------------


def stage(
    model: MoeModel,
    form: Form,
    layers: Sequence[int],
    *,
    choice: Choice = ABSMAX,
    numa: int = 1,
    backward: bool = False,
    loose_files: bool = False,
    max_shard_size: int | None,
    metadata: Mapping[str, str],
) -> Stage[ExpertsWork]:
    """The stage that converts these layers; the plan gives shards their final names."""
    shards = [(shard.header_sha256, shard.size, shard.blob) for shard in model.source.shards]
    names = form.names(model)
    units = []
    for layer in layers:
        experts, hidden, intermediate = model.shape(layer)
        grid = ExpertGrid(layer, hidden, intermediate, numa, backward)
        each = expert_bytes(form, grid)
        limit = None if loose_files else max_shard_size or form.shard_bytes
        cuts = group_by_limit([each] * experts, limit)
        for number, (start, stop) in enumerate(cuts):
            tensors = [t for e in range(start, stop) for t in model.expert_tensors(layer, e)]
            about = layer_metadata(model, layer, metadata)
            extent = Extent(model.reading(layer), tuple(sorted(about.items())), grid, (start, stop), loose_files, names)
            units.append(
                Unit(
                    stage=form.stage,
                    key=f"layer-{layer:03d}" + (f"-{number:03d}" if len(cuts) > 1 else ""),
                    versions=(VERSION, form.grid.version, form.version),
                    params=(*form.params(extent), *_chosen(choice)),
                    inputs=tuple((t.name, t.dtype, t.shape, shards[t.shard]) for t in tensors),
                    final=loose.layer_folder(layer) if loose_files else "",
                    bytes_in=sum(t.nbytes for t in tensors),
                    bytes_out=each * (stop - start),
                    folder=loose_files,
                    work=ExpertsWork(model, form, choice, grid, start, stop, about),
                )
            )
    return Stage(form.stage, form.title, ("source",), tuple(units), write_folder if loose_files else write_shard)


def layer_metadata(model: MoeModel, layer: int, metadata: Mapping[str, str]) -> dict[str, str]:
    """What the shards of a layer say of it, beside what all shards say."""
    experts, hidden, intermediate = model.shape(layer)
    return {
        **metadata,
        "layer": str(layer),
        "num_experts": str(experts),
        "hidden_size": str(hidden),
        "moe_intermediate_size": str(intermediate),
    }


def _chosen(choice: Choice) -> tuple[tuple[str, object], ...]:
    """The default came first and is not named."""
    return () if choice == ABSMAX else (("scale", choice.name), ("scale_version", choice.version))


def peak_memory(units: Sequence[Unit[ExpertsWork]], packing: int) -> int:
    """Bytes for so many projections under way, and for what waits for its place in the shards in flight; the source is
    only mapped.
    """
    each = scratch = measured = waiting = 0
    for work in {(unit.work.grid, unit.work.stop - unit.work.start): unit.work for unit in units}.values():
        rest = 0
        for projection in PROJECTIONS:
            parts = work.grid.parts(0, projection)
            sizes = [[tensor.nbytes for tensor in work.form.tensors(part.n, part.k)] for part in parts]
            each = max(each, sum(map(sum, sizes)))
            rest += sum(sum(others) for _, *others in sizes)
        waiting = max(waiting, rest * (work.stop - work.start))
        widest = max(work.grid.hidden, work.grid.intermediate)
        scratch = max(scratch, 2 * STRIP * widest + work.model.reading_bytes(work.grid.layer, work.grid.backward))
        measured = max(measured, work.form.error_bytes(widest))
    return (packing + 2 * LANES) * each + packing * scratch + LANES * (measured + waiting)


# --- a unit ---------------------------------------------------------------------------------------


def plan_parts(form: Form, names: Names, parts: Iterable[Part], metadata: Mapping[str, str]) -> ShardPlan:
    """A shard of parts: all first tensors, then all second ones, and so on, so that each is aligned to its items."""
    by_part = [
        [Entry(names.key(part.place, t.suffix), t.dtype, t.shape, t.nbytes) for t in form.tensors(part.n, part.k)]
        for part in parts
    ]
    return plan_shard([entry for kind in zip(*by_part, strict=True) for entry in kind], metadata)


def append_others(file: publish.DirectFile, others: Sequence[Packed]) -> None:
    """Write what comes after all first tensors; others: the tensors of each part less the first."""
    for kind in zip(*others, strict=True):
        file.append(np.concatenate(kind))


def write_shard(unit: Unit[ExpertsWork], partial: Path, context: Context) -> Result:
    """One safetensors shard: header, all first tensors straight from the packing threads, then the others."""
    work = unit.work
    names = work.form.names(work.model)
    plan = plan_parts(work.form, names, work.grid.all_parts(range(work.start, work.stop)), work.metadata)
    todo = list(items(work.start, work.stop))
    sizes = {item: _first_bytes(work, item) for item in todo}
    offsets: dict[Item, int] = {}
    at = len(plan.header)
    for item in todo:
        offsets[item] = at
        at += sizes[item]
    in_pages = all(size % ALIGNMENT == 0 for size in sizes.values())
    others: list[Packed] = []
    with publish.DirectFile(partial, plan.size) as file:
        file.append(plan.header)

        def make(item: Item, place: Bytes) -> list[tuple[Part, Packed]]:
            packed = _checked(work, names, item, place, context)
            if in_pages:
                file.write_at(offsets[item], place[: sizes[item]])
            return packed

        for item, place, packed in in_order(context.pool, _read_ahead(work), _places(work, context), make):
            (file.skip if in_pages else file.append)(place[: sizes[item]])
            others += [tensors[1:] for _, tensors in packed]
            taken(work.model, work.grid.layer, item, context.reporter)
        append_others(file, others)
        digest = file.close()
    return Result((Written("", plan.size, digest),), len(plan.entries), _sampled(work))


def write_folder(unit: Unit[ExpertsWork], partial: Path, context: Context) -> Result:
    """One folder of loose files, a file for each tensor, synced together."""
    work = unit.work
    names = work.form.names(work.model)
    partial.mkdir()
    for node in range(work.grid.numa):
        (partial / loose.numa_folder(node)).mkdir()

    def make(item: Item, place: Bytes) -> list[Written]:
        written = []
        for part, packed in _checked(work, names, item, place, context):
            for tensor, data in zip(work.form.tensors(part.n, part.k), packed, strict=True):
                name = work.form.loose_path(part, tensor)
                assert name is not None
                written.append(Written(name, data.size, publish.write_unsynced(partial / name, data)))
        return written

    files: list[Written] = []
    for item, _, written in in_order(context.pool, _read_ahead(work), _places(work, context), make):
        files += written
        taken(work.model, work.grid.layer, item, context.reporter)
    publish.sync_tree(partial)
    return Result(tuple(files), len(files), _sampled(work))


def _checked(work: ExpertsWork, names: Names, item: Item, place: Bytes, context: Context) -> list[tuple[Part, Packed]]:
    """Quantize one item; warn where the result is all zeros."""
    packed = work.quantize(item, place)
    if all(work.form.is_zero(tensors) for _, tensors in packed):
        part, _ = packed[0]
        name = names.key(part.place, "").removesuffix(".")
        context.reporter.warn(f"{name} is all zeros in the source: its expert computes nothing")
    return packed


def _first_bytes(work: ExpertsWork, item: Item) -> int:
    return sum(work.form.tensors(part.n, part.k)[0].nbytes for part in work.grid.parts(*item))


def _places(work: ExpertsWork, context: Context) -> list[Bytes]:
    """Page-aligned buffers, each for the first tensors of one item."""
    size = max(_first_bytes(work, (0, projection)) for projection in PROJECTIONS)
    return [publish.aligned_buffer(size) for _ in range(context.window)]


def _read_ahead(work: ExpertsWork) -> Iterator[Item]:
    return read_ahead(work.model, work.grid.layer, work.start, work.stop)


def _sampled(work: ExpertsWork) -> dict[str, object]:
    """The quality figures of one expert."""
    return sampled_error(work.model, work.grid.layer, work.start, work.stop, work.error)
