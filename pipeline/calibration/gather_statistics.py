"""Statistics of what experts read: a file per layer of a chain, the units that end it, and `calibrate`'s chain."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.output_tensors import OtherTensor
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.statistics import folder, second_moments
from ktconvert.layouts.statistics.imatrix import LayerSums, write_imatrix
from ktconvert.layouts.statistics.second_moments import file_of
from ktconvert.pipeline.calibration import chain, portions
from ktconvert.pipeline.calibration.consumers import Consumer, Evidence, ExpertGroup, Importance, TokenCounts, spread
from ktconvert.pipeline.calibration.footprint import REMEDIES_TO_CALIBRATE
from ktconvert.pipeline.calibration.layer import kinds_of, visit_portion
from ktconvert.pipeline.engine.plan import tool_version
from ktconvert.pipeline.engine.units import Context, Link, Result, Stage, Unit, Written
from ktconvert.pipeline.options.quantization import CalibrateOptions
from ktconvert.quantizers import gptq

VERSION = 1
KEYS = tuple(Path(name).stem for name in (folder.IMATRIX, folder.COUNTS, folder.DOCUMENT))  # of the closing units


@dataclass
class Gathering:
    """The two consumers that gather the statistics of one layer."""

    layer: int
    counts: TokenCounts = field(default_factory=TokenCounts)
    importance: Importance = field(default_factory=Importance)

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        return self.counts, self.importance

    def write(self, path: Path) -> tuple[Written, int]:
        """Write a new file of the layer, synced; returns it and its number of tensors. Errors as of `tensors`."""
        tensors = self.tensors()
        return chain.write_arrays(path, tensors, {}), len(tensors)

    def tensors(self) -> dict[str, Any]:
        """Raises VerificationError, naming the layer and an expert, for sums that are not finite in float32."""
        with np.errstate(over="ignore"):
            inputs, middle = (x.astype("<f4") for x in (self.importance.inputs, self.importance.middle))
        for values in (inputs, middle):
            wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
            if wrong.size:
                raise _not_finite(self.layer, int(wrong[0]))
        return {"counts": self.counts.tokens[self.layer].astype("<i8"), "inputs": inputs, "middle": middle}


@dataclass
class GatherMoments:
    """A consumer that writes the second moments of a layer as it gets them: a group of experts is in memory."""

    file: DirectFile
    evidence = Evidence(gptq.Hessian.empty, "mixed", weighted=True)
    replaces = False

    def take(self, group: ExpertGroup) -> None:
        """Append those of a group, and of gate and up before the first. VerificationError for what is not finite."""
        if 0 in group.weights:
            self._append(group, 0, group.gate_up[0])
        for expert in group.weights:
            self._append(group, expert, group.down[expert])

    def _append(self, group: ExpertGroup, expert: int, hessian: gptq.Hessian) -> None:
        values = second_moments.packed((hessian.sum / 2).cpu().numpy())
        if not np.isfinite(values).all():
            raise _not_finite(group.layer, expert)
        self.file.append(values.view(np.uint8))


def _not_finite(layer: int, expert: int) -> VerificationError:
    return VerificationError(
        f"layer {layer}, expert {expert}: the squares of its inputs do not have a finite sum; the model gives NaN or "
        "infinity on this data set. Try another --dataset."
    )


def layer_bytes(model: MoeModel, layer: int) -> int:
    experts, hidden, width = model.shape(layer)
    return experts * (8 + 4 * (hidden + width))


def moments_bytes(model: MoeModel, layer: int) -> int:
    return sum(entry.nbytes for entry in second_moments.entries(model.shape(layer)))


@dataclass(frozen=True)
class Closing:
    """The work of a unit that ends a chain.

    about  what is known of model, data and settings before anything is computed (folder.Document)
    make   writes the unit's file at this path
    kept   whether statistics are the output itself; else they lie at the side of the chain's units
    """

    chain: chain.Chain
    about: Mapping[str, Any]
    make: Callable[[Closing, Path, Link], Result]
    kept: bool

    def sums(self, link: Link, layer: int) -> LayerSums:
        path = (link.store if self.kept else link.sides)[f"layer-{layer:03d}"]
        return LayerSums(*chain.read_arrays(path, "counts", "inputs", "middle"))


def closing_units(own: chain.Chain, last: Unit[Any], about: Mapping[str, Any], *, kept: bool) -> list[Unit[Any]]:
    """The units after the last layer, one for each file. about, kept: as of Closing."""
    shapes = [own.model.shape(layer) for layer in own.model.layers]
    imatrix = sum(4 * experts * (2 * hidden + width + 3) for experts, hidden, width in shapes)
    counts = 8 * int(about["model"]["decoder_layers"]) * max(experts for experts, _, _ in shapes)
    files = ((folder.IMATRIX, imatrix, _imatrix), (folder.COUNTS, counts, _counts), (folder.DOCUMENT, 4096, _document))
    units: list[Unit[Any]] = []
    for key, (name, nbytes, make) in zip(KEYS, files, strict=True):
        units.append(
            Unit(
                stage=own.name,
                key=key,
                versions=(VERSION, folder.FORMAT),
                params=(("after", (units or [last])[-1].fingerprint), ("about", json.dumps(about, sort_keys=True))),
                final=name,
                bytes_out=nbytes,
                kept=kept,
                work=Closing(own, about, make, kept),
            )
        )
    return units


def _imatrix(work: Closing, partial: Path, link: Link) -> Result:
    data = work.about["data"]
    nbytes, digest = write_imatrix(
        partial,
        {layer: work.chain.model.shape(layer) for layer in work.chain.model.layers},
        lambda layer: work.sums(link, layer),
        datasets=[data["dataset"]],
        chunks=len(chain.read_samples(link.store[chain.SAMPLES])),
        chunk_size=data["max_length"],
    )
    return Result((Written("", nbytes, digest),), 6 * len(work.chain.model.layers))


def _counts(work: Closing, partial: Path, link: Link) -> Result:
    model = work.about["model"]
    experts = max(work.chain.model.shape(layer)[0] for layer in work.chain.model.layers)
    counts = np.zeros((model["decoder_layers"], experts), "<i8")
    for layer in work.chain.model.layers:
        own = work.sums(link, layer).counts
        counts[layer, : len(own)] = own
    metadata = {key: str(model[key]) for key in ("architecture", "name", "source")}
    return Result((chain.write_arrays(partial, {folder.KEY: counts}, {"format": "pt", **metadata}),), 1)


def _document(work: Closing, partial: Path, link: Link) -> Result:
    lengths = [len(ids) for ids in chain.read_samples(link.store[chain.SAMPLES])]
    files = []
    stored = {name: link.store[Path(name).stem] for name in (folder.IMATRIX, folder.COUNTS)}
    if work.about["settings"].get("second_moments"):
        stored |= {file_of(layer): link.store[f"layer-{layer:03d}"] for layer in work.chain.model.layers}
    for name, path in stored.items():
        files.append({"name": name, "size": path.stat().st_size, "sha256": publish.sha256_file(path)})
    data = {**work.about["data"], "samples": len(lengths), "tokens": sum(lengths)}
    text = folder.encode({**work.about, "data": data}, files, tool_version())
    return Result((Written("", len(text), publish.write_file(partial, text)),), 0)


NAME, CHAIN_VERSION = "calibrate", 1
INSTEAD = "take an importance matrix that is published for it"  # advice where a model cannot be calibrated


@dataclass(frozen=True)
class CalibrateWork(chain.LayerWork):
    """moments: whether second moments are kept, too."""

    moments: bool


def stage(
    model: MoeModel, options: CalibrateOptions, rest: Mapping[str, OtherTensor], group: int, about: Mapping[str, Any]
) -> Stage[Any]:
    """The chain of `calibrate`. rest, group: as of chain.Chain; about: as statistics.json has it."""
    own = chain.Chain(NAME, CHAIN_VERSION, model, options, rest, group, INSTEAD, REMEDIES_TO_CALIBRATE)
    moments = options.second_moments
    units: list[Unit[Any]] = [own.first()]
    for unit in own.layers():
        layer = unit.work.layer
        units.append(
            replace(
                unit,
                versions=(CHAIN_VERSION, VERSION),
                params=(("after", units[-1].fingerprint), ("reading", model.reading(layer))),
                final=file_of(layer) if moments else "",
                bytes_out=(moments_bytes if moments else layer_bytes)(model, layer),
                kept=moments,
                work=CalibrateWork(own, layer, unit.work.before, moments),
            )
        )
    units += closing_units(own, units[-1], about, kept=True)
    run = functools.partial(chain.run, _run_layer, _run_portion)
    return Stage(NAME, "gather what experts read", tuple(units), run, chain=True)


def _run_layer(unit: Unit[Any], partial: Path, context: Context) -> Result:
    if isinstance(unit.work, Closing):
        return unit.work.make(unit.work, partial, context.link)
    work: CalibrateWork = unit.work
    gathering = Gathering(work.layer)
    if work.moments:
        entries = second_moments.entries(work.model.shape(work.layer))
        plan, tensors = plan_shard(entries, {"format": "pt", "layer": str(work.layer)}), len(entries)
        with DirectFile(partial, plan.size) as file:
            file.append(plan.header)
            chain.walk(unit, context, (*gathering.consumers, GatherMoments(file)))
            chain.append_arrays(file, gathering.tensors().values())
            written = Written("", plan.size, file.close())
    else:
        chain.walk(unit, context, gathering.consumers)
        written, tensors = gathering.write(partial)
    context.reporter.advance(unit.bytes_in)
    tokens = spread(gathering.counts.tokens[work.layer])
    return Result((written,), tensors, {"layer": work.layer, "routed_tokens": tokens})


def _run_portion(layer: Unit[CalibrateWork], portion: portions.Portion, partial: Path) -> Result:
    work = layer.work
    kinds = [*kinds_of(Gathering(work.layer).consumers), *([GatherMoments.evidence] if work.moments else ())]
    left = visit_portion(work.model, work.chain.skeleton, work.layer, portion, kinds)
    return Result((portions.write(partial, left),), 0)
