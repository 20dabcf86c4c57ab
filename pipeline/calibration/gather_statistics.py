"""Statistics of the inputs of experts: visitors that gather them, their files, and the chain of `calibrate`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.statistics import folder, second_moments
from ktconvert.layouts.statistics.expert_counts import arrange_counts
from ktconvert.layouts.statistics.imatrix import LayerSums, write_imatrix
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.calibration import chain, portions
from ktconvert.pipeline.calibration.expert_visitors import ExpertGroup, ExpertVisitor, StatisticsSpec, TokenCounts
from ktconvert.pipeline.calibration.layer_runner import list_specs, visit_portion
from ktconvert.pipeline.engine.plan import tool_version
from ktconvert.pipeline.engine.units import ChainPaths, Context, Portion, Result, Stage, Unit, Written
from ktconvert.pipeline.options.conversion_options import CalibrateOptions
from ktconvert.quantizers import gptq

if TYPE_CHECKING:
    import torch

F64 = npt.NDArray[np.float64]
NAME, CHAIN_VERSION = "calibrate", 1
VERSION = 2
SENSITIVITY = TensorInfo("sensitivity", "F32", (1,), 4)  # of a layer's file
ALTERNATIVE = "use a published importance matrix of this model"  # advice for a model that cannot be calibrated
# Keys of the closing units.
KEYS = tuple(Path(name).stem for name in (folder.IMATRIX, folder.COUNTS, folder.DOCUMENT))


# --- visitors -------------------------------------------------------------------------------------


@dataclass
class TokenCounter:
    """A visitor that records the token counts of each layer."""

    token_counts: dict[int, TokenCounts] = field(default_factory=dict)
    statistics = None
    replaces_weights = False

    def visit(self, group: ExpertGroup) -> None:
        self.token_counts[group.layer] = group.token_counts


@dataclass
class SquareSums:
    """The sum of x * x by column over calibration inputs, float64 [k]: the diagonal of the sum of x xT."""

    sum: torch.Tensor

    @classmethod
    def empty(cls, width: int, device: Any = "cpu") -> SquareSums:
        """Return sums of no input, for linears with k = width inputs."""
        import torch

        return cls(torch.zeros(width, dtype=torch.float64, device=device))

    def add(self, inputs: torch.Tensor, routing_weights: torch.Tensor | None = None) -> None:
        """Add a sequence's inputs, BF16 [T, k]. Their squares are exact in float32; routing weights are ignored."""
        import torch

        if len(inputs):
            self.sum += inputs.to(self.sum.device, torch.float32).square().sum(0, dtype=torch.float64)


@dataclass
class ImportanceGatherer:
    """A visitor that gathers the importance matrix of one layer.

    It has the sum of squares of each input column of an expert's linears, over the tokens routed to the expert;
    float64.

    inputs  sums for gate and up, [experts, H]
    middle  sums for down, [experts, I]
    """

    inputs: F64 = field(default_factory=lambda: np.empty((0, 0)))
    middle: F64 = field(default_factory=lambda: np.empty((0, 0)))
    statistics = StatisticsSpec(SquareSums.empty, "routed")
    replaces_weights = False

    def visit(self, group: ExpertGroup) -> None:
        for expert in group.weights:
            inputs, middle = (sums[expert].sum.cpu().numpy() for sums in (group.gate_up, group.down))
            if not self.inputs.size:
                self.inputs, self.middle = (np.zeros((len(group.token_counts), len(x))) for x in (inputs, middle))
            self.inputs[expert] = inputs
            self.middle[expert] = middle


