"""A run of all sequences through one layer: record the experts' inputs, visit the experts, compute the layer's output.

Memory holds the layer without its experts, one group of experts with its statistics, and one sequence. Inputs and
outputs of the experts, for all sequences, are files.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.files.direct_file import RowFile
from ktconvert.native_quant import kernels
from ktconvert.pipeline.calibration import portions
from ktconvert.pipeline.calibration.expert_visitors import (
    Accumulator,
    ExpertGroup,
    ExpertVisitor,
    ExpertWeights,
    StatisticsSpec,
)
from ktconvert.pipeline.calibration.layered_model import LayeredModel, bits_to_tensor, tensor_to_bits
from ktconvert.pipeline.calibration.portions import ExpertInputs, LayerWorkers, TensorTree
from ktconvert.pipeline.calibration.requirements import GRADIENT_TOKENS
from ktconvert.pipeline.engine.units import Portion
from ktconvert.quantizers import predictions
from ktconvert.quantizers.reference import f32_to_bf16

if TYPE_CHECKING:
    import torch


# Accumulators of gate and up, and those of down, by expert.
Accumulators = tuple[dict[int, Accumulator], dict[int, Accumulator]]
STATISTICS, WEIGHTS = "statistics", "weights"  # entries of a worker's result (visit_portion)


class GatheredGroup(NamedTuple):
    """A group of experts with its statistics, by spec; the other fields are as in ExpertGroup."""

    weights: Mapping[int, ExpertWeights]
    statistics: Mapping[StatisticsSpec, Accumulators]
    slopes: Mapping[int, torch.Tensor]
    portion_result: TensorTree | None = None


@dataclass(frozen=True)
class LayerRun:
    """One layer and the sequences that run through it.

    lengths          tokens of each sequence; their rows are consecutive in the files
    experts_at_once  experts that are in memory at a time
    """

    model: MoeModel
    layered_model: LayeredModel
    layer: int
    lengths: Sequence[int]
    experts_at_once: int

    def sequences(self, rows: RowFile) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, BF16 [T, width]) of each sequence."""
        start = 0
        for length in self.lengths:
            yield start, bits_to_tensor(rows.read(start, start + length), self.layered_model.device)
            start += length

    def gate_and_up(self, x: torch.Tensor, expert: ExpertWeights) -> list[torch.Tensor]:
        """Return the outputs of an expert's gate, if it has one, and up for inputs [T, H], each BF16 [T, I]."""
        return [expert.multiply(projection, x) for projection in self.model.projections[:-1]]

    def down_inputs(self, x: torch.Tensor, expert: ExpertWeights) -> torch.Tensor:
        """Return the inputs of an expert's down projection for inputs [T, H], BF16 [T, I]."""
        return self.layered_model.activate(self.layer, *self.gate_and_up(x, expert))

    def read_expert(self, expert: int) -> ExpertWeights:
        """Read an expert's weights from the checkpoint, decoded to BF16."""
        device = self.layered_model.device
        matrices = {
            projection: bits_to_tensor(kernels.decode(self.model.linear(self.layer, expert, projection)), device)
            for projection in self.model.projections
        }
        return ExpertWeights(matrices, self.read_biases(expert))

    def read_biases(self, expert: int) -> dict[str, torch.Tensor]:
        """Read an expert's biases from the checkpoint, rounded to BF16; {} if it has none."""
        biases = {p: self.model.bias(self.layer, expert, p) for p in self.model.projections}
        device = self.layered_model.device
        return {p: bits_to_tensor(f32_to_bf16(bias), device) for p, bias in biases.items() if bias is not None}


