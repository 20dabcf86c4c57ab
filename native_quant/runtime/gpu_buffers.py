"""Experts in the order of checkpoints, for the buffers of SGLang's layerwise prefill on GPUs.

See docs/how-to/replace-kt-kernel.md. A GPU rank gets two weights, each with its scales: its rows of gate, then its rows
of up; its columns of down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ktconvert.layouts.outputs.slices import NumaSlice
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.methods import METHODS, RowLayout
from ktconvert.native_quant.runtime.pool import Job, check_error
from ktconvert.quantizers import panels

BUFFERS = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")
Addresses = Sequence[Sequence[int]]  # addresses of each rank's memory, for each of BUFFERS


def write(experts: KTExperts, expert: int, ranks: int, buffers: Addresses) -> Job:
    """Start to write an expert's weights, after all earlier jobs of its pool, and return the job.

    An expert that is not loaded is read from its file for this job only. Raises NotImplementedError for a method whose
    weights no GPU reads, ValueError for wrong arguments, InputError for files that cannot be read.
    """
    if experts._function.biases or not experts._function.gated:
        kind = "biases" if experts._function.biases else "no gate"
        remedy = "start SGLang without --kt-gpu-prefill-token-threshold"
        raise NotImplementedError(f"experts with {kind} cannot be written to the buffers of a GPU: {remedy}")
    layouts = experts._packed.methods["up"].row_layouts
    if not layouts:
        supported = ", ".join(sorted(method.name for method in METHODS.values() if method.row_layouts))
        problem = f"stores weights that no GPU kernel reads (supported: {supported})"
        remedy = "start SGLang without --kt-gpu-prefill-token-threshold"
        raise NotImplementedError(f"method={experts.method!r} {problem}: {remedy}")
    if not 0 <= expert < experts.num_experts:
        raise ValueError(f"expert_id is {expert}, and layer {experts.layer} has experts 0 to {experts.num_experts - 1}")
    multiple = max(panels.ROWS, *(layout.columns for layout in layouts))
    if ranks < 1 or experts.intermediate % (ranks * multiple):
        rule = f"must be a multiple of gpu_tp_count times {multiple} for {experts.method}"
        raise ValueError(f"gpu_tp_count is {ranks}, but the intermediate size, {experts.intermediate}, {rule}")
    roles = ("weight", "scale")[: len(layouts)]
    for name, addresses in zip(BUFFERS, buffers, strict=True):
        if name.split("_")[1] in roles and (len(addresses) != ranks or not all(address > 0 for address in addresses)):
            raise ValueError(f"{name}_ptrs must be an address for each of {ranks} ranks, not {list(addresses)}")
    packed = experts._packed
    arrays = packed.read_expert(experts._order[expert])
    rectangles: list[tuple[Any, ...]] = []
    for numa_slice, stored in arrays.items():
        for index, (layout, data) in enumerate(zip(layouts, stored, strict=True)):
            address = data.__array_interface__["data"][0]
            targets = buffers[2 + index if numa_slice.projection == "down" else index]
            rectangles += _make_rectangles(numa_slice, layout, address, targets, experts)
    items = ffi.new("ktq_rectangle[]", rectangles)
    pointer = ffi.new("ktq_job **")
    check_error(lib.ktq_copy_job_new(experts._pool.pointer, len(rectangles), items, pointer))
    job = Job(pointer[0], packed.check_reads, (experts._pool, packed, arrays, items))
    job.submit()
    return job


def _make_rectangles(
    numa_slice: NumaSlice, layout: RowLayout, source: int, targets: Sequence[int], experts: KTExperts
) -> Iterator[tuple[Any, ...]]:
    """Yield a ktq_rectangle for each rank that gets some of a slice's tensor.

    source: address of the tensor; targets: address of the buffer of each rank.
    """
    rank_width, slice_width = experts.intermediate // len(targets), experts.intermediate // experts.parts
    slice_start = numa_slice.node * slice_width
    for rank, target in enumerate(targets):
        first = max(slice_start, rank * rank_width)
        last = min(slice_start + slice_width, (rank + 1) * rank_width)
        if first >= last:
            continue
        start, rank_start = first - slice_start, first - rank * rank_width  # within the slice, and within the rank
        if numa_slice.projection == "down":
            row_stride = layout.item_count(rank_width) * layout.size
            destination = target + layout.item_index(rank_start) * layout.size
            row = 0
            column = start
            rows = numa_slice.n
            columns = last - first
        else:
            row_stride = layout.item_count(numa_slice.k) * layout.size
            rank_row = (numa_slice.projection == "up") * rank_width + rank_start
            destination = target + rank_row // layout.rows * row_stride
            row = start
            column = 0
            rows = last - first
            columns = numa_slice.k
        items = layout.item_count(columns) * (layout.size if layout.order == lib.KTQ_IN_ROWS else 1)
        address = source + layout.offset(row, column, numa_slice.k)
        pointers = ffi.cast("void *", address), ffi.cast("void *", destination)
        yield layout.order, rows // layout.rows, items, layout.stride(numa_slice.k), row_stride, *pointers
