"""The report of `ktconvert verify` as one HTML page: nothing on it comes from elsewhere, and nothing runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.files.publish import MARK
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.layouts.statistics.imatrix import I64
from ktconvert.pipeline.stages.expert_stream import error_figures
from ktconvert.pipeline.ui.heat_maps import MOST_BARS, MOST_TITLES, Heat, bars, heat_maps
from ktconvert.pipeline.ui.markup import Markup, element, folded, table, together
from ktconvert.pipeline.ui.page_style import style
from ktconvert.pipeline.verify.checks import ProjectionErrors
from ktconvert.pipeline.verify.report import document, facts_rows
from ktconvert.pipeline.verify.scale_survey import LOWEST, STEPS, LinearScales, Scales
from ktconvert.pipeline.verify.verify import Report

SHOWN = 100  # problems listed per check; --json has them all
LARGEST = 12  # linears with the largest scales

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
EXPLAINED = (
    "The relative error of a linear is the length of its difference from the source in BF16, divided by the length of "
    "the source: 0 % is equal. The worst is the expert with the largest error."
)


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
    facts = document(report)
    name = Path(facts["output"]).name
    cells = _count(report)
    sections = [*_errors(report, cells), *_scales(report, cells), *_usage(report, cells)]
    head = together([
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta name="generator" content="{MARK}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Markup('<link rel="icon" href="data:,">'),
        element("title", f"{name}: {'verified' if facts['ok'] else 'NOT verified'}"),
        element("style", Markup(style())),
    ])  # fmt: skip
    body = element("main", _header(name, facts), _tiles(report, facts), _checks(facts), *sections, _footer(facts))
    return f'<!DOCTYPE html>\n<html lang="en">\n{element("head", head)}\n{element("body", body)}\n</html>\n'


def _count(report: Report) -> int:
    """Cells of all maps of the page."""
    figures = report.figures
    if figures is None:
        return 0
    errors = sum(len(layer.experts) for layer in report.errors)
    scales = 0 if errors or figures.scales is None else len(figures.scales.linears)
    return errors + scales + (0 if figures.counts is None else figures.counts.size)


# --- what was verified, and the result ----------------------------------------------------------------


def _header(name: str, facts: Mapping[str, Any]) -> Markup:
    verdict = element("span", "verified" if facts["ok"] else "NOT verified",
                      class_=f"verdict {'good' if facts['ok'] else 'bad'}")  # fmt: skip
    against = f", against {facts['against']}" if facts["against"] else ""
    return element("header", element("h1", name), verdict, element("p", f"{facts['output']}{against}", class_="soft"))


def _tiles(report: Report, facts: Mapping[str, Any]) -> Markup:
    """The few numbers that one looks for first."""
    tiles = [("method", facts["method"] + (f", {facts['scale']}" if "scale" in facts else ""))]
    if facts["layers"]:
        experts = facts["experts"] if isinstance(facts["experts"], int) else "different numbers of"
        tiles.append((f"layer{'s' * (len(facts['layers']) != 1)}, of {experts} experts", str(len(facts["layers"]))))
    for projection in PROJECTIONS:
        sums = [layer.sums for layer in report.errors if layer.projection == projection]
        if sums:
            error = error_figures(np.sum(sums, axis=0))["relative_error"]
            tiles.append((f"relative error, {projection}", percent(error)))
    if facts["predictions"] is not None:
        tiles.append(("KL divergence per token", f"{facts['predictions']['kl']:.4g}"))
    good = sum(check["ok"] for check in facts["checks"])
    tiles.append(("checks passed", f"{good} of {len(facts['checks'])}"))
    return element("div", *(element("div", element("b", value), what) for what, value in tiles), class_="tiles")


def _checks(facts: Mapping[str, Any]) -> Markup:
    rows = [
        (
            check["name"],
            element("span", "ok" if check["ok"] else "failed", class_="good" if check["ok"] else "bad"),
            check["result"]
            if check["ok"]
            else f"{len(check['problems'])} problem{'s' * (len(check['problems']) != 1)}",
        )
        for check in facts["checks"]
    ]
    left = [element("h2", "Checks"), table(("check", "state", "result"), rows, "checks")]
    right = [element("h2", "Output"), table((), facts_rows(dict(facts)), "output")]
    parts = [element("div", element("div", *left), element("div", *right), class_="pair")]
    wrong = [check for check in facts["checks"] if not check["ok"]]
    if wrong:
        listed = [element("p", facts["message"] or "")]
        for check in wrong:
            problems = check["problems"]
            more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
            listed += [element("b", check["name"]),
                       element("ul", *(element("li", text) for text in (*problems[:SHOWN], *more)))]  # fmt: skip
        parts.insert(0, element("section", *listed, class_="problems", aria_label="problems"))
    if facts["notes"]:
        notes = element("ul", *(element("li", note) for note in facts["notes"]), class_="notes")
        parts += [element("h2", "Notes"), notes]
    return together(parts)


def _footer(facts: Mapping[str, Any]) -> Markup:
    made = f"{facts['made_by']} {facts['command']}" if facts["made_by"] else "a program that left no manifest"
    return element("footer", f"ktconvert verify; the output was made by {made}.")


# --- errors -------------------------------------------------------------------------------------------


def _errors(report: Report, cells: int) -> Iterator[Markup]:
    if not report.errors:
        return
    heat = Heat("relative error", percent, lambda v: three(100 * v), titles=cells <= MOST_TITLES)
    maps = {
        projection: {
            (e.layer, e.expert): e.relative_error
            for layer in report.errors
            if layer.projection == projection
            for e in layer.experts
        }
        for projection in PROJECTIONS
    }
    yield element("h2", "Error against the source")
    measured = max(len(layer.experts) for layer in report.errors)
    which = "" if measured == max(e for e, _, _ in report.measure.shapes.values()) else (
        f" Measured on {measured} experts of each layer; --full measures all."
    )  # fmt: skip
    yield element("p", EXPLAINED + which)
    yield heat_maps(maps, heat)
    rows = list(_layer_rows(report.errors))
    yield folded("error of each layer", rows, _layer_head())
    yield from _worst(report)


def _layer_head() -> tuple[str, ...]:
    return ("layer", *(projection + what for projection in PROJECTIONS for what in ("", ", cosine", ", worst")))


def _layer_rows(errors: tuple[ProjectionErrors, ...]) -> Iterator[tuple[str, ...]]:
    """A row for each layer: every projection's relative error, cosine, and worst expert with its error."""
    for layer, group in groupby(sorted(errors, key=lambda e: e.layer), key=lambda e: e.layer):
        own = {e.projection: e for e in group}
        cells: list[str] = [str(layer)]
        for projection in PROJECTIONS:
            if (error := own.get(projection)) is None:
                cells += ["", "", ""]
                continue
            figures, worst = error.figures, error.worst
            cells += [percent(figures["relative_error"]), f"{figures['cosine']:.5f}"]
            cells.append(f"{worst.expert} ({percent(worst.relative_error)})")
        yield tuple(cells)