@dataclass
class MomentsWriter:
    """A visitor that writes the second moments of a layer group by group, without keeping them in memory."""

    file: DirectFile
    statistics = StatisticsSpec(gptq.Hessian.empty, "mixed", weighted=True)
    replaces_weights = False

    def visit(self, group: ExpertGroup) -> None:
        """Append the moments of a group, after those of gate and up for the first one.

        Raises VerificationError if moments are not finite.
        """
        if 0 in group.weights:
            self._append(group, 0, group.gate_up[0])
        for expert in group.weights:
            self._append(group, expert, group.down[expert])

    def _append(self, group: ExpertGroup, expert: int, hessian: gptq.Hessian) -> None:
        values = second_moments.pack_triangle((hessian.sum / 2).cpu().numpy())
        if not np.isfinite(values).all():
            raise _not_finite_error(f"{group.layer}, expert {expert}", "its inputs")
        self.file.append(values.view(np.uint8))


def _not_finite_error(layer: str, values: str) -> VerificationError:
    return VerificationError(
        f"layer {layer}: the squares of {values} do not have a finite sum: the model computes NaN or infinity; "
        "compare its files with the release (`ktconvert models --check MODEL`), then try a different --dataset."
    )


def summarize_counts(counts: TokenCounts) -> dict[str, int]:
    """Return how evenly a layer's tokens were routed, for reports; "none" is the number of experts without tokens."""
    return {
        "least": int(counts.min()),
        "median": int(np.median(counts)),
        "most": int(counts.max()),
        "none": int((counts == 0).sum()),
    }


# --- files ----------------------------------------------------------------------------------------


@dataclass
class LayerStatistics:
    """The statistics of one layer, as two visitors gather them, and its sensitivity (run_expert_layer)."""

    layer: int
    sensitivity: float = 0.0
    counter: TokenCounter = field(default_factory=TokenCounter)
    importance: ImportanceGatherer = field(default_factory=ImportanceGatherer)

    @property
    def visitors(self) -> tuple[ExpertVisitor, ...]:
        return self.counter, self.importance

    @property
    def token_counts(self) -> TokenCounts:
        return self.counter.token_counts[self.layer]

    def write(self, path: Path) -> tuple[Written, int]:
        """Write a new file of the layer, synced; return it and its number of tensors.

        Raises VerificationError as `make_tensors` does.
        """
        tensors = self.make_tensors()
        return chain.write_arrays(path, tensors, {}), len(tensors)

    def make_tensors(self) -> dict[str, Any]:
        """Return the layer's arrays. Raises VerificationError for sums that are not finite in float32."""
        with np.errstate(over="ignore"):
            inputs, middle = (x.astype("<f4") for x in (self.importance.inputs, self.importance.middle))
        for values in (inputs, middle):
            infinite_experts = np.flatnonzero(~np.isfinite(values).all(axis=1))
            if infinite_experts.size:
                raise _not_finite_error(f"{self.layer}, expert {infinite_experts[0]}", "its inputs")
        if not np.isfinite(self.sensitivity):
            raise _not_finite_error(str(self.layer), "its outputs")
        return {
            "counts": self.token_counts.astype("<i8"),
            "inputs": inputs,
            "middle": middle,
            SENSITIVITY.name: np.array([self.sensitivity], "<f4"),
        }


def layer_bytes(model: MoeModel, layer: int) -> int:
    """Return the bytes of a layer's statistics."""
    experts, hidden, width = model.shape(layer)
    return experts * (8 + 4 * (hidden + width)) + SENSITIVITY.nbytes


def moments_bytes(model: MoeModel, layer: int) -> int:
    """Return the bytes of a layer's statistics with second moments."""
    return sum(entry.nbytes for entry in _moments_entries(model.shape(layer)))


def _moments_entries(shape: tuple[int, int, int]) -> list[TensorInfo]:
    return [*second_moments.tensor_entries(shape), SENSITIVITY]


