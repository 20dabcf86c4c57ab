"""The chain of GPTQ: samples, then one layer after the other, each of which hands the hidden states of all sequences to
the next.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.checkpoints.source import TensorInfo
from ktconvert.layouts.errors import ResourceError
from ktconvert.layouts.files.rows import RowFile
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.layouts.outputs.form import Form, expert_bytes
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.engine.units import Context, Link, Result, Stage, Unit, Written
from ktconvert.pipeline.gptq import oneshot
from ktconvert.pipeline.gptq.compensate import Compensate
from ktconvert.pipeline.gptq.settings import Settings
from ktconvert.pipeline.gptq.shard import LayerWork, ShardWriter, error_of_sample, nearest, report
from ktconvert.pipeline.stages.carry_over import Carried
from ktconvert.pipeline.stages.experts import layer_metadata
from ktconvert.pipeline.walk.consumers import Counts
from ktconvert.pipeline.walk.layer import LayerWalk, walk_dense_layer, walk_layer
from ktconvert.pipeline.walk.layered import LayeredModel
from ktconvert.pipeline.walk.needs import REMEDIES
from ktconvert.pipeline.walk.samples import SamplesWork, read_samples, write_samples
from ktconvert.quantizers import gptq

NAME = "gptq"
VERSION = 1
SAMPLES = "samples"
Work = SamplesWork | LayerWork
CPU_FULL = "DefaultCPUAllocator"  # what torch's RuntimeError for a failed allocation on the CPU names


def stage(
    model: MoeModel,
    form: Form,
    settings: Settings,
    rest: Mapping[str, Carried],
    metadata: Mapping[str, str],
) -> Stage[Work]:
    """The chain. rest: the checkpoint's tensors outside the routed experts, by name."""

    @functools.cache
    def skeleton() -> LayeredModel:
        code, device = settings.trust_remote_code, settings.machine["device_type"]
        return LayeredModel(model.source, rest, trust_remote_code=code, device=device)

    @functools.cache
    def library(samples: Path) -> oneshot.Quantized:
        return oneshot.quantize_model(
            model.source.root,
            read_samples(samples),
            form,
            dampening=settings.dampening,
            every_expert=not settings.routed,
            trust_remote_code=settings.trust_remote_code,
        )

    hidden = model.shape(model.layers[0])[1]
    most = settings.calibration.samples * settings.calibration.max_length
    boundary = 2 * most * hidden if settings.engine == "stream" else 0
    ids_bytes = 8 * (most + settings.calibration.samples)
    units: list[Unit[Work]] = [
        Unit(
            stage=NAME,
            key=SAMPLES,
            versions=(VERSION,),
            params=settings.params(),
            inputs=(),
            final="",
            bytes_in=0,
            bytes_out=ids_bytes,
            kept=False,
            leaves=boundary,
            work=SamplesWork(settings.calibration, settings.machine["threads"], skeleton),
        )
    ]
    shards = [(shard.header_sha256, shard.size, shard.blob) for shard in model.source.shards]
    first = 0
    for layer in model.layers:
        experts, hidden, width = model.shape(layer)
        before = tuple(range(first, layer))
        first = layer + 1
        about = layer_metadata(layer, model.shape(layer), metadata)
        beside = [c for n in (*before, layer) for c in beside_experts(model, rest, n)]
        tensors: list[TensorInfo] = [*model.layer_tensors(layer), *(i for c in beside for i in c.reads)]
        units.append(
            Unit(
                stage=NAME,
                key=f"layer-{layer:03d}",
                versions=(VERSION, gptq.VERSION, form.grid.version, form.version),
                params=(
                    ("after", units[-1].fingerprint),
                    ("form", form.name),
                    ("reading", model.reading(layer)),
                    ("metadata", tuple(sorted(about.items()))),
                ),
                inputs=tuple((t.name, t.dtype, t.shape, shards[t.shard]) for t in tensors),
                final="",
                bytes_in=sum(t.nbytes for t in tensors),
                bytes_out=experts * expert_bytes(form, ExpertGrid(layer, hidden, width)),
                leaves=boundary if layer != model.layers[-1] else 0,
                work=LayerWork(model, form, settings, layer, before, about, skeleton, library),
            )
        )
    return Stage(
        NAME, f"calibrate, and quantize experts to {form.name}", ("source",), tuple(units), run_unit, chain=True
    )


