"""The walk through one layer: record what its experts read, pass them to consumers group by group, and run the layer
with their outputs.

Memory is the layer without its experts, a group of experts with the evidence gathered of them, and one sequence; inputs
and outputs of the experts, for all sequences, lie in files.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.files.direct_file import RowFile
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.native_quant import kernels
from ktconvert.pipeline.calibration import bf16, portions
from ktconvert.pipeline.calibration.consumers import Accumulator, Consumer, Evidence, ExpertGroup, ExpertWeights
from ktconvert.pipeline.calibration.footprint import GRADIENTS
from ktconvert.pipeline.calibration.layered import LayeredModel
from ktconvert.pipeline.calibration.portions import ExpertInputs, Left, Portion
from ktconvert.pipeline.engine.units import Made
from ktconvert.quantizers import predictions

if TYPE_CHECKING:
    import torch


Accumulators = tuple[dict[int, Accumulator], dict[int, Accumulator]]  # by expert: of gate and up, and of down
# Portions -> what workers made of them, in order; their files are there until the last is taken.
Away = Callable[[Sequence[Portion]], Generator[Made, None, None]]


class Visited(NamedTuple):
    """A group of experts, fields as of ExpertGroup; gathered: by kind of evidence."""

    weights: Mapping[int, ExpertWeights]
    gathered: Mapping[Evidence, Accumulators]
    slopes: Mapping[int, torch.Tensor]
    left: Left | None = None


@dataclass(frozen=True)
class LayerWalk:
    """One layer and the sequences that pass it. lengths: tokens of each, whose rows follow each other in the files;
    group: experts that are in memory at a time.
    """

    model: MoeModel
    lm: LayeredModel
    layer: int
    lengths: Sequence[int]
    group: int

    def sequences(self, rows: RowFile) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, BF16 [T, width]) of each sequence."""
        start = 0
        for length in self.lengths:
            yield start, bf16.to_tensor(rows.read(start, start + length), self.lm.device)
            start += length

    def gate_and_up(self, x: torch.Tensor, expert: ExpertWeights) -> list[torch.Tensor]:
        """What an expert's gate and up give for these inputs, BF16 [T, H]."""
        import torch

        return [torch.nn.functional.linear(x, weight) for weight in (expert.gate, expert.up)]

    def middle(self, x: torch.Tensor, expert: ExpertWeights) -> torch.Tensor:
        """What the down projection of an expert reads for these inputs, BF16 [T, H]."""
        return self.lm.middle(self.layer, *self.gate_and_up(x, expert))

    def weights(self, expert: int) -> ExpertWeights:
        linears = (self.model.linear(self.layer, expert, projection) for projection in PROJECTIONS)
        return ExpertWeights(*(bf16.to_tensor(kernels.decode(linear), self.lm.device) for linear in linears))


def walk_layer(
    walk: LayerWalk,
    consumers: Sequence[Consumer],
    entering: RowFile,
    scratch: Path,
    leaving: Path | None,
    away: Away | None = None,
) -> None:
    """Run all sequences through a layer with experts.

    entering  rows [tokens, hidden] of what enters the layer
    scratch   folder for the inputs and outputs of the experts, of that size each
    leaving   path of a new, durable file for what leaves the layer; None if it is not needed
    away      has portions visited by workers (visit_portion); None: experts are visited here
    Raises ValueError where more than one consumer replaces the experts, InputError and VerificationError as
    LayeredModel does.
    """
    if sum(consumer.replaces for consumer in consumers) > 1:
        raise ValueError("more than one consumer replaces the experts; give each a walk of its own")
    kinds = kinds_of(consumers)
    with walk.lm.loaded(walk.layer), ExitStack() as files:
        walk.lm.require_causal(walk.layer)
        inputs = _record(walk, entering, files.enter_context(_file_like(entering, scratch / portions.ROWS)), kinds)
        if leaving is None:
            return _visit_experts(walk, inputs, consumers, kinds, None, away)
        outputs = files.enter_context(_file_like(entering, scratch / "outputs"))
        _visit_experts(walk, inputs, consumers, kinds, outputs, away)
        with _file_like(entering, leaving) as left:
            for (start, hidden), (_, summed) in zip(walk.sequences(entering), walk.sequences(outputs), strict=True):

                def experts(x: torch.Tensor, *_: Any, summed: torch.Tensor = summed) -> torch.Tensor:
                    return summed.reshape(x.shape)

                left.write(start, bf16.to_bits(walk.lm.run(walk.layer, hidden, experts)))
            left.sync()


