"""Which forms can hold a model in how many parts, and the reason for those that cannot."""

from __future__ import annotations

from collections.abc import Iterable

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.outputs.form import Form

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # NUMA nodes that machines have


def illegal_reason(form: Form, shapes: Iterable[tuple[int, int]], parts: int) -> str | None:
    """Why a form cannot hold experts of these sizes (H, I) in this many parts: the first reason, None if it can."""
    reasons = (form.illegal_reason(hidden, intermediate, parts) for hidden, intermediate in dict.fromkeys(shapes))
    return next((reason for reason in reasons if reason is not None), None)


def legal_counts(form: Form, shapes: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The numbers of parts, of COUNTS, that a form can hold experts of all these sizes in."""
    shapes = tuple(shapes)
    return tuple(parts for parts in COUNTS if illegal_reason(form, shapes, parts) is None)


def require_legal(form: Form, hidden: int, intermediate: int, parts: int, others: Iterable[Form] = ()) -> None:
    """Raise UnsupportedError, naming what is legal for this model, unless `parts` is."""
    reason = form.illegal_reason(hidden, intermediate, parts)
    if reason is None:
        return
    choices = []
    for candidate in (form, *(other for other in others if other != form)):
        counts = legal_counts(candidate, [(hidden, intermediate)])
        listed = ", ".join(map(str, counts)) if counts else "no NUMA count"
        choices.append(f"{candidate.option} ({candidate.name}) takes --threadpool-count {listed}")
    raise UnsupportedError(
        f"{form.name} cannot hold this model in {parts} NUMA parts: {reason}. Legal here: {'; '.join(choices)}."
    )
