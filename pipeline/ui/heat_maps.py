"""Heat maps layers x experts, as tables whose cells are coloured by class; and the histogram of scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ktconvert.pipeline.ui.markup import Markup, element, markup, together

STEPS = "abcdefghijklmnop"  # classes of the cells, from the smallest value to the largest
STRANGE = "x"  # the class of a value that is not finite
MOST_COLUMNS = 8  # of a map that has room for numbers
MOST_BARS = 64
WIDTH = 1.1  # of the colours of a map, at least: where all values are nearly equal, all colours are
# Above so many cells on one page only the rows have titles: 100 bytes instead of 30 for each cell.
MOST_TITLES = 64_000

Cells = Mapping[tuple[int, int], float]  # (layer, expert) -> value


@dataclass(frozen=True)
class Heat:
    """What a map's values are.

    label    what the legend calls them
    text     a value, in titles and the legend; without " and <
    short    the same in a cell: four characters, if possible
    ratios   whether equal ratios, not equal differences, have equal steps
    titles   whether each cell has one
    """

    label: str
    text: Callable[[float], str]
    short: Callable[[float], str]
    ratios: bool = False
    titles: bool = True

    def place(self, value: float) -> float:
        """Where a value stands on the axis."""
        return math.log(value) if self.ratios else value


def heat_maps(maps: Mapping[str, Cells], heat: Heat) -> Markup:
    """One map per name, all with the same layers and experts, each with colours of its own; and what they mean."""
    layers = sorted({layer for cells in maps.values() for layer, _ in cells})
    experts = sorted({expert for cells in maps.values() for _, expert in cells})
    wide = " wide" if len(experts) > 64 else ""
    tables = [_map(name, cells, layers, experts, _bounds(cells, heat), heat) for name, cells in maps.items()]
    empty = any(len(cells) < len(layers) * len(experts) for cells in maps.values())
    strange = any(not _is_shown(value, heat) for cells in maps.values() for value in cells.values())
    legend = _legend(heat, empty=empty, strange=strange)
    return together([legend, element("div", *tables, class_=f"maps{wide}")])


def _bounds(cells: Cells, heat: Heat) -> tuple[float, float]:
    """What the first and the last colour stand for: the smallest and the largest value, but WIDTH apart."""
    shown = [value for value in cells.values() if _is_shown(value, heat)]
    return (min(shown), max(max(shown), WIDTH * min(shown))) if shown else (1.0, 1.0)


def _is_shown(value: float, heat: Heat) -> bool:
    return math.isfinite(value) and (value > 0 or not heat.ratios)


def _map(
    name: str, cells: Cells, layers: Sequence[int], experts: Sequence[int], bounds: tuple[float, float], heat: Heat
) -> Markup:
    numbered = len(experts) <= MOST_COLUMNS
    every = 1 << max(0, math.ceil(math.log2(max(len(experts), 1) / MOST_COLUMNS)))
    height = 22 if numbered or len(layers) <= 12 else 14 if len(layers) <= 32 else 7
    together_rows = max(1, 14 // height)
    heads = [f'<th scope=col colspan={min(every, len(experts) - at)}>{experts[at]}'
             for at in range(0, len(experts), every)]  # fmt: skip
    lines = []
    for number, layer in enumerate(layers):
        row = [(expert, cells.get((layer, expert))) for expert in experts]
        head = ""
        if number % together_rows == 0:
            rows = min(together_rows, len(layers) - number)
            head = f"<th scope=row{f'group rowspan={rows}' if rows > 1 else ''}>{layer}"
        title = "" if heat.titles else f' title="{_row_title(layer, row, heat)}"'
        lines.append(f"<tr{title}>{head}{''.join(_cell(layer, e, v, bounds, heat, numbered) for e, v in row)}")
    body = Markup("\n".join(["<thead><tr><th scope=col>layer", "".join(heads), "<tbody>", *lines]))
    style = f"--columns:{len(experts)};--height:{height}px"
    ramp = element("span", Markup("".join(f"<i class={step}></i>" for step in STEPS)), class_="ramp")
    low, high = (element("span", heat.text(bound)) for bound in bounds)
    caption = element("caption", element("div", element("b", name), low, ramp, high, class_="legend"))
    return element(
        "div", element("table", caption, body, class_="heat", style=style), class_="box", tabindex="0", role="region",
        aria_label=f"{name}: {heat.label}"
    )  # fmt: skip


def _cell(layer: int, expert: int, value: float | None, bounds: tuple[float, float], heat: Heat, numbered: bool) -> str:
    """One cell, whose end is implied."""
    if value is None:
        return "<td>"
    title = f' title="{layer}/{expert}: {heat.text(value)}"' if heat.titles else ""
    return f"<td class={_class(value, bounds, heat)}{title}>{heat.short(value) if numbered else ''}"


def _class(value: float, bounds: tuple[float, float], heat: Heat) -> str:
    if not _is_shown(value, heat):
        return STRANGE
    low, high = (heat.place(bound) for bound in bounds)
    share = (heat.place(value) - low) / (high - low) if high > low else 0.0
    return STEPS[min(int(share * len(STEPS)), len(STEPS) - 1)]


def _row_title(layer: int, row: Sequence[tuple[int, float | None]], heat: Heat) -> str:
    known = [(value, expert) for expert, value in row if value is not None and _is_shown(value, heat)]
    if not known:
        return f"layer {layer}"
    (low, _), (high, expert) = min(known), max(known)
    return f"layer {layer}: {heat.text(low)} to {heat.text(high)} (expert {expert})"


def _legend(heat: Heat, *, empty: bool, strange: bool) -> Markup:
    parts = [element("b", heat.label), "layers from top to bottom, experts from left to right"]
    if strange:
        what = "not a positive number" if heat.ratios else "not a number"
        parts.append(element("span", Markup("<i class=x></i> "), what))
    if empty:
        parts.append(element("span", Markup("<i class=none></i> "), "not measured"))
    hint = "point at a cell for layer/expert: value" if heat.titles else "point at a row for its range"
    return element("p", *parts, element("span", hint, class_="hint"), class_="legend")


def bars(name: str, counts: Sequence[int], edges: Sequence[float]) -> Markup:
    """A histogram: counts [n] between edges [n + 1]."""
    most, total = max(counts, default=0), sum(counts)
    rects = [
        f"<rect x={at} y={100 - 100 * count / most:.2f} width=1 height={100 * count / most:.2f}>"
        f"<title>{edges[at]:.3g} to {edges[at + 1]:.3g}: {count:,}</title></rect>"
        for at, count in enumerate(counts)
        if count
    ]
    says = f"{name}: {total:,} scales from {edges[0]:.3g} to {edges[-1]:.3g}"
    picture = element("svg", Markup("".join(rects)), viewBox=f"0 0 {max(len(counts), 1)} 100", role="img",
                      preserveAspectRatio="none", aria_label=says)  # fmt: skip
    ticks = (edges[0], edges[len(edges) // 2], edges[-1])
    axis = element("div", *(element("span", f"{edge:.3g}") for edge in ticks), class_="axis")
    caption = element("figcaption", element("b", name), markup(f", {total:,} scales; highest bar {most:,}"))
    return element("figure", caption, picture, axis)
