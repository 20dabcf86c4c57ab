"""Reading routed experts one after the other through memory maps: prefetched ahead of use, released after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.pipeline.ui.progress import Reporter

READ_AHEAD = 64 << 20  # bytes of input that are prefetched
SAMPLED = 8  # experts per layer that stand for all of them


def items(start: int, stop: int) -> Iterator[tuple[int, str]]:
    """(expert, projection) of the experts start..stop-1, in file order."""
    for expert in range(start, stop):
        for projection in PROJECTIONS:
            yield expert, projection


def read_ahead(model: MoeModel, layer: int, start: int, stop: int) -> Iterator[tuple[int, str]]:
    """The items, while the next experts are prefetched: on a cold cache the disk is never idle."""
    each = sum(t.nbytes for t in model.expert_tensors(layer, start))
    ahead = max(1, READ_AHEAD // each)
    prefetched = start
    for expert, projection in items(start, stop):
        while prefetched < min(expert + ahead + 1, stop):
            for info in model.expert_tensors(layer, prefetched):
                model.source.prefetch(info)
            prefetched += 1
        yield expert, projection


def taken(model: MoeModel, layer: int, item: tuple[int, str], reporter: Reporter) -> None:
    """Count an expert as read and release its mapped pages, once its last projection has been converted."""
    expert, projection = item
    if projection == PROJECTIONS[-1]:
        tensors = model.expert_tensors(layer, expert)
        for info in tensors:
            model.source.release(info)
        reporter.advance(sum(t.nbytes for t in tensors))


def non_finite(model: MoeModel, layer: int, expert: int, projection: str, place: tuple[int, int]) -> InputError:
    """The sentence for a NaN or an infinity at (row, column) of a linear."""
    info = model.weight(layer, expert, projection).values
    shard = model.source.path(info)
    return InputError(
        f"{shard}: tensor {info.name} (layer {layer}, expert {expert}, {projection}_proj) holds a value that is not "
        f"finite at row {place[0]}, column {place[1]}; download the file again or ask its publisher."
    )


def sample(count: int) -> Sequence[int]:
    """Some of a layer's experts, evenly spread; all where they are few."""
    return range(count) if count <= SAMPLED else [i * count // SAMPLED for i in range(SAMPLED)]


def sampled_error(
    model: MoeModel, layer: int, start: int, stop: int, error: Callable[[int, str], dict[str, float]]
) -> dict[str, Any]:
    """error(expert, projection) of one expert of a unit: the quality figure of the report."""
    expert = start + layer % (stop - start)
    figures: dict[str, Any] = {"sampled_expert": expert}
    for projection in PROJECTIONS:
        figures[projection] = error(expert, projection)
    for info in model.expert_tensors(layer, expert):
        model.source.release(info)
    return figures


def error_figures(sums: npt.NDArray[np.float64]) -> dict[str, float]:
    """Figures from the sums of x*x, y*y, x*y and (x-y)^2; an all-zero source is matched exactly or not at all."""
    xx, yy, xy, dd = (float(v) for v in sums)
    relative = (dd / xx) ** 0.5 if xx else float(dd > 0)
    cosine = xy / (xx * yy) ** 0.5 if xx and yy else float(xx == yy)
    return {"relative_error": round(relative, 6), "cosine": round(cosine, 6)}
