"""GPTQ of all layers as a chain: samples, then layer after layer, each of which passes hidden states to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor
from ktconvert.layouts.encodings.encoding import Bytes, is_zero
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.shards import ShardPlan
from ktconvert.layouts.outputs import loose
from ktconvert.layouts.outputs.format import Format, expert_bytes
from ktconvert.layouts.outputs.linear_names import linear_name
from ktconvert.layouts.outputs.slices import PackedSlices, Slicing
from ktconvert.pipeline.calibration import chain, gather_statistics, portions
from ktconvert.pipeline.calibration.expert_visitors import ExpertVisitor, TokenCounts
from ktconvert.pipeline.calibration.gptq_experts import (
    GptqVisitor,
    ReadLinear,
    RoundLinear,
    SharedFactors,
    WriteLinear,
    run_oneshot,
)
from ktconvert.pipeline.calibration.layer_runner import list_specs, visit_portion
from ktconvert.pipeline.calibration.requirements import ALTERNATIVES
from ktconvert.pipeline.engine.units import Context, Portion, Result, Stage, Unit, Written
from ktconvert.pipeline.options.conversion_options import QuantizationOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.stages import expert_files, quantize_experts
from ktconvert.quantizers import descent, gptq, predictions
from ktconvert.quantizers.differences import source_values
from ktconvert.quantizers.quantizer import ABSMAX, Quantizer
from ktconvert.quantizers.reference import F32

NAME = "gptq"
VERSION = 1
ROWS = 32  # rows to decode at a time, until a value is not zero


@dataclass(frozen=True)
class GptqWork(chain.LayerWork):
    """The work of a layer's unit.

    slicing      the NUMA slices of the layer's experts
    quantizer    the quantizer that chooses scales
    metadata     entries of the shard's header
    run_oneshot  path of the samples -> a function that returns a linear, for --engine oneshot
    loose        whether the unit is a folder of loose files
    """

    fmt: Format
    slicing: Slicing
    quantizer: Quantizer
    metadata: Mapping[str, str]
    run_oneshot: Callable[[Path], ReadLinear]
    loose: bool = False

    @property
    def options(self) -> QuantizationOptions:
        options = self.chain.options
        assert isinstance(options, QuantizationOptions)
        return options


def make_stage(
    model: MoeModel,
    fmt: Format,
    options: QuantizationOptions,
    non_experts: Mapping[str, OutputTensor],
    experts_at_once: int,
    metadata: Mapping[str, str],
    *,
    quantizer: Quantizer = ABSMAX,
    numa: int = 1,
    loose_files: bool = False,
    document: Mapping[str, Any] | None = None,
) -> Stage[Any]:
    """Return the chain of units that calibrates and quantizes all layers.

    non_experts, experts_at_once  as in chain.Chain
    document                      entries of statistics.json; None if no statistics are gathered
    """
    streams = options.engine == "stream"
    gptq_options = options.gptq
    unit_chain = chain.Chain(
        NAME,
        VERSION,
        model,
        options,
        non_experts,
        experts_at_once,
        f"use {ALTERNATIVES[options.command]}",
        passes_hidden_states=streams,
    )

    @functools.cache
    def run_library(samples: Path) -> ReadLinear:
        return run_oneshot(
            model,
            chain.read_samples(samples),
            fmt,
            dampening=gptq_options.dampening_frac,
            every_expert=gptq_options.calibrate == "all",
            trust_remote_code=options.hardware.trust_remote_code,
        )

    outer_identities = unit_chain.outer_identities() if gptq_options.gptq_steps == "full" else ()
    side_versions = () if document is None else (gather_statistics.VERSION,)
    versions = (VERSION, gptq.VERSION, descent.VERSION, predictions.VERSION, *side_versions)
    units: list[Unit[Any]] = [unit_chain.make_samples_unit()]
    for unit in unit_chain.make_layer_units():
        layer = unit.work.layer
        experts, hidden, width = model.shape(layer)
        layer_fmt = fmt.layer_format(layer)
        slicing = Slicing(layer, hidden, width, numa, gated=model.is_gated)
        shard_metadata = quantize_experts.layer_metadata(layer_fmt, layer, model.shape(layer), metadata)
        units.append(
            replace(
                unit,
                versions=(*versions, layer_fmt.encoding.grid.version, layer_fmt.encoding.version),
                params=(
                    ("after", units[-1].fingerprint),
                    ("format", layer_fmt.name),
                    ("quantizer", (quantizer.name, quantizer.version)),
                    ("reading", model.storage_identity(layer)),
                    ("metadata", tuple(sorted(shard_metadata.items()))),
                ),
                inputs=unit.inputs + outer_identities,
                final=loose.layer_folder(layer) if loose_files else "",
                folder=loose_files,
                bytes_out=experts * expert_bytes(layer_fmt.encoding, slicing),
                side_bytes=0 if document is None else gather_statistics.layer_bytes(model, layer),
                work=GptqWork(
                    unit_chain,
                    layer,
                    unit.work.dense_layers,
                    layer_fmt,
                    slicing,
                    quantizer,
                    shard_metadata,
                    run_library,
                    loose_files,
                ),
            )
        )
    if document is not None:
        units += gather_statistics.make_closing_units(unit_chain, units[-1], document, in_output=False)
    run = functools.partial(chain.run_unit, _run_layer)
    run_portion = functools.partial(chain.run_portion, _run_portion)
    title = f"calibrate, and quantize experts to {fmt.name}"
    return Stage(
        NAME,
        title,
        tuple(units),
        run,
        chain=True,
        run_portion=run_portion,
        prepare=unit_chain.load_samples,
    )


def _run_layer(unit: Unit[Any], partial: Path, context: Context) -> Result:
    """Write the layer's routed experts, and hidden states for the next layer."""
    paths = context.chain_paths
    if isinstance(unit.work, gather_statistics.ClosingWork):
        return unit.work.write_file(unit.work, partial, paths)
    work: GptqWork = unit.work
    statistics = gather_statistics.LayerStatistics(work.layer)
    reported: dict[str, Any] = {"layer": work.layer}
    with _open_writer(work, partial, context.reporter) as writer:
        if work.options.engine == "stream":
            visitors, gptq_visitor = _make_visitors(unit, statistics, writer.write, SharedFactors())
            has_statistics = paths.side is not None
            statistics.sensitivity = chain.run_layers(unit, context, visitors, needs_outputs=has_statistics)
            reported = _report_layer(work, statistics.token_counts, gptq_visitor, context.reporter)
        else:
            read_linear = work.run_oneshot(paths.finished[chain.SAMPLES])
            for expert, projection in expert_files.iterate_linears(work.slicing, 0, work.model.shape(work.layer)[0]):
                writer.write(expert, projection, read_linear(work.layer, expert, projection))
        written, tensors = writer.finish()
    if paths.side is not None:
        statistics.write(paths.side)
    context.reporter.advance(unit.bytes_in - sum(t.nbytes for t in work.model.layer_tensors(work.layer)))
    return Result(written, tensors, {**reported, **writer.figures})


