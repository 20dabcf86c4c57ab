"""Experts that are read equalized: which are, what is reported of them, and how their errors are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints.moe_model import MoeModel, equalize
from ktconvert.layouts.encodings.encoding import Bytes, Encoding, Rows
from ktconvert.layouts.outputs import Format
from ktconvert.layouts.outputs.parts import Part
from ktconvert.quantizers import Matrix
from ktconvert.quantizers.equalizing import Exponents
from ktconvert.quantizers.reference import F32

FACT = "equalized"  # of the manifest: which experts are; empty where none is, absent where it was not asked for


def equalized(model: MoeModel, fmt: Format) -> MoeModel:
    """The model as --equalize reads it: equalized in layers that are rounded to a format with scales of a row's own."""
    encodings = {layer: fmt.of_layer(layer).encoding for layer in model.layers}
    return equalize(model, (n for n, own in encodings.items() if own.pack is not None and not own.is_exact(model)))


def figures(model: MoeModel, layer: int, start: int, stop: int) -> dict[str, Any]:
    """Which of these experts are equalized, for the journal; nothing where it was not asked for."""
    if layer not in model.equalized:
        return {}
    return {"equalized_experts": [e for e in range(start, stop) if model.exponents(layer, e) is not None]}


def share_of(model: MoeModel, part: Part) -> Exponents | None:
    """The exponents of an equalized part, of each row of up or column of down; None where nothing is scaled."""
    whole = None if part.projection == "gate" else model.exponents(part.layer, part.expert)
    width = part.k if part.projection == "down" else part.n
    return None if whole is None else whole[part.first : part.first + width]


def undone(model: MoeModel, encoding: Encoding, part: Part) -> tuple[Encoding, Matrix]:
    """What the error of a part is measured between: its encoding, with the powers of two taken out of its numbers
    again, and the part as the checkpoint has it.
    """
    linear = part.of(model.stored(part.layer, part.expert, part.projection))
    exponents = share_of(model, part)
    if exponents is None:
        return encoding, linear

    def decode(stored: Sequence[Bytes], n: int, k: int, rows: Rows) -> F32:
        each = -exponents[rows, None] if part.projection == "up" else exponents
        values: F32 = np.ldexp(encoding.decode(stored, n, k, rows), each)
        return values

    return replace(encoding, decode=decode, error_sums=None), linear
