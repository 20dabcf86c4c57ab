"""The chain of GPTQ: samples, then layer after layer, each of which hands on the hidden states."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.outputs import loose
from ktconvert.layouts.outputs.format import Format, expert_bytes
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit
from ktconvert.pipeline.gptq import oneshot
from ktconvert.pipeline.gptq.compensate import Compensate, Shared, Stored, Write
from ktconvert.pipeline.gptq.shard import GptqWork, nearest, report, writer
from ktconvert.pipeline.options.quantization import QuantizationOptions
from ktconvert.pipeline.stages import chain, gather_statistics
from ktconvert.pipeline.stages.copy_tensors import OtherTensor
from ktconvert.pipeline.stages.expert_stream import items
from ktconvert.pipeline.stages.quantize_experts import layer_metadata
from ktconvert.pipeline.walk import portions
from ktconvert.pipeline.walk.consumers import Consumer
from ktconvert.pipeline.walk.footprint import REMEDIES
from ktconvert.pipeline.walk.layer import kinds_of, visit_portion
from ktconvert.quantizers import descent, gptq, predictions
from ktconvert.quantizers.choice import ABSMAX, Quantizer

NAME = "gptq"
VERSION = 1
INSTEAD = "use --quant-method RTN (gpu) or --scale mse (cpu)"  # advice where a model cannot be calibrated


def stage(
    model: MoeModel,
    fmt: Format,
    options: QuantizationOptions,
    rest: Mapping[str, OtherTensor],
    group: int,
    metadata: Mapping[str, str],
    *,
    choice: Quantizer = ABSMAX,
    numa: int = 1,
    loose_files: bool = False,
    document: Mapping[str, Any] | None = None,
) -> Stage[Any]:
    """The chain. rest, group: as of chain.Chain; document: as statistics.json has it, None where no statistics are
    gathered.
    """
    streams, gptq_options = options.engine == "stream", options.gptq
    own = chain.Chain(NAME, VERSION, model, options, rest, group, INSTEAD, REMEDIES, hands_on=streams)

    @functools.cache
    def library(samples: Path) -> oneshot.Quantized:
        return oneshot.quantize_model(
            model.source.root,
            chain.read_samples(samples),
            fmt,
            dampening=gptq_options.dampening_frac,
            every_expert=gptq_options.calibrate == "all",
            trust_remote_code=options.machine.trust_remote_code,
        )

    outside = own.outside() if gptq_options.gptq_steps == "full" else ()
    units: list[Unit[Any]] = [own.first()]
    for step in own.steps():
        experts, hidden, width = model.shape(step.layer)
        grid = ExpertGrid(step.layer, hidden, width, numa)
        to = fmt.of_layer(step.layer)
        about = layer_metadata(to, step.layer, model.shape(step.layer), metadata)
        units.append(
            Unit(
                stage=NAME,
                key=step.key,
                versions=(
                    VERSION,
                    gptq.VERSION,
                    descent.VERSION,
                    predictions.VERSION,
                    to.encoding.grid.version,
                    to.encoding.version,
                ),
                params=(
                    ("after", units[-1].fingerprint),
                    ("format", to.name),
                    ("quantizer", (choice.name, choice.version)),
                    ("reading", model.reading(step.layer)),
                    ("metadata", tuple(sorted(about.items()))),
                ),
                inputs=step.inputs + outside,
                final=loose.layer_folder(step.layer) if loose_files else "",
                folder=loose_files,
                bytes_in=step.bytes_in,
                bytes_out=experts * expert_bytes(to.encoding, grid),
                handed_on=step.handed_on,
                side=0 if document is None else gather_statistics.layer_bytes(model, step.layer),
                work=GptqWork(own, step, to, grid, choice, about, library, loose_files),
            )
        )
    if document is not None:
        units += gather_statistics.closing_units(NAME, units[-1], model, document, kept=False)
    run = functools.partial(gather_statistics.run_in_chain, _run_layer, _run_portion)
    return Stage(NAME, f"calibrate, and quantize experts to {fmt.name}", tuple(units), run, chain=True)


def _run_layer(unit: Unit[GptqWork], partial: Path, context: Context) -> Result:
    """The layer's routed experts, and for the next layer the hidden states that leave this one."""
    work, link, gathering = unit.work, context.link, gather_statistics.Gathering(unit.work.layer)
    reported: dict[str, Any] = {"layer": work.layer}
    with writer(work, partial, context.reporter) as files:
        if work.options.engine == "stream":
            consumers, compensate = _consumers(unit, gathering, files.write, Shared())
            chain.walk(unit, context, consumers)
            reported = report(work, gathering.counts.tokens[work.layer], compensate, context.reporter)
        else:
            quantized = work.oneshot(link.store[chain.SAMPLES])
            for expert, projection in items(0, work.model.shape(work.layer)[0]):
                files.write(expert, projection, quantized(work.layer, expert, projection))
        written, tensors = files.finish()
    if link.side is not None:
        gathering.write(link.side)
    context.reporter.advance(unit.bytes_in - sum(t.nbytes for t in work.model.layer_tensors(work.layer)))
    return Result(written, tensors, {**reported, **files.figures})


def _consumers(
    unit: Unit[GptqWork], gathering: gather_statistics.Gathering, write: Write, shared: Shared
) -> tuple[tuple[Consumer, ...], Compensate]:
    """All of a layer's, and the one that replaces the experts."""
    work, options, of = unit.work, unit.work.options, unit.work.options.gptq
    how = of.dampening_frac, options.rounding, of.calibrate, of.min_expert_tokens
    compensate = Compensate(work.fmt.encoding, *how, nearest(work), write, work.grid.numa, of.gptq_steps, shared=shared)
    return (*(gathering.consumers if unit.side else (gathering.counts,)), compensate), compensate


@functools.lru_cache(1)
def _shared(_layer: str, _sha256: str) -> Shared:
    """What the portions of a layer that a worker makes have in common."""
    return Shared()


def _run_portion(layer: Unit[GptqWork], portion: portions.Portion, partial: Path) -> Result:
    work, linears = layer.work, list[tuple[int, str, Stored]]()
    gathering, shared = gather_statistics.Gathering(work.layer), _shared(layer.fingerprint, portion.sha256)
    consumers, compensate = _consumers(layer, gathering, lambda *linear: linears.append(linear), shared)
    left = visit_portion(work.model, work.chain.skeleton, work.layer, portion, kinds_of(consumers), compensate)
    return Result((portions.write(partial, {**left, **compensate.left(linears)}),), 0)
