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
from ktconvert.layouts.tensors import PROJECTIONS
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

if TYPE_CHECKING:
    import torch


Accumulators = tuple[dict[int, Accumulator], dict[int, Accumulator]]  # by expert: for gate and up, and for down


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
    lm: LayeredModel
    layer: int
    lengths: Sequence[int]
    experts_at_once: int

    def sequences(self, rows: RowFile) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, BF16 [T, width]) of each sequence."""
        start = 0
        for length in self.lengths:
            yield start, bits_to_tensor(rows.read(start, start + length), self.lm.device)
            start += length

    def gate_and_up(self, x: torch.Tensor, expert: ExpertWeights) -> list[torch.Tensor]:
        """Return the outputs of an expert's gate and up for inputs [T, H], each BF16 [T, I]."""
        import torch

        return [torch.nn.functional.linear(x, weight) for weight in (expert.gate, expert.up)]

    def down_inputs(self, x: torch.Tensor, expert: ExpertWeights) -> torch.Tensor:
        """Return the inputs of an expert's down projection for inputs [T, H], BF16 [T, I]."""
        return self.lm.activate(self.layer, *self.gate_and_up(x, expert))

    def read_expert(self, expert: int) -> ExpertWeights:
        """Read an expert's weights from the checkpoint, decoded to BF16."""
        linears = (self.model.linear(self.layer, expert, projection) for projection in PROJECTIONS)
        return ExpertWeights(*(bits_to_tensor(kernels.decode(linear), self.lm.device) for linear in linears))


def run_expert_layer(
    run: LayerRun,
    visitors: Sequence[ExpertVisitor],
    layer_inputs: RowFile,
    scratch: Path,
    output_path: Path | None,
    workers: LayerWorkers | None = None,
) -> None:
    """Run all sequences through a layer with experts.

    layer_inputs  rows [tokens, hidden]
    scratch       folder for the inputs and outputs of the experts, each as large as layer_inputs
    output_path   path of a new, durable file for the layer's outputs; None if they are not needed
    workers       visit portions (visit_portion); None: experts are visited in this process
    Raises ValueError if several visitors replace weights, InputError and VerificationError as LayeredModel does.
    """
    if sum(visitor.replaces_weights for visitor in visitors) > 1:
        raise ValueError("more than one visitor replaces weights; use one run for each")
    specs = list_specs(visitors)
    with run.lm.load_layer(run.layer), ExitStack() as files:
        run.lm.require_causal(run.layer)
        rows = files.enter_context(_create_like(layer_inputs, scratch / portions.ROWS_FILE))
        inputs = _record_expert_inputs(run, layer_inputs, rows, specs)
        if output_path is None:
            return _visit_experts(run, inputs, visitors, specs, None, workers)
        expert_outputs = files.enter_context(_create_like(layer_inputs, scratch / "outputs"))
        _visit_experts(run, inputs, visitors, specs, expert_outputs, workers)
        with _create_like(layer_inputs, output_path) as layer_outputs:
            for (start, hidden), (_, summed) in zip(
                run.sequences(layer_inputs), run.sequences(expert_outputs), strict=True
            ):

                def experts(x: torch.Tensor, *_: Any, summed: torch.Tensor = summed) -> torch.Tensor:
                    return summed.reshape(x.shape)

                layer_outputs.write(start, tensor_to_bits(run.lm.run_layer(run.layer, hidden, experts)))
            layer_outputs.sync()


def run_dense_layer(run: LayerRun, layer_inputs: RowFile, output_path: Path) -> RowFile:
    """Run all sequences through a layer without routed experts; return the new file of its outputs."""
    layer_outputs = _create_like(layer_inputs, output_path)
    with run.lm.load_layer(run.layer):
        run.lm.require_causal(run.layer)
        for start, hidden in run.sequences(layer_inputs):
            layer_outputs.write(start, tensor_to_bits(run.lm.run_layer(run.layer, hidden)))
    return layer_outputs


def _create_like(other: RowFile, path: Path) -> RowFile:
    return RowFile(path, other.count, other.width, new=True)


def list_specs(visitors: Sequence[ExpertVisitor]) -> list[StatisticsSpec]:
    """List the different specs of statistics that visitors need, in their order."""
    return [*dict.fromkeys(visitor.statistics for visitor in visitors if visitor.statistics is not None)]


