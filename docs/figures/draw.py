#!/usr/bin/env python3
"""The figures of the site, drawn from the data beside this file, for light and for dark pages: `make figures`.

accuracy.json, scale.json     written by benchmarks/accuracy.py and benchmarks/scale.py, with --write
training.json                 by benchmarks/fine_tune.py
gguf.json, decode.json, converting.json   the rows of tables that were measured by hand, as the pages print them
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
# (text, lines of axes, ours, others, two more colours): readable on white, and on the dark grey of the dark pages
LIGHT = ("#1f2328", "#8b949e", "#0b57d0", "#b3541e", "#1a7f37", "#8250df")
DARK = ("#e6e6ea", "#8b8f98", "#7ab0ff", "#f0a06a", "#6fcf7f", "#c9a7ff")
DRAWN: dict[str, Callable[[Any, tuple[str, ...], Any], Any]] = {}


def figure(draw: Callable[[Any, tuple[str, ...], Any], Any]) -> Callable[[Any, tuple[str, ...], Any], Any]:
    """A row of DRAWN: a function of axes, colours and its data, NAME.json."""
    DRAWN[draw.__name__] = draw
    return draw


def number(cell: str) -> float:
    """The first number of a table's cell."""
    return float(cell.replace("*", "").split()[0])


# how codes were chosen -> marker, and which of the colours
CHOICES = {"absmax": ("o", 2), "mse": ("s", 4), "imatrix": ("D", 5), "gptq": ("^", 3)}
LABELS = {"int4": (-9, 7), "mxfp4": (14, -4), "rawint4": (14, 2), "int8": (12, 2)}


@figure
def accuracy(axes: Any, colours: tuple[str, ...], data: Any) -> None:
    """KL divergence against bits of a weight: every method by every choice, and llama.cpp's types."""
    gguf = json.loads((HERE / "gguf.json").read_text())["rows"]
    axes.plot([number(r[2]) for r in gguf], [number(r[3]) for r in gguf], "x", color=colours[1], label="GGUF")
    for row in gguf:
        below = row[0] in ("Q8_0", "Q4_0")
        place = {"xytext": (-8 if below else 5, -12 if below else 3), "textcoords": "offset points", "fontsize": 7.5}
        axes.annotate(row[0], (number(row[2]), number(row[3])), color=colours[1], **place)
    rows = [(*row[0].split()[:2], number(row[1]), number(row[2])) for row in data["bundled model"]]
    for number_of_choice, (choice, (marker, colour)) in enumerate(CHOICES.items()):
        # Side by side, as two choices can have almost the same divergence
        points = [(bits + 0.07 * (number_of_choice - 1.5), kl) for _, chosen, bits, kl in rows if chosen == choice]
        axes.plot(*zip(*points, strict=True), marker, color=colours[colour], label=choice, ms=6)
    for method in LABELS:
        bits, kl = max((bits, kl) for name, _, bits, kl in rows if name == method)
        axes.annotate(method, (bits, kl), xytext=LABELS[method], textcoords="offset points", color=colours[0])
    axes.set(yscale="log", xlabel="bits of a weight, scales included", ylabel="KL divergence from BF16, nats")
    axes.set_yticks([0.0002, 0.0005, 0.001, 0.002, 0.005], ["0.0002", "0.0005", "0.001", "0.002", "0.005"])
    axes.minorticks_off()
    axes.set(xlim=(3.5, 9.1), ylim=(0.00015, 0.008))
    axes.legend(frameon=False, labelcolor=colours[0], loc="upper right")


@figure
def synthetic(axes: Any, colours: tuple[str, ...], data: Any) -> None:
    """Error of the outputs on synthetic layers, for each method and choice."""
    rows = [row for row in data["synthetic layers"] if not row[0].startswith("int8 mse")]
    at = range(len(rows))
    for shift, column, colour, label in ((-0.2, 3, 2, "Gaussian"), (0.2, 4, 3, "Student's t (5)")):
        axes.barh([y + shift for y in at], [number(r[column]) for r in rows], 0.38, color=colours[colour], label=label)
    axes.set_yticks(at, [row[0].replace(" (kt-kernel's)", "") for row in rows])
    axes.set(xlabel="relative error of the outputs, %")
    axes.invert_yaxis()
    axes.legend(frameon=False, labelcolor=colours[0], loc="lower right", title="weights", alignment="left")
    axes.get_legend().get_title().set_color(colours[0])