def _make_visitors(
    unit: Unit[GptqWork],
    statistics: gather_statistics.LayerStatistics,
    write_linear: WriteLinear,
    shared: SharedFactors,
) -> tuple[tuple[ExpertVisitor, ...], GptqVisitor]:
    """Return all visitors of a layer, and the one that replaces weights."""
    work = unit.work
    options = work.options
    gptq_options = options.gptq
    gptq_visitor = GptqVisitor(
        work.fmt.encoding,
        gptq_options.dampening_frac,
        options.rounding,
        gptq_options.calibrate,
        gptq_options.min_expert_tokens,
        _make_rounder(work),
        write_linear,
        work.slicing.numa,
        gptq_options.gptq_steps,
        shared=shared,
    )
    others = statistics.visitors if unit.side_bytes else (statistics.counter,)
    return (*others, gptq_visitor), gptq_visitor


@functools.lru_cache(1)
def _share_factors(_layer: str, _sha256: str) -> SharedFactors:
    """Return the same object for all portions of a layer in this worker."""
    return SharedFactors()


def _run_portion(layer_unit: Unit[GptqWork], portion: Portion, partial: Path) -> Result:
    work = layer_unit.work
    linears: list[tuple[int, str, PackedSlices]] = []
    statistics = gather_statistics.LayerStatistics(work.layer)
    shared = _share_factors(layer_unit.fingerprint, portion.sha256)
    visitors, gptq_visitor = _make_visitors(layer_unit, statistics, lambda *linear: linears.append(linear), shared)
    result = visit_portion(
        work.model, work.chain.layered_model, work.layer, portion, list_specs(visitors), gptq_visitor
    )
    written = portions.save_tensors(partial, {**result, **gptq_visitor.export_result(linears)})
    return Result((written,), 0)


def _make_rounder(work: GptqWork) -> RoundLinear:
    """Return a function that rounds a linear of the layer to nearest, with scales from the work's quantizer."""
    experts = work.model.shape(work.layer)[0]
    rounding = quantize_experts.ExpertsWork(
        work.fmt, work.slicing, 0, experts, work.metadata, work.model, work.quantizer
    )

    def round_linear(expert: int, projection: str, importance: F32 | None) -> PackedSlices:
        return replace(rounding, importance=lambda *_: importance).make_linear((expert, projection))

    return round_linear


