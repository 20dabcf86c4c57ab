"""Reading routed experts one after the other through memory maps: prefetched ahead of use, released after it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel, equalize
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings.encoding import Bytes, Encoding, Rows, error_sums
from ktconvert.layouts.outputs import PROJECTIONS, Format
from ktconvert.layouts.outputs.parts import Part
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.quantizers import Matrix
from ktconvert.quantizers.equalizing import Exponents
from ktconvert.quantizers.reference import F32

Thing = TypeVar("Thing")
FACT = "equalized"  # of the manifest: which experts are; empty where none is, absent where it was not asked for
READ_AHEAD = 64 << 20  # bytes of input that are prefetched
SAMPLED = 8  # experts per layer that stand for all of them


def items(start: int, stop: int) -> Iterator[tuple[int, str]]:
    """(expert, projection) of the experts start..stop-1, in file order."""
    return itertools.product(range(start, stop), PROJECTIONS)


def read_ahead(
    source: TensorSource, things: Iterable[Thing], reads: Callable[[Thing], Sequence[TensorInfo]]
) -> Iterator[Thing]:
    """The things, while what the next ones read is prefetched: on a cold cache the disk is never idle."""
    ahead: deque[tuple[Thing, int]] = deque()
    waiting = 0
    for thing in things:
        tensors = reads(thing)
        for info in tensors:
            source.prefetch(info)
        ahead.append((thing, sum(info.nbytes for info in tensors)))
        waiting += ahead[-1][1]
        while waiting > READ_AHEAD and len(ahead) > 1:
            done, nbytes = ahead.popleft()
            waiting -= nbytes
            yield done
    yield from (thing for thing, _ in ahead)


def taken(model: MoeModel, layer: int, item: tuple[int, str], reporter: Reporter) -> None:
    """Count an expert as read and release its mapped pages, once its last projection has been converted."""
    expert, projection = item
    if projection == PROJECTIONS[-1]:
        tensors = model.expert_tensors(layer, expert)
        for info in tensors:
            model.source.release(info)
        reporter.advance(sum(t.nbytes for t in tensors))


def sample(count: int) -> Sequence[int]:
    """Some of a layer's experts, evenly spread; all where they are few."""
    return range(count) if count <= SAMPLED else [i * count // SAMPLED for i in range(SAMPLED)]


def error_figures(sums: npt.NDArray[np.float64]) -> dict[str, float]:
    """Figures from the sums of x*x, y*y, x*y and (x-y)^2; an all-zero source is matched exactly or not at all."""
    xx, yy, xy, dd = (float(v) for v in sums)
    relative = (dd / xx) ** 0.5 if xx else float(dd > 0)
    cosine = xy / (xx * yy) ** 0.5 if xx and yy else float(xx == yy)
    return {"relative_error": round(relative, 6), "cosine": round(cosine, 6)}


# Experts that are read equalized: which are, what is reported of them, and how their errors are measured.
def equalized(model: MoeModel, fmt: Format) -> MoeModel:
    """The model as --equalize reads it: equalized in layers that are rounded to a format with scales of a row's own."""
    encodings = {layer: fmt.of_layer(layer).encoding for layer in model.layers}
    return equalize(model, (n for n, own in encodings.items() if own.pack is not None and not own.is_exact(model)))


def figures(model: MoeModel, layer: int, start: int, stop: int) -> dict[str, Any]:
    """Which of these experts are equalized, for the journal; nothing where it was not asked for."""
    if layer not in model.equalized:
        return {}
    return {"equalized_experts": [e for e in range(start, stop) if model.exponents(layer, e) is not None]}


def share_of(model: MoeModel, part: Part) -> Exponents | None:
    """The exponents of an equalized part, of each row of up or column of down; None where nothing is scaled."""
    whole = None if part.projection == "gate" else model.exponents(part.layer, part.expert)
    width = part.k if part.projection == "down" else part.n
    return None if whole is None else whole[part.first : part.first + width]


def error_of(model: MoeModel, encoding: Encoding, stored: Iterable[tuple[Part, Sequence[Bytes]]]) -> dict[str, float]:
    """error_figures of these parts of a linear, against the checkpoint."""
    return error_figures(sum((error_sums(*undone(model, encoding, p), made) for p, made in stored), np.zeros(4)))


def undone(model: MoeModel, encoding: Encoding, part: Part) -> tuple[Encoding, Matrix]:
    """The encoding, less an equalized part's powers of two, and the part as the checkpoint has it."""
    linear = part.of(model.stored(part.layer, part.expert, part.projection))
    if (exponents := share_of(model, part)) is None:
        return encoding, linear

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: Rows) -> F32:
        each = -exponents[rows, None] if part.projection == "up" else exponents
        values: F32 = np.ldexp(encoding.decode(stored, n, k, rows), each)
        return values

    return replace(encoding, decode=decode, error_sums=None), linear
