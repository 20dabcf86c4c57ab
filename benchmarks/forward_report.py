"""Tables of the results of forward.py, and its targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forward_cells import Cell
from mixtures import METHODS, Shape


@dataclass(frozen=True)
class Load:
    """load_weights_from_tensors: bytes of BF16, and seconds of each round by side.

    "saved" includes saving, "unsaved" does not.
    """

    shape: str
    method: str
    threads: int
    bytes: int
    seconds: dict[str, list[dict[str, float]]]

    def median(self, side: str, figure: str) -> float:
        """Return the median over the rounds, in seconds."""
        return statistics.median(one[figure] for one in self.seconds[side])


def print_load(load: Load) -> None:
    """Print one line for a load."""
    texts = []
    for side in load.seconds:
        unsaved, saved = load.median(side, "unsaved"), load.median(side, "saved")
        cpu = load.median(side, "unsaved_cpu")
        texts.append(
            f"{side} {unsaved:.2f} s ({cpu:.2f} of CPU) = {load.bytes / unsaved / 1e9:.2f} GB/s, "
            f"{saved:.2f} s with saving"
        )
    plural = "s" * (load.threads > 1)
    print(
        f"\n{load.shape} {load.method}, {load.threads} thread{plural}, from BF16 tensors: {'; '.join(texts)}",
        flush=True,
    )


def print_heading(
    shape: Shape,
    method: str,
    threads: int,
    layers: int,
    reads: Mapping[str, float],
    rates: Mapping[str, float],
    sides: Sequence[str],
) -> None:
    """Print the heading of a table: `reads` by streams, `rates` of operations by instruction (Run)."""
    ceilings = [f"{what} {rate / 1e12:.2f} TOPS" for what, rate in rates.items()]
    if "amx" not in rates:
        ceilings.append("no AMX here")
    by_streams = {streams: f"{rate / 1e9:.1f}" for streams, rate in reads.items() if streams != "cpu"}
    ceilings.append(f"reads {', '.join(by_streams.values())} GB/s in {', '.join(by_streams)} streams")
    plural = "s" * (threads > 1)
    print(f"\n{shape.name} {method}, {threads} thread{plural}, {layers} layers in turn; {', '.join(ceilings)}")
    line = f"{'tokens':>6} {'routing':12} {'experts':>7} {'busiest':>7} {_heading_of_side(sides[0])} "
    line += f"{'GB/s':>6} {'% read':>6} {'by CPU':>6} {'TOPS':>6}"
    for name in sides[1:]:
        line += f" | {_heading_of_side(name)} {'x wall':>7} {'x CPU':>6}"
    print(line + (f" | {'differ':>7} {'off by':>8}" if len(sides) > 1 else ""))


def print_cell(cell: Cell) -> None:
    """Print one line of the table."""
    first, *others = cell.figures
    line = (
        f"{cell.tokens:6} {cell.routing:12} {cell.distinct:7.1f} {cell.busiest:7.1f} {_calls(cell, first)} "
        f"{cell.bytes / cell.seconds() / 1e9:6.2f} {cell.read_share:6.0%} {cell.read_share_by_cpu:6.0%} "
        f"{cell.rate / 1e12:6.3f}"
    )
    for name in others:
        wall = f"{cell.ratio(name):.2f}{cell.mark(name)}"
        line += f" | {_calls(cell, name)} {wall:>7} {cell.figures[name].work / cell.ours.cpu:6.2f}"
    if cell.distance is not None:
        differing = "" if cell.differing is None else cell.differing
        line += f" | {differing:7} {cell.distance:8.1e}"
    print(line, flush=True)


def print_marks(cells: Sequence[Cell]) -> None:
    """Explain the marks of a table, if it has any."""
    marks = {cell.mark(*others) for cell in cells for _, *others in [list(cell.figures)]}
    if "*" in marks:
        print("* a side has no quiet call: busy ones are compared")
    if "?" in marks:
        print("? quiet calls of one side against busy ones of the other: no comparison")


def _heading_of_side(side: str) -> str:
    return f"{side + ' ms':>10} {'busy':>8} {'calls q/b':>9}"


def _calls(cell: Cell, side: str) -> str:
    """Return the medians of a side's quiet and busy calls in ms, and the numbers of calls."""
    calls = cell.figures[side].split_calls(cell.limit)
    quiet, busy = (f"{statistics.median(walls) * 1e3:.3f}" if walls else "-" for walls in calls)
    return f"{quiet:>10} {busy:>8} {f'{len(calls[0])}/{len(calls[1])}':>9}"


# --- targets --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A target and its measured figure, both in the unit of `least`."""

    title: str
    value: float
    least: float
    where: str = ""


def print_targets(cells: Sequence[Cell], loads: Sequence[Load]) -> None:
    """Print every target that has figures. Targets for AMX get a verdict only on machines with AMX."""
    amx = any("amx" in cell.ceilings for cell in cells)
    float_cells, cells = (
        [c for c in cells if (METHODS[c.method].source in ("tensors", "plain")) == integers]
        for integers in (False, True)
    )
    rows = [*_isa_targets([*cells, *float_cells]), *_load_targets(loads), *_float_targets(float_cells)]
    rows += [] if amx else _avx512_targets(cells)
    if rows:
        print("targets")
    for row in rows:
        _print_target(row, "met" if row.value >= row.least else "MISSED")
    rows = _amx_targets(cells)
    if rows:
        print("targets for a machine with AMX" + ("" if amx else " (this one has none: no verdict)"))
    for row in rows:
        _print_target(row, ("met" if row.value >= row.least else "MISSED") if amx else "")


