"""The chain of GPTQ: samples, then layer after layer, each of which hands on the hidden states."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.outputs import PROJECTIONS, loose
from ktconvert.layouts.outputs.format import Format, expert_bytes
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written
from ktconvert.pipeline.gptq import oneshot
from ktconvert.pipeline.gptq.compensate import Compensate, Shared, Stored, Write, left_name
from ktconvert.pipeline.gptq.settings import INSTEAD, Settings
from ktconvert.pipeline.gptq.shard import GptqWork, error_of_sample, nearest, report, writer
from ktconvert.pipeline.stages import chain, gather_statistics
from ktconvert.pipeline.stages.copy_tensors import OtherTensor
from ktconvert.pipeline.stages.quantize_experts import layer_metadata
from ktconvert.pipeline.walk import portions
from ktconvert.pipeline.walk.arrays import write_arrays
from ktconvert.pipeline.walk.consumers import Consumer
from ktconvert.pipeline.walk.footprint import REMEDIES
from ktconvert.pipeline.walk.layer import SamplesWork, kinds_of, read_samples, visit_portion
from ktconvert.pipeline.walk.portions import PortionWork
from ktconvert.quantizers import descent, gptq, predictions
from ktconvert.quantizers.choice import ABSMAX, Quantizer

NAME = "gptq"
VERSION = 1


def stage(
    model: MoeModel,
    fmt: Format,
    settings: Settings,
    rest: Mapping[str, OtherTensor],
    metadata: Mapping[str, str],
    *,
    choice: Quantizer = ABSMAX,
    numa: int = 1,
    loose_files: bool = False,
    document: Mapping[str, Any] | None = None,
) -> Stage[Any]:
    """The chain. rest: the checkpoint's tensors outside the routed experts, by name; document: as statistics.json has
    it, None where no statistics are gathered.
    """
    trusted = settings.trust_remote_code
    skeleton = chain.skeleton_of(model, rest, settings.machine, trusted=trusted, instead=INSTEAD)

    @functools.cache
    def library(samples: Path) -> oneshot.Quantized:
        return oneshot.quantize_model(
            model.source.root,
            read_samples(samples),
            fmt,
            dampening=settings.dampening,
            every_expert=settings.sees == "all",
            trust_remote_code=settings.trust_remote_code,
        )

    boundary = chain.boundary_bytes(model, settings.calibration) if settings.engine == "stream" else 0
    outside = chain.tensors_outside(model, rest) if settings.steps == "full" else ()
    threads = int(settings.machine["threads"])
    samples = SamplesWork(settings.calibration, threads, skeleton)
    units: list[Unit[Any]] = [chain.samples_unit(NAME, VERSION, settings.fingerprint, boundary, samples)]
    for step in chain.steps(model, rest, boundary):
        experts, hidden, width = model.shape(step.layer)
        grid = ExpertGrid(step.layer, hidden, width, numa)
        own = fmt.of_layer(step.layer)
        about = layer_metadata(own, step.layer, model.shape(step.layer), metadata)
        units.append(
            Unit(
                stage=NAME,
                key=step.key,
                versions=(
                    VERSION,
                    gptq.VERSION,
                    descent.VERSION,
                    predictions.VERSION,
                    own.encoding.grid.version,
                    own.encoding.version,
                ),
                params=(
                    ("after", units[-1].fingerprint),
                    ("format", own.name),
                    ("quantizer", (choice.name, choice.version)),
                    ("reading", model.reading(step.layer)),
                    ("metadata", tuple(sorted(about.items()))),
                ),
                inputs=step.inputs + outside,
                final=loose.layer_folder(step.layer) if loose_files else "",
                folder=loose_files,
                bytes_in=step.bytes_in,
                bytes_out=experts * expert_bytes(own.encoding, grid),
                handed_on=step.handed_on,
                side=0 if document is None else gather_statistics.layer_bytes(model, step.layer),
                work=GptqWork(model, own, settings, grid, choice, step.before, about, skeleton, library, loose_files),
            )
        )
    if document is not None:
        units += gather_statistics.closing_units(NAME, units[-1], model, document, lambda link: link.sides, kept=False)
    run = functools.partial(gather_statistics.run_in_chain, threads, REMEDIES, _run_layer)
    title = f"calibrate, and quantize experts to {fmt.name}"
    return Stage(NAME, title, tuple(units), run, chain=True, portion=portions.unit_of)


def _run_layer(unit: Unit[Any], partial: Path, context: Context) -> Result:
    if isinstance(unit.work, PortionWork):
        return _run_portion(unit, partial)
    work: GptqWork = unit.work
    files, tensors, figures = (write_layer if work.settings.engine == "stream" else write_whole)(work, partial, context)
    context.reporter.advance(unit.bytes_in - sum(t.nbytes for t in work.model.layer_tensors(work.layer)))
    return Result(files, tensors, figures)


def write_layer(work: GptqWork, partial: Path, context: Context) -> tuple[tuple[Written, ...], int, dict[str, Any]]:
    """One shard with the layer's routed experts, and for the next layer the hidden states that leave this one."""
    link, gathering = context.link, gather_statistics.Gathering(work.layer)
    with writer(work, partial, context.reporter) as files:
        compensate = _compensate(work, files.write)
        consumers = (*_gathered(gathering, link.side is not None), compensate)
        chain.walk(work.model, work.layer, work.before, work.skeleton(), work.settings.group, consumers, context)
        written, tensors = files.finish()
    if link.side is not None:
        gathering.write(link.side)
    reported = report(work, gathering.counts.tokens[work.layer], compensate, context.reporter)
    return written, tensors, {**error_of_sample(work, partial), **reported}


