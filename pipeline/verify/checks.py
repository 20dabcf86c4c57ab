"""What verify finds: a check with its problems, an error measured, a byte that differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.pipeline.stages.expert_stream import error_figures
from ktconvert.pipeline.ui.progress import Reporter
from ktconvert.pipeline.verify.asking import Ask
from ktconvert.pipeline.verify.calibrated import Calibrated

AGAIN = "convert it again with --overwrite"
PIECE = 4 << 20  # bytes of a tensor compared at a time
SAMPLED = 8  # experts per layer whose error is measured, unless all are


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what holds if there are no problems, else the problems, one sentence each, and what
    to do.
    """

    name: str
    result: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remedy: str = AGAIN


class LinearError(NamedTuple):
    """How far one projection of one expert lies from its source in BF16: ||x-y||/||x||, and x.y/(||x|| ||y||)."""

    layer: int
    expert: int
    projection: str
    relative_error: float
    cosine: float


@dataclass
class ProjectionErrors:
    """The same over the measured experts of a layer: sums of x*x, y*y, x*y, (x-y)^2, and each expert's own figures."""

    layer: int
    projection: str
    sums: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    experts: list[LinearError] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        """Relative error and cosine of all measured experts together."""
        return error_figures(self.sums)

    @property
    def worst(self) -> LinearError:
        """The expert with the largest relative error."""
        return max(self.experts, key=lambda e: e.relative_error)


@dataclass
class ExpertComparison:
    """What comparing one expert gave."""

    problems: list[str] = field(default_factory=list)
    equal: int = 0
    sums: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    calibrated: list[Calibrated] = field(default_factory=list)


@dataclass
class Gathered:
    """What comparing all experts gave: problems, how many tensors are equal, errors, what was seen of calibrated
    linears.
    """

    problems: list[str]
    equal: int
    errors: list[ProjectionErrors]
    calibrated: list[Calibrated]


def gather(model: MoeModel, layers: Iterable[int], ask: Ask, reporter: Reporter) -> Gathered:
    """The comparisons of every expert of these layers, put together."""
    gathered = Gathered([], 0, [], [])
    errors: dict[tuple[int, str], ProjectionErrors] = {}
    items = [(layer, expert) for layer in layers for expert in range(model.shape(layer)[0])]
    sizes = [sum(t.nbytes for t in model.expert_tensors(*item)) for item in items]
    for nbytes, ((layer, expert), comparison) in zip(sizes, ask("experts", items, sizes), strict=True):
        gathered.problems += comparison.problems
        gathered.equal += comparison.equal
        gathered.calibrated += comparison.calibrated
        for projection, sums in comparison.sums.items():
            total = errors.setdefault((layer, projection), ProjectionErrors(layer, projection))
            total.sums += sums
            total.experts.append(LinearError(layer, expert, projection, **error_figures(sums)))
        reporter.at(f"layer {layer}")
        reporter.advance(nbytes)
    gathered.errors = list(errors.values())
    return gathered


def sample(count: int) -> frozenset[int]:
    """Experts spread evenly."""
    return frozenset(i * count // SAMPLED for i in range(SAMPLED)) if count > SAMPLED else frozenset(range(count))


def first_difference(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> tuple[int, int, int, int] | None:
    """(position of the first differing byte, its value in a and in b, how many bytes differ); None for equal bytes."""
    if np.array_equal(a, b):
        return None
    at = np.flatnonzero(a != b)
    return int(at[0]), int(a[at[0]]), int(b[at[0]]), at.size


def worst(errors: Iterable[ProjectionErrors], count: int = 5) -> list[LinearError]:
    """The experts with the largest relative errors, of all that were measured."""
    return sorted((e for layer in errors for e in layer.experts), key=lambda e: -e.relative_error)[:count]
