"""Heat maps layers x experts, as tables with cells coloured by class, and histograms: parts of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEPS = "abcdefghijklmnop"  # classes of the cells, from the smallest value to the largest
STRANGE = "x"  # the class of a value that is not finite
MOST_COLUMNS = 8  # of a map whose cells hold numbers
MOST_WIDTH = 64  # columns of maps that stand next to each other
WIDTH = 1.1  # of the colours of a map, at least: where all values are nearly equal, all colours are
# Above so many cells on one page only the rows have titles: 100 bytes instead of 30 for each cell.
MOST_TITLES = 64_000

Cells = Mapping[tuple[int, int], float]  # (layer, expert) -> value


@dataclass(frozen=True)
class Scale:
    """What a map's values are.

    label    what the legend calls them
    text     a value, in titles and the legend
    short    the same in a cell: four characters, if possible
    ratios   whether equal ratios, not equal differences, have equal steps
    """

    label: str
    text: Callable[[float], str]
    short: Callable[[float], str]
    ratios: bool = False

    def is_shown(self, value: float) -> bool:
        """Whether a value has a colour on the ramp."""
        return math.isfinite(value) and (value > 0 or not self.ratios)

    def step(self, value: float, low: float, high: float) -> str:
        """The class of a value on a ramp from low to high."""
        if not self.is_shown(value):
            return STRANGE
        low, high, value = (math.log(each) if self.ratios else each for each in (low, high, value))
        share = (value - low) / (high - low) if high > low else 0.0
        return STEPS[min(int(share * len(STEPS)), len(STEPS) - 1)]


def heat_maps(maps: Mapping[str, Cells], scale: Scale, titles: bool) -> dict[str, Any]:
    """One map per name, of the same layers and experts, and the legend. titles: of each cell, not of each row."""
    layers = sorted({layer for cells in maps.values() for layer, _ in cells})
    experts = sorted({expert for cells in maps.values() for _, expert in cells})
    numbers = len(experts) <= MOST_COLUMNS
    every = 1 << max(0, math.ceil(math.log2(max(len(experts), 1) / MOST_COLUMNS)))
    height = 22 if numbers or len(layers) <= 12 else 14 if len(layers) <= 32 else 7
    rows_per_head = max(1, 14 // height)
    strange = any(not scale.is_shown(value) for cells in maps.values() for value in cells.values())

    def drawn(name: str, cells: Cells) -> dict[str, Any]:
        shown = [value for value in cells.values() if scale.is_shown(value)]
        low, high = (min(shown), max(max(shown), WIDTH * min(shown))) if shown else (1.0, 1.0)

        def cell(layer: int, expert: int) -> tuple[str, str, str] | None:
            if (value := cells.get((layer, expert))) is None:
                return None
            title = f"{layer}/{expert}: {scale.text(value)}" if titles else ""
            return scale.step(value, low, high), title, scale.short(value) if numbers else ""

        def row_title(layer: int) -> str:
            known = [(v, e) for e in experts if (v := cells.get((layer, e))) is not None and scale.is_shown(v)]
            if not known:
                return f"layer {layer}"
            (least, _), (most, expert) = min(known), max(known)
            return f"layer {layer}: {scale.text(least)} to {scale.text(most)} (expert {expert})"

        rows = [
            {
                "layer": layer,
                "span": 0 if at % rows_per_head else min(rows_per_head, len(layers) - at),
                "title": "" if titles else row_title(layer),
                "cells": [cell(layer, expert) for expert in experts],
            }
            for at, layer in enumerate(layers)
        ]
        return {"name": name, "low": scale.text(low), "high": scale.text(high), "rows": rows}

    return {
        "label": scale.label,
        "titles": titles,
        "wide": len(experts) > MOST_WIDTH,
        "columns": len(experts),
        "height": height,
        "steps": STEPS,
        "heads": [(min(every, len(experts) - at), experts[at]) for at in range(0, len(experts), every)],
        "strange": strange and ("not a positive number" if scale.ratios else "not a number"),
        "empty": any(len(cells) < len(layers) * len(experts) for cells in maps.values()),
        "maps": [drawn(name, cells) for name, cells in maps.items()],
    }


def histogram(name: str, counts: Sequence[int], edges: Sequence[float]) -> dict[str, Any]:
    """Counts [n] between edges [n + 1]."""
    most, total = max(counts, default=0), sum(counts)
    return {
        "name": name,
        "total": f"{total:,}",
        "most": f"{most:,}",
        "label": f"{name}: {total:,} scales from {edges[0]:.3g} to {edges[-1]:.3g}",
        "columns": max(len(counts), 1),
        "bars": [
            (at, 100 * count / most, f"{edges[at]:.3g} to {edges[at + 1]:.3g}: {count:,}")
            for at, count in enumerate(counts)
            if count
        ],
        "ticks": [f"{edge:.3g}" for edge in (edges[0], edges[len(edges) // 2], edges[-1])],
    }
