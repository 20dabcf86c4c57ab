"""The walk through one layer: record what its experts read, pass them to consumers group by group, and run the layer
with their outputs.

Memory is the layer without its experts, a group of experts with the evidence gathered of them, and one sequence; inputs
and outputs of the experts, for all sequences, lie in files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.files.rows import RowFile
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.native_quant import kernels
from ktconvert.pipeline.walk import bf16
from ktconvert.pipeline.walk.consumers import Accumulator, Consumer, Evidence, ExpertGroup, ExpertWeights, Tokens
from ktconvert.pipeline.walk.layered import LayeredModel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerWalk:
    """One layer and the sequences that pass it.

    lengths  tokens of each sequence; its rows follow each other in the files
    group    experts that are in memory at a time
    """

    model: MoeModel
    layer: int
    lengths: Sequence[int]
    group: int

    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each sequence's rows."""
        start = 0
        for length in self.lengths:
            yield start, start + length
            start += length


def walk_layer(
    walk: LayerWalk,
    lm: LayeredModel,
    consumers: Sequence[Consumer],
    entering: RowFile,
    scratch: Path,
    leaving: Path | None,
) -> None:
    """Run all sequences through a layer with experts.

    entering  rows [tokens, hidden] of what enters the layer
    scratch   folder for the inputs and outputs of the experts, of that size each
    leaving   path of a new, durable file for what leaves the layer; None if it is not needed
    Raises ValueError where more than one consumer replaces the experts, InputError and VerificationError as
    LayeredModel does."""
    if sum(consumer.replaces for consumer in consumers) > 1:
        raise ValueError("more than one consumer replaces the experts; give each a walk of its own")
    evidence = {consumer.evidence for consumer in consumers if consumer.evidence is not None}
    with lm.loaded(walk.layer), ExitStack() as files:
        lm.require_causal(walk.layer)
        rows = files.enter_context(_file_like(entering, scratch / "inputs"))
        inputs = _record(walk, lm, entering, rows, evidence)
        outputs = files.enter_context(_file_like(entering, scratch / "outputs")) if leaving is not None else None
        _visit_experts(walk, lm, inputs, consumers, evidence, outputs)
        if outputs is not None and leaving is not None:
            with _file_like(entering, leaving) as left:
                _pass_on(walk, lm, entering, outputs, left)
                left.sync()


def walk_dense_layer(walk: LayerWalk, lm: LayeredModel, entering: RowFile, leaving: Path) -> RowFile:
    """Run all sequences through a layer without routed experts; what leaves it goes to a new
    file, which is returned.
    """
    left = _file_like(entering, leaving)
    with lm.loaded(walk.layer):
        lm.require_causal(walk.layer)
        for start, stop in walk.spans():
            hidden = bf16.to_tensor(entering.read(start, stop), lm.device)
            left.write(start, bf16.to_bits(lm.run(walk.layer, hidden)))
    return left


def _file_like(other: RowFile, path: Path) -> RowFile:
    return RowFile(path, other.count, other.width, new=True)


# --- what the experts read ------------------------------------------------------------------------


@dataclass
class _Inputs:
    """The inputs of the layer's experts: rows in a file; of each sequence the router's ids and weights [T, k]; evidence
    of all tokens.
    """

    rows: RowFile
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    shared: Mapping[Evidence, Accumulator]


def _record(
    walk: LayerWalk, lm: LayeredModel, entering: RowFile, rows: RowFile, evidence: Collection[Evidence]
) -> _Inputs:
    """Run a loaded layer as far as its experts, for all sequences."""
    import torch

    shared = {kind: kind.empty(entering.width, lm.device) for kind in evidence if kind.shared}
    inputs = _Inputs(rows, [], [], shared)
    for start, stop in walk.spans():
        x, ids, weights = lm.routed_inputs(walk.layer, bf16.to_tensor(entering.read(start, stop), lm.device))
        with torch.inference_mode():
            for accumulator in shared.values():
                accumulator.add(x)
        rows.write(start, bf16.to_bits(x))
        inputs.ids.append(ids.int().cpu())
        inputs.weights.append(weights.cpu())
    return inputs


def _token_counts(walk: LayerWalk, inputs: _Inputs) -> Tokens:
    experts = walk.model.shape(walk.layer)[0]
    counts = np.zeros(experts, np.int64)
    for ids in inputs.ids:
        counts += np.bincount(ids.numpy().reshape(-1), minlength=experts)[:experts]
    return counts


# --- group after group ----------------------------------------------------------------------------


