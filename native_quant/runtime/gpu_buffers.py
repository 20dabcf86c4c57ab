"""Experts in the order in which checkpoints store them, written to the buffers of SGLang's layerwise prefill on GPUs
(docs/how-to/replace-kt-kernel.md).

A GPU rank gets two weights, each with its scales: its rows of gate, then its rows of up; its columns of down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ktconvert.layouts.outputs.slices import NumaSlice
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.methods import METHODS, InRows
from ktconvert.native_quant.runtime.pool import Job, check_error
from ktconvert.quantizers import panels

BUFFERS = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")
Addresses = Sequence[Sequence[int]]  # of each of these, by rank: memory as large as what is written there


def write(experts: Experts, expert: int, ranks: int, buffers: Addresses) -> Job:
    """Starts to write what an expert computes with, after all earlier jobs of its pool; the job's wait() returns then.

    Raises NotImplementedError for a method whose weights no GPU reads, ValueError for arguments that do not fit.
    """
    in_rows = experts.packed.rows["gate"].in_rows
    if not in_rows:
        able = ", ".join(sorted(method.name for method in METHODS.values() if method.in_rows))
        why = f"holds weights as no GPU kernel reads them (those of {able} can be written)"
        remedy = "start SGLang without --kt-gpu-prefill-token-threshold"
        raise NotImplementedError(f"method={experts.method!r} {why}: {remedy}")
    if not 0 <= expert < experts.num_experts:
        raise ValueError(f"expert_id is {expert}, and layer {experts.layer} has experts 0 to {experts.num_experts - 1}")
    multiple = max(panels.ROWS, *(of.columns for of in in_rows))
    if ranks < 1 or experts.intermediate % (ranks * multiple):
        needed = f"must be a multiple of it times {multiple} for {experts.method}"
        raise ValueError(f"gpu_tp_count is {ranks}, but the intermediate size, {experts.intermediate}, {needed}")
    used = ("weight", "scale")[: len(in_rows)]
    for name, addresses in zip(BUFFERS, buffers, strict=True):
        if name.split("_")[1] in used and (len(addresses) != ranks or not all(address > 0 for address in addresses)):
            raise ValueError(f"{name}_ptrs must be an address for each of {ranks} ranks, not {list(addresses)}")
    packed = experts.packed
    rectangles = [
        rectangle
        for numa_slice, stored in packed.arrays.items()
        if numa_slice.expert == experts.order[expert]
        for at, (of, data) in enumerate(zip(in_rows, stored, strict=True))
        for rectangle in _of_slice(numa_slice, of, data.__array_interface__["data"][0], ranks, experts, buffers, at)
    ]
    items = ffi.new("ktq_rectangle[]", rectangles)
    job = ffi.new("ktq_job **")
    check_error(lib.ktq_copy_job_new(experts.pool.pointer, len(rectangles), items, job))
    started = Job(job[0], packed.check_reads, (experts.pool, packed, items))
    started.submit()
    return started


def _of_slice(
    numa_slice: NumaSlice, of: InRows, source: int, ranks: int, experts: Experts, buffers: Addresses, at: int
) -> Iterator[tuple[Any, ...]]:
    """A ktq_rectangle for what each rank gets of a slice's tensor. source: its address; at: its number in the slice."""
    width, share = experts.intermediate // ranks, experts.intermediate // experts.parts
    for rank in range(ranks):
        first = max(numa_slice.node * share, rank * width)
        last = min((numa_slice.node + 1) * share, (rank + 1) * width)
        if first >= last:
            continue
        skipped, written = first - numa_slice.node * share, first - rank * width
        if numa_slice.projection == "down":
            row_stride = of.items(width) * of.size
            to = buffers[2 + at][rank] + of.number(written) * of.size
            row, column, rows, columns = 0, skipped, numa_slice.n, last - first
        else:
            row_stride = of.items(numa_slice.k) * of.size
            to = buffers[at][rank] + ((numa_slice.projection == "up") * width + written) // of.rows * row_stride
            row, column, rows, columns = skipped, 0, last - first, numa_slice.k
        items = of.items(columns) * (of.size if of.order == lib.KTQ_IN_ROWS else 1)
        addresses = (ffi.cast("void *", address) for address in (source + of.offset(row, column, numa_slice.k), to))
        yield of.order, rows // of.rows, items, of.stride(numa_slice.k), row_stride, *addresses
