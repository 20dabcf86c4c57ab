"""The statistics of inputs of a conversion: opened when it is planned, held against the model, known by a sha256."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import InputError, UsageError
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.statistics.folder import COUNTS, DOCUMENT, InputStatistics, imatrix_of, read_statistics
from ktconvert.layouts.statistics.imatrix import Imatrix
from ktconvert.layouts.statistics.second_moments import SecondMoments
from ktconvert.pipeline.options.quantization import CpuOptions
from ktconvert.quantizers.choice import Quantizer


def importance_for(choice: Quantizer, options: CpuOptions, model: MoeModel) -> InputStatistics | None:
    """The importance matrix that the options name, for a choice of codes that asks for one, or the second moments, for
    one that takes them; None where there are none. Raises UsageError where they are named and not asked for, or the
    other way round; InputError for those of another model, and for others than those with which the conversion was
    begun.
    """
    given = options.importance
    path = given.file
    if not choice.importance and path is not None and (given.imatrix is not None or not choice.moments):
        raise UsageError(f"--imatrix and --statistics are for --scale imatrix, not {choice.name}; leave them out.")
    if path is None:
        if choice.importance:
            raise UsageError(
                f"--scale {choice.name} needs the importance of inputs: --imatrix FILE or --statistics DIR."
            )
        return None
    opened = open_for(path, model) if choice.importance else moments_in(path.parent, model)
    begun_with = getattr(options, f"{opened.fact}_sha256")
    if begun_with not in (None, opened.sha256):
        raise InputError(
            f"{opened.path}: is not the file that this conversion was begun with (its sha256 is {opened.sha256[:12]}, "
            f"and was {begun_with[:12]}); put the old file back and resume."
        )
    return opened


def open_for(path: Path, model: MoeModel) -> Imatrix:
    """A file's importance matrix. Raises InputError for one that is damaged, or of another model."""
    return imatrix_of(path, str(model.source.root), _shapes(model), model.mtp_layers)


def moments_in(folder: Path, model: MoeModel) -> SecondMoments:
    """The second moments in a folder of statistics. InputError where there are none, or those of another model."""
    return read_statistics(folder).second_moments(str(model.source.root), _shapes(model))


def _shapes(model: MoeModel) -> dict[int, tuple[int, int, int]]:
    return {layer: model.shape(layer) for layer in model.layers}


def files_of(inputs: InputStatistics | None) -> tuple[Path, ...]:
    """The files of the statistics of inputs, and those next to them that describe them."""
    if inputs is None:
        return ()
    own = (file.path for file in inputs.layers.values()) if isinstance(inputs, SecondMoments) else (inputs.path,)
    return (*own, *(inputs.path.with_name(name) for name in (DOCUMENT, COUNTS)))


def facts_of(inputs: InputStatistics | None, layers: Sequence[int]) -> dict[str, Any]:
    """The sha256 of the statistics of inputs, and `without_counts`, the experts of these layers that have none."""
    if inputs is None:
        return {}
    unreached = {layer: inputs.unreached(layer) for layer in layers}
    listed = [f"layer {layer}: {ranges(experts)}" for layer, experts in unreached.items() if experts]
    return {inputs.fact: inputs.sha256, **({"without_counts": listed} if listed else {})}


def notes_of(facts: Mapping[str, Any]) -> tuple[str, ...]:
    if not (listed := facts.get("without_counts")):
        return ()
    return (f"no token reached these experts, whose scales are those of --scale mse: {'; '.join(listed)}",)