def run_expert_layer(
    run: LayerRun,
    visitors: Sequence[ExpertVisitor],
    layer_inputs: RowFile,
    scratch: Path,
    output_path: Path | None,
    workers: LayerWorkers | None = None,
) -> float:
    """Run all sequences through a layer with experts; return its sensitivity.

    The sensitivity is the sum of all squared routing weights, divided by the sum of squares of the layer's outputs: a
    squared error of 1 in the output of each expert gives outputs of this squared relative error. It is 0 if the outputs
    are not needed.

    layer_inputs  rows [tokens, hidden]
    scratch       folder for the inputs and outputs of the experts, each as large as layer_inputs
    output_path   path of a new, durable file for the layer's outputs; None if they are not needed
    workers       visit portions (visit_portion); None: experts are visited in this process

    Raises ValueError if several visitors replace weights, InputError and VerificationError as LayeredModel does.
    """
    if sum(visitor.replaces_weights for visitor in visitors) > 1:
        raise ValueError("more than one visitor replaces weights; use one run for each")
    specs = list_specs(visitors)
    with run.layered_model.load_layer(run.layer), ExitStack() as files:
        run.layered_model.require_causal(run.layer)
        _, hidden, _ = run.model.shape(run.layer)  # in a latent space, it is not that of the layer
        rows = files.enter_context(_create_like(layer_inputs, scratch / portions.ROWS_FILE, hidden))
        inputs = _record_expert_inputs(run, layer_inputs, rows, specs)
        if output_path is None:
            _visit_experts(run, inputs, visitors, specs, None, workers)
            return 0.0
        energy = 0.0
        expert_outputs = files.enter_context(_create_like(rows, scratch / "outputs"))
        _visit_experts(run, inputs, visitors, specs, expert_outputs, workers)
        with _create_like(layer_inputs, output_path) as layer_outputs:
            sequences = zip(run.sequences(layer_inputs), run.sequences(expert_outputs), strict=True)
            for (start, layer_input), (_, expert_sums) in sequences:

                def return_sums(x: torch.Tensor, *_: Any, sums: torch.Tensor = expert_sums) -> torch.Tensor:
                    return sums.reshape(x.shape)

                outputs = run.layered_model.run_layer(run.layer, layer_input, return_sums)
                layer_outputs.write(start, tensor_to_bits(outputs))
                energy += float(outputs.double().square().sum())
            layer_outputs.sync()
        return sum(float(weights.double().square().sum()) for weights in inputs.routing_weights) / (energy or 1.0)


def run_dense_layer(run: LayerRun, layer_inputs: RowFile, output_path: Path) -> RowFile:
    """Run all sequences through a layer without routed experts; return the new file of its outputs."""
    layer_outputs = _create_like(layer_inputs, output_path)
    with run.layered_model.load_layer(run.layer):
        run.layered_model.require_causal(run.layer)
        for start, hidden in run.sequences(layer_inputs):
            layer_outputs.write(start, tensor_to_bits(run.layered_model.run_layer(run.layer, hidden)))
    return layer_outputs


def _create_like(template: RowFile, path: Path, width: int | None = None) -> RowFile:
    return RowFile(path, template.count, width or template.width, new=True)


def list_specs(visitors: Sequence[ExpertVisitor]) -> list[StatisticsSpec]:
    """List the different specs of statistics that visitors need, in their order."""
    return [*dict.fromkeys(visitor.statistics for visitor in visitors if visitor.statistics is not None)]


