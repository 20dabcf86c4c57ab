"""The threads that compute: groups of them, one per NUMA node, that work on one forward at a time.

A pool's threads spin for a few microseconds while they wait for work, then sleep; the caller of forward() works as one
of them. After fork() the child starts its own threads at its first forward. When Python exits, the threads of all pools
are stopped and joined.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Sequence
from typing import Any

from ktconvert.layouts.errors import ResourceError
from ktconvert.native_quant import machine
from ktconvert.native_quant._ktq import ffi, lib

_alive: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """`threads` threads (default: the physical cores that this process may use), spread over NUMA nodes.

    numa_nodes  the nodes, one group of threads each; a node that this machine lacks is a group that is not pinned.
                Default: every node with CPUs that this process may use.
    Raises ValueError for counts out of range, ResourceError where the system cannot start more threads.
    """

    # Kept here because at exit the module's globals may be cleared before the last pools are freed.
    _free = staticmethod(lib.ktq_pool_free)

    def __init__(self, threads: int | None = None, *, numa_nodes: Sequence[int] | None = None) -> None:
        cores = machine.core_cpus()
        nodes = tuple(cores) if numa_nodes is None else tuple(numa_nodes)
        if threads is None:
            threads = machine.physical_cores()
        if threads < 1 or not nodes:
            raise ValueError(f"a pool needs at least one thread and one NUMA node, not {threads} and {len(nodes)}")
        self.nodes = nodes[:threads]
        self.threads = threads
        counts = [threads // len(self.nodes) + (g < threads % len(self.nodes)) for g in range(len(self.nodes))]
        cpus = [cpu for node, count in zip(self.nodes, counts, strict=True) for cpu in _cpus(cores, node, count)]
        pool = ffi.new("ktq_pool **")
        error = lib.ktq_pool_new(len(counts), ffi.new("int[]", counts), ffi.new("int[]", cpus), pool)
        if error == lib.KTQ_EINVAL:
            raise ValueError(f"{threads} threads are more than a pool can have")
        if error != lib.KTQ_OK:
            raise no_threads()
        self.pointer: Any = pool[0]
        _alive.add(self)

    def close(self) -> None:
        """Finish the submitted jobs, then stop and join the threads; later forwards and jobs raise ValueError."""
        lib.ktq_pool_close(self.pointer)

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._free(self.pointer)


def no_threads() -> ResourceError:
    """The error for a system (ulimit -u or -v, a container's limit of processes) that starts no more threads."""
    return ResourceError(
        "the system starts no more threads for this process; ask for fewer, or raise its limits (ulimit -u, ulimit -v)."
    )


def _cpus(cores: dict[int, tuple[int, ...]], node: int, count: int) -> list[int]:
    """A CPU for each thread of a node's group; -1 (not pinned) with one node only, or fewer cores than threads."""
    own = cores.get(node, ())
    return list(own[:count]) if len(cores) > 1 and count <= len(own) else [-1] * count


@functools.cache
def shared_pool(threads: int | None = None, numa_nodes: tuple[int, ...] | None = None) -> Pool:
    """The pool of this process with these settings; the same settings give the same pool."""
    return Pool(threads, numa_nodes=numa_nodes)


def default_pool() -> Pool:
    """The pool of this process with the default settings."""
    return shared_pool()


@atexit.register
def _stop() -> None:
    for pool in list(_alive):
        pool.close()
