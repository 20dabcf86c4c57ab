"""Scales of floating-point formats, looked at before they are used: a few bytes of each weight."""

from __future__ import annotations

import numpy as np

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs.form import Form
from ktconvert.layouts.outputs.output import AGAIN, Bytes, Output
from ktconvert.layouts.outputs.parts import Part

NO_NUMBER = {"F32": lambda scales: ~np.isfinite(scales.view("<f4")), "U8": lambda scales: scales == 255}  # by dtype


def require_numbers(output: Output, form: Form, part: Part, stored: tuple[Bytes, ...]) -> None:
    """Raises InputError where a scale of a part is infinite or NaN (E8M0: 255)."""
    for tensor, data in zip(form.tensors(part.n, part.k), stored, strict=True):
        if tensor.suffix == "scales" and NO_NUMBER[tensor.dtype](data).any():
            found = output.tensors[part.place, tensor.suffix]
            described = output.names.describe(part.place, tensor.suffix)
            raise InputError(f"{output.root / found.file}: {described}: one is not finite; {AGAIN}.")
