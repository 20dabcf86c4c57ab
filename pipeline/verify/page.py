"""HTML page of a verification: one file without scripts and without references to other files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.files.publish import MARK
from ktconvert.layouts.tensors import PROJECTIONS
from ktconvert.native_quant.arrays import I64
from ktconvert.pipeline.report.text import plural
from ktconvert.pipeline.stages.quantize_experts import error_figures
from ktconvert.pipeline.verify.checks import ProjectionErrors
from ktconvert.pipeline.verify.page_data import LOWEST, STEPS, LinearScales, Scales, WorstRow
from ktconvert.pipeline.verify.verify import Report, output_rows, report_document

TEMPLATES = Path(__file__).parent
MAX_SHOWN = 100  # problems per check; --json has all
LARGEST = 12  # rows of the table of the largest scales
MOST_BARS = 64
COLOURS = "abcdefghijklmnop"  # classes of the cells, from the smallest value to the largest
NOT_SHOWN = "x"  # class of a value without a colour
MOST_COLUMNS = 8  # columns of a map with numbers in its cells
MOST_WIDTH = 64  # columns of maps side by side
LEAST_RANGE = 2  # smallest ratio of the ends of a colour scale: nearly equal values get nearly equal colours
# With more cells on a page, only rows have titles: a title takes 100 bytes instead of 30 for each cell.
MOST_TITLES = 64_000

# Cells of tables. Only outputs with several NUMA slices have the column NUMA.
LINEAR, NUMA = "layer {0.layer}, expert {0.expert}, {0.projection}", "NUMA slice"

Row = tuple[str, ...]


def format_percent(share: float) -> str:
    """Return a share as text: 11.71 %."""
    if not math.isfinite(share):
        return "not finite"
    return f"{100 * share:#.4g} %" if share else "0 %"


def format_three_digits(value: float) -> str:
    """Return the text of a map's cell: three digits, 12.0."""
    return f"{value:#.3g}" if math.isfinite(value) and value else "0" if value == 0 else "?"


def render_page(report: Report) -> str:
    """Return the page. It depends only on the report."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    files = FileSystemLoader(TEMPLATES)
    undefined = StrictUndefined
    environment = Environment(loader=files, autoescape=True, undefined=undefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html").render(_make_page_values(report)).lstrip()


def _make_page_values(report: Report) -> dict[str, Any]:
    """Return the values of the template."""
    document = report_document(report)
    data = report.page_data
    scales, counts = (None, None) if data is None else (data.scales, data.counts)
    cells = sum(len(layer.experts) for layer in report.errors)
    cells += 0 if report.errors or scales is None else len(scales.linears)
    titles = cells + (0 if counts is None else counts.size) <= MOST_TITLES
    parts = report.measure.numa > 1

    def check_rows(state: Callable[[Any], str]) -> Iterator[Row]:
        for check in document["checks"]:
            problems = check["problems"]
            yield check["name"], state(check), plural(len(problems), "problem") if problems else check["result"]

    return {
        **document,
        "name": Path(document["output"]).name,
        "verdict": "verified" if document["ok"] else "NOT verified",
        "generator": MARK,
        "shown": MAX_SHOWN,
        "parts": parts,
        "maker": f"{document['made_by']} {document['command']}"
        if document["made_by"]
        else "a program without a manifest",
        "tiles": list(_make_tiles(report, document)),
        "check_rows": check_rows,
        "output_rows": output_rows(document),
        "errors": _make_error_values(report, titles) if report.errors else None,
        "worst_rows": _make_worst_rows(data.rows, parts) if data is not None and data.rows else None,
        "scales": _make_scale_values(scales, not report.errors, titles, parts)
        if scales is not None and scales.linears
        else None,
        "usage": None if counts is None else _make_usage_values(counts, list(report.measure.shapes), titles),
    }


def _make_tiles(report: Report, document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of the most important numbers."""
    yield "method", ", ".join(document[name] for name in ("method", "scale") if name in document)
    if document["layers"]:
        experts = document["experts"] if isinstance(document["experts"], int) else "different numbers of"
        yield f"layer{'s' * (len(document['layers']) != 1)}, of {experts} experts", str(len(document["layers"]))
    for projection in PROJECTIONS:
        if sums := [layer.sums for layer in report.errors if layer.projection == projection]:
            yield f"relative error, {projection}", format_percent(error_figures(np.sum(sums, axis=0))["relative_error"])
    if document["predictions"] is not None:
        yield "KL divergence per token", f"{document['predictions']['kl']:.4g}"
    yield "checks passed", f"{sum(check['ok'] for check in document['checks'])} of {len(document['checks'])}"


