"""The threads that compute, in groups, one per NUMA node, on one forward at a time; and forwards in the background.

Threads spin for a few microseconds while they wait for work, then sleep; the caller of forward() works as one of them.
After fork() the child starts its own at its first forward. When Python exits, all threads are stopped and joined.
"""

from __future__ import annotations

import atexit
import functools
import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from ktconvert.layouts.errors import ResourceError
from ktconvert.native_quant import machine
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error

_alive: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """`threads` threads (default: the physical cores that this process may use), spread over NUMA nodes.

    threads     how many, spread by the nodes' cores; or how many of each node
    numa_nodes  the nodes, one group of threads each. Default: every node with CPUs that this process may use.
    Raises ValueError for counts and nodes that do not fit, ResourceError where the system starts no more threads.
    """

    # Kept here because at exit the module's globals may be cleared before the last pools are freed.
    _free = staticmethod(lib.ktq_pool_free)

    def __init__(self, threads: int | Sequence[int] | None = None, *, numa_nodes: Sequence[int] | None = None) -> None:
        nodes = machine.numa_nodes() if numa_nodes is None else checked_nodes(numa_nodes)
        count = machine.physical_cores() if threads is None else threads
        groups = layout(count, nodes, machine.node_cpus(), machine.core_cpus())
        sets = [cpus for group in groups for cpus in group]
        self.nodes, self.threads = nodes[: len(groups)], len(sets)
        pool = ffi.new("ktq_pool **")
        if lib.ktq_pool_new(len(groups), list(map(len, groups)), b"".join(map(_bits, sets)), pool) != lib.KTQ_OK:
            check(lib.KTQ_ESYSTEM)
        self.pointer: Any = pool[0]
        _alive.add(self)

    def close(self) -> None:
        """Finish the submitted jobs, then stop and join the threads; later forwards and jobs raise ValueError."""
        lib.ktq_pool_close(self.pointer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        return self  # whatever is copied shares its threads

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pool cannot be pickled: its threads belong to this process; make it there again")

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._free(self.pointer)


def checked_nodes(nodes: Sequence[int]) -> tuple[int, ...]:
    """The numbers of NUMA nodes. Raises ValueError unless each is there once and has CPUs that this process may use."""
    usable = machine.numa_nodes()
    try:
        numbers = tuple(map(operator.index, nodes))
    except TypeError:
        numbers = ()
    if not numbers or not set(numbers) <= set(usable) or len(set(numbers)) < len(numbers):
        these = f"numbers of NUMA nodes with CPUs that this process may use, each once: some of {list(usable)}"
        raise ValueError(f"numa_nodes must be {these}, not {nodes!r}")
    return numbers


def layout(
    threads: int | Sequence[int],
    nodes: Sequence[int],
    cpus: Mapping[int, Collection[int]],
    cores: Mapping[int, Sequence[int]],
) -> list[list[frozenset[int]]]:
    """The CPUs of each thread, by groups: one per node, or fewer if there are fewer threads.

    A thread has a core of its node for itself. Where the node has more threads than cores, or is the only one, it has
    all CPUs of the node. cpus, cores: machine.node_cpus and core_cpus. Raises ValueError for counts out of range.
    """
    if isinstance(threads, int):
        counts = _spread(threads, [len(cores.get(node, ())) or 1 for node in nodes[: max(0, threads)]])
    else:
        counts = list(threads)
        if len(counts) != len(nodes):
            raise ValueError(f"{len(counts)} counts of threads for {len(nodes)} NUMA nodes")
    if sum(counts) > lib.KTQ_POOL_THREADS:
        raise ValueError(f"{sum(counts)} threads are more than a pool can have, {lib.KTQ_POOL_THREADS}")
    if not counts or min(counts) < 1:
        raise ValueError(f"a pool needs at least one NUMA node and a thread for each, not {len(nodes)} and {threads}")
    all_cpus = frozenset[int]().union(*cpus.values())
    groups = []
    for node, count in zip(nodes, counts, strict=False):
        if len(cpus) > 1 and count <= len(cores.get(node, ())):
            groups.append([frozenset([cpu]) for cpu in cores[node][:count]])
        else:
            groups.append([frozenset(cpus.get(node, all_cpus))] * count)
    return groups


def _spread(threads: int, cores: Sequence[int]) -> list[int]:
    """How many of the threads work on each of the nodes with so many cores: one, and the others by the cores."""
    if threads > lib.KTQ_POOL_THREADS:
        return [threads]
    counts = [1] * len(cores)
    for _ in range(threads - len(cores)):
        emptiest = min(range(len(cores)), key=lambda node: counts[node] / cores[node])
        counts[emptiest] += 1
    return counts


def _bits(cpus: Collection[int]) -> bytes:
    """A set of CPUs as ktq_pool_new takes it."""
    return sum(1 << cpu for cpu in cpus if cpu < 8 * lib.KTQ_CPU_BYTES).to_bytes(lib.KTQ_CPU_BYTES, "little")


@functools.cache
def shared_pool(threads: int | None = None, numa_nodes: tuple[int, ...] | None = None) -> Pool:
    """The pool of this process with these settings; the same settings give the same pool."""
    return Pool(threads, numa_nodes=numa_nodes)


@atexit.register
def _stop() -> None:
    for pool in list(_alive):
        pool.close()


class Job:
    """A forward, or a copy, that runs in the background; its arrays must live until wait() has returned.

    require_whole  raises InputError where weights could not be read
    """

    # Kept here because at exit the module's globals may be cleared before the last jobs are freed.
    _free = staticmethod(lib.ktq_job_free)

    def __init__(self, pointer: Any, require_whole: Callable[[], None], keep: tuple[object, ...]) -> None:
        self.pointer, self._require_whole, self._keep = pointer, require_whole, keep

    def submit(self) -> None:
        """Queue it (again), after waiting for its last run. It keeps its experts alive, even if they are closed."""
        lib.ktq_job_submit(self.pointer)

    def wait(self) -> None:
        """Wait for it. Raises forward()'s errors, and RuntimeError in a child that was forked while it was pending."""
        lib.ktq_job_wait(self.pointer)
        check(lib.ktq_job_result(self.pointer))
        self._require_whole()

    def __del__(self) -> None:
        self._free(self.pointer)


def check(error: int) -> None:
    """raise_error, and ResourceError where the system starts no more threads."""
    if error == lib.KTQ_ESYSTEM:
        remedy = "ask for fewer, or raise its limits (ulimit -u, ulimit -v)"
        raise ResourceError(f"the system starts no more threads for this process; {remedy}.")
    raise_error(error)