def beside_experts(model: MoeModel, rest: Mapping[str, Carried], layer: int) -> list[Carried]:
    """The tensors of a decoder layer outside its routed experts."""
    expert = model.weight_name(model.layers[0], 0, "gate")
    before, _, _ = f".{expert}".partition(f".{model.layers[0]}.")
    prefix = f"{before}.{layer}.".removeprefix(".")
    return [carried for name, carried in rest.items() if name.startswith(prefix)]


def run_unit(unit: Unit[Work], partial: Path, context: Context) -> Result:
    """Any unit of the chain. Raises ResourceError where memory runs out."""
    import torch

    work = unit.work
    try:
        if isinstance(work, SamplesWork):
            torch.set_num_threads(work.threads)
            return write_samples(unit.key, work, partial, context)
        torch.set_num_threads(int(work.settings.machine["threads"]))
        shard, tensors, figures = (write_layer if work.settings.engine == "stream" else write_whole)(
            work, partial, context
        )
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and CPU_FULL not in str(error):
            raise
        raise ResourceError(
            f"{unit.key}: not enough memory. {REMEDIES} Then resume, or start again with --overwrite."
        ) from error
    context.reporter.advance(unit.bytes_in - sum(t.nbytes for t in work.model.layer_tensors(work.layer)))
    return Result((shard,), tensors, figures)


def write_layer(work: LayerWork, partial: Path, context: Context) -> tuple[Written, int, dict[str, Any]]:
    """One shard with the layer's routed experts, and for the next layer the hidden states that leave this one."""
    link: Link = context.chain  # type: ignore[assignment]
    lm, settings = work.skeleton(), work.settings
    lengths = [len(ids) for ids in read_samples(link.store[SAMPLES])]
    assert link.before is not None
    entering = RowFile(link.before, sum(lengths), lm.hidden, new=False)
    for layer in work.before:
        with entering:
            walk = LayerWalk(work.model, layer, lengths, settings.group)
            left = walk_dense_layer(walk, lm, entering, link.scratch / f"after-{layer:03d}")
        if entering.path != link.before:
            entering.path.unlink()
        entering = left
    with entering, ShardWriter(work, partial, context.reporter) as shard:
        options = settings.dampening, settings.rounding, settings.routed, settings.floor
        counts = Counts()
        compensate = Compensate(work.form, *options, nearest(work), shard.write)
        walk = LayerWalk(work.model, work.layer, lengths, settings.group)
        walk_layer(walk, lm, (counts, compensate), entering, link.scratch, link.leaves)
        written, tensors = shard.finish()
    reported = report(work, counts.tokens[work.layer], compensate, context.reporter)
    return written, tensors, {**error_of_sample(work, partial), **reported}


def write_whole(work: LayerWork, partial: Path, context: Context) -> tuple[Written, int, dict[str, Any]]:
    """One shard, with the weights from oneshot, which runs on the whole model when the first layer asks for them."""
    link: Link = context.chain  # type: ignore[assignment]
    quantized = work.oneshot(link.store[SAMPLES])
    with ShardWriter(work, partial, context.reporter) as shard:
        for expert in range(work.model.shape(work.layer)[0]):
            for projection in PROJECTIONS:
                shard.write(expert, projection, quantized(work.layer, expert, projection))
        written, tensors = shard.finish()
    return written, tensors, {"layer": work.layer, **error_of_sample(work, partial)}
