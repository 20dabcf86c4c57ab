"""The rows of a linear that lie farthest from their source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.pipeline.verify.checks import LinearError
from ktconvert.quantizers import fp8
from ktconvert.quantizers.errors import source_values

CHUNK = 64  # rows in memory as float64 at a time


class WorstRow(NamedTuple):
    """A linear, and of its rows in each NUMA part the one with the largest ||x-y||/||x||."""

    linear: LinearError
    numa: int
    row: int
    relative_error: float


def worst_rows(output: Output, measure: Measure, model: MoeModel, linears: Iterable[LinearError]) -> list[WorstRow]:
    """For each of these linears; its parts are in memory one at a time, as float32.

    Tensors that are missing or have other sizes are left out. Raises VerificationError if the disk cannot be read.
    """
    assert measure.fmt is not None
    fmt = measure.fmt.configured(output.facts)
    source = (
        fp8.source_values if fmt.encoding.is_exact(model) else source_values
    )  # BF16 would round codes that are kept
    rows = []
    for linear in linears:
        _, hidden, intermediate = measure.shapes[linear.layer]
        grid = ExpertGrid(linear.layer, hidden, intermediate, measure.numa, measure.backward, fmt.forward)
        whole = model.linear(linear.layer, linear.expert, linear.projection)
        worst: WorstRow | None = None
        for part in grid.parts(linear.expert, linear.projection):
            tensors = fmt.encoding.tensors(part.n, part.k)
            here = [output.tensors.get((part.place, tensor.name)) for tensor in tensors]
            stored = [
                output.read(s) for s, tensor in zip(here, tensors, strict=True) if s and s.nbytes == tensor.nbytes
            ]
            if not grid.is_measured(part) or len(stored) != len(tensors):
                continue
            values, matrix = fmt.encoding.decode(stored, part.n, part.k, slice(None)), part.of(whole, measure.numa)
            for start in range(0, part.n, CHUNK):
                chunk = slice(start, min(start + CHUNK, part.n))
                errors = _relative(source(matrix.rows(chunk.start, chunk.stop)), values[chunk])
                row = int(np.argmax(errors))
                if worst is None or errors[row] > worst.relative_error:
                    worst = WorstRow(linear, part.numa, start + row, float(errors[row]))
        rows += [] if worst is None else [worst]
    return rows


def _relative(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Each row's ||x-y||/||x||: float64 [rows]; of a row of zeros 0 or 1, as of linears."""
    wide = x.astype(np.float64)
    norm, away = (np.sqrt(np.square(values).sum(axis=1)) for values in (wide, wide - y))
    errors: npt.NDArray[np.float64] = np.divide(away, norm, out=(away > 0).astype(np.float64), where=norm > 0)
    return errors
