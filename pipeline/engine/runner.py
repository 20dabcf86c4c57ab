"""Who makes the units of a plan: the contract between the loop and threads here, or tasks for an executor elsewhere."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ktconvert.pipeline.engine.units import Link, Result, Stage, Unit, Written


@dataclass(frozen=True)
class Made:
    """A unit that was made, and lies under a name of its own until it is published.

    seconds  that it took
    who      the host and the process that made it, for records and events
    link     of a unit of a chain; for_chain: the files that it has for others of the chain
    """

    path: Path
    result: Result
    seconds: float
    who: dict[str, Any] = field(default_factory=dict)
    link: Link | None = None
    for_chain: tuple[Written, ...] = ()


class Runner(Protocol):
    """Makes units, in any order and several at a time."""

    @property
    def most(self) -> int:
        """How many units it takes at a time."""

    def submit(self, stage: Stage[Any], unit: Unit[Any]) -> Future[Any]:
        """Have a unit made."""

    def take(self, unit: Unit[Any], future: Future[Any]) -> Made | None:
        """What came of it; None: it is to be submitted once more. Raises what prevented it."""

    def give_up(self, unit: Unit[Any], future: Future[Any]) -> bool:
        """Take a unit back that nobody makes yet; False where somebody does."""

    def watch(self) -> None:
        """Called several times a second: look around, and report what there is to report."""