def _make_error_values(report: Report, titles: bool) -> dict[str, Any]:
    maps: dict[str, dict[tuple[int, int], float]] = {projection: {} for projection in PROJECTIONS}
    for layer in report.errors:
        maps[layer.projection] |= {(error.layer, error.expert): error.relative_error for error in layer.experts}
    measured = max(len(layer.experts) for layer in report.errors)
    return {
        "measured": measured if measured < max(experts for experts, _, _ in report.measure.shapes.values()) else None,
        "heat": make_heat_maps(
            maps, ColourScale("relative error", format_percent, lambda value: format_three_digits(100 * value)), titles
        ),
        "head": (
            "layer",
            *(projection + suffix for projection in PROJECTIONS for suffix in ("", ", cosine", ", worst")),
        ),
        "rows": list(_make_layer_rows(report.errors)),
    }


def _make_layer_rows(errors: Sequence[ProjectionErrors]) -> Iterator[Row]:
    """Yield a row for each layer: relative error, cosine, and worst expert with its error of every projection."""
    for layer, group in groupby(sorted(errors, key=lambda error: error.layer), key=lambda error: error.layer):
        by_projection = {error.projection: error for error in group}
        row = [str(layer)]
        for error in map(by_projection.get, PROJECTIONS):
            if error is None:
                row += ["", "", ""]
                continue
            figures = error.figures
            worst = error.worst
            row += [format_percent(figures["relative_error"]), f"{figures['cosine']:.5f}"]
            row.append(f"{worst.expert} ({format_percent(worst.relative_error)})")
        yield tuple(row)


def _make_worst_rows(rows: Sequence[WorstRow], parts: bool) -> dict[str, Any]:
    return {
        "head": ("linear", "error", "cosine", *[NUMA] * parts, "worst row", "its error"),
        "rows": [
            (
                LINEAR.format(row.linear),
                format_percent(row.linear.relative_error),
                f"{row.linear.cosine:.5f}",
                *[str(row.numa)] * parts,
                str(row.row),
                format_percent(row.relative_error),
            )
            for row in rows
        ],
    }


def _make_scale_values(scales: Scales, medians: bool, titles: bool, parts: bool) -> dict[str, Any]:
    """Return the values of the template for the scales.

    medians  whether to draw the median of each expert, too
    """
    finite = [linear.median for linear in scales.linears if math.isfinite(linear.median)]
    power = math.floor(math.log10(min(finite))) if finite else 0
    scale = ColourScale(
        "median scale",
        lambda value: f"{value:.4g}",
        lambda value: format_three_digits(value / 10.0**power),
        ratios=True,
    )
    maps = {
        projection: {
            (linear.layer, linear.expert): linear.median for linear in scales.linears if linear.projection == projection
        }
        for projection in PROJECTIONS
    }
    known = [linear for linear in scales.linears if math.isfinite(linear.largest)]
    not_drawn = {"zeros": scales.zeros, "others": scales.others}

    def ratio(linear: LinearScales) -> str:
        return f"{linear.largest / linear.median:.3g}"

    return {
        **{name: f"{n:,}" if scales.zeros or scales.others else "" for name, n in not_drawn.items()},
        "histograms": list(_make_histograms(scales)),
        "power": power,
        "heat": make_heat_maps(maps, scale, titles) if medians else None,
        "head": ("linear", *[NUMA] * parts, "row", "largest scale", "median of the linear", "ratio"),
        "rows": [
            (
                LINEAR.format(linear),
                *[str(linear.numa)] * parts,
                str(linear.row),
                f"{linear.largest:.4g}",
                f"{linear.median:.4g}",
                ratio(linear),
            )
            for linear in sorted(known, key=lambda linear: -linear.largest)[:LARGEST]
        ],
    }