def _visit_experts(
    walk: LayerWalk,
    lm: LayeredModel,
    inputs: _Inputs,
    consumers: Sequence[Consumer],
    evidence: Collection[Evidence],
    outputs: RowFile | None,
) -> None:
    """Pass one group of experts after the other to the consumers; the sums of the experts' outputs, by token, go to
    `outputs`.
    """
    tokens = _token_counts(walk, inputs)
    for start in range(0, len(tokens), walk.group):
        weights = {e: _weights(walk, lm, e) for e in range(start, min(start + walk.group, len(tokens)))}
        gathered = {kind: _accumulators(walk, lm, inputs, weights, kind) for kind in evidence}
        _gather(walk, lm, inputs, weights, gathered)
        computing: Mapping[int, ExpertWeights] = weights
        for consumer in consumers:
            gate_up, down = gathered[consumer.evidence] if consumer.evidence is not None else ({}, {})
            replaced = consumer.take(ExpertGroup(walk.layer, tokens, weights, gate_up, down))
            if consumer.replaces:
                assert replaced is not None and replaced.keys() == weights.keys()
                computing = replaced
        if outputs is not None:
            _add_outputs(walk, lm, inputs, computing, outputs)


Gathered = tuple[dict[int, Accumulator], dict[int, Accumulator]]  # by expert: of gate and up, and of down


def _accumulators(
    walk: LayerWalk, lm: LayeredModel, inputs: _Inputs, experts: Collection[int], kind: Evidence
) -> Gathered:
    _, hidden, width = walk.model.shape(walk.layer)
    gate_up = {e: inputs.shared[kind] if kind.shared else kind.empty(hidden, lm.device) for e in experts}
    return gate_up, {e: kind.empty(width, lm.device) for e in experts}


def _gather(
    walk: LayerWalk,
    lm: LayeredModel,
    inputs: _Inputs,
    weights: Mapping[int, ExpertWeights],
    gathered: Mapping[Evidence, Gathered],
) -> None:
    """Add the inputs of a group's linears, for all sequences, to the accumulators."""
    import torch

    inner = lm.expert(walk.layer).inner
    with torch.inference_mode():
        for (start, stop), ids in zip(walk.spans(), inputs.ids, strict=True):
            x = bf16.to_tensor(inputs.rows.read(start, stop), lm.device)
            for routed in sorted({kind.routed for kind in gathered}):
                of_kind = [(kind.shared, *both) for kind, both in gathered.items() if kind.routed == routed]
                for e, own in weights.items():
                    seen = x[torch.where(ids == e)[0].to(lm.device)] if routed else x
                    between = inner(_linear(seen, own.gate), _linear(seen, own.up))
                    for shared, gate_up, down in of_kind:
                        if not shared:
                            gate_up[e].add(seen)
                        down[e].add(between)


def _add_outputs(
    walk: LayerWalk, lm: LayeredModel, inputs: _Inputs, weights: Mapping[int, ExpertWeights], outputs: RowFile
) -> None:
    """Add the outputs of a group of experts for the tokens routed to them, in BF16, expert after expert."""
    import torch

    inner = lm.expert(walk.layer).inner
    first = 0 in weights
    with torch.inference_mode():
        for (start, stop), ids, shares in zip(walk.spans(), inputs.ids, inputs.weights, strict=True):
            x = bf16.to_tensor(inputs.rows.read(start, stop), lm.device)
            total = torch.zeros_like(x) if first else bf16.to_tensor(outputs.read(start, stop), lm.device)
            for e, own in weights.items():
                tokens, place = torch.where(ids == e)
                if not len(tokens):
                    continue
                share = shares[tokens, place, None].to(lm.device)
                tokens = tokens.to(lm.device)
                # The matrix library takes another path for a single row, which gives other bits than the same row among
                # others.
                seen = x[tokens] if len(tokens) > 1 else x[tokens.repeat(2)]
                out = _linear(inner(_linear(seen, own.gate), _linear(seen, own.up)), own.down)[: len(tokens)]
                total.index_add_(0, tokens, (out * share).to(total.dtype))
            outputs.write(start, bf16.to_bits(total))


def _weights(walk: LayerWalk, lm: LayeredModel, expert: int) -> ExpertWeights:
    """An expert of the checkpoint in BF16."""
    linears = (walk.model.linear(walk.layer, expert, projection) for projection in PROJECTIONS)
    return ExpertWeights(*(bf16.to_tensor(kernels.decode(linear), lm.device) for linear in linears))


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.linear(x, weight)


# --- what goes on ---------------------------------------------------------------------------------


def _pass_on(walk: LayerWalk, lm: LayeredModel, entering: RowFile, outputs: RowFile, leaving: RowFile) -> None:
    """Run a loaded layer for all sequences, with its experts' outputs read from `outputs`."""
    for start, stop in walk.spans():
        summed = bf16.to_tensor(outputs.read(start, stop), lm.device)

        def experts(x: torch.Tensor, *_: Any, summed: torch.Tensor = summed) -> torch.Tensor:
            return summed.reshape(x.shape)

        hidden = bf16.to_tensor(entering.read(start, stop), lm.device)
        leaving.write(start, bf16.to_bits(lm.run(walk.layer, hidden, experts)))
