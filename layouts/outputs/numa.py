"""Which rows and columns of an expert belong to which NUMA part: pure arithmetic (FORMAT.md, section "The split").

H is the hidden size, I the intermediate size of an expert, T the number of parts. Every part is quantized and packed on its own, so T is
baked into the bytes of down_proj's scales.
"""

from __future__ import annotations

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs.layout import Layout
from ktconvert.quantizers import Matrix

COUNTS_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16)


def part_shape(projection: str, hidden: int, intermediate: int, parts: int) -> tuple[int, int]:
    """(n, k) of one part: gate and up are split by rows, down by columns."""
    width = intermediate // parts
    return (hidden, width) if projection == "down" else (width, hidden)


def take_part(linear: Matrix, projection: str, part: int, parts: int) -> Matrix:
    """Part number `part` of a whole linear; a view."""
    if projection == "down":
        width = linear.shape[1] // parts
        return linear.columns(part * width, (part + 1) * width)
    width = linear.shape[0] // parts
    return linear.rows(part * width, (part + 1) * width)


def illegal_reason(layout: Layout, hidden: int, intermediate: int, parts: int) -> str | None:
    """Why this layout cannot hold these sizes in so many parts, or None."""
    m = layout.multiple
    if parts < 1:
        return "the number of NUMA parts must be at least 1"
    if hidden % m:
        return f"the hidden size {hidden} is not a multiple of {m}"
    if intermediate % parts:
        return f"the intermediate size {intermediate} does not divide by {parts}"
    if (intermediate // parts) % m:
        return f"the intermediate size per part, {intermediate}/{parts} = {intermediate // parts}, is not a multiple of {m}"
    return None


def legal_counts(layout: Layout, hidden: int, intermediate: int) -> tuple[int, ...]:
    """The NUMA counts, of those that machines have, that this layout can hold."""
    return tuple(t for t in COUNTS_SHOWN if illegal_reason(layout, hidden, intermediate, t) is None)


def require_legal(layout: Layout, hidden: int, intermediate: int, parts: int, others: tuple[Layout, ...] = ()) -> None:
    """Raise UnsupportedError, naming what is legal for this model, unless `parts` is."""
    reason = illegal_reason(layout, hidden, intermediate, parts)
    if reason is None:
        return
    choices = []
    for candidate in (layout, *(o for o in others if o != layout)):
        counts = legal_counts(candidate, hidden, intermediate)
        listed = ", ".join(map(str, counts)) if counts else "no NUMA count"
        choices.append(f"{candidate.quantizer.name} ({candidate.name}) takes --threadpool-count {listed}")
    raise UnsupportedError(
        f"{layout.name} cannot hold this model in {parts} NUMA parts: {reason}. Legal here: {'; '.join(choices)}."
    )