def walk_dense_layer(walk: LayerWalk, entering: RowFile, leaving: Path) -> RowFile:
    """Run all sequences through a layer without routed experts; returns the new file of what leaves it."""
    left = _file_like(entering, leaving)
    with walk.lm.loaded(walk.layer):
        walk.lm.require_causal(walk.layer)
        for start, hidden in walk.sequences(entering):
            left.write(start, bf16.to_bits(walk.lm.run(walk.layer, hidden)))
    return left


def _file_like(other: RowFile, path: Path) -> RowFile:
    return RowFile(path, other.count, other.width, new=True)


def kinds_of(consumers: Sequence[Consumer]) -> list[Evidence]:
    """The kinds of evidence that they need, each once, in their order."""
    return [*dict.fromkeys(consumer.evidence for consumer in consumers if consumer.evidence is not None)]


def _record(walk: LayerWalk, entering: RowFile, rows: RowFile, kinds: Sequence[Evidence]) -> ExpertInputs:
    """Run a loaded layer as far as its experts, for all sequences."""
    import torch

    shared = {kind: kind.empty(entering.width, walk.lm.device) for kind in kinds if kind.shared}
    inputs, with_outputs, leaving = ExpertInputs(rows, [], [], shared), any(kind.outputs for kind in kinds), []
    every = -(-entering.count // GRADIENTS)
    for start, hidden in walk.sequences(entering):
        x, ids, shares, left = walk.lm.routed_inputs(walk.layer, hidden, through=with_outputs)
        if left is not None:
            leaving.append(left[-start % every :: every].clone())
        with torch.inference_mode():
            for accumulator in shared.values():
                accumulator.add(x)
        rows.write(start, bf16.to_bits(x))
        inputs.ids.append(ids.int().cpu())
        inputs.shares.append(shares.cpu())
    if with_outputs:
        gradients = walk.lm.gradients(torch.cat(leaving), seed=walk.layer)
        inputs.outputs = predictions.information(gradients, len(walk.lm.layers) - 1 - walk.layer)
    return inputs


def _visit_experts(
    walk: LayerWalk,
    inputs: ExpertInputs,
    consumers: Sequence[Consumer],
    kinds: Sequence[Evidence],
    outputs: RowFile | None,
    away: Away | None,
) -> None:
    """Pass groups of experts to the consumers; the sums of their outputs, by token, go to `outputs`."""
    experts = walk.model.shape(walk.layer)[0]
    tokens = inputs.tokens(experts)
    if away is None:
        groups = _visited_here(walk, inputs, kinds, range(experts))
    else:
        groups = _visited_away(walk, inputs, kinds, away)
    with closing(groups):
        for weights, gathered, slopes, left in groups:
            computing: Mapping[int, ExpertWeights] = weights
            for consumer in consumers:
                gate_up, down = gathered.get(consumer.evidence, ({}, {})) if consumer.evidence else ({}, {})
                group = ExpertGroup(walk.layer, tokens, weights, gate_up, down, inputs.outputs, slopes, left)
                replaced = consumer.take(group)
                if consumer.replaces:
                    assert replaced is not None and replaced.keys() == weights.keys()
                    computing = replaced
            if outputs is not None:
                _add_outputs(walk, inputs, computing, outputs)


def _visited_here(
    walk: LayerWalk, inputs: ExpertInputs, kinds: Sequence[Evidence], experts: range
) -> Generator[Visited, None, None]:
    for start in range(experts.start, experts.stop, walk.group):
        weights = {e: walk.weights(e) for e in range(start, min(start + walk.group, experts.stop))}
        slopes: dict[int, torch.Tensor] = {}
        gathered = _gather(walk, inputs, weights, kinds, slopes if inputs.outputs is not None else None)
        yield Visited(weights, gathered, slopes)


def _visited_away(
    walk: LayerWalk, inputs: ExpertInputs, kinds: Sequence[Evidence], away: Away
) -> Generator[Visited, None, None]:
    """What workers left of the layer's portions, in order (visit_portion)."""
    handed_out = portions.hand_out(inputs, walk.lengths, kinds, walk.model.shape(walk.layer)[0], walk.group)
    with closing(away(handed_out)) as made:
        for portion, one in zip(handed_out, made, strict=True):
            left = portions.read(one.path, one.result.files[0].sha256, walk.lm.device)
            experts = range(portion.first, portion.stop)
            gathered: dict[Evidence, Accumulators] = {}
            for number, sides in left["evidence"].items():
                kind = kinds[number]
                *own, down = ({e: portions.accumulator(kind, x) for e, x in side.items()} for side in sides)
                gathered[kind] = own[0] if own else dict.fromkeys(experts, inputs.shared[kind]), down
            weights = {e: ExpertWeights(*x) for e, x in left["weights"].items()}
            yield Visited(weights or {e: walk.weights(e) for e in experts}, gathered, {}, left)


def visit_portion(
    model: MoeModel,
    lm: LayeredModel,
    layer: int,
    portion: Portion,
    kinds: Sequence[Evidence],
    consumer: Consumer | None = None,
) -> dict[str, Any]:
    """What a worker leaves of a portion for the walk that waits for it: evidence of consumers that only look, and the
    weights that replace the experts. kinds: of all consumers, as kinds_of gives them; consumer: the one that replaces.
    """
    replacing = None if consumer is None else consumer.evidence
    with portions.handed_out(portion, kinds, lm.hidden, lm.device) as (lengths, inputs):
        walk = LayerWalk(model, lm, layer, lengths, portion.stop - portion.first)
        (one,) = _visited_here(walk, inputs, kinds, range(portion.first, portion.stop))
        evidence = {
            number: [{e: vars(x) for e, x in side.items()} for side in one.gathered[kind][kind.shared :]]
            for number, kind in enumerate(kinds)
            if kind != replacing
        }
        rounded = None
        if consumer is not None and replacing is not None:
            tokens, own = inputs.tokens(model.shape(layer)[0]), one.gathered[replacing]
            rounded = consumer.take(ExpertGroup(layer, tokens, one.weights, *own, inputs.outputs, one.slopes))
        weights = {e: (own.gate, own.up, own.down) for e, own in (rounded or {}).items()}
        return {"evidence": evidence, "weights": weights}


def _gather(
    walk: LayerWalk,
    inputs: ExpertInputs,
    weights: Mapping[int, ExpertWeights],
    kinds: Sequence[Evidence],
    slopes: dict[int, torch.Tensor] | None,
) -> Mapping[Evidence, Accumulators]:
    """The evidence of a group's linears, over all sequences; into `slopes`, if given, that of ExpertGroup."""
    import torch

    _, hidden, width = walk.model.shape(walk.layer)
    gathered: dict[Evidence, Accumulators] = {}
    for kind in kinds:
        gate_up = {e: inputs.shared[kind] if kind.shared else kind.empty(hidden, walk.lm.device) for e in weights}
        gathered[kind] = gate_up, {e: kind.empty(width, walk.lm.device) for e in weights}
    if slopes is not None:
        slopes |= {e: torch.zeros((2 * width, 2 * width), device=walk.lm.device) for e in weights}
    with torch.inference_mode():
        for (_, x), ids, shares in zip(walk.sequences(inputs.rows), inputs.ids, inputs.shares, strict=True):
            for routed in sorted({kind.routed for kind in kinds} | ({True} if slopes else set())):
                for e, own in weights.items():
                    tokens, choice = torch.where(ids == e)
                    seen = x[tokens.to(walk.lm.device)] if routed else x
                    gate_and_up = walk.gate_and_up(seen, own)
                    middle = walk.lm.middle(walk.layer, *gate_and_up)
                    for kind in [kind for kind in kinds if kind.routed == routed]:
                        gate_up, down = gathered[kind]
                        share = shares[tokens, choice].float() if kind.weighted and routed else None
                        if not kind.shared:
                            gate_up[e].add(seen, share)
                        down[e].add(middle, share)
                    if slopes and routed:
                        slope = walk.lm.slopes(walk.layer, *gate_and_up)
                        slope *= shares[tokens, choice, None].to(slope)
                        slopes[e].addmm_(slope.T, slope)
    return gathered


def _add_outputs(walk: LayerWalk, inputs: ExpertInputs, weights: Mapping[int, ExpertWeights], outputs: RowFile) -> None:
    """Add the outputs of a group of experts for the tokens routed to them, in BF16, expert after expert."""
    import torch

    device = walk.lm.device
    with torch.inference_mode():
        for (start, x), ids, shares in zip(walk.sequences(inputs.rows), inputs.ids, inputs.shares, strict=True):
            first = 0 in weights
            total = torch.zeros_like(x) if first else bf16.to_tensor(outputs.read(start, start + len(x)), device)
            for e, own in weights.items():
                tokens, choice = torch.where(ids == e)
                if not len(tokens):
                    continue
                share = shares[tokens, choice, None].to(device)
                tokens = tokens.to(device)
                # The matrix library takes another path for a single row, which gives other bits than the same row among
                # others.
                seen = x[tokens] if len(tokens) > 1 else x[tokens.repeat(2)]
                out = torch.nn.functional.linear(walk.middle(seen, own), own.down)[: len(tokens)]
                total.index_add_(0, tokens, (out * share).to(total.dtype))
            outputs.write(start, bf16.to_bits(total))
