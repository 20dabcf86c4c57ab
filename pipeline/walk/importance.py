"""Importance as a consumer of the walk: for each column of what an expert's linears read, the sum of its squares over
the tokens that are routed to the expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.pipeline.walk.consumers import Evidence, ExpertGroup

if TYPE_CHECKING:
    import torch

F64 = npt.NDArray[np.float64]


@dataclass
class Squares:
    """The sum of x * x by column over calibration inputs, float64 [k]: the diagonal of the sum of x xT."""

    sum: torch.Tensor

    @classmethod
    def empty(cls, width: int, device: Any = "cpu") -> Squares:
        """No input yet, for linears of k = width inputs."""
        import torch

        return cls(torch.zeros(width, dtype=torch.float64, device=device))

    def add(self, inputs: torch.Tensor) -> None:
        """Add a sequence's inputs, BF16 [T, k]. Their squares are exact in float32."""
        import torch

        if len(inputs):
            self.sum += inputs.to(self.sum.device, torch.float32).square().sum(0, dtype=torch.float64)


@dataclass
class Importance:
    """Gathers the sums of squares of one layer.

    inputs  float64 [experts, H]: of what gate and up read
    middle  float64 [experts, I]: of what down reads
    """

    inputs: F64 = field(default_factory=lambda: np.empty((0, 0)))
    middle: F64 = field(default_factory=lambda: np.empty((0, 0)))
    evidence = Evidence(Squares.empty, "routed")
    replaces = False

    def take(self, group: ExpertGroup) -> None:
        """Store the sums of a group's experts."""
        for expert in group.weights:
            of_inputs, of_middle = (sums[expert].sum.cpu().numpy() for sums in (group.gate_up, group.down))
            if not self.inputs.size:
                self.inputs, self.middle = (np.zeros((len(group.tokens), len(x))) for x in (of_inputs, of_middle))
            self.inputs[expert], self.middle[expert] = of_inputs, of_middle
