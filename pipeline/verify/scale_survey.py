"""The scales of an output by themselves: the median and the largest of each linear, and how they are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import scale_values
from ktconvert.layouts.outputs import PROJECTIONS, Format, legal
from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.parts import Place, part_shape
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.own_cpus import use_own_cpus
from ktconvert.pipeline.stages.ordered import in_order

STEPS = 16  # bins for each power of two
LOWEST = -150  # a power of two below every positive float32
BINS = STEPS * (128 - LOWEST)

Linear = tuple[int, int, str]  # layer, expert, projection
F32 = npt.NDArray[np.float32]


class LinearScales(NamedTuple):
    """The positive scales of one projection of one expert, in all its parts; numa and row: where the largest is, the
    first row of those that share it. NaN and -1 where there is no positive scale.
    """

    layer: int
    expert: int
    projection: str
    median: float
    largest: float
    numa: int
    row: int


@dataclass(frozen=True)
class Scales:
    """Those of all experts.

    linears    in the order of layers, experts and projections
    counts     projection -> how many positive scales lie in each bin: bin i begins at 2^(i / STEPS + LOWEST)
    zeros      how many scales are zero, others: negative, infinite or not a number
    """

    linears: list[LinearScales] = field(default_factory=list)
    counts: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    zeros: int = 0
    others: int = 0


def survey(output: Output, measure: Measure, threads: int) -> Scales | None:
    """The scales of every expert, one expert per thread in memory; None where the format has none, or is not known.

    Tensors of other sizes than they should have are left out. Raises VerificationError if the disk cannot be read.
    """
    fmt, numa = measure.fmt, measure.numa
    if fmt is None or fmt.encoding.scales is None:
        return None
    sound = {n for n, (_, h, i) in measure.shapes.items() if legal.illegal_reason(fmt, [(h, i)], numa) is None}
    linears: dict[Linear, list[tuple[Place, TensorInfo]]] = {}
    last = fmt.encoding.tensors(0, 0)[-1].name
    for (place, suffix), stored in output.tensors.items():
        if suffix == last and place.backward != fmt.forward and place.layer in sound:
            linears.setdefault((place.layer, place.expert, place.projection), []).append((place, stored))
    ordered = sorted(linears, key=lambda linear: (*linear[:2], PROJECTIONS.index(linear[2])))
    found, zeros, others = [], 0, 0
    counts = {projection: np.zeros(BINS, np.int64) for projection in PROJECTIONS}

    def one(linear: Linear, _slot: int) -> list[tuple[int, F32]]:
        return _read(output, fmt, measure, linears[linear])

    with ThreadPoolExecutor(threads, thread_name_prefix="scales", initializer=use_own_cpus) as pool:
        for linear, _, parts in in_order(pool, ordered, list(range(2 * threads)), one):
            if not parts:
                continue
            values = np.concatenate([scales.reshape(-1) for _, scales in parts])
            positive = values[np.isfinite(values) & (values > 0)]
            none = int((values == 0).sum())
            zeros, others = zeros + none, others + values.size - positive.size - none
            counts[linear[2]] += np.bincount(_bins(positive), minlength=BINS)
            n, _ = _part_shape(fmt, measure, linear)
            found.append(_linear(linear, positive, parts, n))
    return Scales(found, counts, zeros, others)


def _read(
    output: Output, fmt: Format, measure: Measure, stored: Sequence[tuple[Place, TensorInfo]]
) -> list[tuple[int, F32]]:
    """(NUMA part, float32 [rows, groups]) of a linear's parts."""
    parts = []
    for place, tensor in sorted(stored):
        n, k = _part_shape(fmt, measure, place[:3])
        wanted: TensorInfo = fmt.encoding.tensors(n, k)[-1]
        if tensor.nbytes == wanted.nbytes:
            parts.append((place.numa, scale_values(fmt.encoding, output.read(tensor), n, k)))
    return parts


def _part_shape(fmt: Format, measure: Measure, linear: Linear) -> tuple[int, int]:
    layer, _, projection = linear
    _, hidden, intermediate = measure.shapes[layer]
    n, k = part_shape(projection, hidden, intermediate, measure.numa)
    return (n, k) if fmt.forward else (k, n)


def _linear(linear: Linear, positive: F32, parts: Sequence[tuple[int, F32]], rows: int) -> LinearScales:
    if not positive.size:
        return LinearScales(*linear, np.nan, np.nan, -1, -1)
    largest = positive.max()
    numa, scales = next((numa, scales) for numa, scales in parts if (scales == largest).any())
    first = int(np.argmax((scales == largest).any(axis=1)))
    return LinearScales(*linear, float(np.median(positive)), float(largest), numa, first * (rows // len(scales)))


def _bins(positive: F32) -> npt.NDArray[np.int64]:
    return (STEPS * (np.log2(positive.astype(np.float64)) - LOWEST)).astype(np.int64)