@figure
def decode(axes: Any, colours: tuple[str, ...], data: Any) -> None:
    """How fast weights are read at one token, by us and by kt-kernel, beside what memory gives."""
    layer, bars = "", []
    for row in data["rows"]:
        layer = row[0] or layer
        if row[1] == "1":
            shares, ratios = (cell.replace("*", "").replace("%", "").replace(")", "").split("(") for cell in row[3:5])
            bars += [(layer, n, float(shares[n]) / 100, float(ratios[n])) for n in (0, 1)]
    bars.sort(key=lambda bar: bar[1])
    ticks = []
    for at, (title, n, share, ratio) in enumerate(bars):
        y, limit = at + 0.6 * n, data["bandwidth"][n]
        label = at == 0
        axes.plot([limit, limit], [y - 0.45, y + 0.45], color=colours[0], lw=1.5, label="memory" if label else None)
        axes.barh(y - 0.2, share * limit, 0.36, color=colours[2], label="ktconvert" if label else None)
        axes.barh(y + 0.2, share * limit / ratio, 0.36, color=colours[3], label="kt-kernel 0.7.2" if label else None)
        ticks.append((y, f"{title.replace(' with 16 experts', '')}, {n + 1} thread{'s' * n}"))
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.set(xlabel="GB/s of weights read at one token")
    axes.invert_yaxis()
    axes.legend(frameon=False, labelcolor=colours[0], loc="upper right")


@figure
def converting(axes: Any, colours: tuple[str, ...], data: Any) -> None:
    """Time of a conversion, as a multiple of `cp -r`."""
    rows = [(row[0].replace("`", ""), row[1]) for row in data["rows"]]
    for y, (name, cell) in enumerate(rows):
        least, _, most = cell.partition(" to ")
        value = number(most or least)
        colour = colours[1] if name.startswith("cp") else colours[2 if name.startswith("ktconvert") else 3]
        axes.barh(y, value, 0.6, color=colour)
        axes.text(value + 0.2, y, cell, va="center", color=colours[0])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set(xlabel="wall time, cp -r of the same model = 1", xlim=(0, 18))
    axes.invert_yaxis()


@figure
def scale(axes: Any, colours: tuple[str, ...], data: Any) -> None:
    """Calculated minutes over hosts, with the point from which on the file system is the limit."""
    for line in data["lines"]:
        if line["model"] != data["lines"][0]["model"]:
            continue
        colour = colours[2 if "measured" in line["host"] else 3]
        style = "-" if line["file system"] == "20 GB/s" else ":"
        hosts = range(1, len(line["minutes"]) + 1)
        axes.plot(hosts, line["minutes"], style, color=colour, label=f"{line['host']}; {line['file system']}")
        limit = round(line["limit"])
        if 1 <= limit <= len(line["minutes"]):
            axes.plot([limit], [line["minutes"][limit - 1]], "o", color=colour)
    axes.set(xscale="log", yscale="log", xlabel="hosts", ylabel="minutes, calculated")
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.legend(frameon=False, labelcolor=colours[0], title="host; bandwidth of the file system")
    axes.get_legend().get_title().set_color(colours[0])


@figure
def training(axes: Any, colours: tuple[str, ...], data: Any) -> None:
    """Losses of other text over the steps of a fine-tune, in transformers and through converted experts."""
    # Equal losses stay visible: hollow markers of different sizes.
    for run, marker, colour, size in zip(data["runs"], "xos^", (1, 4, 2, 3), (6, 13, 10, 5), strict=True):
        steps, losses = zip(*run["eval"], strict=True)
        label = f"{run['name']}: {losses[-1]:.4f}"
        axes.plot(steps, losses, f"{marker}-", color=colours[colour], label=label, ms=size, mfc="none", linewidth=1)
    axes.set(xlabel="step", ylabel="loss of other text, nats per token")
    axes.legend(frameon=False, labelcolor=colours[0])


DATA = {"synthetic": "accuracy"}  # figures whose data have another name
SIZES = {"synthetic": (5.4, 4.4), "decode": (5.8, 5.6), "converting": (5.4, 1.9), "accuracy": (5.4, 3.8)}


def in_colours(colours: tuple[str, ...], name: str) -> Iterator[Any]:
    text, line = colours[:2]
    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9.5, "text.color": text, "axes.edgecolor": line}
    style |= {"axes.labelcolor": text, "xtick.color": line, "ytick.color": line, "xtick.labelcolor": text}
    style |= {"ytick.labelcolor": text, "font.sans-serif": ["DejaVu Sans"], "figure.facecolor": "none"}
    style |= {"axes.facecolor": "none", "savefig.facecolor": "none", "xtick.minor.visible": False}
    with plt.rc_context(style):
        yield plt.subplots(figsize=SIZES.get(name, (5.4, 3.6)), layout="constrained")


def main() -> None:
    for name, draw in DRAWN.items():
        data = json.loads((HERE / f"{DATA.get(name, name)}.json").read_text())
        for page, colours in (("light", LIGHT), ("dark", DARK)):
            for drawing, axes in in_colours(colours, name):
                axes.spines[["top", "right"]].set_visible(False)
                draw(axes, colours, data)
                drawing.savefig(HERE / f"{name}-{page}.svg", metadata={"Date": None})
                plt.close(drawing)


if __name__ == "__main__":
    main()
