"""Scales of floating-point formats, looked at before they are used: a few bytes of each weight."""

from __future__ import annotations

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs.output import AGAIN, Bytes, Output
from ktconvert.layouts.outputs.parts import Part
from ktconvert.layouts.outputs.strip_form import StripForm


def require_numbers(output: Output, form: StripForm, part: Part, stored: tuple[Bytes, ...]) -> None:
    """Raises InputError where a scale of a part is none that the form has."""
    for tensor, defect in list(zip(form.tensors(part.n, part.k), form.defects, strict=True))[1:]:
        if what := defect(stored, part.k):
            found = output.tensors[part.place, tensor.suffix]
            described = output.names.describe(part.place, tensor.suffix)
            raise InputError(f"{output.root / found.file}: {described}: {what}; {AGAIN}.")
