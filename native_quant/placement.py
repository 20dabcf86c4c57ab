"""Placement of memory on NUMA nodes: the memory policy of this process, and blocks on chosen nodes (mempolicy(7))."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ktconvert.native_quant import machine
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.arrays import Bytes
from ktconvert.native_quant.instruction_sets import raise_error

# The index is the number in linux/mempolicy.h.
MODES = ("default", "preferred", "bind", "interleave", "local", "preferred-many", "weighted-interleave")
PLACEMENT_DENIED = (
    "This process may not choose the NUMA nodes of its memory (mbind: {reason}; containers forbid it by default): "
    "some weights will be on the wrong node, and slower to read. Allow it with "
    "docker run --cap-add SYS_NICE, or with the capability SYS_NICE in Kubernetes."
)


class Policy(NamedTuple):
    """The memory policy of a thread: one of MODES, and its nodes."""

    mode: str
    nodes: frozenset[int]


def read_policy() -> Policy:
    """Return the memory policy of the calling thread, "default" if none is set. Raises OSError if denied."""
    mode, words = ffi.new("int *"), ffi.new("uint64_t[]", lib.KTQ_NODE_WORDS)
    _raise_system_error(lib.ktq_memory_policy(mode, words))
    number = mode[0] & 0xFF  # higher bits are flags
    nodes = frozenset(node for node in range(64 * len(words)) if words[node // 64] >> node % 64 & 1)
    return Policy(MODES[number] if number < len(MODES) else f"number {number}", nodes)


def place(block: Bytes, nodes: Sequence[int]) -> None:
    """Let new pages of a block be allocated on these nodes, in turn, while they have space. Raises OSError."""
    _raise_system_error(lib.ktq_place_memory(ffi.from_buffer(block), block.nbytes, len(nodes), list(nodes)))


def gather(block: Bytes, node: int) -> None:
    """Move a block's pages to this node, which frees page cache for them. Raises OSError."""
    _raise_system_error(lib.ktq_gather_memory(ffi.from_buffer(block), block.nbytes, node))


def explain_denial() -> str | None:
    """Return a message with the remedy if this process cannot place memory; None if it can."""
    try:
        read_policy()
        place(np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8), machine.memory_nodes()[:1])
    except OSError as error:
        return PLACEMENT_DENIED.format(reason=error.strerror)
    return None


def slice_nodes(index: int, count: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes for the memory of one of `count` NUMA slices: the nodes of the thread groups that begin with it.

    nodes: the pool's nodes. Slices are assigned to groups as in forward/moe.c.
    """
    groups = min(len(nodes), count)
    group_nodes = (node for group, node in enumerate(nodes) if group % groups == index % groups)
    return tuple(dict.fromkeys(map(machine.nearest_memory, group_nodes)))


def describe_shortages(slice_bytes: Sequence[int], nodes: Sequence[int], available: Mapping[int, int]) -> str:
    """Name the nodes that have less memory available than NUMA slices of these sizes (bytes) need there; "" if none.

    nodes      the pool's nodes
    available  result of machine.node_memory_available()
    On a machine with one node the result is always "".
    """
    needs: dict[int, float] = {}
    for index, size in enumerate(slice_bytes if len(available) > 1 else ()):
        owners = slice_nodes(index, len(slice_bytes), nodes)
        for owner in owners:
            needs[owner] = needs.get(owner, 0) + size / len(owners)
    return ", ".join(
        f"node {node} has {available[node] / 2**30:.2f} GiB left for {needed / 2**30:.2f} GiB"
        for node, needed in needs.items()
        if needed > available.get(node, needed)
    )


def _raise_system_error(result: int) -> None:
    if result == lib.KTQ_ESYSTEM:
        raise OSError(ffi.errno, os.strerror(ffi.errno))
    raise_error(result)
