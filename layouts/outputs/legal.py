"""Which formats can hold a model in how many parts, and the reason for those that cannot."""

from __future__ import annotations

from collections.abc import Iterable

from ktconvert.layouts.encodings.encoding import why_not_multiple
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs.format import Format

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # NUMA nodes that machines have


def illegal_reason(fmt: Format, shapes: Iterable[tuple[int, int]], parts: int) -> str | None:
    """Why a format cannot hold experts of these sizes (H, I) in this many parts: the first reason, None if it can."""
    multiple = fmt.encoding.multiple
    reasons = (why_not_multiple(multiple, h, i, parts) for h, i in dict.fromkeys(shapes))
    return next((reason for reason in reasons if reason is not None), None)


def legal_counts(fmt: Format, shapes: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The numbers of parts, of COUNTS, that a format can hold experts of all these sizes in."""
    shapes = tuple(shapes)
    return tuple(parts for parts in COUNTS if illegal_reason(fmt, shapes, parts) is None)


def require_legal(fmt: Format, hidden: int, intermediate: int, parts: int, others: Iterable[Format] = ()) -> None:
    """Raise UnsupportedError, naming what is legal for this model, unless `parts` is."""
    reason = illegal_reason(fmt, [(hidden, intermediate)], parts)
    if reason is None:
        return
    choices = []
    for candidate in (fmt, *(other for other in others if other != fmt)):
        counts = legal_counts(candidate, [(hidden, intermediate)])
        listed = ", ".join(map(str, counts)) if counts else "no NUMA count"
        choices.append(f"{candidate.option} ({candidate.name}) takes --threadpool-count {listed}")
    raise UnsupportedError(
        f"{fmt.name} cannot hold this model in {parts} NUMA parts: {reason}. Legal here: {'; '.join(choices)}."
    )