def _record_expert_inputs(
    run: LayerRun, layer_inputs: RowFile, rows: RowFile, specs: Sequence[StatisticsSpec]
) -> ExpertInputs:
    """Run a loaded layer up to its experts, for all sequences; write the experts' inputs to `rows`."""
    import torch

    shared = {spec: spec.new_accumulator(rows.width, run.layered_model.device) for spec in specs if spec.shared_gate_up}
    inputs = ExpertInputs(rows, [], [], shared)
    needs_fisher = any(spec.fisher for spec in specs)
    layer_outputs: list[torch.Tensor] = []
    step = -(-layer_inputs.count // GRADIENT_TOKENS)  # distance of the rows with gradients
    for start, hidden in run.sequences(layer_inputs):
        x, ids, weights, output = run.layered_model.expert_inputs(run.layer, hidden, to_end=needs_fisher)
        if output is not None:
            layer_outputs.append(output[-start % step :: step].clone())
        with torch.inference_mode():
            for accumulator in shared.values():
                accumulator.add(x)
        rows.write(start, tensor_to_bits(x))
        inputs.expert_ids.append(ids.int().cpu())
        inputs.routing_weights.append(weights.cpu())
    if needs_fisher:
        gradients = run.layered_model.prediction_gradients(torch.cat(layer_outputs), seed=run.layer)
        if rows.width != layer_inputs.width:
            gradients = gradients @ run.layered_model.output_derivatives(run.layer, rows.width).T
        inputs.output_fisher = predictions.fisher_information(gradients, len(run.layered_model.layers) - 1 - run.layer)
    return inputs


def _visit_experts(
    run: LayerRun,
    inputs: ExpertInputs,
    visitors: Sequence[ExpertVisitor],
    specs: Sequence[StatisticsSpec],
    outputs: RowFile | None,
    workers: LayerWorkers | None,
) -> None:
    """Pass groups of experts to the visitors; write the sums of their outputs, by token, to `outputs`."""
    experts = run.model.shape(run.layer)[0]
    token_counts = inputs.count_tokens(experts)
    if workers is None:
        groups = _gather_groups(run, inputs, specs, range(experts))
    else:
        groups = _gather_from_workers(run, inputs, specs, workers)
    with closing(groups):
        for gathered in groups:
            final_weights = gathered.weights
            for visitor in visitors:
                accumulators: Accumulators = ({}, {})
                if visitor.statistics is not None:
                    accumulators = gathered.statistics.get(visitor.statistics, accumulators)
                gate_up, down = accumulators
                group = ExpertGroup(
                    run.layer,
                    token_counts,
                    gathered.weights,
                    gate_up,
                    down,
                    inputs.output_fisher,
                    gathered.slopes,
                    gathered.portion_result,
                )
                new_weights = visitor.visit(group)
                if visitor.replaces_weights:
                    assert new_weights is not None and new_weights.keys() == gathered.weights.keys()
                    final_weights = new_weights
            if outputs is not None:
                _add_expert_outputs(run, inputs, final_weights, outputs)


def _gather_groups(
    run: LayerRun, inputs: ExpertInputs, specs: Sequence[StatisticsSpec], experts: range
) -> Generator[GatheredGroup, None, None]:
    """Yield these experts in groups of at most experts_at_once, with their statistics."""
    needs_slopes = inputs.output_fisher is not None
    for first in range(experts.start, experts.stop, run.experts_at_once):
        group = range(first, min(first + run.experts_at_once, experts.stop))
        weights = {expert: run.read_expert(expert) for expert in group}
        slopes: dict[int, torch.Tensor] = {}
        statistics = _gather_statistics(run, inputs, weights, specs, slopes if needs_slopes else None)
        yield GatheredGroup(weights, statistics, slopes)


def _gather_from_workers(
    run: LayerRun, inputs: ExpertInputs, specs: Sequence[StatisticsSpec], workers: LayerWorkers
) -> Generator[GatheredGroup, None, None]:
    """Yield the results of workers for the layer's portions, in order (visit_portion)."""
    expert_count = run.model.shape(run.layer)[0]
    layer_portions = portions.write_portions(
        workers.unit, inputs, run.lengths, specs, expert_count, run.experts_at_once
    )
    with closing(workers.make_portions(layer_portions)) as finished_portions:
        for portion, finished in zip(layer_portions, finished_portions, strict=True):
            sha256 = finished.result.files[0].sha256
            result = portions.load_tensors(finished.path, sha256, run.layered_model.device)
            experts = range(portion.first, portion.stop)
            statistics = {
                specs[number]: _restore_accumulators(specs[number], stored, experts, inputs)
                for number, stored in result[STATISTICS].items()
            }
            weights = {
                expert: ExpertWeights(matrices, run.read_biases(expert)) for expert, matrices in result[WEIGHTS].items()
            }
            if not weights:
                weights = {expert: run.read_expert(expert) for expert in experts}
            yield GatheredGroup(weights, statistics, {}, result)


def _restore_accumulators(
    spec: StatisticsSpec, stored: Sequence[Mapping[int, Mapping[str, Any]]], experts: range, inputs: ExpertInputs
) -> Accumulators:
    """Return the accumulators that a worker has stored with `_store_accumulators`, and the shared ones."""
    *gate_up, down = (
        {expert: portions.restore_accumulator(spec, fields) for expert, fields in accumulators.items()}
        for accumulators in stored
    )
    return gate_up[0] if gate_up else dict.fromkeys(experts, inputs.shared[spec]), down


def _store_accumulators(spec: StatisticsSpec, accumulators: Accumulators) -> list[dict[int, dict[str, Any]]]:
    """Return the fields of accumulators by expert: those of gate and up, unless they are shared, and of down."""
    stored_accumulators = accumulators[1:] if spec.shared_gate_up else accumulators
    return [
        {expert: vars(accumulator) for expert, accumulator in by_expert.items()} for by_expert in stored_accumulators
    ]


def visit_portion(
    model: MoeModel,
    layered_model: LayeredModel,
    layer: int,
    portion: Portion,
    specs: Sequence[StatisticsSpec],
    replacing_visitor: ExpertVisitor | None = None,
) -> dict[str, Any]:
    """Visit a portion's experts in a worker; return the result for the run that waits for it.

    The result has two entries: STATISTICS, the accumulators for the visitors that replace no weights, by the number of
    their spec; and WEIGHTS, the replaced weights by expert.

    specs  those of all visitors, as `list_specs` returns them
    """
    replacing_spec = None if replacing_visitor is None else replacing_visitor.statistics
    experts, hidden, _ = model.shape(layer)
    with portions.open_expert_inputs(portion, specs, hidden, layered_model.device) as (lengths, inputs):
        run = LayerRun(model, layered_model, layer, lengths, portion.stop - portion.first)
        (group,) = _gather_groups(run, inputs, specs, range(portion.first, portion.stop))
        statistics = {
            number: _store_accumulators(spec, group.statistics[spec])
            for number, spec in enumerate(specs)
            if spec != replacing_spec
        }
        new_weights: Mapping[int, ExpertWeights] | None = None
        if replacing_visitor is not None and replacing_spec is not None:
            token_counts = inputs.count_tokens(experts)
            gate_up, down = group.statistics[replacing_spec]
            new_weights = replacing_visitor.visit(
                ExpertGroup(layer, token_counts, group.weights, gate_up, down, inputs.output_fisher, group.slopes)
            )
        weights = {expert: dict(new.matrices) for expert, new in (new_weights or {}).items()}
        return {STATISTICS: statistics, WEIGHTS: weights}


def _iterate_expert_inputs(
    run: LayerRun, inputs: ExpertInputs
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield of each sequence: first row, experts' inputs BF16 [T, H], expert ids and routing weights [T, k]."""
    sequences = zip(run.sequences(inputs.rows), inputs.expert_ids, inputs.routing_weights, strict=True)
    for (start, x), expert_ids, routing_weights in sequences:
        yield start, x, expert_ids, routing_weights


def _gather_statistics(
    run: LayerRun,
    inputs: ExpertInputs,
    weights: Mapping[int, ExpertWeights],
    specs: Sequence[StatisticsSpec],
    slopes: dict[int, torch.Tensor] | None,
) -> Mapping[StatisticsSpec, Accumulators]:
    """Gather statistics of a group's linears over all sequences; fill `slopes`, if given, as in ExpertGroup."""
    import torch

    device = run.layered_model.device
    _, hidden, width = run.model.shape(run.layer)
    statistics: dict[StatisticsSpec, Accumulators] = {}
    for spec in specs:
        if spec.shared_gate_up:
            gate_up = dict.fromkeys(weights, inputs.shared[spec])
        else:
            gate_up = {expert: spec.new_accumulator(hidden, device) for expert in weights}
        down = {expert: spec.new_accumulator(width, device) for expert in weights}
        statistics[spec] = gate_up, down
    if slopes is not None:
        rows = width * len(run.model.projections[:-1])
        slopes |= {expert: torch.zeros((rows, rows), device=device) for expert in weights}
    # Statistics of all tokens and of routed tokens need different inputs of down, so there is a pass for each.
    passes = sorted({spec.routed_down for spec in specs} | ({True} if slopes else set()))
    with torch.inference_mode():
        for _, x, expert_ids, routing_weights in _iterate_expert_inputs(run, inputs):
            for routed in passes:
                pass_statistics = {spec: statistics[spec] for spec in specs if spec.routed_down == routed}
                for expert, expert_weights in weights.items():
                    if not routed:
                        _add_to_statistics(run, expert, expert_weights, x, None, pass_statistics, slopes)
                        continue
                    tokens, choices = torch.where(expert_ids == expert)
                    expert_x = x[tokens.to(device)]
                    token_weights = routing_weights[tokens, choices]
                    _add_to_statistics(run, expert, expert_weights, expert_x, token_weights, pass_statistics, slopes)
    return statistics


def _add_to_statistics(
    run: LayerRun,
    expert: int,
    weights: ExpertWeights,
    x: torch.Tensor,
    token_weights: torch.Tensor | None,
    statistics: Mapping[StatisticsSpec, Accumulators],
    slopes: Mapping[int, torch.Tensor] | None,
) -> None:
    """Add an expert's inputs, for one sequence, to the statistics and slopes of the expert.

    x              inputs of gate and up, BF16 [T, H]
    token_weights  routing weights [T] of the tokens, if only those routed to the expert are given; None for all tokens
    """
    gate_and_up = run.gate_and_up(x, weights)
    down_inputs = run.layered_model.activate(run.layer, *gate_and_up)
    for spec, (gate_up, down) in statistics.items():
        spec_weights = token_weights.float() if spec.weighted and token_weights is not None else None
        if not spec.shared_gate_up:
            gate_up[expert].add(x, spec_weights)
        down[expert].add(down_inputs, spec_weights)
    if slopes and token_weights is not None:
        token_slopes = run.layered_model.activation_slopes(run.layer, *gate_and_up)
        token_slopes *= token_weights[:, None].to(token_slopes)
        slopes[expert].addmm_(token_slopes.T, token_slopes)


def _add_expert_outputs(
    run: LayerRun, inputs: ExpertInputs, weights: Mapping[int, ExpertWeights], outputs: RowFile
) -> None:
    """Add the outputs of a group of experts for the tokens routed to them, in BF16, expert after expert."""
    import torch

    device = run.layered_model.device
    with torch.inference_mode():
        for start, x, expert_ids, routing_weights in _iterate_expert_inputs(run, inputs):
            is_first_group = 0 in weights
            if is_first_group:
                sums = torch.zeros_like(x)
            else:
                sums = bits_to_tensor(outputs.read(start, start + len(x)), device)
            for expert, expert_weights in weights.items():
                tokens, choices = torch.where(expert_ids == expert)
                if not len(tokens):
                    continue
                token_weights = routing_weights[tokens, choices, None].to(device)
                tokens = tokens.to(device)
                # The matrix library computes a single row differently, with different bits than the same row
                # among others.
                expert_x = x[tokens] if len(tokens) > 1 else x[tokens.repeat(2)]
                down_inputs = run.down_inputs(expert_x, expert_weights)
                down_outputs = expert_weights.multiply("down", down_inputs)[: len(tokens)]
                sums.index_add_(0, tokens, (down_outputs * token_weights).to(sums.dtype))
            outputs.write(start, tensor_to_bits(sums))
