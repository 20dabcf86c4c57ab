"""Writing the experts of a unit, merged or loose, in file order: whatever makes them, and however many threads do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from ktconvert.layouts.encodings.encoding import Bytes, is_zero
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import DirectFile, aligned_buffer
from ktconvert.layouts.files.shards import ALIGNMENT, ShardPlan, group_by_limit, plan_shard
from ktconvert.layouts.outputs import PROJECTIONS, Format, loose
from ktconvert.layouts.outputs.format import expert_bytes
from ktconvert.layouts.outputs.parts import ExpertGrid, Item, Names, Packed, Part, Parts
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.pipeline.engine.threads import UNITS_AT_ONCE, in_order
from ktconvert.pipeline.engine.units import Context, Result, Unit, Written
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.stages.expert_stream import items

# First tensors of a shard that a thread makes and writes at a time, in bytes: handing small ones over one by one would
# take longer than packing them.
BATCH = 2 << 20


class Batch(NamedTuple):
    """Items whose first tensors lie side by side in a shard, `offset` bytes after its header."""

    items: tuple[Item, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ExpertsToWrite(ABC):
    """What a unit writes: experts [start, stop) of one layer in the parts of `grid`, and how they come about. metadata:
    of the shard.
    """

    fmt: Format
    grid: ExpertGrid
    start: int
    stop: int
    metadata: Mapping[str, str]

    @property
    def sampled(self) -> int:
        """The expert that is measured."""
        return self.start + self.grid.layer % (self.stop - self.start)

    @property
    @abstractmethod
    def names(self) -> Names: ...

    @abstractmethod
    def make(self, item: Item, place: Bytes | None = None) -> Parts:
        """All parts of a projection of an expert, in many threads; first tensors into `place`, one after another."""

    def coming(self) -> Iterator[Item]:
        """The items in file order; what they are made of may be prefetched meanwhile."""
        return items(self.start, self.stop)

    @abstractmethod
    def made(self, item: Item, reporter: Reporter) -> None:
        """An item was written: let go of what it was made of, and report progress."""

    @abstractmethod
    def scratch_bytes(self) -> tuple[int, int]:
        """The memory that making an item takes at most beside its tensors, and that measuring takes."""

    @abstractmethod
    def figures(self) -> dict[str, object]:
        """What is reported of the unit's numbers."""


Work = TypeVar("Work", bound=ExpertsToWrite)


def cuts(fmt: Format, grid: ExpertGrid, experts: int, limit: int | None) -> list[tuple[str, int, int, int]]:
    """The units of a layer, of at most `limit` bytes each: key, first expert, the one after the last, bytes."""
    each = expert_bytes(fmt.encoding, grid)
    found = group_by_limit([each] * experts, limit)
    return [
        (f"layer-{grid.layer:03d}" + (f"-{number:03d}" if len(found) > 1 else ""), start, stop, each * (stop - start))
        for number, (start, stop) in enumerate(found)
    ]


def plan_parts(fmt: Format, names: Names, parts: Iterable[Part], metadata: Mapping[str, str]) -> ShardPlan:
    """A shard of parts: all first tensors, then all second ones, and so on, so that each is aligned to its items."""
    by_part = [
        [
            TensorInfo(names.key(part.place, t.name), t.dtype, t.shape, t.nbytes)
            for t in fmt.encoding.tensors(part.n, part.k)
        ]
        for part in parts
    ]
    return plan_shard([entry for kind in zip(*by_part, strict=True) for entry in kind], metadata)


def append_others(file: DirectFile, others: Sequence[Packed]) -> None:
    """Write what comes after all first tensors; others: the tensors of each part less the first."""
    for kind in zip(*others, strict=True):
        file.append(np.concatenate(kind))


def write(unit: Unit[Work], partial: Path, context: Context) -> Result:
    """A shard, or a folder of loose files."""
    return (_write_folder if unit.folder else _write_shard)(unit, partial, context)


def _write_shard(unit: Unit[Work], partial: Path, context: Context) -> Result:
    """One safetensors shard: header, all first tensors straight from the packing threads, then the others."""
    work = unit.work
    plan = plan_parts(work.fmt, work.names, work.grid.all_parts(range(work.start, work.stop)), work.metadata)
    sizes = _first_bytes(work)
    in_pages = all(size % ALIGNMENT == 0 for size in sizes.values())
    others: list[Packed] = []
    with DirectFile(partial, plan.size) as file:
        file.append(plan.header)

        def make(batch: Batch, buffer: Bytes) -> Parts:
            packed, at = [], 0
            for expert, projection in batch.items:
                packed += _checked(work, (expert, projection), buffer[at:], context)
                at += sizes[projection]
            if in_pages:
                file.write_at(len(plan.header) + batch.offset, buffer[: batch.nbytes])
            return packed

        buffers = _buffers(context, _batch_bytes(sizes.values(), work.stop - work.start))
        for batch, buffer, packed in in_order(context.pool, _batches(work, sizes), buffers, make):
            (file.skip if in_pages else file.append)(buffer[: batch.nbytes])
            others += [tensors[1:] for _, tensors in packed]
            for item in batch.items:
                work.made(item, context.reporter)
        append_others(file, others)
        digest = file.close()
    return Result((Written("", plan.size, digest),), len(plan.entries), work.figures())


