"""Loose .kt files, ours and kt-kernel's (MOE_INT4 and MOE_INT8, too), copied unchanged into safetensors shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files.direct_file import DirectFile
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.outputs import loose
from ktconvert.layouts.outputs.numa import NumaNames
from ktconvert.layouts.outputs.parts import Part
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.engine.units import Context, Result, Stage, Unit, Written

NAME = "merge_parts"
VERSION = 1
CHUNK = 4 << 20  # bytes read at a time


@dataclass(frozen=True)
class LooseFile:
    """One .kt file: its matrix, "weight" or "scale", where it is, its size in bytes and time of change."""

    part: Part
    what: str
    path: Path
    nbytes: int
    mtime_ns: int

    @property
    def entry(self) -> TensorInfo:
        tensor = loose.tensor(self.what, self.nbytes)
        return replace(tensor, name=NumaNames(tuple(loose.SUFFIXES)).key(self.part.place, tensor.name))


@dataclass(frozen=True)
class MergeWork:
    files: tuple[LooseFile, ...]
    metadata: Mapping[str, str]


def stage(files: list[LooseFile], max_tensors: int, metadata: Mapping[str, str], root: Path) -> Stage[MergeWork]:
    """The stage that packs these files, in this order, into shards of at most max_tensors tensors."""
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
                inputs=tuple(
                    (f.path.relative_to(root).as_posix(), f.entry.dtype, f.entry.shape, f.nbytes) for f in group
                ),
                files=frozenset(f.path.relative_to(root).as_posix() for f in group),
                bytes_in=nbytes,
                bytes_out=nbytes,
                work=MergeWork(group, metadata),
            )
        )
    return Stage(NAME, "loose files into safetensors", tuple(units), write_shard)


def write_shard(unit: Unit[MergeWork], partial: Path, context: Context) -> Result:
    """One shard: weights first, each file streamed into its place."""
    work = unit.work
    files = sorted(work.files, key=lambda f: f.what != "weight")
    plan = plan_shard([f.entry for f in files], work.metadata)
    with DirectFile(partial, plan.size) as out:
        out.append(plan.header)
        for loose_file in files:
            try:
                with loose_file.path.open("rb") as source:
                    rest = loose_file.nbytes
                    while rest and (chunk := source.read(min(CHUNK, rest))):
                        out.append(chunk)
                        rest -= len(chunk)
            except FileNotFoundError as error:
                raise InputError(f"{loose_file.path}: is gone; put it back and resume.") from error
            if rest:
                raise InputError(
                    f"{loose_file.path}: became shorter while it was read; convert its layer again and resume."
                )
            context.reporter.advance(loose_file.nbytes)
        digest = out.close()
    return Result((Written("", plan.size, digest),), len(plan.entries))
