"""Loose .kt files, ours and kt-kernel's (including MOE_INT4 and MOE_INT8), copied unchanged into shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written

NAME = "merge_parts"
VERSION = 1
CHUNK = 4 << 20  # bytes read at a time


@dataclass(frozen=True)
class MergeWork:
    """The work of a unit: loose files, which become tensors of a shard.

    root      folder of the files
    files     the tensors, each with its name in the shard and its file below `root`
    metadata  metadata of the shard
    """

    root: Path
    files: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]


def make_stage(files: list[TensorInfo], max_tensors: int, metadata: Mapping[str, str], root: Path) -> Stage[MergeWork]:
    """Return the stage that packs these files, in this order, into shards of at most max_tensors tensors."""
    units = []
    for number, start in enumerate(range(0, len(files), max_tensors)):
        group = tuple(files[start : start + max_tensors])
        nbytes = sum(f.nbytes for f in group)
        units.append(
            Unit(
                stage=NAME,
                key=f"{number:04d}",
                versions=(VERSION,),
                params=(("metadata", tuple(sorted(metadata.items()))),),
                inputs=tuple((f.file, f.dtype, f.shape, f.nbytes) for f in group),
                files=frozenset(f.file for f in group),
                bytes_in=nbytes,
                bytes_out=nbytes,
                work=MergeWork(root, group, metadata),
            )
        )
    return Stage(NAME, "merge loose files into shards", tuple(units), write_shard)


def write_shard(unit: Unit[MergeWork], partial: Path, context: Context) -> Result:
    """Write one shard: weights first, each file streamed to its offset."""
    work = unit.work
    files = sorted(work.files, key=lambda f: not f.name.endswith(".weight"))
    plan = plan_shard([TensorInfo(f.name, f.dtype, f.shape, f.nbytes) for f in files], work.metadata)
    with DirectFile(partial, plan.size) as out:
        out.append(plan.header)
        for loose_file in files:
            path = work.root / loose_file.file
            remaining = loose_file.nbytes
            try:
                with path.open("rb") as source:
                    while remaining and (chunk := source.read(min(CHUNK, remaining))):
                        out.append(chunk)
                        remaining -= len(chunk)
            except FileNotFoundError as error:
                raise InputError(f"{path}: missing; restore it, and run the command again.") from error
            if remaining:
                raise InputError(
                    f"{path}: shrank while it was read; convert its layer again, and run the command again."
                )
            context.reporter.advance(loose_file.nbytes)
        digest = out.close()
    return Result((Written("", plan.size, digest),), len(plan.entries))
