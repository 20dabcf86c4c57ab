"""The main job: one layer's routed experts, read once through memory maps, quantized and packed in one pass, written once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.shards import group_by_limit
from ktconvert.layouts.outputs import PROJECTIONS, Layout, loose, merged
from ktconvert.layouts.outputs.parts import ExpertGrid, Part
from ktconvert.native_quant import kernels
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written
from ktconvert.pipeline.stages.expert_stream import (
    error_figures,
    items,
    non_finite,
    read_ahead,
    sampled_error,
    taken,
)
from ktconvert.pipeline.stages.ordered import in_order

NAME = "cpu_experts"
VERSION = 1
Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Job:
    """What one unit converts: experts [start, stop) of one layer."""

    model: MoeModel
    layout: Layout
    grid: ExpertGrid
    start: int
    stop: int
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Buffers:
    """Room for one projection of one expert: packed weights of all its parts, and their scales."""

    weights: Array
    scales: npt.NDArray[np.float32]


def stage(
    model: MoeModel,
    layout: Layout,
    layers: tuple[int, ...],
    *,
    numa: int,
    backward: bool,
    merge: bool,
    max_shard_size: int | None,
    metadata: Mapping[str, str],
) -> Stage[Job]:
    """The stage that converts these layers; final names of shards are given by the plan."""
    shards = {s: (shard.header_sha256, shard.size, shard.blob) for s, shard in enumerate(model.source.shards)}
    units = []
    for layer in layers:
        experts, hidden, intermediate = model.shape(layer)
        grid = ExpertGrid(layer, hidden, intermediate, numa, backward)
        each = grid.expert_bytes(layout)
        cuts = group_by_limit([each] * experts, max_shard_size) if merge else [(0, experts)]
        for number, (start, stop) in enumerate(cuts):
            tensors = [t for e in range(start, stop) for t in model.expert_tensors(layer, e)]
            about = {**metadata, "layer": str(layer), "num_experts": str(experts), "hidden_size": str(hidden)}
            about["moe_intermediate_size"] = str(intermediate)
            units.append(
                Unit(
                    stage=NAME,
                    key=f"layer-{layer:03d}" + (f"-{number:03d}" if len(cuts) > 1 else ""),
                    versions=(VERSION, layout.quantizer.version, layout.version),
                    params=(
                        ("layout", layout.name),
                        ("reading", model.reading(layer)),
                        ("metadata", tuple(sorted(about.items()))),
                        ("numa", numa),
                        ("backward", backward),
                        ("experts", (start, stop)),
                        ("merged", merge),
                    ),
                    inputs=tuple((t.name, t.dtype, t.shape, shards[t.shard]) for t in tensors),
                    final=loose.layer_folder(layer) if not merge else "",
                    bytes_in=sum(t.nbytes for t in tensors),
                    bytes_out=each * (stop - start),
                    folder=not merge,
                    work=Job(model, layout, grid, start, stop, about),
                )
            )
    run = write_shard if merge else write_folder
    return Stage(NAME, f"quantize and pack experts as {layout.name}", ("source",), tuple(units), run)


def buffer_bytes(layout: Layout, grid: ExpertGrid) -> int:
    """Bytes of the Buffers for the widest projection."""
    return max(
        sum(layout.weight_bytes(p.n, p.k) + layout.scale_bytes(p.n) for p in grid.parts(0, proj))
        for proj in PROJECTIONS
    )


def scratch_bytes(grid: ExpertGrid) -> int:
    """Bytes of BF16 rows that a kernel may hold while it decodes: one strip of 32 rows."""
    return 2 * 32 * max(grid.hidden, grid.intermediate)


def write_shard(unit: Unit[Job], partial: Path, context: Context) -> Result:
    """One safetensors shard: header, all weights straight from the packing threads, then all scales."""
    job = unit.work
    plan = merged.plan_experts(job.grid, range(job.start, job.stop), job.layout, job.metadata)
    scales: list[npt.NDArray[np.float32]] = []
    with publish.DirectFile(partial, plan.size) as file:
        file.append(plan.header)
        offsets = {}
        at = len(plan.header)
        for item in items(job.start, job.stop):
            offsets[item] = at
            at += sum(job.layout.weight_bytes(p.n, p.k) for p in job.grid.parts(*item))

        def make(item: tuple[int, str], buffers: Buffers) -> tuple[Array, npt.NDArray[np.float32]]:
            weights, item_scales = _pack(job, item, buffers)
            file.write_at(offsets[item], weights)
            return weights, item_scales

        for item, _, (weights, item_scales) in in_order(
            context.pool, read_ahead(job.model, job.grid.layer, job.start, job.stop), _slots(job, context), make
        ):
            file.skip(weights)
            scales.append(item_scales.copy())
            taken(job.model, job.grid.layer, item, context.reporter)
        file.append(np.concatenate(scales).view(np.uint8))
        digest = file.close()
    return Result((Written("", plan.size, digest),), len(plan.entries), _sampled_error(job))


def write_folder(unit: Unit[Job], partial: Path, context: Context) -> Result:
    """One loose layer folder: two files per matrix, synced together."""
    job = unit.work
    partial.mkdir()
    for node in range(job.grid.numa):
        (partial / f"_numa_{node}").mkdir()

    def make(item: tuple[int, str], buffers: Buffers) -> list[Written]:
        weights, scales = _pack(job, item, buffers)
        written = []
        for part, weight, scale in _split(job, item, weights, scales):
            for what, data in (("quant", weight), ("scale", scale.view(np.uint8))):
                name = loose.path_in_layer(part, job.layout, what)
                written.append(Written(name, data.size, publish.write_unsynced(partial / name, data)))
        return written

    files: list[Written] = []
    for item, _, written in in_order(
        context.pool, read_ahead(job.model, job.grid.layer, job.start, job.stop), _slots(job, context), make
    ):
        files += written
        taken(job.model, job.grid.layer, item, context.reporter)
    publish.sync_tree(partial)
    return Result(tuple(files), len(files), _sampled_error(job))


def _slots(job: Job, context: Context) -> list[Buffers]:
    def of(projection: str) -> tuple[int, int]:
        parts = job.grid.parts(0, projection)
        return sum(job.layout.weight_bytes(p.n, p.k) for p in parts), sum(p.n for p in parts)

    sizes = [of(projection) for projection in PROJECTIONS]
    weight, rows = max(w for w, _ in sizes), max(r for _, r in sizes)
    return [Buffers(publish.aligned_buffer(weight), np.empty(rows, np.float32)) for _ in range(context.window)]


def _split(
    job: Job, item: tuple[int, str], weights: Array, scales: npt.NDArray[np.float32]
) -> Iterator[tuple[Part, Array, npt.NDArray[np.float32]]]:
    """The buffers cut into one piece per part."""
    w = s = 0
    for part in job.grid.parts(*item):
        size = job.layout.weight_bytes(part.n, part.k)
        yield part, weights[w : w + size], scales[s : s + part.n]
        w += size
        s += part.n


def _pack(job: Job, item: tuple[int, str], buffers: Buffers) -> tuple[Array, npt.NDArray[np.float32]]:
    """Quantize one projection of one expert into the buffers; returns the parts of them that are used."""
    expert, projection = item
    linear = job.model.linear(job.grid.layer, expert, projection)
    w = s = 0
    for part, weight, scale in _split(job, item, buffers.weights, buffers.scales):
        piece = part.of(linear, job.grid.numa)
        try:
            job.layout.pack(piece, weight, scale)
        except kernels.NonFinite as error:
            place = (piece.origin[0] + error.row, piece.origin[1] + error.column)
            raise non_finite(
                job.model, job.grid.layer, expert, projection, place[::-1] if part.backward else place
            ) from error
        w += weight.size
        s += scale.size
    return buffers.weights[:w], buffers.scales[:s]


def _sampled_error(job: Job) -> dict[str, Any]:
    """Relative error and cosine of one expert of this unit, by projection: the quality figure of the report."""

    def error(expert: int, projection: str) -> dict[str, float]:
        return measure_error(job.model, job.layout, job.grid, expert, projection)

    return sampled_error(job.model, job.grid.layer, job.start, job.stop, error)


def measure_error(model: MoeModel, layout: Layout, grid: ExpertGrid, expert: int, projection: str) -> dict[str, float]:
    """Quantize one projection again and compare with the source: {"relative_error": ||x-y||/||x||, "cosine": x.y/(||x|| ||y||)}."""
    linear = model.linear(grid.layer, expert, projection)
    sums = np.zeros(4)
    for part in grid.parts(expert, projection)[: grid.numa]:
        piece = part.of(linear, grid.numa)
        weight, scale = np.empty(layout.weight_bytes(part.n, part.k), np.uint8), np.empty(part.n, np.float32)
        layout.pack(piece, weight, scale)
        sums += layout.error_sums(piece, weight, scale)
    return error_figures(sums)
