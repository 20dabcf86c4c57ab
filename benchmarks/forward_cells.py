"""What forward.py measured: samples of the two sides, quiet and busy ones apart, beside the ceilings of the machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

QUIET = 1.15  # a probe of at most so many times the best of the run is quiet


def best_probe(probes: Sequence[float]) -> float:
    """The quietest state of a run: of every hundred probes one may be lower, which an interrupt spoiled."""
    return sorted(probes)[len(probes) // 100]


@dataclass(frozen=True)
class Figures:
    """One side's calls in one cell.

    wall    the median of all seconds; walls: of each call
    states  of the cores at each call: the worse of the probes before and after it
    cpu     CPU seconds per call of the process; workers: of kt-kernel's workers alone
    """

    wall: float
    walls: list[float]
    states: list[float]
    cpu: float
    workers: float | None

    @classmethod
    def of(cls, turns: Sequence[Mapping[str, Any]]) -> Figures:
        """From the turns that a worker reported (turns.timed)."""
        walls = [wall for turn in turns for wall in turn["walls"]]
        workers = [turn["workers"] for turn in turns if turn["workers"] is not None]
        return cls(
            statistics.median(walls),
            walls,
            [max(pair) for turn in turns for pair in zip(turn["probes"], turn["probes"][1:], strict=False)],
            statistics.median(turn["cpu"] for turn in turns),
            statistics.median(workers) if workers else None,
        )

    def parted(self, limit: float) -> tuple[list[float], list[float]]:
        """The seconds of calls in quiet states, which are at most `limit`, and in busy ones."""
        quiet = [wall for wall, state in zip(self.walls, self.states, strict=True) if state <= limit]
        return quiet, [wall for wall, state in zip(self.walls, self.states, strict=True) if state > limit]

    @property
    def work(self) -> float:
        """CPU seconds without kt-kernel's thread that only waits."""
        return self.cpu if self.workers is None else self.workers


@dataclass(frozen=True)
class Cell:
    """One shape, method, number of threads, tokens and routing.

    bytes       of weights and scales of the experts touched
    read        bytes per second that as many threads read at most; read_cpu: per CPU second
    ceilings    INT8 operations per second of as many threads: "amx" with operands in L2, "vnni" on registers
    limit       of quiet states
    differing   BF16 values of `elements` that differ in exact mode; distance: relative, of the default mode
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
        """A side's median of quiet calls, or of busy ones where it has no quiet one; without a name: ours."""
        quiet, busy = (self.ours if name is None else self.figures[name]).parted(self.limit)
        return statistics.median(quiet or busy)

    @property
    def of_read(self) -> float:
        """The share of the read bandwidth, by wall time."""
        return self.bytes / self.seconds() / self.read

    @property
    def of_read_cpu(self) -> float:
        """The same by CPU time, which other processes of this machine affect less."""
        return self.bytes / self.ours.cpu / self.read_cpu

    @property
    def rate(self) -> float:
        """INT8 operations per second."""
        return self.operations / self.seconds()

    def ratio(self, name: str) -> float:
        """That side's time as a multiple of ours: of quiet calls, or of busy ones where a side has no quiet one."""
        for ours, theirs in zip(self.ours.parted(self.limit), self.figures[name].parted(self.limit), strict=True):
            if ours and theirs:
                return statistics.median(theirs) / statistics.median(ours)
        return self.seconds(name) / self.seconds()

    def mark(self, *names: str) -> str:
        """What is wrong with comparing ours with these sides: "*" where busy calls had to do, "?" where the one has
        quiet calls alone and the other busy ones.
        """
        sides = [self.ours.parted(self.limit), *(self.figures[name].parted(self.limit) for name in names)]
        if all(quiet for quiet, _ in sides):
            return ""
        return "*" if all(busy for _, busy in sides) else "?"


@dataclass
class Run:
    """What is known of the machine; it gets better while the run lasts.

    probes      all of them
    reads       by threads, then by streams and "cpu": bytes per second, the best
    operations  by threads, then by instruction: operations per second, the best
    """

    probes: list[float] = field(default_factory=list)
    reads: dict[int, dict[str, float]] = field(default_factory=dict)
    operations: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Up to where a state is quiet."""
        return best_probe(self.probes) * QUIET

    def saw(self, ceilings: dict[int, dict[str, float]], threads: int, rates: Mapping[str, float]) -> None:
        """Keep the best: `ceilings` is reads or operations."""
        known = ceilings.setdefault(threads, {})
        known |= {what: max(rate, known.get(what, 0.0)) for what, rate in rates.items()}

    def read(self, threads: int) -> float:
        """Bytes per second, in the best number of streams."""
        return max(rate for streams, rate in self.reads[threads].items() if streams != "cpu")

    def settled(self, cell: Cell) -> Cell:
        """The cell with what is known now."""
        reads = self.reads[cell.threads]
        return replace(
            cell,
            limit=self.limit,
            read=self.read(cell.threads),
            read_cpu=reads["cpu"],
            ceilings=dict(self.operations[cell.threads]),
        )


def document(cell: Cell) -> dict[str, Any]:
    """A cell as JSON: its fields, and for each side how many calls were quiet and busy, and their medians."""
    sides = {}
    for name, figures in cell.figures.items():
        parts = zip(("quiet", "busy"), figures.parted(cell.limit), strict=True)
        sides[name] = {
            what: {"calls": len(walls), "wall": statistics.median(walls) if walls else None} for what, walls in parts
        }
    return asdict(cell) | {"sides": sides}