@dataclass(frozen=True)
class ClosingWork:
    """The work of a unit that ends a chain: one file about all layers.

    document    entries of statistics.json that are known before anything is computed (folder.Document)
    write_file  writes the unit's file to a path
    in_output   whether statistics are the output itself; else they are side files of the chain's units
    """

    chain: chain.Chain
    document: Mapping[str, Any]
    write_file: Callable[[ClosingWork, Path, ChainPaths], Result]
    in_output: bool

    def read_layer(self, paths: ChainPaths, layer: int) -> LayerSums:
        return LayerSums(*self.read_arrays(paths, layer, "counts", "inputs", "middle"))

    def read_arrays(self, paths: ChainPaths, layer: int, *names: str) -> list[npt.NDArray[Any]]:
        """Read arrays of a layer's file. Raises InputError if it is damaged."""
        path = (paths.finished if self.in_output else paths.side_files)[f"layer-{layer:03d}"]
        return chain.read_arrays(path, *names)


def make_closing_units(
    unit_chain: chain.Chain, last_layer: Unit[Any], document: Mapping[str, Any], *, in_output: bool
) -> list[Unit[Any]]:
    """Return the units after the last layer's, one for each file.

    document, in_output  as in ClosingWork
    """
    shapes = [unit_chain.model.shape(layer) for layer in unit_chain.model.layers]
    imatrix_bytes = sum(4 * experts * (2 * hidden + width + 3) for experts, hidden, width in shapes)
    counts_bytes = 8 * int(document["model"]["decoder_layers"]) * max(experts for experts, _, _ in shapes)
    files = (
        (folder.IMATRIX, imatrix_bytes, _write_imatrix),
        (folder.COUNTS, counts_bytes, _write_counts),
        (folder.DOCUMENT, 4096, _write_document),
    )
    units: list[Unit[Any]] = []
    for key, (name, nbytes, write_file) in zip(KEYS, files, strict=True):
        previous = (units or [last_layer])[-1]
        units.append(
            Unit(
                stage=unit_chain.name,
                key=key,
                versions=(VERSION, folder.FOLDER_VERSION),
                params=(("after", previous.fingerprint), ("about", json.dumps(document, sort_keys=True))),
                final=name,
                bytes_out=nbytes,
                in_output=in_output,
                work=ClosingWork(unit_chain, document, write_file, in_output),
            )
        )
    return units


def _write_imatrix(work: ClosingWork, partial: Path, paths: ChainPaths) -> Result:
    data = work.document["data"]
    model = work.chain.model
    nbytes, digest = write_imatrix(
        partial,
        {layer: model.shape(layer) for layer in model.layers},
        lambda layer: work.read_layer(paths, layer),
        datasets=[data["dataset"]],
        chunks=len(chain.read_samples(paths.finished[chain.SAMPLES])),
        chunk_size=data["max_length"],
    )
    return Result((Written("", nbytes, digest),), 6 * len(model.layers))


def _write_counts(work: ClosingWork, partial: Path, paths: ChainPaths) -> Result:
    description = work.document["model"]
    model = work.chain.model
    rows = {layer: work.read_layer(paths, layer).counts for layer in model.layers}
    counts = arrange_counts(description["decoder_layers"], rows).astype("<i8")
    metadata = {key: str(description[key]) for key in ("architecture", "name", "source")}
    return Result((chain.write_arrays(partial, {folder.COUNTS_KEY: counts}, {"format": "pt", **metadata}),), 1)


def _write_document(work: ClosingWork, partial: Path, paths: ChainPaths) -> Result:
    lengths = [len(ids) for ids in chain.read_samples(paths.finished[chain.SAMPLES])]
    finished = {name: paths.finished[Path(name).stem] for name in (folder.IMATRIX, folder.COUNTS)}
    if work.document["settings"].get("second_moments"):
        layers = work.chain.model.layers
        finished |= {second_moments.file_name(layer): paths.finished[f"layer-{layer:03d}"] for layer in layers}
    files = [
        {"name": name, "size": path.stat().st_size, "sha256": publish.sha256_file(path)}
        for name, path in finished.items()
    ]
    data = {**work.document["data"], "samples": len(lengths), "tokens": sum(lengths)}
    sensitivity = [float(work.read_arrays(paths, layer, SENSITIVITY.name)[0][0]) for layer in work.chain.model.layers]
    entries = {**work.document, "data": data, "sensitivity": sensitivity}
    text = folder.encode_document(entries, files, tool_version())
    return Result((Written("", len(text), publish.write_file(partial, text)),), 0)


