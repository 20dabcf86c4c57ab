"""On which NUMA nodes memory lies: the memory policy of this process, and blocks placed on nodes (mempolicy(7))."""

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

# By number, as in linux/mempolicy.h.
MODES = ("default", "preferred", "bind", "interleave", "local", "preferred-many", "weighted-interleave")
REFUSED = (
    "This process may not choose the NUMA nodes of its memory (mbind: {reason}; containers forbid it by default): "
    "weights lie where they fall, and some are read from another node, which is slower. Allow it with "
    "docker run --cap-add SYS_NICE, or with the capability SYS_NICE in Kubernetes."
)


class Policy(NamedTuple):
    """The memory policy of a thread: one of MODES, and the nodes that it names."""

    mode: str
    nodes: frozenset[int]


def policy() -> Policy:
    """The memory policy of the calling thread, "default" if nobody set one. Raises OSError where the kernel refuses."""
    mode, words = ffi.new("int *"), ffi.new("uint64_t[]", lib.KTQ_NODE_WORDS)
    _require(lib.ktq_memory_policy(mode, words))
    number = mode[0] & 0xFF  # higher bits are flags that say how the nodes are counted
    nodes = frozenset(node for node in range(64 * len(words)) if words[node // 64] >> node % 64 & 1)
    return Policy(MODES[number] if number < len(MODES) else f"number {number}", nodes)


def place(block: Bytes, nodes: Sequence[int]) -> None:
    """Let pages that a block gets lie on a node, in turns on several, as far as these have space. Raises OSError."""
    _require(lib.ktq_place_memory(ffi.from_buffer(block), block.nbytes, len(nodes), list(nodes)))


def gather(block: Bytes, node: int) -> None:
    """Move a block's pages to this node, which takes memory back from its page cache for that. Raises OSError."""
    _require(lib.ktq_gather_memory(ffi.from_buffer(block), block.nbytes, node))


def refusal() -> str | None:
    """A sentence with the remedy if this process cannot place memory; None if it can."""
    try:
        policy()
        place(np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8), machine.memory_nodes()[:1])
    except OSError as error:
        return REFUSED.format(reason=error.strerror)
    return None


def nodes_of(part: int, parts: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """Where a part's memory belongs: the nodes of the pool's groups of threads that begin with it (forward/moe.c)."""
    groups = min(len(nodes), parts)
    mine = (node for group, node in enumerate(nodes) if group % groups == part % groups)
    return tuple(dict.fromkeys(map(machine.nearest_memory, mine)))


def shortages(part_bytes: Sequence[int], nodes: Sequence[int], left: Mapping[int, int]) -> str:
    """Which nodes have less memory left than parts of these sizes (bytes) need there, for people; "": none. nodes:
    those of a pool; left: machine.node_memory_available() at a time. Always "" on a machine with one node.
    """
    needs: dict[int, float] = {}
    for part, size in enumerate(part_bytes if len(left) > 1 else ()):
        homes = nodes_of(part, len(part_bytes), nodes)
        for home in homes:
            needs[home] = needs.get(home, 0) + size / len(homes)
    return ", ".join(
        f"node {node} has {left[node] / 2**30:.2f} GiB left for {needed / 2**30:.2f} GiB"
        for node, needed in needs.items()
        if needed > left.get(node, needed)
    )


def _require(result: int) -> None:
    if result == lib.KTQ_ESYSTEM:
        raise OSError(ffi.errno, os.strerror(ffi.errno))
    raise_error(result)
