"""Memory for packed weights: huge pages, a block for each NUMA part, on the node whose threads compute with it."""

from __future__ import annotations

import functools
import mmap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from ktconvert.layouts.outputs.parts import Part
from ktconvert.native_quant import machine, placement
from ktconvert.native_quant.arrays import Bytes

HUGE_PAGE = 2 << 20
ALIGNMENT = 64  # a cache line, at which the kernels read fastest


def memory_available() -> int:
    """The memory that this process can fill now (bytes): that of some nodes only where a policy or a cpuset says so."""
    by_node, total = machine.node_memory_available(), machine.memory_available()
    nodes = by_node.keys() & machine.memory_nodes()
    with suppress(OSError):
        policy = placement.policy()
        if policy.mode == "bind":
            nodes &= policy.nodes
    return total if nodes == by_node.keys() else min(total, sum(by_node[node] for node in nodes))


def binds_memory() -> bool:
    """Whether blocks are placed: several nodes, no policy of the user, and the kernel permits it (or a warning)."""
    if len(machine.memory_nodes()) < 2:
        return False
    if refusal := placement.refusal():
        _warn_once(refusal)
    return not refusal and placement.policy().mode == "default"


def warn_of_shortages(where: str, part_bytes: Sequence[int], nodes: Sequence[int], left: Mapping[int, int]) -> None:
    """A warning, once, if blocks will be placed and the pool's nodes have less left than their parts will take."""
    if (shortages := placement.shortages(part_bytes, nodes, left)) and binds_memory():
        _warn_once(
            f"{where}: not all of it fits the NUMA nodes of its threads ({shortages}): the rest lies on other nodes "
            "and is read more slowly. Free memory there, or convert with another --threadpool-count."
        )


@contextmanager
def blocks(
    sizes: Mapping[tuple[Part, str], int], parts: int, nodes: Sequence[int]
) -> Iterator[dict[tuple[Part, str], Bytes]]:
    """Memory for tensors of these sizes (bytes), to be filled inside the context. nodes: those of the pool that will
    compute; if memory is placed, each part's block ends on the nodes of its threads, as far as these have space.
    """
    is_placed, views = binds_memory(), dict[tuple[Part, str], Bytes]()
    on_one_node: list[tuple[Bytes, int]] = []
    for part in range(parts):
        mine = {key: size for key, size in sizes.items() if key[0].numa == part}
        block = _huge_pages(sum(map(_aligned, mine.values())))
        if is_placed:
            homes = placement.nodes_of(part, parts, nodes)
            placement.place(block, homes)
            if len(homes) == 1:
                on_one_node.append((block, homes[0]))
        start = 0
        for key, size in mine.items():
            views[key] = block[start : start + size]
            start += _aligned(size)
    yield views
    for block, node in on_one_node:
        if machine.node_memory_available().get(node, 0) > block.nbytes:
            with suppress(OSError):  # some pages cannot be moved
                placement.gather(block, node)


def _huge_pages(size: int) -> Bytes:
    """`size` bytes that begin on the boundary of a huge page."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + size]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
