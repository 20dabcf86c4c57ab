"""Tensors that are no routed experts, copied under kt-kernel's names, streamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ktconvert.layouts import merged, publish
from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.checkpoints.source import TensorInfo, TensorSource
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.shards import Entry, group_by_limit, plan_shard
from ktconvert.pipeline.graph import Result, Stage, Unit, Written
from ktconvert.pipeline.run import Context

NAME = "carry_over"
VERSION = 1
DEFAULT_SHARD = 5 * 10**9  # bytes; what transformers writes


@dataclass(frozen=True)
class Job:
    """The tensors of one shard, with their new names."""

    source: TensorSource
    tensors: tuple[tuple[str, TensorInfo], ...]
    metadata: Mapping[str, str]


def stage(model: MoeModel, max_shard_size: int | None, metadata: Mapping[str, str]) -> Stage:
    """The stage that copies everything but routed experts. Raises InputError where two tensors would get one name."""
    source = model.source
    taken = model.expert_tensor_names() | model.mtp_tensors
    renamed: dict[str, TensorInfo] = {}
    for name, info in source.tensors.items():
        if name in taken:
            continue
        key = merged.rename_non_expert(name)
        if key in renamed:
            raise InputError(
                f"{source.root}: tensors {renamed[key].name} and {name} would both be called {key}; use --non-experts skip."
            )
        renamed[key] = info
    tensors = list(renamed.items())
    shards = [(s.header_sha256, s.size, s.blob) for s in source.shards]
    units = []
    for number, (start, stop) in enumerate(
        group_by_limit([t.nbytes for _, t in tensors], max_shard_size or DEFAULT_SHARD)
    ):
        group = tuple(tensors[start:stop])
        nbytes = sum(t.nbytes for _, t in group)
        units.append(
            Unit(
                stage=NAME,
                key=f"{number:03d}",
                versions=(VERSION,),
                params=(("metadata", tuple(sorted(metadata.items()))), ("names", tuple(key for key, _ in group))),
                inputs=tuple((t.name, t.dtype, t.shape, shards[t.shard]) for _, t in group),
                final="",
                bytes_in=nbytes,
                bytes_out=nbytes,
                work=Job(source, group, metadata),
            )
        )
    return Stage(NAME, "copy tensors that are no routed experts", ("source",), tuple(units), write_shard)


def write_shard(unit: Unit, partial: Path, context: Context) -> Result:
    """One shard of copied tensors."""
    job: Job = unit.work
    plan = plan_shard([Entry(key, t.dtype, t.shape, t.nbytes) for key, t in job.tensors], job.metadata)
    with publish.DirectFile(partial, plan.size) as file:
        file.append(plan.header)
        for _, info in job.tensors:
            data = job.source.view(replace(info, dtype="U8", shape=(info.nbytes,)))
            for start in range(0, data.size, publish.STAGING_BYTES):
                file.append(np.ascontiguousarray(data[start : start + publish.STAGING_BYTES]))
            job.source.release(info)
            context.reporter.advance(info.nbytes)
        digest = file.close()
    return Result((Written("", plan.size, digest),), len(plan.entries))
