"""Reading and writing of a unit's experts in file order, into a shard or loose files, with many threads."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.encodings.encoding import Bytes, is_zero
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import DirectFile, allocate_aligned
from ktconvert.layouts.files.shards import ALIGNMENT, ShardPlan, group_by_limit, plan_shard
from ktconvert.layouts.outputs import Format, loose
from ktconvert.layouts.outputs.format import expert_bytes
from ktconvert.layouts.outputs.slices import LinearId, NumaSlice, PackedSlices, SliceTensors, Slicing, TensorNames
from ktconvert.layouts.sources.source import TensorSource
from ktconvert.layouts.tensors import PROJECTIONS, TensorInfo
from ktconvert.pipeline.engine.threads import UNITS_AT_ONCE, run_in_order
from ktconvert.pipeline.engine.units import Context, Result, Unit, Written
from ktconvert.pipeline.report.progress import Reporter

READ_AHEAD = 64 << 20  # bytes of input to prefetch
# Bytes of first tensors that a thread makes and writes at a time: passing small tensors to threads one at a time would
# take longer than packing them.
BATCH = 2 << 20
Item = TypeVar("Item")


def iterate_linears(slicing: Slicing, start: int, stop: int) -> Iterator[LinearId]:
    """Yield (expert, projection) of the experts start..stop-1, in file order."""
    return itertools.product(range(start, stop), slicing.projections)


def read_ahead(
    source: TensorSource, items: Iterable[Item], list_tensors: Callable[[Item], Sequence[TensorInfo]]
) -> Iterator[Item]:
    """Yield the items while the tensors of the next ones are prefetched, so that a disk with a cold cache is busy.

    list_tensors  returns the tensors of an item
    """
    prefetched: deque[tuple[Item, int]] = deque()
    prefetched_bytes = 0
    for item in items:
        tensors = list_tensors(item)
        for info in tensors:
            source.prefetch(info)
        item_bytes = sum(info.nbytes for info in tensors)
        prefetched.append((item, item_bytes))
        prefetched_bytes += item_bytes
        while prefetched_bytes > READ_AHEAD and len(prefetched) > 1:
            first, first_bytes = prefetched.popleft()
            prefetched_bytes -= first_bytes
            yield first
    yield from (item for item, _ in prefetched)


def release_expert(model: MoeModel, layer: int, item: LinearId, reporter: Reporter, *, is_kept: bool = False) -> None:
    """Report progress and release an expert's mapped pages, once its last projection has been converted.

    is_kept  do not release the pages
    """
    expert, projection = item
    if projection == PROJECTIONS[-1]:
        tensors = model.expert_tensors(layer, expert)
        for info in () if is_kept else tensors:
            model.source.release(info)
        reporter.advance(sum(t.nbytes for t in tensors))


class Batch(NamedTuple):
    """Items whose first tensors are adjacent in a shard, `offset` bytes after its header."""

    items: tuple[LinearId, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ExpertsToWrite(ABC):
    """The work of a unit: some experts of one layer.

    slicing   how the experts are cut
    start     the first expert
    stop      the expert after the last one
    metadata  metadata of the shard
    """

    fmt: Format
    slicing: Slicing
    start: int
    stop: int
    metadata: Mapping[str, str]

    @property
    def sampled_expert(self) -> int:
        """The expert whose error is measured."""
        return self.start + self.slicing.layer % (self.stop - self.start)

    @property
    @abstractmethod
    def names(self) -> TensorNames: ...

    @abstractmethod
    def make_linear(self, item: LinearId, buffer: Bytes | None = None) -> PackedSlices:
        """Make all slices of a projection of an expert; many threads call this.

        buffer  memory for the first tensor of each slice, one after another
        """

    def iterate_items(self) -> Iterator[LinearId]:
        """Yield the items in file order; may prefetch their inputs."""
        return iterate_linears(self.slicing, self.start, self.stop)

    @abstractmethod
    def finish_item(self, item: LinearId, reporter: Reporter) -> None:
        """Release the inputs of an item that has been written, and report progress."""

    @abstractmethod
    def scratch_bytes(self) -> tuple[int, int]:
        """Return upper bounds of the memory for making an item, beside its tensors, and for measuring."""

    @abstractmethod
    def measure_errors(self) -> dict[str, object]:
        """Return the figures of the unit for the report, such as errors of the sampled expert."""


Work = TypeVar("Work", bound=ExpertsToWrite)


def split_layer(fmt: Format, slicing: Slicing, experts: int, limit: int | None) -> list[tuple[str, int, int, int]]:
    """Split a layer into units of at most `limit` bytes: (key, first expert, expert after the last, bytes)."""
    nbytes = expert_bytes(fmt.encoding, slicing)
    groups = group_by_limit([nbytes] * experts, limit)
    parts = []
    for number, (start, stop) in enumerate(groups):
        suffix = f"-{number:03d}" if len(groups) > 1 else ""
        parts.append((f"layer-{slicing.layer:03d}{suffix}", start, stop, nbytes * (stop - start)))
    return parts


def plan_slices(fmt: Format, names: TensorNames, slices: Iterable[NumaSlice], metadata: Mapping[str, str]) -> ShardPlan:
    """Plan a shard of slices: all first tensors, then all second ones, and so on; so each is aligned to its items."""
    by_slice = [
        [
            TensorInfo(names.tensor_name(numa_slice.id, t.name), t.dtype, t.shape, t.nbytes)
            for t in fmt.encoding.tensors(numa_slice.n, numa_slice.k)
        ]
        for numa_slice in slices
    ]
    return plan_shard([entry for entries in zip(*by_slice, strict=True) for entry in entries], metadata)


def append_later_tensors(file: DirectFile, later_tensors: Sequence[SliceTensors]) -> None:
    """Write the tensors after all first ones.

    later_tensors  the tensors of each slice without the first
    """
    for tensors in zip(*later_tensors, strict=True):
        file.append(np.concatenate(tensors))


def write_experts_shard(unit: Unit[Work], partial: Path, context: Context) -> Result:
    """Write a safetensors shard: header, all first tensors straight from the packing threads, then the others."""
    work = unit.work
    plan = plan_slices(work.fmt, work.names, work.slicing.all_slices(range(work.start, work.stop)), work.metadata)
    sizes = _first_tensor_bytes(work)
    is_aligned = all(size % ALIGNMENT == 0 for size in sizes.values())
    later_tensors: list[SliceTensors] = []
    zeros: list[str] = []
    with DirectFile(partial, plan.size) as file:
        file.append(plan.header)

        def make_batch(batch: Batch, buffer: Bytes) -> PackedSlices:
            packed = []
            position = 0
            for expert, projection in batch.items:
                packed += _make_linear(work, (expert, projection), buffer[position:], zeros)
                position += sizes[projection]
            if is_aligned:
                file.write_at(len(plan.header) + batch.offset, buffer[: batch.nbytes])
            return packed

        buffers = _allocate_buffers(context, _batch_bytes(sizes.values(), work.stop - work.start))
        for batch, buffer, packed in run_in_order(context.pool, _iterate_batches(work, sizes), buffers, make_batch):
            if is_aligned:  # written by the thread, but not hashed yet
                file.skip(buffer[: batch.nbytes])
            else:
                file.append(buffer[: batch.nbytes])
            later_tensors += [tensors[1:] for _, tensors in packed]
            for item in batch.items:
                work.finish_item(item, context.reporter)
        append_later_tensors(file, later_tensors)
        digest = file.close()
    warn_of_zeros(zeros, context.reporter)
    return Result((Written("", plan.size, digest),), len(plan.entries), work.measure_errors())


def write_experts_folder(unit: Unit[Work], partial: Path, context: Context) -> Result:
    """Write a folder of loose files, one for each tensor, synced together."""
    work = unit.work
    make_folders(partial, work.slicing.numa)
    zeros: list[str] = []

    def make_files(item: LinearId, buffer: Bytes) -> list[Written]:
        return [
            written
            for numa_slice, packed in _make_linear(work, item, buffer, zeros)
            for written in write_loose_files(work.fmt, numa_slice, packed, partial)
        ]

    files: list[Written] = []
    buffers = _allocate_buffers(context, max(_first_tensor_bytes(work).values()))
    for item, _, written in run_in_order(context.pool, work.iterate_items(), buffers, make_files):
        files += written
        work.finish_item(item, context.reporter)
    publish.sync_tree(partial)
    warn_of_zeros(zeros, context.reporter)
    return Result(tuple(files), len(files), work.measure_errors())


def make_folders(folder: Path, numa: int) -> None:
    """Make a layer's folder for loose files, with a folder for each NUMA slice in it."""
    folder.mkdir()
    for node in range(numa):
        (folder / loose.numa_folder(node)).mkdir()