def _record_expert_inputs(
    run: LayerRun, layer_inputs: RowFile, rows: RowFile, specs: Sequence[StatisticsSpec]
) -> ExpertInputs:
    """Run a loaded layer up to its experts, for all sequences; write the experts' inputs to `rows`."""
    import torch

    shared = {spec: spec.new_accumulator(layer_inputs.width, run.lm.device) for spec in specs if spec.shared_gate_up}
    inputs, needs_fisher, layer_outputs = ExpertInputs(rows, [], [], shared), any(spec.fisher for spec in specs), []
    every = -(-layer_inputs.count // GRADIENT_TOKENS)
    for start, hidden in run.sequences(layer_inputs):
        x, ids, weights, output = run.lm.expert_inputs(run.layer, hidden, to_end=needs_fisher)
        if output is not None:
            layer_outputs.append(output[-start % every :: every].clone())
        with torch.inference_mode():
            for accumulator in shared.values():
                accumulator.add(x)
        rows.write(start, tensor_to_bits(x))
        inputs.expert_ids.append(ids.int().cpu())
        inputs.routing_weights.append(weights.cpu())
    if needs_fisher:
        gradients = run.lm.prediction_gradients(torch.cat(layer_outputs), seed=run.layer)
        inputs.output_fisher = predictions.fisher_information(gradients, len(run.lm.layers) - 1 - run.layer)
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
        for weights, statistics, slopes, result in groups:
            final_weights: Mapping[int, ExpertWeights] = weights
            for visitor in visitors:
                gate_up, down = statistics.get(visitor.statistics, ({}, {})) if visitor.statistics else ({}, {})
                group = ExpertGroup(
                    run.layer, token_counts, weights, gate_up, down, inputs.output_fisher, slopes, result
                )
                replaced = visitor.visit(group)
                if visitor.replaces_weights:
                    assert replaced is not None and replaced.keys() == weights.keys()
                    final_weights = replaced
            if outputs is not None:
                _add_expert_outputs(run, inputs, final_weights, outputs)


def _gather_groups(
    run: LayerRun, inputs: ExpertInputs, specs: Sequence[StatisticsSpec], experts: range
) -> Generator[GatheredGroup, None, None]:
    for start in range(experts.start, experts.stop, run.experts_at_once):
        weights = {e: run.read_expert(e) for e in range(start, min(start + run.experts_at_once, experts.stop))}
        slopes: dict[int, torch.Tensor] = {}
        needs_slopes = inputs.output_fisher is not None
        statistics = _gather_statistics(run, inputs, weights, specs, slopes if needs_slopes else None)
        yield GatheredGroup(weights, statistics, slopes)


def _gather_from_workers(
    run: LayerRun, inputs: ExpertInputs, specs: Sequence[StatisticsSpec], workers: LayerWorkers
) -> Generator[GatheredGroup, None, None]:
    """Yield the results of workers for the layer's portions, in order (visit_portion)."""
    count = run.model.shape(run.layer)[0]
    own = portions.write_portions(workers.unit, inputs, run.lengths, specs, count, run.experts_at_once)
    with closing(workers.make_portions(own)) as finished:
        for portion, one in zip(own, finished, strict=True):
            result = portions.load_tensors(one.path, one.result.files[0].sha256, run.lm.device)
            experts = range(portion.first, portion.stop)
            statistics: dict[StatisticsSpec, Accumulators] = {}
            for number, sides in result["evidence"].items():
                spec = specs[number]
                *gate_up, down = (
                    {e: portions.restore_accumulator(spec, fields) for e, fields in side.items()} for side in sides
                )
                statistics[spec] = gate_up[0] if gate_up else dict.fromkeys(experts, inputs.shared[spec]), down
            weights = {e: ExpertWeights(*x) for e, x in result["weights"].items()}
            yield GatheredGroup(weights or {e: run.read_expert(e) for e in experts}, statistics, {}, result)


def visit_portion(
    model: MoeModel,
    lm: LayeredModel,
    layer: int,
    portion: Portion,
    specs: Sequence[StatisticsSpec],
    replacing_visitor: ExpertVisitor | None = None,
) -> dict[str, Any]:
    """Visit a portion's experts in a worker; return the result for the run that waits for it.

    The result has statistics for the visitors that replace no weights, and the replaced weights. specs: those of all
    visitors, as `list_specs` returns them.
    """
    own_spec = None if replacing_visitor is None else replacing_visitor.statistics
    with portions.open_expert_inputs(portion, specs, lm.hidden, lm.device) as (lengths, inputs):
        run = LayerRun(model, lm, layer, lengths, portion.stop - portion.first)
        (group,) = _gather_groups(run, inputs, specs, range(portion.first, portion.stop))
        evidence = {
            number: [{e: vars(x) for e, x in side.items()} for side in group.statistics[spec][spec.shared_gate_up :]]
            for number, spec in enumerate(specs)
            if spec != own_spec
        }
        replaced = None
        if replacing_visitor is not None and own_spec is not None:
            counts, statistics = inputs.count_tokens(model.shape(layer)[0]), group.statistics[own_spec]
            replaced = replacing_visitor.visit(
                ExpertGroup(layer, counts, group.weights, *statistics, inputs.output_fisher, group.slopes)
            )
        weights = {e: (own.gate, own.up, own.down) for e, own in (replaced or {}).items()}
        return {"evidence": evidence, "weights": weights}


def _gather_statistics(
    run: LayerRun,
    inputs: ExpertInputs,
    weights: Mapping[int, ExpertWeights],
    specs: Sequence[StatisticsSpec],
    slopes: dict[int, torch.Tensor] | None,
) -> Mapping[StatisticsSpec, Accumulators]:
    """Gather statistics of a group's linears over all sequences; fill `slopes`, if given, as in ExpertGroup."""
    import torch

    _, hidden, width = run.model.shape(run.layer)
    statistics: dict[StatisticsSpec, Accumulators] = {}
    for spec in specs:
        statistics[spec] = (
            {
                e: inputs.shared[spec] if spec.shared_gate_up else spec.new_accumulator(hidden, run.lm.device)
                for e in weights
            },
            {e: spec.new_accumulator(width, run.lm.device) for e in weights},
        )
    if slopes is not None:
        slopes |= {e: torch.zeros((2 * width, 2 * width), device=run.lm.device) for e in weights}
    with torch.inference_mode():
        for (_, x), ids, routing_weights in zip(
            run.sequences(inputs.rows), inputs.expert_ids, inputs.routing_weights, strict=True
        ):
            for routed in sorted({spec.routed_down for spec in specs} | ({True} if slopes else set())):
                for e, own in weights.items():
                    tokens, choice = torch.where(ids == e)
                    own_x = x[tokens.to(run.lm.device)] if routed else x
                    gate_and_up = run.gate_and_up(own_x, own)
                    down_inputs = run.lm.activate(run.layer, *gate_and_up)
                    for spec in [spec for spec in specs if spec.routed_down == routed]:
                        gate_up, down = statistics[spec]
                        token_weights = routing_weights[tokens, choice].float() if spec.weighted and routed else None
                        if not spec.shared_gate_up:
                            gate_up[e].add(own_x, token_weights)
                        down[e].add(down_inputs, token_weights)
                    if slopes and routed:
                        slope = run.lm.activation_slopes(run.layer, *gate_and_up)
                        slope *= routing_weights[tokens, choice, None].to(slope)
                        slopes[e].addmm_(slope.T, slope)
    return statistics


def _add_expert_outputs(
    run: LayerRun, inputs: ExpertInputs, weights: Mapping[int, ExpertWeights], outputs: RowFile
) -> None:
    """Add the outputs of a group of experts for the tokens routed to them, in BF16, expert after expert."""
    import torch

    device = run.lm.device
    with torch.inference_mode():
        for (start, x), ids, routing_weights in zip(
            run.sequences(inputs.rows), inputs.expert_ids, inputs.routing_weights, strict=True
        ):
            first = 0 in weights
            total = torch.zeros_like(x) if first else bits_to_tensor(outputs.read(start, start + len(x)), device)
            for e, own in weights.items():
                tokens, choice = torch.where(ids == e)
                if not len(tokens):
                    continue
                token_weights = routing_weights[tokens, choice, None].to(device)
                tokens = tokens.to(device)
                # The matrix library computes a single row differently, with different bits than the same row
                # among others.
                own_x = x[tokens] if len(tokens) > 1 else x[tokens.repeat(2)]
                out = torch.nn.functional.linear(run.down_inputs(own_x, own), own.down)[: len(tokens)]
                total.index_add_(0, tokens, (out * token_weights).to(total.dtype))
            outputs.write(start, tensor_to_bits(total))
