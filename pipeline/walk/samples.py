"""The first unit of the chain: the tokens of all samples, and their embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files.direct_file import DirectFile, RowFile
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.engine.units import Context, Link, Result, Written
from ktconvert.pipeline.walk import bf16
from ktconvert.pipeline.walk.calibration_data import Calibration, token_ids
from ktconvert.pipeline.walk.layered import LayeredModel


@dataclass(frozen=True)
class SamplesWork:
    """Which samples, torch's number of threads, and the model whose tokenizer and embedding they go through."""

    calibration: Calibration
    threads: int
    skeleton: Callable[[], LayeredModel]


def write_samples(key: str, work: SamplesWork, partial: Path, context: Context) -> Result:
    """Write the tokens of all samples, as the unit `key` of a chain, and for the first layer their embeddings."""
    link: Link = context.chain  # type: ignore[assignment]
    calibration, lm = work.calibration, work.skeleton()
    stored = link.store.get(key)
    if stored is not None and stored.exists():
        samples = read_samples(stored)
    else:
        samples = token_ids(calibration, lm.tokenizer(), context.reporter.note)
        if len(samples) < calibration.samples:
            context.reporter.note(
                f"{calibration.dataset}: {len(samples)} samples, {calibration.samples} were asked for"
            )
    lengths = np.array([len(ids) for ids in samples], np.int64)
    ids = np.concatenate(samples)
    plan = plan_shard(
        [
            TensorInfo("input_ids", "I64", ids.shape, ids.nbytes),
            TensorInfo("lengths", "I64", lengths.shape, lengths.nbytes),
        ],
        {},
    )
    with DirectFile(partial, plan.size) as file:
        for data in (plan.header, ids.view(np.uint8), lengths.view(np.uint8)):
            file.append(data)
        digest = file.close()
    _require_known_tokens(calibration, lm, ids)
    if link.handed_on is not None:
        with RowFile(link.handed_on, len(ids), lm.hidden, new=True) as leaving:
            start = 0
            for hidden in lm.embed(iter(samples)):
                leaving.write(start, bf16.to_bits(hidden))
                start += len(hidden)
            leaving.sync()
    return Result((Written("", plan.size, digest),), 2, {"samples": len(samples), "calibration_tokens": len(ids)})


def _require_known_tokens(calibration: Calibration, lm: LayeredModel, ids: npt.NDArray[np.int64]) -> None:
    """Raise InputError for tokens that the model has no embedding for."""
    size = lm.model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= size:
        raise InputError(
            f"{lm.source.root}: its tokenizer gives token {int(ids.max())} for {calibration.dataset}, and the model "
            f"has {size}; put the right tokenizer files beside config.json."
        )


def read_samples(path: Path) -> list[npt.NDArray[np.int64]]:
    """The samples that write_samples wrote, each int64 [T]. Raises InputError for a damaged file."""
    header = read_header(path)
    stored = {e.name: np.fromfile(path, "<i8", e.nbytes // 8, offset=e.start) for e in header.entries}
    return np.split(stored["input_ids"], np.cumsum(stored["lengths"])[:-1])
