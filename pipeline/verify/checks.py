"""Results of checks: problems, and measured errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.pipeline.stages.quantize_experts import error_figures

CONVERT_AGAIN = "convert it again with --overwrite"
CHUNK_BYTES = 4 << 20  # bytes in memory at a time, of a tensor to compare or a file to hash


@dataclass(frozen=True)
class Check:
    """The result of one check.

    result    a sentence for a check without problems
    skipped   whether it could not be made; the notes say why
    problems  one sentence each
    remedy    advice about the problems
    """

    name: str
    result: str
    problems: Sequence[str] = ()
    notes: Sequence[str] = field(default=(), repr=False)
    remedy: str = field(default=CONVERT_AGAIN, repr=False)
    skipped: bool = False

    @property
    def state(self) -> str:
        """The state in JSON and in Python: "ok", "failed" or "skipped"."""
        if self.problems:
            return "failed"
        return "skipped" if self.skipped else "ok"


# A function that checks many items with one of item_checks.ITEM_CHECKS and reports progress. Its arguments are the name
# of the check, the items, and the number of bytes to read for each; it yields (item, finding) in order.
CheckItems = Callable[[str, Sequence[Any], Sequence[int]], Iterator[tuple[Any, Any]]]


class LinearError(NamedTuple):
    """The error of one projection y of one expert, whose source in BF16 is x.

    relative_error  ||x-y||/||x||
    cosine          x.y/(||x|| ||y||)
    """

    layer: int
    expert: int
    projection: str
    relative_error: float
    cosine: float


@dataclass
class ProjectionErrors:
    """The error of one projection over the measured experts of a layer.

    sums     sums of x*x, y*y, x*y and (x-y)^2
    experts  the error of each expert
    """

    layer: int
    projection: str
    sums: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    experts: list[LinearError] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, float]:
        return error_figures(self.sums)

    @property
    def worst(self) -> LinearError:
        return max(self.experts, key=lambda e: e.relative_error)

    def document(self) -> dict[str, Any]:
        """Return the JSON object that `verify --json` prints, with NaN and infinity as they are."""
        worst = {"worst_expert": self.worst.expert, "worst_relative_error": self.worst.relative_error}
        return {
            "layer": self.layer,
            "projection": self.projection,
            "experts": len(self.experts),
            **self.figures,
            **worst,
        }


def worst_linears(errors: Iterable[ProjectionErrors], count: int = 5) -> list[LinearError]:
    """Return the linears with the largest relative errors."""
    return sorted((e for layer in errors for e in layer.experts), key=lambda e: -e.relative_error)[:count]
