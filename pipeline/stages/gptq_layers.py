"""The chain of GPTQ: samples, then layer after layer, each of which hands on the hidden states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.output_tensors import OtherTensor
from ktconvert.layouts.encodings.encoding import Bytes, is_zero
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.shards import ShardPlan
from ktconvert.layouts.outputs import loose
from ktconvert.layouts.outputs.format import Format, expert_bytes
from ktconvert.layouts.outputs.linear_names import linear_name
from ktconvert.layouts.outputs.parts import ExpertGrid, Parts
from ktconvert.pipeline.calibration import chain, gather_statistics, oneshot, portions
from ktconvert.pipeline.calibration.compensate import Compensate, Nearest, Shared, Write
from ktconvert.pipeline.calibration.consumers import Consumer, Tokens, spread
from ktconvert.pipeline.calibration.footprint import REMEDIES
from ktconvert.pipeline.calibration.layer import kinds_of, visit_portion
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written
from ktconvert.pipeline.options.quantization import QuantizationOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.stages import expert_files, expert_stream, quantize_experts
from ktconvert.quantizers import descent, gptq, predictions
from ktconvert.quantizers.choice import ABSMAX, Quantizer
from ktconvert.quantizers.differences import source_values
from ktconvert.quantizers.reference import F32

NAME = "gptq"
VERSION = 1
INSTEAD = "use --quant-method RTN (gpu) or --scale mse (cpu)"  # advice where a model cannot be calibrated
ROWS = 32  # that are decoded at a time to find a value that is not zero


@dataclass(frozen=True)
class GptqWork(chain.LayerWork):
    """grid: the parts of the layer's experts; choice: how scales are chosen; loose: whether it becomes a folder."""

    fmt: Format
    grid: ExpertGrid
    choice: Quantizer
    metadata: Mapping[str, str]
    oneshot: Callable[[Path], oneshot.Quantized]
    loose: bool = False

    @property
    def options(self) -> QuantizationOptions:
        options = self.chain.options
        assert isinstance(options, QuantizationOptions)
        return options


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
    """The chain. rest, group: as of chain.Chain; document: as statistics.json has it, None where none are gathered."""
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
    for unit in own.layers():
        layer, before = unit.work.layer, unit.work.before
        experts, hidden, width = model.shape(layer)
        to, grid = fmt.of_layer(layer), ExpertGrid(layer, hidden, width, numa)
        versions = VERSION, gptq.VERSION, descent.VERSION, predictions.VERSION
        about = quantize_experts.layer_metadata(to, layer, model.shape(layer), metadata)
        units.append(
            replace(
                unit,
                versions=(*versions, to.encoding.grid.version, to.encoding.version),
                params=(
                    ("after", units[-1].fingerprint),
                    ("format", to.name),
                    ("quantizer", (choice.name, choice.version)),
                    ("reading", model.reading(layer)),
                    ("metadata", tuple(sorted(about.items()))),
                ),
                inputs=unit.inputs + outside,
                final=loose.layer_folder(layer) if loose_files else "",
                folder=loose_files,
                bytes_out=experts * expert_bytes(to.encoding, grid),
                side=0 if document is None else gather_statistics.layer_bytes(model, layer),
                work=GptqWork(own, layer, before, to, grid, choice, about, library, loose_files),
            )
        )
    if document is not None:
        units += gather_statistics.closing_units(own, units[-1], document, kept=False)
    run = functools.partial(chain.run, _run_layer, _run_portion)
    return Stage(NAME, f"calibrate, and quantize experts to {fmt.name}", tuple(units), run, chain=True)


def _run_layer(unit: Unit[Any], partial: Path, context: Context) -> Result:
    """The layer's routed experts, and for the next layer the hidden states that leave this one."""
    link = context.link
    if isinstance(unit.work, gather_statistics.Closing):
        return unit.work.make(unit.work, partial, link)
    work: GptqWork = unit.work
    gathering = gather_statistics.Gathering(work.layer)
    reported: dict[str, Any] = {"layer": work.layer}
    with _writer(work, partial, context.reporter) as files:
        if work.options.engine == "stream":
            consumers, compensate = _consumers(unit, gathering, files.write, Shared())
            chain.walk(unit, context, consumers)
            reported = _report(work, gathering.counts.tokens[work.layer], compensate, context.reporter)
        else:
            quantized = work.oneshot(link.store[chain.SAMPLES])
            for expert, projection in expert_stream.items(0, work.model.shape(work.layer)[0]):
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
    compensate = Compensate(
        work.fmt.encoding, *how, _nearest(work), write, work.grid.numa, of.gptq_steps, shared=shared
    )
    return (*(gathering.consumers if unit.side else (gathering.counts,)), compensate), compensate


@functools.lru_cache(1)
def _shared(_layer: str, _sha256: str) -> Shared:
    """What the portions of a layer that a worker makes have in common."""
    return Shared()


def _run_portion(layer: Unit[GptqWork], portion: portions.Portion, partial: Path) -> Result:
    work, linears = layer.work, list[tuple[int, str, Parts]]()
    gathering, shared = gather_statistics.Gathering(work.layer), _shared(layer.fingerprint, portion.sha256)
    consumers, compensate = _consumers(layer, gathering, lambda *linear: linears.append(linear), shared)
    left = visit_portion(work.model, work.chain.skeleton, work.layer, portion, kinds_of(consumers), compensate)
    return Result((portions.write(partial, {**left, **compensate.left(linears)}),), 0)


