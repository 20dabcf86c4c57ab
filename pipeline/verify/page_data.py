"""What the page of `ktconvert verify` shows beyond the checks: worst rows, scales, use of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.measuring import Measure
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.statistics.counts import FILE
from ktconvert.layouts.statistics.folder import counts_of
from ktconvert.layouts.statistics.imatrix import I64
from ktconvert.pipeline.verify.checks import ProjectionErrors, worst
from ktconvert.pipeline.verify.scale_survey import Scales, survey
from ktconvert.pipeline.verify.structure import MOST_EXPERTS
from ktconvert.pipeline.verify.worst_rows import WorstRow, worst_rows

LINEARS = 12  # whose rows are looked at


@dataclass(frozen=True)
class Figures:
    """rows: of the linears with the largest errors, if errors were measured. scales: None where there are none. counts:
    int64 [decoder layers, experts], None where no statistics were given.
    """

    rows: tuple[WorstRow, ...] = ()
    scales: Scales | None = None
    counts: I64 | None = None


def figures(
    output: Output,
    measure: Measure,
    model: MoeModel | None,
    errors: Sequence[ProjectionErrors],
    counts: I64 | None,
    threads: int,
) -> Figures:
    """All of it, of an output whose weight files are whole. Raises VerificationError if the disk cannot be read."""
    rows = () if model is None else tuple(worst_rows(output, measure, model, worst(errors, LINEARS)))
    return Figures(rows, survey(output, measure, threads), counts)


def counts_for(folder: Path, measure: Measure, output: Output) -> I64 | None:
    """How often each expert was routed to, int64 [decoder layers, experts], from a folder of statistics. None where it
    has only the importance matrix that the output was made with.

    Raises InputError where they are damaged or of another model, UsageError for an output without layers of experts.
    """
    root = output.root
    if not measure.shapes:
        raise UsageError(f"--statistics {folder}: {root} has no layers of experts; leave it out.")
    path = folder / FILE
    if "imatrix" in output.facts and not path.exists():
        return None
    counts = counts_of(folder)
    layers, experts = counts.shape
    known = {shape[0] for layer, shape in measure.shapes.items() if layer < layers and counts[layer].any()}
    if known != {experts} or experts > MOST_EXPERTS:
        here = ranges(sorted({shape[0] for shape in measure.shapes.values()}))
        raise InputError(
            f"{path}: has counts of {experts} experts in {layers} layers, and {root} has {here} experts in layers "
            f"{ranges(sorted(measure.shapes))}; give the statistics of this model."
        )
    return counts
