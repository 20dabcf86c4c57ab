"""Routed experts for the GPU, rounded to nearest: one layer's linears through memory maps, into pack-quantized shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.shards import group_by_limit
from ktconvert.layouts.outputs.compressed import Compressed, linear_name, linears, plan_experts
from ktconvert.native_quant import kernels
from ktconvert.pipeline.engine.loop import LANES
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written
from ktconvert.pipeline.stages.expert_stream import error_figures, non_finite, read_ahead, sampled_error, taken
from ktconvert.pipeline.stages.ordered import in_order
from ktconvert.quantizers import groups

NAME = "gpu_linears"
VERSION = 1
DEFAULT_SHARD = 5 * 10**9  # bytes: the scales of a shard wait in memory for their place, 3 % of it
Packed = npt.NDArray[np.int32]
Scales = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Job:
    """What one unit converts: experts [start, stop) of one layer."""

    model: MoeModel
    form: Compressed
    rounding: str
    layer: int
    start: int
    stop: int
    metadata: Mapping[str, str]

    def shape(self, projection: str) -> tuple[int, int]:
        """(n, k) of one linear."""
        _, hidden, width = self.model.shape(self.layer)
        return (hidden, width) if projection == "down" else (width, hidden)


def stage(
    model: MoeModel, form: Compressed, *, rounding: str, max_shard_size: int | None, metadata: Mapping[str, str]
) -> Stage[Job]:
    """The stage that rounds the experts of every layer; final names of shards are given by the plan."""
    shards = [(shard.header_sha256, shard.size, shard.blob) for shard in model.source.shards]
    units = []
    for layer in model.layers:
        experts, hidden, width = model.shape(layer)
        each = form.expert_bytes(hidden, width)
        cuts = group_by_limit([each] * experts, max_shard_size or DEFAULT_SHARD)
        for number, (start, stop) in enumerate(cuts):
            tensors = [t for e in range(start, stop) for t in model.expert_tensors(layer, e)]
            about = {**metadata, "layer": str(layer), "num_experts": str(experts), "hidden_size": str(hidden)}
            about["moe_intermediate_size"] = str(width)
            names = tuple(name for _, _, name, _, _ in linears(model, layer, range(start, stop)))
            units.append(
                Unit(
                    stage=NAME,
                    key=f"layer-{layer:03d}" + (f"-{number:03d}" if len(cuts) > 1 else ""),
                    versions=(VERSION, form.quantizer.version, form.version),
                    params=(
                        ("form", form.name),
                        ("reading", model.reading(layer)),
                        ("metadata", tuple(sorted(about.items()))),
                        ("rounding", rounding),
                        ("names", names),
                        ("experts", (start, stop)),
                    ),
                    inputs=tuple((t.name, t.dtype, t.shape, shards[t.shard]) for t in tensors),
                    final="",
                    bytes_in=sum(t.nbytes for t in tensors),
                    bytes_out=each * (stop - start),
                    work=Job(model, form, rounding, layer, start, stop, about),
                )
            )
    return Stage(NAME, f"round experts to {form.name}", ("source",), tuple(units), write_shard)


def peak_memory(model: MoeModel, form: Compressed, units: tuple[Unit[Job], ...], packing: int) -> int:
    """Bytes that so many linears under way need, and the scales of the units in flight; the source is only mapped."""
    shapes = {model.shape(layer)[1:] for layer in model.layers}
    linear = max(form.linear_bytes(width, hidden) for hidden, width in shapes)
    decoded = 2 * 32 * max(max(shape) for shape in shapes)  # BF16 rows that a kernel holds
    sampled = max(2 * h * w + 4096 * max(h, w) for h, w in shapes)  # one linear in BF16 and some rows in float64
    scales = max(unit.bytes_out for unit in units) // (1 + form.quantizer.group * form.quantizer.bits // 16)
    return (packing + 2 * LANES) * linear + packing * decoded + LANES * (sampled + scales)


def write_shard(unit: Unit[Job], partial: Path, context: Context) -> Result:
    """One safetensors shard: header, all codes straight from the packing threads, then all shapes and scales."""
    job = unit.work
    experts = range(job.start, job.stop)
    plan = plan_experts(job.model, job.layer, experts, job.form, job.metadata)
    places: dict[tuple[int, str], int] = {}
    at = len(plan.header)
    shapes: list[tuple[int, int]] = []
    for expert, projection, _, n, k in linears(job.model, job.layer, experts):
        places[expert, projection] = at
        at += job.form.entries("", n, k)[0].nbytes
        shapes.append((n, k))
    scales: list[Scales] = []
    with publish.DirectFile(partial, plan.size) as file:
        file.append(plan.header)

        def make(item: tuple[int, str], buffer: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], Scales]:
            packed, scale = quantize(job, *item, buffer)
            if (scale == groups.EMPTY_SCALE).all() and not job.form.codes(packed).any():
                name = linear_name(job.model, job.layer, *item)
                context.reporter.warn(f"{name} is all zeros in the source: its expert computes nothing")
            raw = packed.reshape(-1).view(np.uint8)
            file.write_at(places[item], raw)  # whole pages: n and k are multiples of 128
            return raw, scale

        todo = read_ahead(job.model, job.layer, job.start, job.stop)
        for item, _, (raw, scale) in in_order(context.pool, todo, _slots(job, context), make):
            file.skip(raw)
            scales.append(scale)
            taken(job.model, job.layer, item, context.reporter)
        file.append(np.array(shapes, "<i8").view(np.uint8).reshape(-1))
        for scale in scales:
            file.append(scale.view(np.uint8).reshape(-1))
        digest = file.close()

    def error(expert: int, projection: str) -> dict[str, float]:
        return measure_error(job, expert, projection)

    stats = sampled_error(job.model, job.layer, job.start, job.stop, error)
    return Result((Written("", plan.size, digest),), len(plan.entries), stats)


def _slots(job: Job, context: Context) -> list[npt.NDArray[np.uint8]]:
    """Room for the codes of one linear each, on pages of their own."""
    size = max(job.form.entries("", *job.shape(p))[0].nbytes for p in ("gate", "down"))
    return [publish.aligned_buffer(size) for _ in range(context.window)]


def quantize(job: Job, expert: int, projection: str, buffer: npt.NDArray[np.uint8]) -> tuple[Packed, Scales]:
    """One linear's codes, in the buffer, and scales. Raises InputError, naming the place, for a value that is not finite."""
    n, k = job.shape(projection)
    codes, _, scales = job.form.entries("", n, k)
    packed = buffer[: codes.nbytes].view(np.int32).reshape(codes.shape)
    scale = np.empty(scales.shape, np.uint16)
    linear = job.model.linear(job.layer, expert, projection)
    try:
        job.form.pack(linear, packed, scale, job.rounding)
    except kernels.NonFinite as error:
        place = (linear.origin[0] + error.row, linear.origin[1] + error.column)
        raise non_finite(job.model, job.layer, expert, projection, place) from error
    return packed, scale


def measure_error(job: Job, expert: int, projection: str) -> dict[str, float]:
    """Quantize one linear again and compare with the source, as error_figures says."""
    n, k = job.shape(projection)
    buffer = np.empty(job.form.entries("", n, k)[0].nbytes, np.uint8)
    packed, scale = quantize(job, expert, projection, buffer)
    return error_figures(job.form.error_sums(job.model.linear(job.layer, expert, projection), packed, scale))
