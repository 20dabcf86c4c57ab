"""The report of `ktconvert verify` as one HTML page: nothing on it comes from elsewhere, and nothing runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.files.publish import MARK
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.layouts.statistics.imatrix import I64
from ktconvert.pipeline.stages.expert_stream import error_figures
from ktconvert.pipeline.ui.heat_maps import MOST_TITLES, Scale, heat_maps, histogram
from ktconvert.pipeline.verify.checks import ProjectionErrors
from ktconvert.pipeline.verify.page_data import LOWEST, STEPS, Scales, WorstRow
from ktconvert.pipeline.verify.report import document, facts_rows
from ktconvert.pipeline.verify.verify import Report

TEMPLATES = Path(__file__).parent
SHOWN = 100  # problems listed per check; --json has them all
LARGEST = 12  # linears with the largest scales
MOST_BARS = 64

Row = tuple[str, ...]


def percent(share: float) -> str:
    """For people: 11.71 %."""
    if not math.isfinite(share):
        return "not finite"
    return f"{100 * share:#.4g} %" if share else "0 %"


def three(value: float) -> str:
    """For a cell of a map: three digits, 12.0."""
    return f"{value:#.3g}" if math.isfinite(value) and value else "0" if value == 0 else "?"


def page(report: Report) -> str:
    """The page. Its text is a function of the report alone."""
    return str(_template().render(_content(report))).lstrip()


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    files, undefined = FileSystemLoader(TEMPLATES), StrictUndefined
    where = Environment(loader=files, autoescape=True, undefined=undefined, trim_blocks=True, lstrip_blocks=True)
    return where.get_template("page.html")


def _content(report: Report) -> dict[str, Any]:
    facts, found = document(report), report.page_data
    scales, counts = (None, None) if found is None else (found.scales, found.counts)
    cells = sum(len(layer.experts) for layer in report.errors)
    cells += 0 if report.errors or scales is None else len(scales.linears)
    titles = cells + (0 if counts is None else counts.size) <= MOST_TITLES
    parts = report.measure.numa > 1

    def check_rows(state: Callable[[Any], str]) -> Iterator[Row]:
        for check in facts["checks"]:
            wrong = len(check["problems"])
            yield check["name"], state(check), f"{wrong} problem{'s' * (wrong != 1)}" if wrong else check["result"]

    return {
        **facts,
        "name": Path(facts["output"]).name,
        "verdict": "verified" if facts["ok"] else "NOT verified",
        "generator": MARK,
        "shown": SHOWN,
        "parts": parts,
        "maker": f"{facts['made_by']} {facts['command']}" if facts["made_by"] else "a program that left no manifest",
        "tiles": list(_tiles(report, facts)),
        "check_rows": check_rows,
        "output_rows": facts_rows(facts),
        "errors": _errors(report, titles) if report.errors else None,
        "worst_rows": _worst_rows(found.rows, parts) if found is not None and found.rows else None,
        "scales": _scales(scales, not report.errors, titles, parts) if scales is not None and scales.linears else None,
        "usage": None if counts is None else _usage(counts, list(report.measure.shapes), titles),
    }


def _tiles(report: Report, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The few numbers that one looks for first."""
    yield "method", facts["method"] + (f", {facts['scale']}" if "scale" in facts else "")
    if facts["layers"]:
        experts = facts["experts"] if isinstance(facts["experts"], int) else "different numbers of"
        yield f"layer{'s' * (len(facts['layers']) != 1)}, of {experts} experts", str(len(facts["layers"]))
    for projection in PROJECTIONS:
        sums = [layer.sums for layer in report.errors if layer.projection == projection]
        if sums:
            yield f"relative error, {projection}", percent(error_figures(np.sum(sums, axis=0))["relative_error"])
    if facts["predictions"] is not None:
        yield "KL divergence per token", f"{facts['predictions']['kl']:.4g}"
    yield "checks passed", f"{sum(check['ok'] for check in facts['checks'])} of {len(facts['checks'])}"


def _errors(report: Report, titles: bool) -> dict[str, Any]:
    maps = {
        projection: {
            (e.layer, e.expert): e.relative_error
            for layer in report.errors
            if layer.projection == projection
            for e in layer.experts
        }
        for projection in PROJECTIONS
    }
    measured = max(len(layer.experts) for layer in report.errors)
    return {
        "measured": measured if measured < max(e for e, _, _ in report.measure.shapes.values()) else None,
        "heat": heat_maps(maps, Scale("relative error", percent, lambda v: three(100 * v)), titles),
        "head": ("layer", *(projection + what for projection in PROJECTIONS for what in ("", ", cosine", ", worst"))),
        "rows": list(_layer_rows(report.errors)),
    }