def _compensate(work: GptqWork, write: Write, shared: Shared | None = None) -> Compensate:
    of = work.settings
    options = of.dampening, of.rounding, of.sees, of.floor
    own = Compensate(work.fmt.encoding, *options, nearest(work), write, work.grid.numa, of.steps)
    return own if shared is None else replace(own, shared=shared)


def _gathered(gathering: gather_statistics.Gathering, statistics: bool) -> tuple[Consumer, ...]:
    return gathering.consumers if statistics else (gathering.counts,)


@functools.lru_cache(1)
def _shared(layer: str, sha256: str) -> Shared:
    """What all portions of a layer that a worker makes have in common."""
    return Shared()


def _run_portion(unit: Unit[PortionWork], partial: Path) -> Result:
    portion, work = unit.work.portion, unit.work.of.work
    arrays: dict[str, Any] = {}

    def write(expert: int, projection: str, stored: Stored) -> None:
        for number, (_, tensors) in enumerate(stored):
            arrays.update({left_name(expert, projection, number, n): tensor for n, tensor in enumerate(tensors)})

    compensate = _compensate(work, write, _shared(unit.work.of.fingerprint, portion.sha256))
    consumers = (*_gathered(gather_statistics.Gathering(work.layer), unit.work.of.side > 0), compensate)
    arrays |= visit_portion(work.model, work.skeleton(), work.layer, portion, kinds_of(consumers), compensate)
    arrays |= compensate.notes()
    return Result((write_arrays(partial, arrays),), len(arrays))


def write_whole(work: GptqWork, partial: Path, context: Context) -> tuple[tuple[Written, ...], int, dict[str, Any]]:
    """One shard, with the weights from oneshot, which runs on the whole model when the first layer asks for them."""
    quantized = work.oneshot(context.link.store[chain.SAMPLES])
    with writer(work, partial, context.reporter) as files:
        for expert in range(work.model.shape(work.layer)[0]):
            for projection in PROJECTIONS:
                files.write(expert, projection, quantized(work.layer, expert, projection))
        written, tensors = files.finish()
    return written, tensors, {"layer": work.layer, **error_of_sample(work, partial)}
