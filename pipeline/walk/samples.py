"""The first unit of the chain: the tokens of all samples, and what they are embedded to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.rows import RowFile
from ktconvert.layouts.files.shards import Entry, plan_shard
from ktconvert.pipeline.engine.units import Context, Link, Result, Unit, Written
from ktconvert.pipeline.walk import layer as layerwise
from ktconvert.pipeline.walk.calibration import Calibration, token_ids
from ktconvert.pipeline.walk.layered import LayeredModel


def write_samples(
    unit: Unit[Any], partial: Path, context: Context, calibration: Calibration, lm: LayeredModel
) -> Result:
    """The tokens of all samples, and for the first layer what they are embedded to."""
    link: Link = context.chain  # type: ignore[assignment]
    known = link.store[unit.key]
    if known.exists():
        found = read_samples(known)
    else:
        found = token_ids(calibration, lm.tokenizer(), context.reporter.note)
        if len(found) < calibration.samples:
            context.reporter.note(f"{calibration.dataset}: {len(found)} samples, {calibration.samples} were asked for")
    lengths = np.array([len(ids) for ids in found], np.int64)
    ids = np.concatenate(found)
    plan = plan_shard(
        [Entry("input_ids", "I64", ids.shape, ids.nbytes), Entry("lengths", "I64", lengths.shape, lengths.nbytes)], {}
    )
    with publish.DirectFile(partial, plan.size) as file:
        for data in (plan.header, ids.view(np.uint8), lengths.view(np.uint8)):
            file.append(data)
        digest = file.close()
    _require_known_tokens(calibration, lm, ids)
    if link.leaves is not None:
        with RowFile(link.leaves, len(ids), lm.hidden, new=True) as leaving:
            start = 0
            for hidden in lm.embed(iter(found)):
                leaving.write(start, layerwise.bits(hidden))
                start += len(hidden)
            leaving.sync()
    return Result((Written("", plan.size, digest),), 2, {"samples": len(found), "calibration_tokens": len(ids)})


def _require_known_tokens(calibration: Calibration, lm: LayeredModel, ids: npt.NDArray[np.int64]) -> None:
    """Raise InputError for tokens that the model has no embedding for."""
    size = lm.model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= size:
        raise InputError(
            f"{lm.source.root}: its tokenizer gives token {int(ids.max())} for {calibration.dataset}, and the model has {size}; "
            "put the right tokenizer files beside config.json."
        )


def read_samples(path: Path) -> list[npt.NDArray[np.int64]]:
    """The samples that write_samples wrote, each int64 [T]. Raises InputError for a damaged file."""
    header = read_header(path)
    found = {e.name: np.fromfile(path, "<i8", e.nbytes // 8, offset=e.start) for e in header.entries}
    return np.split(found["input_ids"], np.cumsum(found["lengths"])[:-1])
