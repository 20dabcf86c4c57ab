"""Plots for --plot of `bench`, `eval`, `experts` and `train`, by matplotlib (extra `plot`), which is imported late."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktconvert.layouts.extras import require_packages
from ktconvert.layouts.files import publish
from ktconvert.pipeline.report.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# File suffix -> metadata key of the program
PLOT_SUFFIXES = {
    ".png": "Software",
    ".svg": "Creator",
    ".pdf": "Creator",
}
MEASURED, REFERENCE = "#1f5fa8", "#b5452c"  # colours


def require_matplotlib() -> None:
    """Raise KTConvertError if matplotlib is not installed."""
    require_packages("--plot", ["matplotlib"], "plot")


def plot_bench(path: Path, document: Mapping[str, Any]) -> None:
    """Plot GB/s (with the memory's) and tokens/s over the batch size.

    document  the JSON of `ktconvert bench`
    """
    figure = _make_figure(
        f"{Path(document['output']).name}, layer {document['layer']}: {document['method']}, "
        f"{document['isa']}, {plural(document['threads'], 'thread')}"
    )
    rows: Sequence[Mapping[str, Any]] = document["timings"]
    tokens = [row["tokens"] for row in rows]
    left, right = figure.subplots(1, 2)
    left.plot(tokens, [row["bytes_per_second"] / 1e9 for row in rows], "o-", color=MEASURED, label="expert weights")
    left.axhline(document["memory_bytes_per_second"] / 1e9, color=REFERENCE, linestyle="--", label="memory, read")
    left.set(ylabel="GB/s", title="weights read, each expert once", ylim=(0, None))
    left.legend(frameon=False)
    right.plot(tokens, [row["tokens_per_second"] for row in rows], "o-", color=MEASURED)
    right.set(ylabel="tokens/s", yscale="log", title="through this layer")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(count) for count in tokens])
        axes.set_xlabel("tokens per forward")
    _save_figure(figure, path)


def plot_eval(path: Path, document: Mapping[str, Any], divergences: Sequence[float]) -> None:
    """Plot a histogram of KL divergences, and each layer's error.

    document  the JSON of `ktconvert eval`
    """
    figure = _make_figure(
        f"{Path(document['cpu_weights'] or document['gpu_weights']).name} against {Path(document['model']).name}: "
        f"perplexity {document['perplexity']['converted']:.4g} against {document['perplexity']['original']:.4g}"
    )
    divergence_axes, error_axes = figure.subplots(1, 2)
    smallest = 1e-9  # equal distributions are at the left edge
    low, high = (f(max(value, smallest) for value in divergences) for f in (min, max))
    steps = [low * (high / low) ** (i / 50) for i in range(51)] if high > low else [low / 2, low * 2]
    divergence_axes.hist([max(value, smallest) for value in divergences], bins=steps, color=MEASURED)
    for name, value, style in (("mean", document["kl"]["mean"], "--"), ("99 %", document["kl"]["p99"], ":")):
        divergence_axes.axvline(max(value, smallest), color=REFERENCE, linestyle=style, label=f"{name} {value:.3g}")
    divergence_axes.set(
        xscale="log", xlabel="KL divergence (nats)", ylabel="positions", title=f"{len(divergences)} positions"
    )
    divergence_axes.legend(frameon=False)
    errors = [row["relative_error"] for row in document["layers"]]
    labels = {"ylabel": "relative L2", "title": "error of the experts' output", "ylim": (0, None)}
    _draw_bars(error_axes, document["layers"], errors, **labels)
    _save_figure(figure, path)


def plot_experts(path: Path, document: Mapping[str, Any]) -> None:
    """Plot each layer's coverage and number of hot experts.

    document  the JSON of `ktconvert experts`
    """
    layers = document["layers"]
    hot = sum(len(row["hot"]) for row in layers)
    figure = _make_figure(
        f"{document['counts']}: {hot} of {document['experts'] * len(layers)} experts are hot, "
        f"{document['coverage']:.1%} of routed tokens"
    )
    coverage_axes, count_axes = figure.subplots(1, 2)
    coverage_axes.axhline(100 * document["coverage"], color=REFERENCE, linestyle="--", label="all layers")
    coverage = [100 * row["coverage"] for row in layers]
    counts = [len(row["hot"]) for row in layers]
    _draw_bars(coverage_axes, layers, coverage, ylabel="% of routed tokens", title="go to hot experts", ylim=(0, 100))
    coverage_axes.legend(frameon=False)
    _draw_bars(count_axes, layers, counts, ylabel="experts", title=f"hot, of {document['experts']}", ylim=(0, None))
    _save_figure(figure, path)


def plot_losses(path: Path, model: str, losses: Sequence[Any], eval_losses: Sequence[Any]) -> None:
    """Plot the losses of a training: (step, loss) of training steps, and of evaluations between them."""
    figure = _make_figure(f"a LoRA adapter of {model}")
    axes = figure.subplots()
    axes.plot(*zip(*losses, strict=True), "-", color=MEASURED, linewidth=0.8, label="training")
    if eval_losses:
        axes.plot(*zip(*eval_losses, strict=True), "o-", color=REFERENCE, label="other texts")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    _save_figure(figure, path)


def _draw_bars(axes: Axes, layers: Sequence[Mapping[str, Any]], values: Sequence[float], **labels: Any) -> None:
    numbers = [row["layer"] for row in layers]
    axes.bar(numbers, values, color=MEASURED)
    axes.set(xlabel="layer", **labels)
    if len(numbers) <= 20:
        axes.set_xticks(numbers)


def _make_figure(title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    return figure


def _save_figure(figure: Figure, path: Path) -> None:
    kind = path.suffix.lower()
    data = io.BytesIO()
    figure.savefig(data, format=kind[1:], metadata={PLOT_SUFFIXES[kind]: publish.MARK})
    publish.write_marked_file(path, data.getvalue())