def _worst(report: Report) -> Iterator[Markup]:
    if report.figures is None or not report.figures.rows:
        return
    parts = report.measure.numa > 1
    rows = [
        (
            f"layer {row.linear.layer}, expert {row.linear.expert}, {row.linear.projection}",
            percent(row.linear.relative_error),
            f"{row.linear.cosine:.5f}",
            *([str(row.numa)] if parts else []),
            str(row.row),
            percent(row.relative_error),
        )
        for row in report.figures.rows
    ]
    head = ("linear", "error", "cosine", *(["NUMA part"] if parts else []), "worst row", "its error")
    yield element("h2", "Worst rows")
    text = "The linears with the largest errors, and of each the row that lies farthest from its source"
    yield element("p", text + (", counted within its NUMA part." if parts else "."))
    yield table(head, rows, "worst rows", range(1, len(head)))


# --- scales -------------------------------------------------------------------------------------------


def _scales(report: Report, cells: int) -> Iterator[Markup]:
    scales = None if report.figures is None else report.figures.scales
    if scales is None or not scales.linears:
        return
    yield element("h2", "Scales")
    text = "How many scales have which value, on a logarithmic axis; all three share it."
    if scales.zeros or scales.others:
        text += f" Not drawn: {scales.zeros:,} zeros, {scales.others:,} that are negative or not finite."
    yield element("p", text)
    yield element("div", *_histograms(scales), class_="maps")
    if not report.errors:
        yield from _median_maps(scales, cells)
    yield from _largest(scales, report.measure.numa > 1)


