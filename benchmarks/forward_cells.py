"""Measurements of forward.py: calls of each side, quiet and busy ones apart, beside the ceilings of the machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

QUIET = 1.15  # a probe is quiet up to this multiple of the best probe of the run


def best_probe(probes: Sequence[float]) -> float:
    """Return the quietest state of a run. One probe in a hundred may be lower, because an interrupt spoiled it."""
    return sorted(probes)[len(probes) // 100]


@dataclass(frozen=True)
class Figures:
    """Calls of one side in one cell.

    wall     median of the seconds of all calls
    walls    seconds of each call
    states   state of the cores at each call: the worse of the probes before and after it
    cpu      CPU seconds of the process per call
    workers  CPU seconds per call of kt-kernel's workers alone
    """

    wall: float
    walls: list[float]
    states: list[float]
    cpu: float
    workers: float | None

    @classmethod
    def from_turns(cls, turns: Sequence[Mapping[str, Any]]) -> Figures:
        """Make figures of the turns that a worker reported (turns.time_calls)."""
        walls = [wall for turn in turns for wall in turn["walls"]]
        workers = [turn["workers"] for turn in turns if turn["workers"] is not None]
        return cls(
            statistics.median(walls),
            walls,
            [max(pair) for turn in turns for pair in zip(turn["probes"], turn["probes"][1:], strict=False)],
            statistics.median(turn["cpu"] for turn in turns),
            statistics.median(workers) if workers else None,
        )

    def split_calls(self, limit: float) -> tuple[list[float], list[float]]:
        """Return the seconds of calls in quiet states, up to `limit`, and in busy ones."""
        quiet = [wall for wall, state in zip(self.walls, self.states, strict=True) if state <= limit]
        return quiet, [wall for wall, state in zip(self.walls, self.states, strict=True) if state > limit]

    @property
    def work(self) -> float:
        """CPU seconds without the thread of kt-kernel that only waits."""
        return self.cpu if self.workers is None else self.workers


@dataclass(frozen=True)
class Cell:
    """One shape, method, number of threads, number of tokens and routing.

    bytes       weights and scales of the experts used
    read        largest bytes per second that this number of threads reads; read_cpu: per CPU second
    ceilings    INT8 operations per second of this number of threads: "amx" with operands in L2, "vnni" in registers
    limit       largest quiet state
    differing   number of the `elements` BF16 values that differ in exact mode
    distance    relative distance in the default mode
    figures     by side; the first is ours
    """

    shape: str
    method: str
    threads: int
    tokens: int
    routing: str
    distinct: float
    busiest: float
    bytes: float
    operations: float
    read: float
    read_cpu: float
    ceilings: dict[str, float]
    limit: float
    differing: int | None
    elements: int
    distance: float | None
    figures: dict[str, Figures]

    @property
    def ours(self) -> Figures:
        """The first side."""
        return next(iter(self.figures.values()))

    def seconds(self, name: str | None = None) -> float:
        """Return the median of a side's quiet calls, or of busy ones if it has no quiet ones; by default ours."""
        quiet, busy = (self.ours if name is None else self.figures[name]).split_calls(self.limit)
        return statistics.median(quiet or busy)

    @property
    def read_share(self) -> float:
        """Share of the read bandwidth, by wall time."""
        return self.bytes / self.seconds() / self.read

    @property
    def read_share_by_cpu(self) -> float:
        """Share of the read bandwidth by CPU time, which other processes of this machine affect less."""
        return self.bytes / self.ours.cpu / self.read_cpu

    @property
    def rate(self) -> float:
        """INT8 operations per second."""
        return self.operations / self.seconds()

    def ratio(self, name: str) -> float:
        """Return a side's time as a multiple of ours: of quiet calls, or of busy ones if a side has no quiet ones."""
        for ours, theirs in zip(
            self.ours.split_calls(self.limit), self.figures[name].split_calls(self.limit), strict=True
        ):
            if ours and theirs:
                return statistics.median(theirs) / statistics.median(ours)
        return self.seconds(name) / self.seconds()

    def mark(self, *names: str) -> str:
        """Return a mark for comparisons of ours with these sides that are not between quiet calls.

        "*": busy calls are compared. "?": quiet calls of one side are compared with busy calls of the other.
        """
        sides = [self.ours.split_calls(self.limit), *(self.figures[name].split_calls(self.limit) for name in names)]
        if all(quiet for quiet, _ in sides):
            return ""
        return "*" if all(busy for _, busy in sides) else "?"


@dataclass
class Run:
    """Knowledge of the machine, which improves during the run.

    probes      all probes
    reads       threads -> streams or "cpu" -> best bytes per second
    operations  threads -> instruction -> best operations per second
    """

    probes: list[float] = field(default_factory=list)
    reads: dict[int, dict[str, float]] = field(default_factory=dict)
    operations: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Largest quiet state."""
        return best_probe(self.probes) * QUIET

    def record_rates(self, ceilings: dict[int, dict[str, float]], threads: int, rates: Mapping[str, float]) -> None:
        """Keep the best rates; `ceilings` is reads or operations."""
        best = ceilings.setdefault(threads, {})
        best |= {name: max(rate, best.get(name, 0.0)) for name, rate in rates.items()}

    def read(self, threads: int) -> float:
        """Return the bytes per second with the best number of streams."""
        return max(rate for streams, rate in self.reads[threads].items() if streams != "cpu")

    def update_cell(self, cell: Cell) -> Cell:
        """Return the cell with the present knowledge of the machine."""
        reads = self.reads[cell.threads]
        return replace(
            cell,
            limit=self.limit,
            read=self.read(cell.threads),
            read_cpu=reads["cpu"],
            ceilings=dict(self.operations[cell.threads]),
        )


def cell_document(cell: Cell) -> dict[str, Any]:
    """Return a cell for JSON: its fields, and number and median of the quiet and busy calls of each side."""
    sides = {}
    for name, figures in cell.figures.items():
        calls = zip(("quiet", "busy"), figures.split_calls(cell.limit), strict=True)
        sides[name] = {
            state: {"calls": len(walls), "wall": statistics.median(walls) if walls else None} for state, walls in calls
        }
    return asdict(cell) | {"sides": sides}
