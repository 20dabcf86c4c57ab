"""The chain of GPTQ: samples, then layer after layer, each of which hands on the hidden states."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.outputs import PROJECTIONS, loose
from ktconvert.layouts.outputs.format import Format, expert_bytes
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written
from ktconvert.pipeline.gptq import oneshot
from ktconvert.pipeline.gptq.compensate import Compensate, Shared, Stored, Write
from ktconvert.pipeline.gptq.settings import INSTEAD, Settings
from ktconvert.pipeline.gptq.shard import GptqWork, error_of_sample, nearest, report, writer
from ktconvert.pipeline.stages import chain, gather_statistics
from ktconvert.pipeline.stages.copy_tensors import OtherTensor
from ktconvert.pipeline.stages.quantize_experts import layer_metadata
from ktconvert.pipeline.walk import portions
from ktconvert.pipeline.walk.consumers import Consumer
from ktconvert.pipeline.walk.footprint import REMEDIES
from ktconvert.pipeline.walk.layer import SamplesWork, kinds_of, read_samples, visit_portion
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
    return Stage(NAME, f"calibrate, and quantize experts to {fmt.name}", tuple(units), run, chain=True)


def _run_layer(unit: Unit[Any], partial: Path, context: Context) -> Result:
    if isinstance(unit.work, portions.PortionWork):
        return _run_portion(unit.work, partial)
    work: GptqWork = unit.work
    files, tensors, figures = (write_layer if work.settings.engine == "stream" else write_whole)(unit, partial, context)
    context.reporter.advance(unit.bytes_in - sum(t.nbytes for t in work.model.layer_tensors(work.layer)))
    return Result(files, tensors, figures)


Layer = tuple[tuple[Written, ...], int, dict[str, Any]]  # files, the number of tensors, figures


def write_layer(unit: Unit[GptqWork], partial: Path, context: Context) -> Layer:
    """One shard with the layer's routed experts, and for the next layer the hidden states that leave this one."""
    work, link, gathering = unit.work, context.link, gather_statistics.Gathering(unit.work.layer)
    with writer(work, partial, context.reporter) as files:
        consumers, compensate = _consumers(unit, gathering, files.write, Shared())
        settings = work.settings
        chain.walk(unit, context, work.model, work.layer, work.before, work.skeleton(), settings.group, consumers)
        written, tensors = files.finish()
    if link.side is not None:
        gathering.write(link.side)
    reported = report(work, gathering.counts.tokens[work.layer], compensate, context.reporter)
    return written, tensors, {**error_of_sample(work, partial), **reported}


def _consumers(
    unit: Unit[GptqWork], gathering: gather_statistics.Gathering, write: Write, shared: Shared
) -> tuple[tuple[Consumer, ...], Compensate]:
    """All of a layer's, and the one that replaces the experts."""
    work, of = unit.work, unit.work.settings
    options = of.dampening, of.rounding, of.sees, of.floor, nearest(work), write, work.grid.numa, of.steps
    compensate = Compensate(work.fmt.encoding, *options, shared=shared)
    return (*(gathering.consumers if unit.side else (gathering.counts,)), compensate), compensate


@functools.lru_cache(1)
def _shared(_layer: str, _sha256: str) -> Shared:
    """What the portions of a layer that a worker makes have in common."""
    return Shared()


def _run_portion(work: portions.PortionWork, partial: Path) -> Result:
    unit, portion, linears = work.of, work.portion, list[tuple[int, str, Stored]]()
    of: GptqWork = unit.work
    gathering, shared = gather_statistics.Gathering(of.layer), _shared(unit.fingerprint, portion.sha256)
    consumers, compensate = _consumers(unit, gathering, lambda *linear: linears.append(linear), shared)
    left = visit_portion(of.model, of.skeleton(), of.layer, portion, kinds_of(consumers), compensate)
    return Result((portions.write(partial, {**left, **compensate.left(linears)}),), 0)


def write_whole(unit: Unit[GptqWork], partial: Path, context: Context) -> Layer:
    """One shard, with the weights from oneshot, which runs on the whole model when the first layer asks for them."""
    work = unit.work
    quantized = work.oneshot(context.link.store[chain.SAMPLES])
    with writer(work, partial, context.reporter) as files:
        for expert in range(work.model.shape(work.layer)[0]):
            for projection in PROJECTIONS:
                files.write(expert, projection, quantized(work.layer, expert, projection))
        written, tensors = files.finish()
    return written, tensors, {"layer": work.layer, **error_of_sample(work, partial)}