def _layer_rows(errors: Sequence[ProjectionErrors]) -> Iterator[Row]:
    """A row for each layer: every projection's relative error, cosine, and worst expert with its error."""
    for layer, group in groupby(sorted(errors, key=lambda e: e.layer), key=lambda e: e.layer):
        own = {e.projection: e for e in group}
        row = [str(layer)]
        for error in map(own.get, PROJECTIONS):
            if error is None:
                row += ["", "", ""]
                continue
            figures, worst = error.figures, error.worst
            row += [percent(figures["relative_error"]), f"{figures['cosine']:.5f}"]
            row.append(f"{worst.expert} ({percent(worst.relative_error)})")
        yield tuple(row)


def _part(parts: bool, text: object) -> tuple[str, ...]:
    """A cell that only outputs with several NUMA parts have."""
    return (str(text),) if parts else ()


def _worst_rows(rows: Sequence[WorstRow], parts: bool) -> dict[str, Any]:
    return {
        "head": ("linear", "error", "cosine", *_part(parts, "NUMA part"), "worst row", "its error"),
        "rows": [
            (
                f"layer {row.linear.layer}, expert {row.linear.expert}, {row.linear.projection}",
                percent(row.linear.relative_error),
                f"{row.linear.cosine:.5f}",
                *_part(parts, row.numa),
                str(row.row),
                percent(row.relative_error),
            )
            for row in rows
        ],
    }


def _scales(scales: Scales, medians: bool, titles: bool, parts: bool) -> dict[str, Any]:
    """medians: whether the median of each expert is drawn, too."""
    finite = [linear.median for linear in scales.linears if math.isfinite(linear.median)]
    power = math.floor(math.log10(min(finite))) if finite else 0
    scale = Scale("median scale", lambda v: f"{v:.4g}", lambda v: three(v / 10.0**power), ratios=True)
    maps = {
        projection: {(s.layer, s.expert): s.median for s in scales.linears if s.projection == projection}
        for projection in PROJECTIONS
    }
    known = [linear for linear in scales.linears if math.isfinite(linear.largest)]
    return {
        "zeros": f"{scales.zeros:,}" if scales.zeros or scales.others else "",
        "others": f"{scales.others:,}" if scales.zeros or scales.others else "",
        "histograms": list(_histograms(scales)),
        "power": power,
        "heat": heat_maps(maps, scale, titles) if medians else None,
        "head": ("linear", *_part(parts, "NUMA part"), "row", "largest scale", "median of the linear", "ratio"),
        "rows": [
            (
                f"layer {s.layer}, expert {s.expert}, {s.projection}",
                *_part(parts, s.numa),
                str(s.row),
                f"{s.largest:.4g}",
                f"{s.median:.4g}",
                f"{s.largest / s.median:.3g}",
            )
            for s in sorted(known, key=lambda s: -s.largest)[:LARGEST]
        ],
    }


def _histograms(scales: Scales) -> Iterator[dict[str, Any]]:
    """One for each projection, with the same bins: as many as fit, at least those of the survey."""
    total = np.sum(list(scales.counts.values()), axis=0)
    if not total.any():
        return
    used = np.flatnonzero(total)
    each = math.gcd(int(np.gcd.reduce(used)), STEPS)  # powers of two have a bar each
    while (used[-1] // each - used[0] // each + 1) > MOST_BARS:
        each *= 2
    first, last = int(used[0]) // each, int(used[-1]) // each + 1
    edges = [2.0 ** (bin * each / STEPS + LOWEST) for bin in range(first, last + 1)]
    for projection, counts in scales.counts.items():
        own = np.add.reduceat(counts[first * each : last * each], np.arange(0, (last - first) * each, each))
        yield histogram(projection, own.tolist(), edges)


def _usage(counts: I64, known: Sequence[int], titles: bool) -> dict[str, Any]:
    layers = [n for n in known if n < len(counts) and counts[n].any()]
    shares = {n: counts[n] / counts[n].sum() for n in layers}
    cells = {(n, e): float(share) for n in layers for e, share in enumerate(shares[n])}
    scale = Scale("part of the layer's tokens", percent, lambda v: three(100 * v))
    return {
        "equal": percent(1 / counts.shape[1]),
        "heat": heat_maps({"routed tokens": cells}, scale, titles),
        "rows": [
            (
                str(n),
                f"{int(counts[n].sum()):,}",
                f"{int(counts[n].argmax())} ({percent(float(shares[n].max()))})",
                str(int((counts[n] == 0).sum())),
            )
            for n in layers
        ],
    }