def _make_histograms(scales: Scales) -> Iterator[dict[str, Any]]:
    """Yield a histogram for each projection, all with the same bins: at most MOST_BARS."""
    total = np.sum(list(scales.counts.values()), axis=0)
    if not total.any():
        return
    used = np.flatnonzero(total)
    steps_per_bin = math.gcd(int(np.gcd.reduce(used)), STEPS)  # powers of two have a bar each
    while (used[-1] // steps_per_bin - used[0] // steps_per_bin + 1) > MOST_BARS:
        steps_per_bin *= 2
    first, last = int(used[0]) // steps_per_bin, int(used[-1]) // steps_per_bin + 1
    edges = [2.0 ** (bin * steps_per_bin / STEPS + LOWEST) for bin in range(first, last + 1)]
    for projection, counts in scales.counts.items():
        merged = np.add.reduceat(
            counts[first * steps_per_bin : last * steps_per_bin],
            np.arange(0, (last - first) * steps_per_bin, steps_per_bin),
        )
        yield make_histogram(projection, merged.tolist(), edges)


def _make_usage_values(counts: I64, known: Sequence[int], titles: bool) -> dict[str, Any]:
    layers = [n for n in known if n < len(counts) and counts[n].any()]
    shares = {n: counts[n] / counts[n].sum() for n in layers}
    cells = {(n, e): float(share) for n in layers for e, share in enumerate(shares[n])}
    scale = ColourScale("share of the layer's tokens", format_percent, lambda v: format_three_digits(100 * v))

    def row(layer: int) -> Row:
        tokens = counts[layer]
        most_used = f"{int(tokens.argmax())} ({format_percent(float(shares[layer].max()))})"
        return str(layer), f"{int(tokens.sum()):,}", most_used, str(int((tokens == 0).sum()))

    heat = make_heat_maps({"routed tokens": cells}, scale, titles)
    return {"equal": format_percent(1 / counts.shape[1]), "heat": heat, "rows": [row(layer) for layer in layers]}


# --- heat maps (layers x experts, as tables with coloured cells) and histograms ------------------


Cells = Mapping[tuple[int, int], float]  # (layer, expert) -> value


@dataclass(frozen=True)
class ColourScale:
    """Values of a heat map, and their colours.

    label    name of the values in the legend
    text     formats a value for titles and the legend
    short    formats a value for a cell: four characters, if possible
    ratios   whether the scale is logarithmic
    """

    label: str
    text: Callable[[float], str]
    short: Callable[[float], str]
    ratios: bool = False

    def is_shown(self, value: float) -> bool:
        """Return whether a value has a colour."""
        return math.isfinite(value) and (value > 0 or not self.ratios)

    def step(self, value: float, low: float, high: float) -> str:
        """Return the class of a value on a ramp from low to high."""
        if not self.is_shown(value):
            return NOT_SHOWN
        low, high, value = (math.log(number) if self.ratios else number for number in (low, high, value))
        share = (value - low) / (high - low) if high > low else 0.0
        return COLOURS[min(int(share * len(COLOURS)), len(COLOURS) - 1)]


def make_heat_maps(maps: Mapping[str, Cells], scale: ColourScale, titles: bool) -> dict[str, Any]:
    """Return one map per name, with the same layers and experts, and the legend.

    titles  whether cells have titles
    """
    layers = sorted({layer for cells in maps.values() for layer, _ in cells})
    experts = sorted({expert for cells in maps.values() for _, expert in cells})
    has_numbers = len(experts) <= MOST_COLUMNS
    experts_per_head = 1 << max(0, math.ceil(math.log2(max(len(experts), 1) / MOST_COLUMNS)))
    height = 22 if has_numbers or len(layers) <= 12 else 14 if len(layers) <= 32 else 7
    rows_per_head = max(1, 14 // height)
    any_not_shown = any(not scale.is_shown(value) for cells in maps.values() for value in cells.values())

    def build_map(name: str, cells: Cells) -> dict[str, Any]:
        """Return the heat map of one column of values: its range and rows of cells by layer."""
        shown = [value for value in cells.values() if scale.is_shown(value)]
        low, high = (min(shown), max(max(shown), LEAST_RANGE * min(shown))) if shown else (1.0, 1.0)

        def cell(layer: int, expert: int) -> tuple[str, str, str] | None:
            if (value := cells.get((layer, expert))) is None:
                return None
            title = f"{layer}/{expert}: {scale.text(value)}" if titles else ""
            return scale.step(value, low, high), title, scale.short(value) if has_numbers else ""

        def row_title(layer: int) -> str:
            known = [(v, e) for e in experts if (v := cells.get((layer, e))) is not None and scale.is_shown(v)]
            if not known:
                return f"layer {layer}"
            (smallest, _) = min(known)
            (largest, expert) = max(known)
            return f"layer {layer}: {scale.text(smallest)} to {scale.text(largest)} (expert {expert})"

        rows = [
            {
                "layer": layer,
                "span": 0 if position % rows_per_head else min(rows_per_head, len(layers) - position),
                "title": "" if titles else row_title(layer),
                "cells": [cell(layer, expert) for expert in experts],
            }
            for position, layer in enumerate(layers)
        ]
        return {"name": name, "low": scale.text(low), "high": scale.text(high), "rows": rows}

    return {
        "label": scale.label,
        "titles": titles,
        "wide": len(experts) > MOST_WIDTH,
        "columns": len(experts),
        "height": height,
        "steps": COLOURS,
        "heads": [
            (min(experts_per_head, len(experts) - position), experts[position])
            for position in range(0, len(experts), experts_per_head)
        ],
        "not_shown": any_not_shown and ("not a positive number" if scale.ratios else "not a number"),
        "empty": any(len(cells) < len(layers) * len(experts) for cells in maps.values()),
        "maps": [build_map(name, cells) for name, cells in maps.items()],
    }


def make_histogram(name: str, counts: Sequence[int], edges: Sequence[float]) -> dict[str, Any]:
    """Return the histogram of counts [n] between edges [n + 1]."""
    largest = max(counts, default=0)
    total = sum(counts)
    return {
        "name": name,
        "total": f"{total:,}",
        "most": f"{largest:,}",
        "label": f"{name}: {total:,} scales from {edges[0]:.3g} to {edges[-1]:.3g}",
        "columns": max(len(counts), 1),
        "bars": [
            (position, 100 * count / largest, f"{edges[position]:.3g} to {edges[position + 1]:.3g}: {count:,}")
            for position, count in enumerate(counts)
            if count
        ],
        "ticks": [f"{edge:.3g}" for edge in (edges[0], edges[len(edges) // 2], edges[-1])],
    }