class LayerWriter:
    """Writer of a layer's linears, in file order.

    It writes a shard (all first tensors, then all second ones, and so on) or a folder with a file for each tensor,
    synced together.

    figures  errors of one expert
    """

    def __init__(
        self, work: GptqWork, partial: Path, reporter: Reporter, shard: tuple[DirectFile, ShardPlan] | None = None
    ) -> None:
        self.work = work
        self.partial = partial
        self.reporter = reporter
        self._shard = shard
        experts = work.model.shape(work.layer)[0]
        self.figures: dict[str, Any] = {"sampled_expert": work.layer % experts}
        self._written: list[Written] = []
        self._others: list[list[Bytes]] = []
        self._zeros: list[str] = []

    def write(self, expert: int, projection: str, stored: PackedSlices) -> None:
        """Write a linear. Raise VerificationError if all its codes are zero but the source is not."""
        quantize_experts.write_biases(self.work.model, stored)
        if _has_only_zeros(self.work, expert, projection, stored):
            self._zeros.append(linear_name(self.work.model, self.work.layer, expert, projection))
        if expert == self.figures["sampled_expert"]:
            self.figures[projection] = quantize_experts.measure_error(self.work.model, self.work.fmt.encoding, stored)
        for numa_slice, tensors in stored:
            if self._shard is None:
                self._written += expert_files.write_loose_files(self.work.fmt, numa_slice, tensors, self.partial)
            else:
                self._shard[0].append(tensors[0])
                self._others.append(tensors[1:])
        expert_files.release_expert(self.work.model, self.work.layer, (expert, projection), self.reporter)

    def finish(self) -> tuple[tuple[Written, ...], int]:
        """Complete the files; return them and the number of tensors."""
        expert_files.warn_of_zeros(self._zeros, self.reporter)
        if self._shard is None:
            publish.sync_tree(self.partial)
            return tuple(self._written), len(self._written)
        file, plan = self._shard
        expert_files.append_later_tensors(file, self._others)
        return (Written("", plan.size, file.close()),), len(plan.entries)


@contextmanager
def _open_writer(work: GptqWork, partial: Path, reporter: Reporter) -> Iterator[LayerWriter]:
    if work.loose:
        expert_files.make_folders(partial, work.slicing.numa)
        yield LayerWriter(work, partial, reporter)
        return
    slices = work.slicing.all_slices(range(work.model.shape(work.layer)[0]))
    plan = expert_files.plan_slices(work.fmt, work.fmt.make_names_for_source(work.model), slices, work.metadata)
    with DirectFile(partial, plan.size) as file:
        file.append(plan.header)
        yield LayerWriter(work, partial, reporter, (file, plan))


def _has_only_zeros(work: GptqWork, expert: int, projection: str, stored: PackedSlices) -> bool:
    """Return whether all codes of a linear are zero. Raises VerificationError if those of the source are not."""
    if not all(is_zero(work.fmt.encoding, tensors, numa_slice.n, numa_slice.k) for numa_slice, tensors in stored):
        return False
    name = linear_name(work.model, work.layer, expert, projection)
    source = work.model.linear(work.layer, expert, projection)
    n = source.shape[0]
    if any(source_values(source.rows(first, min(first + ROWS, n))).any() for first in range(0, n, ROWS)):
        remedy = "quantize without calibration (--quant-method RTN, or --scale mse), and report the model to us"
        raise VerificationError(f"{name}: all its codes became zero; {remedy}.")
    return True


def _report_layer(work: GptqWork, counts: TokenCounts, visitor: GptqVisitor, reporter: Reporter) -> dict[str, Any]:
    """Report the experts that were not quantized as usual; return the figures for the journal and the model card."""
    if visitor.too_few_tokens:
        treatment = "rounded to nearest" if work.quantizer.choose_codes is None else "not compensated"
        # Gate and up count all tokens of the layer.
        matrices = " in down" if visitor.statistics.shared_gate_up else ""
        experts = visitor.too_few_tokens
        listing = ", ".join(map(str, experts[:16])) + (", ..." if len(experts) > 16 else "")
        report = reporter.warn if len(experts) == len(counts) else reporter.note
        report(
            f"layer {work.layer}: {len(experts)} of {len(counts)} experts {treatment}{matrices}, because fewer than "
            f"{visitor.min_tokens} tokens were routed to them: {listing}"
        )
    not_factorized = [linear_name(work.model, work.layer, *item) for item in visitor.not_factorized]
    if not_factorized:
        linears = len(work.slicing.projections) * len(counts)
        reporter.warn(
            f"layer {work.layer}: {len(not_factorized)} of {linears} linears rounded to nearest, because their "
            f"Hessian could not be factorized, such as {not_factorized[0]}; a larger --dampening-frac or more samples "
            "may help"
        )
    return {
        "layer": work.layer,
        "routed_tokens": gather_statistics.summarize_counts(counts),
        "expert_tokens": counts.tolist(),
        "rounded_experts": visitor.too_few_tokens,
        "rounded_linears": not_factorized,
        **quantize_experts.report_equalized(work.model, work.layer, 0, len(counts)),
    }
