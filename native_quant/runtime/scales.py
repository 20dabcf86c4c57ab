"""Scales of a converted layer, looked at before they are used: a few bytes of each weight."""

from __future__ import annotations

from collections.abc import Sequence

from ktconvert.layouts.encodings.encoding import Bytes, Encoding
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs.output import AGAIN, Output
from ktconvert.layouts.outputs.parts import Part


def require_numbers(output: Output, encoding: Encoding, part: Part, stored: Sequence[Bytes]) -> None:
    """Raises InputError where a scale of a part is none that the encoding has."""

    def read(tensor: int, start: int = 0, stop: int | None = None) -> Bytes:
        return stored[tensor][start:stop]

    for tensor, defect in list(zip(encoding.tensors(part.n, part.k), encoding.defects, strict=True))[1:]:
        if defect is not None and (what := defect(read, part.n, part.k)):
            found = output.tensors[part.place, tensor.name]
            described = output.names.describe(part.place, tensor.name)
            raise InputError(f"{output.root / found.file}: {described}: {what}; {AGAIN}.")