def write_loose_files(fmt: Format, numa_slice: NumaSlice, packed: SliceTensors, folder: Path) -> Iterator[Written]:
    """Write the loose files of a slice below its layer's folder, without syncing them."""
    for tensor, data in zip(fmt.encoding.tensors(numa_slice.n, numa_slice.k), packed, strict=True):
        name = fmt.loose_path(numa_slice, tensor)
        assert name is not None
        yield Written(name, data.size, publish.write_file(folder / name, data.data, sync=False))


def _make_linear(work: ExpertsToWrite, item: LinearId, buffer: Bytes, zeros: list[str]) -> PackedSlices:
    """Make a linear; add its name to `zeros` if it is all zeros."""
    packed = work.make_linear(item, buffer)
    if all(is_zero(work.fmt.encoding, tensors, numa_slice.n, numa_slice.k) for numa_slice, tensors in packed):
        numa_slice, _ = packed[0]
        linear = f"layer {numa_slice.id.layer}, expert {numa_slice.id.expert}, {numa_slice.id.projection}_proj"
        zeros.append(f"{linear} ({work.names.tensor_name(numa_slice.id, '').removesuffix('.')})")
    return packed


def warn_of_zeros(names: Collection[str], reporter: Reporter) -> None:
    """Warn of a unit's linears that are all zeros in the source, by name: the first one and their number."""
    if len(names) == 1:
        reporter.warn(f"{min(names)} is all zeros in the source: its expert computes nothing")
    elif names:
        linears = f"{len(names)} linears are all zeros in the source, such as {min(names)}"
        reporter.warn(f"{linears}: their experts compute nothing")