def _write_folder(unit: Unit[Work], partial: Path, context: Context) -> Result:
    """One folder of loose files, a file for each tensor, synced together."""
    work = unit.work
    make_folders(partial, work.grid.numa)

    def make(item: Item, buffer: Bytes) -> list[Written]:
        return [
            written
            for part, packed in _checked(work, item, buffer, context)
            for written in write_loose(work.fmt, part, packed, partial)
        ]

    files: list[Written] = []
    buffers = _buffers(context, max(_first_bytes(work).values()))
    for item, _, written in in_order(context.pool, work.coming(), buffers, make):
        files += written
        work.made(item, context.reporter)
    publish.sync_tree(partial)
    return Result(tuple(files), len(files), work.figures())


def make_folders(folder: Path, numa: int) -> None:
    """A layer's folder for loose files, with one for each NUMA part in it."""
    folder.mkdir()
    for node in range(numa):
        (folder / loose.numa_folder(node)).mkdir()


def write_loose(fmt: Format, part: Part, packed: Packed, folder: Path) -> Iterator[Written]:
    """Write the loose files of a part below its layer's folder; they are not synced."""
    for tensor, data in zip(fmt.encoding.tensors(part.n, part.k), packed, strict=True):
        name = fmt.loose_path(part, tensor)
        assert name is not None
        yield Written(name, data.size, publish.write_file(folder / name, data.data, sync=False))


def _checked(work: ExpertsToWrite, item: Item, buffer: Bytes, context: Context) -> Parts:
    """Make one item; warn where the result is all zeros."""
    packed = work.make(item, buffer)
    if all(is_zero(work.fmt.encoding, tensors, part.n, part.k) for part, tensors in packed):
        part, _ = packed[0]
        name = work.names.key(part.place, "").removesuffix(".")
        context.reporter.warn(f"{name} is all zeros in the source: its expert computes nothing")
    return packed


def peak_memory(units: Sequence[Unit[Work]], packing: int) -> int:
    """Bytes for so many batches under way, and for what waits for its turn in the shards in flight."""
    each = scratch = measured = waiting = 0
    for work in {(unit.work.grid, unit.work.stop - unit.work.start): unit.work for unit in units}.values():
        # Of each projection, the tensors after the first, which wait to be written.
        rest = [sum(sum(others) for _, *others in sizes) for sizes in _tensor_bytes(work).values()]
        count, (making, measuring) = work.stop - work.start, work.scratch_bytes()
        each = max(each, _batch_bytes(_first_bytes(work).values(), count) + max(rest))
        waiting, scratch, measured = max(waiting, sum(rest) * count), max(scratch, making), max(measured, measuring)
    return (packing + 2 * UNITS_AT_ONCE) * each + packing * scratch + UNITS_AT_ONCE * (measured + waiting)


def _tensor_bytes(work: ExpertsToWrite) -> dict[str, list[list[int]]]:
    """Projection -> for each of its parts, bytes of the tensors."""
    return {
        projection: [[t.nbytes for t in work.fmt.encoding.tensors(p.n, p.k)] for p in work.grid.parts(0, projection)]
        for projection in PROJECTIONS
    }


def _first_bytes(work: ExpertsToWrite) -> dict[str, int]:
    return {projection: sum(first for first, *_ in sizes) for projection, sizes in _tensor_bytes(work).items()}


def _batches(work: ExpertsToWrite, sizes: Mapping[str, int]) -> Iterator[Batch]:
    """The items in file order, as many at a time as fit into BATCH, or one."""
    coming, offset = work.coming(), 0
    nbytes = [sizes[projection] for _, projection in items(work.start, work.stop)]
    for start, stop in group_by_limit(nbytes, BATCH):
        batch = Batch(tuple(islice(coming, stop - start)), offset, sum(nbytes[start:stop]))
        offset += batch.nbytes
        yield batch


def _batch_bytes(sizes: Collection[int], experts: int) -> int:
    """The most that a batch holds, if the projections of each of so many experts have first tensors of these sizes."""
    return max(*sizes, min(BATCH, sum(sizes) * experts))


def _buffers(context: Context, size: int) -> list[Bytes]:
    return [aligned_buffer(size) for _ in range(context.window)]