def _nearest(work: GptqWork) -> Nearest:
    """A function that rounds a linear of the layer to nearest, with scales as the work's choice has them."""
    count = work.model.shape(work.layer)[0]
    rtn = quantize_experts.ExpertsWork(work.fmt, work.grid, 0, count, work.metadata, work.model, work.choice)

    def quantize(expert: int, projection: str, importance: F32 | None) -> Parts:
        return replace(rtn, importance=lambda *_: importance).make((expert, projection))

    return quantize


class LayerWriter:
    """Writes a layer's linears, in file order: to a shard (all first tensors, then all second ones, and so on), or to a
    folder with a file for each tensor, synced together. figures: how far one expert is from the source.
    """

    def __init__(
        self, work: GptqWork, partial: Path, reporter: Reporter, shard: tuple[DirectFile, ShardPlan] | None = None
    ) -> None:
        self.work, self.partial, self.reporter, self._shard = work, partial, reporter, shard
        experts = work.model.shape(work.layer)[0]
        self.figures: dict[str, Any] = {"sampled_expert": work.layer % experts}
        self._written: list[Written] = []
        self._others: list[list[Bytes]] = []

    def write(self, expert: int, projection: str, stored: Parts) -> None:
        """Write a linear. Raises VerificationError if all codes are zero and the source is not."""
        _require_values(self.work, expert, projection, stored, self.reporter)
        if expert == self.figures["sampled_expert"]:
            self.figures[projection] = expert_stream.error_of(self.work.model, self.work.fmt.encoding, stored)
        for part, tensors in stored:
            if self._shard is None:
                self._written += expert_files.write_loose(self.work.fmt, part, tensors, self.partial)
            else:
                self._shard[0].append(tensors[0])
                self._others.append(tensors[1:])
        expert_stream.taken(self.work.model, self.work.layer, (expert, projection), self.reporter)

    def finish(self) -> tuple[tuple[Written, ...], int]:
        """Complete them; returns the files and the number of tensors."""
        if self._shard is None:
            publish.sync_tree(self.partial)
            return tuple(self._written), len(self._written)
        file, plan = self._shard
        expert_files.append_others(file, self._others)
        return (Written("", plan.size, file.close()),), len(plan.entries)


@contextmanager
def _writer(work: GptqWork, partial: Path, reporter: Reporter) -> Iterator[LayerWriter]:
    """What the layer is written with."""
    if work.loose:
        expert_files.make_folders(partial, work.grid.numa)
        yield LayerWriter(work, partial, reporter)
        return
    parts = work.grid.all_parts(range(work.model.shape(work.layer)[0]))
    plan = expert_files.plan_parts(work.fmt, work.fmt.names_in(work.model), parts, work.metadata)
    with DirectFile(partial, plan.size) as file:
        file.append(plan.header)
        yield LayerWriter(work, partial, reporter, (file, plan))


def _require_values(work: GptqWork, expert: int, projection: str, stored: Parts, reporter: Reporter) -> None:
    """Raise VerificationError if all codes of a linear are zero, and the source is not: it would compute nothing."""
    if not all(is_zero(work.fmt.encoding, tensors, part.n, part.k) for part, tensors in stored):
        return
    name = linear_name(work.model, work.layer, expert, projection)
    source = work.model.linear(work.layer, expert, projection)
    n = source.shape[0]
    if any(source_values(source.rows(first, min(first + ROWS, n))).any() for first in range(0, n, ROWS)):
        remedy = "quantize without calibration (--quant-method RTN, or --scale mse), and tell us the model"
        raise VerificationError(f"{name}: all its codes became zero; {remedy}.")
    reporter.warn(f"{name} is all zeros in the source: its expert computes nothing")


def _report(work: GptqWork, tokens: Tokens, done: Compensate, reporter: Reporter) -> dict[str, Any]:
    """Report what happened to the layer's experts; returns the figures for the journal and the model card."""
    if done.too_few:
        how = "rounded to nearest" if work.choice.choose is None else "not compensated"
        where = " in down" if done.evidence.shared else ""  # of gate and up all tokens of the layer are known
        which = ", ".join(map(str, done.too_few[:16])) + (", ..." if len(done.too_few) > 16 else "")
        reporter.note(
            f"layer {work.layer}: {len(done.too_few)} of {len(tokens)} experts {how}{where}, for fewer than "
            f"{done.floor} tokens were routed to them: {which}"
        )
    fell_back = [linear_name(work.model, work.layer, *item) for item in done.fell_back]
    if fell_back:
        reporter.warn(
            f"layer {work.layer}: {len(fell_back)} of {3 * len(tokens)} linears rounded to nearest, for their Hessian "
            f"could not be factorized, such as {fell_back[0]}; a larger --dampening-frac or more samples may help"
        )
    return {
        "layer": work.layer,
        "routed_tokens": spread(tokens),
        "rounded_experts": done.too_few,
        "rounded_linears": fell_back,
        **expert_stream.figures(work.model, work.layer, 0, len(tokens)),
    }