def _print_target(row: Target, verdict: str) -> None:
    print(f"  {row.title:62} {row.value:7.2f}  at least {row.least:<5} {verdict:7} {row.where}")


def _worst_cell(title: str, least: float, values: Iterable[tuple[float, Cell]]) -> list[Target]:
    """Return the target for the worst of these cells; empty if none was measured."""
    worst = min(values, key=lambda pair: pair[0], default=None)
    if worst is None:
        return []
    value, cell = worst
    where = f"{cell.shape} {cell.method}, {cell.tokens} tokens {cell.routing}, {cell.threads} threads"
    where += ", not all of it quiet" if cell.mark(*list(cell.figures)[1:]) else ""
    return [Target(title, value, least, where)]


def _ratios(cells: Iterable[Cell], name: str = "kt") -> list[tuple[float, Cell]]:
    return [(cell.ratio(name), cell) for cell in cells if name in cell.figures]


def _avx512_targets(cells: Sequence[Cell]) -> list[Target]:
    return _worst_cell("x kt-kernel's AVX-512 variant, wall, its worst cell", 1.0, _ratios(cells))


def _float_targets(cells: Sequence[Cell]) -> list[Target]:
    """Return the target of each floating-point format against kt-kernel, for its worst cell."""
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        rows += _worst_cell(
            f"{method}: x kt-kernel, wall, its worst cell", 1.0, _ratios(c for c in cells if c.method == method)
        )
    return rows


def _isa_targets(cells: Sequence[Cell]) -> list[Target]:
    """Return the target of AVX2 against the best of AVX-512, if both were measured."""
    ratios = []
    for cell in cells:
        wide = [cell.seconds(name) for name in cell.figures if name in ("avx512", "avx512vnni", "avx512bf16")]
        if wide and "avx2" in cell.figures:
            ratios.append((min(wide) / cell.seconds("avx2"), cell))
    return _worst_cell("AVX2, x our AVX-512, its worst cell", 0.5, ratios)


def _load_targets(loads: Sequence[Load]) -> list[Target]:
    comparisons = (
        ("saved", "unsaved", "wall", "it always saves"),
        ("saved_cpu", "unsaved_cpu", "CPU", "it always saves"),
        ("unsaved", "unsaved", "wall", "with its saving disabled, which its API does not offer"),
    )
    return [
        Target(
            f"{load.shape} {load.method} from tensors, x kt-kernel, {unit}",
            load.median("kt", theirs) / load.median("ours", ours),
            10.0,
            where,
        )
        for load in loads
        if "kt" in load.seconds
        for theirs, ours, unit, where in comparisons
    ]


def _amx_targets(cells: Sequence[Cell]) -> list[Target]:
    """Return the targets for machines with AMX."""
    rows = []
    balanced = [cell for cell in cells if cell.routing == "balanced"]
    single_thread = {(c.shape, c.method, c.tokens): c for c in balanced if c.threads == 1}
    for method, share, factor in (("int8", 0.85, 1.4), ("int4", 0.80, 1.8)):
        decode = [c for c in balanced if (c.method, c.tokens, c.threads) == (method, 1, 1)]
        rows += _worst_cell(
            f"{method}, 1 token, 1 thread: share of read bandwidth", share, [(c.read_share, c) for c in decode]
        )
        rows += _worst_cell(f"{method}, 1 token, 1 thread: x kt-kernel", factor, _ratios(decode))
    pairs = [(c, single_thread.get((c.shape, c.method, c.tokens))) for c in balanced if c.threads == 2]
    rows += _worst_cell("2 threads, x our 1 thread", 1.7, [(s.seconds() / c.seconds(), c) for c, s in pairs if s])
    few = [c for c in cells if 4 <= c.tokens <= 16 and c.busiest <= 8]
    rows += _worst_cell(
        "4 to 16 tokens, at most 8 for an expert: share of read", 0.75, [(c.read_share, c) for c in few]
    )
    for shape, method, tokens, threads, factor in (
        ("Qwen3-30B-A3B", "int4", 64, 0, 3.0),
        ("Qwen3-30B-A3B", "int8", 64, 0, 2.2),
        ("DeepSeek-V3", "", 64, 0, 1.5),
        ("Qwen3-30B-A3B", "", 1024, 2, 2.0),
        ("Qwen3-30B-A3B", "", 1024, 1, 1.7),
        ("DeepSeek-V3", "", 1024, 0, 1.75),
    ):
        selected = [
            c
            for c in balanced
            if c.shape == shape and c.tokens == tokens and method in ("", c.method) and threads in (0, c.threads)
        ]
        label = " ".join(
            part for part in (shape, method, f"{tokens} tokens", f"{threads} threads" * bool(threads)) if part
        )
        rows += _worst_cell(f"{label}: x kt-kernel", factor, _ratios(selected))
    prefill = [c for c in balanced if (c.shape, c.tokens) == ("DeepSeek-V3", 1024) and "amx" in c.ceilings]
    rows += _worst_cell(
        "DeepSeek-V3 1024 tokens: share of AMX from L2", 0.6, [(c.rate / c.ceilings["amx"], c) for c in prefill]
    )
    return rows
