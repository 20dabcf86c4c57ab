"""The importance matrix of a conversion: opened when it is planned, held against the model, known by its sha256."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.statistics.folder import COUNTS, DOCUMENT, imatrix_of
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.pipeline.options.quantization import CpuOptions
from ktconvert.quantizers.choice import Quantizer


def importance_for(choice: Quantizer, options: CpuOptions, model: MoeModel) -> Imatrix | None:
    """The importance matrix that the options name, for a choice of codes that asks for one; None for others.

    Raises UsageError where one is named and not asked for, or the other way round; InputError for a file of another
    model, and for another one than that with which the conversion was begun.
    """
    path = options.importance.file
    if not choice.importance:
        if path is not None:
            raise UsageError(f"--imatrix and --statistics are for --scale imatrix, not {choice.name}; leave them out.")
        return None
    if path is None:
        raise UsageError(f"--scale {choice.name} needs the importance of inputs: --imatrix FILE or --statistics DIR.")
    opened = open_for(path, model)
    begun_with = options.imatrix_sha256
    if begun_with not in (None, opened.sha256):
        raise InputError(
            f"{path}: is not the file that this conversion was begun with (its sha256 is {opened.sha256[:12]}, and was "
            f"{begun_with[:12]}); put the old file back and resume."
        )
    return opened


def open_for(path: Path, model: MoeModel) -> Imatrix:
    """A file's importance matrix. Raises InputError for one that is damaged, or of another model."""
    shapes = {layer: model.shape(layer) for layer in model.layers}
    return imatrix_of(path, str(model.source.root), shapes, model.mtp_layers)


def files_of(imatrix: Imatrix | None, options: CpuOptions) -> tuple[Path, ...]:
    """The file of an importance matrix, and those next to it that describe it."""
    path = options.importance.file
    return () if imatrix is None or path is None else (path, *(path.with_name(name) for name in (DOCUMENT, COUNTS)))


def facts_of(imatrix: Imatrix | None, layers: Sequence[int]) -> dict[str, Any]:
    """`imatrix`, its sha256, and `without_counts`, the experts of these layers that have none (mse makes them)."""
    if imatrix is None:
        return {}
    unreached = {layer: imatrix.unreached(layer) for layer in layers}
    listed = [f"layer {layer}: {ranges(experts)}" for layer, experts in unreached.items() if experts]
    return {"imatrix": imatrix.sha256, **({"without_counts": listed} if listed else {})}


def notes_of(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Sentences for the plan."""
    listed = facts.get("without_counts")
    if not listed:
        return ()
    return (f"no token reached these experts, whose scales are those of --scale mse: {'; '.join(listed)}",)
