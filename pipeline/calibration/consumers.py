"""Consumers of the walk: the evidence that they need, what they get for each group of experts, and two of them. The
walk knows none of them by name: to add one, write it and pass it to `walk_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

F64 = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]  # tokens routed to each expert of a layer, over all sequences: [experts]


class Accumulator(Protocol):
    """Statistics of the inputs of a linear; quantizers.gptq.Hessian is one."""

    def add(self, inputs: torch.Tensor, shares: torch.Tensor | None = None) -> None:
        """Add a sequence's inputs, BF16 [T, k]; T is 0 where none of its tokens was routed to the expert. shares:
        float32 [T], the routing weights of tokens, if the evidence is weighted.
        """


@dataclass(frozen=True)
class Evidence:
    """What a consumer needs to know of the inputs of each linear. Consumers that need the same share it.

    empty     (k, device) -> an accumulator that has seen nothing
    sees      which tokens an expert sees. "all": every token; gate and up of all experts of a layer share one
              accumulator. "routed": those routed to it; each has accumulators of its own. "mixed": gate and up as with
              "all", down as with "routed"
    weighted  whether what an expert's own tokens give is weighted by their shares: an error of an expert's output
              reaches the model times the token's routing weight
    outputs   whether it is also asked what errors of the outputs do to the model's predictions
    """

    empty: Callable[[int, Any], Accumulator]
    sees: str = "all"
    weighted: bool = False
    outputs: bool = False

    @property
    def shared(self) -> bool:
        """Whether gate and up of all experts share one accumulator, of all tokens."""
        return self.sees != "routed"

    @property
    def routed(self) -> bool:
        """Whether down sees only the tokens that are routed to its expert."""
        return self.sees != "all"


@dataclass(frozen=True)
class ExpertWeights:
    """One expert in BF16: gate and up [width, hidden], down [hidden, width]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class ExpertGroup:
    """Consecutive experts of a layer, with the evidence that the consumer asked for.

    tokens   of all experts of the layer
    weights  of each expert of the group, by its number
    gate_up  the accumulator of what gate and up read, by expert; {} without evidence
    down     that of what down reads
    outputs  the Fisher information of predictions about what the layer gives, float32 [H, H], up to a factor; None
             where nobody asked
    slopes   of each expert then, the sum of s s^T over its tokens, float32 [2 I, 2 I]: s are the derivatives of what
             down reads with respect to gate and up, times the routing weight
    left     what a worker left of them: then `weights` are those that replace them, if any do, and who replaced them
             gets no evidence
    """

    layer: int
    tokens: Tokens
    weights: Mapping[int, ExpertWeights]
    gate_up: Mapping[int, Any]
    down: Mapping[int, Any]
    outputs: torch.Tensor | None = None
    slopes: Mapping[int, torch.Tensor] = field(default_factory=dict)
    left: Mapping[str, Any] | None = None


class Consumer(Protocol):
    """Takes the evidence of each layer during the walk.

    evidence  what it needs; None if the numbers of tokens are enough
    replaces  whether the next layer reads what the weights that `take` returns give; of one consumer at most
    """

    @property
    def evidence(self) -> Evidence | None: ...

    @property
    def replaces(self) -> bool: ...

    def take(self, group: ExpertGroup) -> Mapping[int, ExpertWeights] | None:
        """Called for each group of experts; returns weights by expert, on the same device, where it replaces them."""


@dataclass
class TokenCounts:
    tokens: dict[int, Tokens] = field(default_factory=dict)
    evidence = None
    replaces = False

    def take(self, group: ExpertGroup) -> None:
        self.tokens[group.layer] = group.tokens


@dataclass
class Squares:
    """The sum of x * x by column over calibration inputs, float64 [k]: the diagonal of the sum of x xT."""

    sum: torch.Tensor

    @classmethod
    def empty(cls, width: int, device: Any = "cpu") -> Squares:
        """No input yet, for linears of k = width inputs."""
        import torch

        return cls(torch.zeros(width, dtype=torch.float64, device=device))

    def add(self, inputs: torch.Tensor, shares: torch.Tensor | None = None) -> None:
        """Add a sequence's inputs, BF16 [T, k]. Their squares are exact in float32; shares do not count."""
        import torch

        if len(inputs):
            self.sum += inputs.to(self.sum.device, torch.float32).square().sum(0, dtype=torch.float64)


@dataclass
class Importance:
    """Gathers the importance of one layer: for each column of what an expert's linears read, the sum of its squares
    over the tokens that are routed to it. float64; inputs [experts, H]: what gate and up read, middle [experts, I]:
    what down reads.
    """

    inputs: F64 = field(default_factory=lambda: np.empty((0, 0)))
    middle: F64 = field(default_factory=lambda: np.empty((0, 0)))
    evidence = Evidence(Squares.empty, "routed")
    replaces = False

    def take(self, group: ExpertGroup) -> None:
        for expert in group.weights:
            of_inputs, of_middle = (sums[expert].sum.cpu().numpy() for sums in (group.gate_up, group.down))
            if not self.inputs.size:
                self.inputs, self.middle = (np.zeros((len(group.tokens), len(x))) for x in (of_inputs, of_middle))
            self.inputs[expert], self.middle[expert] = of_inputs, of_middle


def spread(tokens: Tokens) -> dict[str, int]:
    """How evenly the tokens of a layer went to its experts, for reports; none: the number of experts without any."""
    return {
        "least": int(tokens.min()),
        "median": int(np.median(tokens)),
        "most": int(tokens.max()),
        "none": int((tokens == 0).sum()),
    }
