"""Checks, and what they find: problems, errors measured, bytes that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.pipeline.stages.expert_stream import error_figures

AGAIN = "convert it again with --overwrite"
CHUNK = 4 << 20  # bytes of a tensor compared, or of a file hashed, at a time


@dataclass(frozen=True)
class Check:
    """What a check found: what holds if there are no problems, else the problems, one sentence each, and what to do."""

    result: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remedy: str = AGAIN
    name: str = ""


class Row(NamedTuple):
    """A row of a table of checks: the name, and what checks an output; it gives None where it does not apply."""

    name: str
    check: Callable[..., Check | None]


def run_checks(rows: Iterable[Row], *subject: Any) -> Iterator[Check]:
    for row in rows:
        if (check := row.check(*subject)) is not None:
            yield replace(check, name=row.name)


# Checks many items in one of the ways of item_checks.ITEM_CHECKS and reports the bytes of each as done: called with the
# kind, the items, and the bytes that are to be read for each, it yields (item, what was found) in order.
CheckItems = Callable[[str, Sequence[Any], Sequence[int]], Iterator[tuple[Any, Any]]]


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
        return error_figures(self.sums)

    @property
    def worst(self) -> LinearError:
        return max(self.experts, key=lambda e: e.relative_error)


def worst(errors: Iterable[ProjectionErrors], count: int = 5) -> list[LinearError]:
    """The experts with the largest relative errors, of all that were measured."""
    return sorted((e for layer in errors for e in layer.experts), key=lambda e: -e.relative_error)[:count]
