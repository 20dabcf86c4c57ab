"""Visitors of a layer's experts, the statistics that they ask for, and the groups of experts that they receive.

The layer runner knows no visitor by name: to add one, write it and pass it to `run_expert_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

TokenCounts = npt.NDArray[np.int64]  # tokens routed to each expert of a layer, over all sequences: [experts]


class Accumulator(Protocol):
    """Running statistics of the inputs of a linear, such as quantizers.gptq.Hessian."""

    def add(self, inputs: torch.Tensor, routing_weights: torch.Tensor | None = None, /) -> None:
        """Add a sequence's inputs, BF16 [T, k]; T is 0 if none of its tokens was routed to the expert.

        routing_weights  weights of the tokens, float32 [T]; None unless the statistics are weighted
        """


@dataclass(frozen=True)
class StatisticsSpec:
    """The statistics of each linear's inputs that a visitor needs. Visitors with equal specs share accumulators.

    new_accumulator  (k, device) -> an empty accumulator
    tokens           the tokens that count for an expert. "all": every token; gate and up of all experts of a layer
                     share one accumulator. "routed": the tokens routed to it; each expert has its own accumulators.
                     "mixed": "all" for gate and up, "routed" for down
    weighted         whether the tokens routed to an expert are weighted by their routing weights: an error of an
                     expert's output reaches the model times the token's routing weight
    fisher           whether the visitor also needs to know how errors of the outputs change the model's predictions
    """

    new_accumulator: Callable[[int, Any], Accumulator]
    tokens: str = "all"
    weighted: bool = False
    fisher: bool = False

    @property
    def shared_gate_up(self) -> bool:
        """Return whether gate and up of all experts share one accumulator of all tokens."""
        return self.tokens != "routed"

    @property
    def routed_down(self) -> bool:
        """Return whether only tokens routed to an expert count for its down projection."""
        return self.tokens != "all"


@dataclass(frozen=True)
class ExpertWeights:
    """One expert in BF16.

    matrices  projection -> matrix: gate, if there is one, and up [width, hidden], down [hidden, width]
    biases    projection -> bias of its rows; {} if it has none
    """

    matrices: Mapping[str, torch.Tensor]
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def multiply(self, projection: str, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a projection, BF16 [T, n], for inputs [T, k]."""
        import torch

        return torch.nn.functional.linear(x, self.matrices[projection], self.biases.get(projection))


@dataclass(frozen=True)
class ExpertGroup:
    """Consecutive experts of a layer, with the statistics that a visitor asked for.

    token_counts    counts of all experts of the layer
    weights         weights of each expert of the group, by its number
    gate_up         accumulators of the inputs of gate and up, by expert; {} without statistics
    down            accumulators of the inputs of down, by expert
    output_fisher   Fisher information of the predictions about the layer's outputs, float32 [H, H], up to a factor;
                    None unless a visitor asked for it
    slopes          with output_fisher, for each expert the sum of s s^T over its tokens, float32 [2 I, 2 I], without a
                    gate [I, I]; s are the derivatives of down's inputs with respect to gate and up, times the routing
                    weight
    portion_result  result of a worker for these experts: `weights` are then the replaced ones, if a visitor replaces
                    weights, and that visitor gets no accumulators
    """

    layer: int
    token_counts: TokenCounts
    weights: Mapping[int, ExpertWeights]
    gate_up: Mapping[int, Any]
    down: Mapping[int, Any]
    output_fisher: torch.Tensor | None = None
    slopes: Mapping[int, torch.Tensor] = field(default_factory=dict)
    portion_result: Mapping[str, Any] | None = None


class ExpertVisitor(Protocol):
    """A measurement or replacement of a layer's experts.

    statistics        the statistics of their inputs that it needs; None if token counts are enough
    replaces_weights  whether the next layer reads outputs of the weights that `visit` returns; true for at most one
                      visitor
    """

    @property
    def statistics(self) -> StatisticsSpec | None: ...

    @property
    def replaces_weights(self) -> bool: ...

    def visit(self, group: ExpertGroup) -> Mapping[int, ExpertWeights] | None:
        """Process one group of experts; return their new weights, on the same device, if it replaces weights."""