# --- the chain of `calibrate` ---------------------------------------------------------------------


@dataclass(frozen=True)
class CalibrateWork(chain.LayerWork):
    """The work of a layer's unit.

    moments  whether second moments are written, too
    """

    moments: bool


def make_stage(
    model: MoeModel,
    options: CalibrateOptions,
    non_experts: Mapping[str, OutputTensor],
    experts_at_once: int,
    document: Mapping[str, Any],
) -> Stage[Any]:
    """Return the chain of `calibrate`.

    non_experts, experts_at_once  as in chain.Chain
    document                      as in ClosingWork
    """
    unit_chain = chain.Chain(NAME, CHAIN_VERSION, model, options, non_experts, experts_at_once, ALTERNATIVE)
    moments = options.second_moments
    units: list[Unit[Any]] = [unit_chain.make_samples_unit()]
    for unit in unit_chain.make_layer_units():
        layer = unit.work.layer
        units.append(
            replace(
                unit,
                versions=(CHAIN_VERSION, VERSION),
                params=(("after", units[-1].fingerprint), ("reading", model.storage_identity(layer))),
                final=second_moments.file_name(layer) if moments else "",
                bytes_out=(moments_bytes if moments else layer_bytes)(model, layer),
                in_output=moments,
                work=CalibrateWork(unit_chain, layer, unit.work.dense_layers, moments),
            )
        )
    units += make_closing_units(unit_chain, units[-1], document, in_output=True)
    run = functools.partial(chain.run_unit, _run_layer)
    run_portion = functools.partial(chain.run_portion, _run_portion)
    return Stage(
        NAME,
        "gather statistics of experts' inputs",
        tuple(units),
        run,
        chain=True,
        run_portion=run_portion,
        prepare=unit_chain.load_samples,
    )


def _run_layer(unit: Unit[Any], partial: Path, context: Context) -> Result:
    """Run a layer on the data set and write its statistics or second moments, or write the file of a closing unit."""
    if isinstance(unit.work, ClosingWork):
        return unit.work.write_file(unit.work, partial, context.chain_paths)
    work: CalibrateWork = unit.work
    statistics = LayerStatistics(work.layer)
    if work.moments:
        entries = _moments_entries(work.model.shape(work.layer))
        tensor_count = len(entries)
        plan = plan_shard(entries, {"format": "pt", "layer": str(work.layer)})
        with DirectFile(partial, plan.size) as file:
            file.append(plan.header)
            visitors = (*statistics.visitors, MomentsWriter(file))
            statistics.sensitivity = chain.run_layers(unit, context, visitors, needs_outputs=True)
            chain.append_arrays(file, statistics.make_tensors().values())
            written = Written("", plan.size, file.close())
    else:
        statistics.sensitivity = chain.run_layers(unit, context, statistics.visitors, needs_outputs=True)
        written, tensor_count = statistics.write(partial)
    context.reporter.advance(unit.bytes_in)
    summary = summarize_counts(statistics.token_counts)
    return Result((written,), tensor_count, {"layer": work.layer, "routed_tokens": summary})


def _run_portion(layer_unit: Unit[CalibrateWork], portion: Portion, partial: Path) -> Result:
    work = layer_unit.work
    specs = list_specs(LayerStatistics(work.layer).visitors) + ([MomentsWriter.statistics] if work.moments else [])
    result = visit_portion(work.model, work.chain.layered_model, work.layer, portion, specs)
    return Result((portions.save_tensors(partial, result),), 0)
