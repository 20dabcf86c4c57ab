"""The chain of `ktconvert calibrate`: samples, layer after layer, then the files of the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.statistics.second_moments import file_of
from ktconvert.pipeline.engine.units import Context, Link, Result, Stage, Unit
from ktconvert.pipeline.stages import chain, gather_statistics
from ktconvert.pipeline.stages.copy_tensors import OtherTensor
from ktconvert.pipeline.walk.calibration_data import WalkSettings
from ktconvert.pipeline.walk.consumers import Consumer, spread
from ktconvert.pipeline.walk.footprint import REMEDIES_TO_CALIBRATE
from ktconvert.pipeline.walk.layer import SamplesWork, write_samples

NAME = "calibrate"
VERSION = 1
INSTEAD = "take an importance matrix that is published for it"  # advice where a model cannot be calibrated


@dataclass(frozen=True)
class CalibrateWork:
    """One layer with experts, and the layers without any that lie before it. second_moments: whether they are kept."""

    model: MoeModel
    step: chain.Step
    settings: WalkSettings
    samples: SamplesWork
    second_moments: bool


Work = SamplesWork | CalibrateWork | gather_statistics.Closing


def stage(
    model: MoeModel,
    settings: WalkSettings,
    rest: Mapping[str, OtherTensor],
    about: Mapping[str, Any],
    *,
    second_moments: bool = False,
) -> Stage[Work]:
    """The chain. rest: tensors outside the routed experts, by name; about: as statistics.json has it."""
    layer_bytes = gather_statistics.moments_bytes if second_moments else gather_statistics.layer_bytes
    skeleton = chain.skeleton_of(model, rest, settings.machine, trusted=settings.trust_remote_code, instead=INSTEAD)
    samples = SamplesWork(settings.calibration, settings.machine["threads"], skeleton)
    boundary = chain.boundary_bytes(model, settings.calibration)
    units: list[Unit[Work]] = [chain.samples_unit(NAME, VERSION, settings.fingerprint, boundary, samples)]
    for step in chain.steps(model, rest, boundary):
        units.append(
            Unit(
                stage=NAME,
                key=step.key,
                versions=(VERSION, gather_statistics.VERSION),
                params=(("after", units[-1].fingerprint), ("reading", model.reading(step.layer))),
                inputs=step.inputs,
                final=file_of(step.layer) if second_moments else "",
                bytes_in=step.bytes_in,
                bytes_out=layer_bytes(model, step.layer),
                kept=second_moments,
                handed_on=step.handed_on,
                work=CalibrateWork(model, step, settings, samples, second_moments),
            )
        )
    units += gather_statistics.closing_units(NAME, units[-1], model, about, lambda link: link.store, kept=True)
    return Stage(NAME, "gather what experts read", ("source",), tuple(units), run_unit, chain=True)


def run_unit(unit: Unit[Work], partial: Path, context: Context) -> Result:
    """Any unit of the chain. Raises ResourceError where memory runs out."""
    import torch

    work = unit.work
    if isinstance(work, gather_statistics.Closing):
        return gather_statistics.run_closing(work, partial, context)
    samples = work if isinstance(work, SamplesWork) else work.samples
    torch.set_num_threads(samples.threads)
    with chain.memory_explained(unit.key, REMEDIES_TO_CALIBRATE):
        if isinstance(work, SamplesWork):
            return write_samples(unit.key, work, partial, context)
        link: Link = context.chain  # type: ignore[assignment]
        step = work.step

        def walk(consumers: Sequence[Consumer]) -> None:
            group = work.settings.group
            chain.walk(work.model, step.layer, step.before, samples.skeleton(), group, consumers, link)

        if work.second_moments:
            gathering, written, tensors = gather_statistics.write_with_moments(partial, work.model, step.layer, walk)
        else:
            gathering = gather_statistics.Gathering(step.layer)
            walk(gathering.consumers)
            written, tensors = gathering.write(partial)
    context.reporter.advance(unit.bytes_in)
    tokens = spread(gathering.counts.tokens[step.layer])
    return Result((written,), tensors, {"layer": step.layer, "routed_tokens": tokens})