def _histograms(scales: Scales) -> Iterator[Markup]:
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
        yield bars(projection, own.tolist(), edges)


def _median_maps(scales: Scales, cells: int) -> Iterator[Markup]:
    finite = [linear.median for linear in scales.linears if math.isfinite(linear.median)]
    power = math.floor(math.log10(min(finite))) if finite else 0
    heat = Heat(
        "median scale",
        lambda v: f"{v:.4g}",
        lambda v: three(v / 10.0**power),
        ratios=True,
        titles=cells <= MOST_TITLES,
    )
    maps = {
        projection: {(s.layer, s.expert): s.median for s in scales.linears if s.projection == projection}
        for projection in PROJECTIONS
    }
    yield element("h2", "Median scale of each expert")
    yield element("p", f"Numbers in cells are in units of 1e{power}. An expert that differs much from the others of "
                       "its layer deserves a look.")  # fmt: skip
    yield heat_maps(maps, heat)


def _largest(scales: Scales, parts: bool) -> Iterator[Markup]:
    known = [linear for linear in scales.linears if math.isfinite(linear.largest)]

    def rows(linears: list[LinearScales]) -> Iterator[tuple[str, ...]]:
        for s in linears:
            where = f"layer {s.layer}, expert {s.expert}, {s.projection}"
            part = [str(s.numa)] if parts else []
            yield where, *part, str(s.row), f"{s.largest:.4g}", f"{s.median:.4g}", f"{s.largest / s.median:.3g}"

    worst = sorted(known, key=lambda s: -s.largest)[:LARGEST]
    part = ["NUMA part"] if parts else []
    head = ("linear", *part, "row", "largest scale", "median of the linear", "ratio")
    yield folded("largest scales", list(rows(worst)), head, most=0)


# --- usage --------------------------------------------------------------------------------------------


def _usage(report: Report, cells: int) -> Iterator[Markup]:
    counts: I64 | None = None if report.figures is None else report.figures.counts
    if counts is None:
        return
    layers = [n for n in report.measure.shapes if n < len(counts) and counts[n].any()]
    shares = {n: counts[n] / counts[n].sum() for n in layers}
    heat = Heat("part of the layer's tokens", percent, lambda v: three(100 * v), titles=cells <= MOST_TITLES)
    yield element("h2", "Use of experts")
    yield element("p", "Which part of the routed tokens of a layer each expert got, in the statistics that were given. "
                       f"Equal use would be {percent(1 / counts.shape[1])}.")  # fmt: skip
    yield heat_maps({"routed tokens": {(n, e): float(s) for n in layers for e, s in enumerate(shares[n])}}, heat)
    rows = [
        (
            str(n),
            f"{int(counts[n].sum()):,}",
            f"{int(counts[n].argmax())} ({percent(float(shares[n].max()))})",
            str(int((counts[n] == 0).sum())),
        )
        for n in layers
    ]
    head = ("layer", "routed tokens", "busiest expert", "experts without tokens")
    yield folded("use of each layer", rows, head)