def peak_memory(units: Sequence[Unit[Work]], packing: int) -> int:
    """Return the bytes for `packing` batches in progress, and for tensors that wait in the shards in flight."""
    batch_bytes = making_bytes = measuring_bytes = waiting_bytes = 0
    for work in {(unit.work.slicing, unit.work.stop - unit.work.start): unit.work for unit in units}.values():
        experts = work.stop - work.start
        first_bytes = _first_tensor_bytes(work).values()
        # For each projection, the tensors after the first, which are written later.
        later_bytes = [sum(sum(later) for _, *later in sizes) for sizes in _tensor_bytes(work).values()]
        making, measuring = work.scratch_bytes()
        batch_bytes = max(batch_bytes, _batch_bytes(first_bytes, experts) + max(later_bytes))
        waiting_bytes = max(waiting_bytes, sum(later_bytes) * experts)
        making_bytes = max(making_bytes, making)
        measuring_bytes = max(measuring_bytes, measuring)
    batches = packing + 2 * UNITS_AT_ONCE
    return batches * batch_bytes + packing * making_bytes + UNITS_AT_ONCE * (measuring_bytes + waiting_bytes)


def _tensor_bytes(work: ExpertsToWrite) -> dict[str, list[list[int]]]:
    """Return for each projection, for each of its slices, the bytes of the tensors."""
    encoding = work.fmt.encoding
    return {
        projection: [
            [tensor.nbytes for tensor in encoding.tensors(numa_slice.n, numa_slice.k)]
            for numa_slice in work.slicing.slices(0, projection)
        ]
        for projection in work.slicing.projections
    }


def _first_tensor_bytes(work: ExpertsToWrite) -> dict[str, int]:
    return {projection: sum(first for first, *_ in sizes) for projection, sizes in _tensor_bytes(work).items()}


def _iterate_batches(work: ExpertsToWrite, sizes: Mapping[str, int]) -> Iterator[Batch]:
    """Yield the items in file order, as many at a time as fit into BATCH, or one."""
    items = work.iterate_items()
    offset = 0
    nbytes = [sizes[projection] for _, projection in iterate_linears(work.slicing, work.start, work.stop)]
    for start, stop in group_by_limit(nbytes, BATCH):
        batch = Batch(tuple(itertools.islice(items, stop - start)), offset, sum(nbytes[start:stop]))
        offset += batch.nbytes
        yield batch


def _batch_bytes(sizes: Collection[int], experts: int) -> int:
    """Return the bytes of the largest batch.

    sizes    bytes of an expert's first tensors, for each projection
    experts  number of experts of the unit
    """
    return max(*sizes, min(BATCH, sum(sizes) * experts))


def _allocate_buffers(context: Context, size: int) -> list[Bytes]:
    return [allocate_aligned(size) for _ in range(context.window)]
