"""The numbers of an output by themselves: scales and codes that no finite weight can give."""

from __future__ import annotations

from collections.abc import Iterator

from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.outputs import Form
from ktconvert.layouts.outputs.measuring import forms_of_names
from ktconvert.layouts.outputs.output import Output
from ktconvert.pipeline.verify.checks import Check

NOTES = 5  # that are passed on


def check_numbers(output: Output, form: Form | None) -> Check:
    """Every part's numbers, as its form sees them; without one, as those that name their tensors so do."""
    form = form or forms_of_names(output)[0]
    name, holds = form.numbers
    notes: list[str] = []
    try:
        problems = tuple(_wrong(output, form, notes))
    except VerificationError as error:
        problems = (str(error),)
    return Check(name, holds, problems, tuple(notes[:NOTES]))


def _wrong(output: Output, form: Form, notes: list[str]) -> Iterator[str]:
    dtypes = {tensor.suffix: tensor.dtype for tensor in form.tensors(0, 0)}
    for place in dict.fromkeys(place for place, _ in output.tensors):
        stored = {suffix: output.tensors.get((place, suffix)) for suffix in dtypes}
        if all(tensor is not None and tensor.dtype == dtypes[suffix] for suffix, tensor in stored.items()):
            yield from form.check_numbers(output, place, notes)
