"""The chain of GPTQ: samples, then layer after layer; each leaves the next one what its sequences have become."""

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
from ktconvert.layouts.outputs.compressed import Compressed
from ktconvert.layouts.outputs.form import expert_bytes
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.engine.units import Context, Link, Result, Stage, Unit, Written
from ktconvert.pipeline.gptq import oneshot
from ktconvert.pipeline.gptq.settings import Settings
from ktconvert.pipeline.gptq.shard import Job, figures, rounded, tell, write_shard
from ktconvert.pipeline.stages.carry_over import Carried
from ktconvert.pipeline.stages.experts import layer_metadata
from ktconvert.pipeline.walk import layer as layerwise
from ktconvert.pipeline.walk.layered import LayeredModel
from ktconvert.pipeline.walk.needs import REMEDIES
from ktconvert.pipeline.walk.samples import read_samples, write_samples
from ktconvert.quantizers import gptq

NAME = "gptq"
VERSION = 1
SAMPLES = "samples"
CPU_FULL = "DefaultCPUAllocator"  # what torch's RuntimeError for a failed allocation on the CPU names


def stage(
    model: MoeModel,
    form: Compressed,
    settings: Settings,
    rest: Mapping[str, Carried],
    metadata: Mapping[str, str],
) -> Stage[Any]:
    """The chain. rest: what the checkpoint holds beside its routed experts, by name."""

    @functools.cache
    def skeleton() -> LayeredModel:
        code, device = settings.trust_remote_code, settings.machine["device_type"]
        return LayeredModel(model.source, rest, trust_remote_code=code, device=device)

    @functools.cache
    def library(samples: Path) -> oneshot.Made:
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
    units: list[Unit[Any]] = [
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
            work=(settings, skeleton),
        )
    ]
    shards = [(shard.header_sha256, shard.size, shard.blob) for shard in model.source.shards]
    passed = 0
    for layer in model.layers:
        experts, hidden, width = model.shape(layer)
        before = tuple(range(passed, layer))
        passed = layer + 1
        about = layer_metadata(model, layer, metadata)
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
                work=Job(model, form, settings, layer, before, about, skeleton, library),
            )
        )
    return Stage(NAME, f"calibrate, and quantize experts to {form.name}", ("source",), tuple(units), make, chain=True)


def beside_experts(model: MoeModel, rest: Mapping[str, Carried], layer: int) -> list[Carried]:
    """The tensors of a decoder layer that are no routed experts, by their names."""
    expert = model.weight_name(model.layers[0], 0, "gate")
    before, _, _ = f".{expert}".partition(f".{model.layers[0]}.")
    prefix = f"{before}.{layer}.".removeprefix(".")
    return [carried for name, carried in rest.items() if name.startswith(prefix)]


def make(unit: Unit[Any], partial: Path, context: Context) -> Result:
    """Any unit of the chain."""
    import torch

    settings: Settings = unit.work[0] if unit.key == SAMPLES else unit.work.settings
    torch.set_num_threads(int(settings.machine["threads"]))
    try:
        if unit.key == SAMPLES:
            return write_samples(unit, partial, context, settings.calibration, unit.work[1]())
        return (write_layer if settings.engine == "stream" else write_whole)(unit, partial, context, unit.work)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and CPU_FULL not in str(error):
            raise
        raise ResourceError(
            f"{unit.key}: not enough memory. {REMEDIES} Then resume, or start again with --overwrite."
        ) from error


def write_layer(unit: Unit[Any], partial: Path, context: Context, job: Job) -> Result:
    """One shard: the layer's routed experts; and for the next layer what leaves this one."""
    link: Link = context.chain  # type: ignore[assignment]
    lm = job.skeleton()
    samples = read_samples(link.store[SAMPLES])
    settings, model = job.settings, job.model
    work = layerwise.Work(
        model=model,
        form=job.form,
        layer=job.layer,
        lengths=[len(ids) for ids in samples],
        dampening=settings.dampening,
        rounding=settings.rounding,
        routed=settings.routed,
        floor=settings.floor,
        group=settings.group,
    )
    count = sum(work.lengths)
    assert link.before is not None
    entering = RowFile(link.before, count, lm.hidden, new=False)
    for layer in job.before:
        passed = _pass_through(work, lm, layer, entering, link.scratch / f"after-{layer:03d}")
        if entering.path != link.before:
            entering.path.unlink()
        entering = passed
    with entering, lm.loaded(job.layer):
        lm.require_causal(job.layer)
        inputs = layerwise.record(work, lm, entering, link.scratch / "inputs")
        told = layerwise.Told(layerwise.token_counts(work, inputs))
        with inputs.rows:
            outputs = None
            if link.leaves is not None:
                outputs = RowFile(link.scratch / "outputs", count, lm.hidden, new=True)
            made = layerwise.quantize_experts(work, lm, inputs, rounded(job, context), told, outputs)
            size, digest, tensors = write_shard(job, partial, context, made)
        if outputs is not None and link.leaves is not None:
            with outputs, RowFile(link.leaves, count, lm.hidden, new=True) as leaving:
                layerwise.pass_on(work, lm, entering, outputs, leaving)
                leaving.sync()
    context.reporter.advance(unit.bytes_in - sum(t.nbytes for t in job.model.layer_tensors(job.layer)))
    return Result((Written("", size, digest),), tensors, {**figures(job, partial), **tell(job, told, context)})


def write_whole(unit: Unit[Any], partial: Path, context: Context, job: Job) -> Result:
    """One shard of what oneshot made of the whole model, at the first layer that asks for it."""
    link: Link = context.chain  # type: ignore[assignment]
    made = job.oneshot(link.store[SAMPLES])
    items = ((e, p, *made(job.layer, e, p)) for e in range(job.model.shape(job.layer)[0]) for p in PROJECTIONS)
    size, digest, tensors = write_shard(job, partial, context, items)
    context.reporter.advance(unit.bytes_in - sum(t.nbytes for t in job.model.layer_tensors(job.layer)))
    return Result((Written("", size, digest),), tensors, {"layer": job.layer, **figures(job, partial)})


def _pass_through(work: layerwise.Work, lm: LayeredModel, layer: int, entering: RowFile, path: Path) -> RowFile:
    """A layer without routed experts: what leaves it, in a new file."""
    leaving = RowFile(path, entering.count, entering.width, new=True)
    with entering, lm.loaded(layer):
        lm.require_causal(layer)
        for start, stop in work.spans():
            hidden = layerwise.from_bits(entering.read(start, stop), lm.device)
            leaving.write(start, layerwise.bits(lm.run(layer, hidden)))
    return leaving
