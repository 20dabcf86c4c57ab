"""Pools of threads that compute one forward at a time, in one group per NUMA node; and jobs in the background.

Threads spin for a few microseconds while they wait for work, then sleep; the caller of forward() works as one of them.
After fork() the child starts its own threads at its first forward. At exit, Python stops and joins all threads.
"""

from __future__ import annotations

import atexit
import functools
import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from ktconvert.layouts.errors import ArgumentError, ResourceError
from ktconvert.native_quant import machine
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.instruction_sets import raise_error

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """Threads on NUMA nodes.

    threads     total number, divided by the nodes' cores, or one number for each node. Default: the physical cores that
                this process may use.
    numa_nodes  the nodes, one group of threads each. Default: every node with CPUs that this process may use.
    Raises ArgumentError for inconsistent counts and nodes, ResourceError if the system starts no more threads.
    """

    # An attribute of the class because at exit globals of the module may be cleared before the last pools are freed.
    _free = staticmethod(lib.ktq_pool_free)

    def __init__(self, threads: int | Sequence[int] | None = None, *, numa_nodes: Sequence[int] | None = None) -> None:
        nodes = machine.numa_nodes() if numa_nodes is None else parse_nodes(numa_nodes)
        count = machine.physical_cores() if threads is None else threads
        groups = assign_cpus(count, nodes, machine.node_cpus(), machine.core_cpus())
        cpu_sets = [cpus for group in groups for cpus in group]
        self.nodes = nodes[: len(groups)]
        self.threads = len(cpu_sets)
        pool = ffi.new("ktq_pool **")
        bits = b"".join(map(_cpu_bits, cpu_sets))
        if lib.ktq_pool_new(len(groups), list(map(len, groups)), bits, pool) != lib.KTQ_OK:
            check_error(lib.KTQ_ESYSTEM)
        self.pointer: Any = pool[0]
        _pools.add(self)

    def close(self) -> None:
        """Finish the submitted jobs, then stop and join the threads; later forwards and jobs raise ValueError."""
        lib.ktq_pool_close(self.pointer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        return self  # copies of its users share the threads

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an object with threads cannot be pickled (pickle, torch.save, spawned processes): its threads and weights "
            "belong to this process; create it in the other process, and load its weights there"
        )

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._free(self.pointer)


def parse_nodes(nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of NUMA nodes as integers.

    Raises ArgumentError for duplicates, and for nodes without CPUs that this process may use.
    """
    usable = machine.numa_nodes()
    try:
        numbers = tuple(map(operator.index, nodes))
    except TypeError:
        numbers = ()
    if not numbers or not set(numbers) <= set(usable) or len(set(numbers)) < len(numbers):
        allowed = f"distinct NUMA nodes with CPUs that this process may use, from {list(usable)}"
        raise ArgumentError(f"numa_nodes must be {allowed}, not {nodes!r}")
    return numbers


def assign_cpus(
    threads: int | Sequence[int],
    nodes: Sequence[int],
    cpus: Mapping[int, Collection[int]],
    cores: Mapping[int, Sequence[int]],
) -> list[list[frozenset[int]]]:
    """Return the CPUs of each thread, by groups: one group per node, or fewer if there are fewer threads.

    A thread gets a core of its node for itself. If the node has more threads than cores, or is the only node, each
    thread gets all CPUs of the node. cpus, cores: results of machine.node_cpus and core_cpus. Raises ArgumentError for
    counts out of range.
    """
    if isinstance(threads, int):
        counts = _divide_threads(threads, [len(cores.get(node, ())) or 1 for node in nodes[: max(0, threads)]])
    else:
        counts = list(threads)
        if len(counts) != len(nodes):
            raise ArgumentError(f"{len(counts)} counts of threads for {len(nodes)} NUMA nodes")
    if sum(counts) > lib.KTQ_POOL_THREADS:
        raise ArgumentError(f"{sum(counts)} threads exceed the limit of a pool, {lib.KTQ_POOL_THREADS}")
    if not counts or min(counts) < 1:
        raise ArgumentError(f"a pool needs a NUMA node, and a thread for each node, not {len(nodes)} and {threads}")
    all_cpus = frozenset[int]().union(*cpus.values())
    groups = []
    for node, count in zip(nodes, counts, strict=False):
        if len(cpus) > 1 and count <= len(cores.get(node, ())):
            groups.append([frozenset([cpu]) for cpu in cores[node][:count]])
        else:
            groups.append([frozenset(cpus.get(node, all_cpus))] * count)
    return groups


def _divide_threads(threads: int, cores: Sequence[int]) -> list[int]:
    """Divide threads among nodes in proportion to their numbers of cores; each node gets at least one."""
    if threads > lib.KTQ_POOL_THREADS:
        return [threads]
    counts = [1] * len(cores)
    for _ in range(threads - len(cores)):
        least_loaded = min(range(len(cores)), key=lambda node: counts[node] / cores[node])
        counts[least_loaded] += 1
    return counts


def _cpu_bits(cpus: Collection[int]) -> bytes:
    """Encode a set of CPUs for ktq_pool_new."""
    return sum(1 << cpu for cpu in cpus if cpu < 8 * lib.KTQ_CPU_BYTES).to_bytes(lib.KTQ_CPU_BYTES, "little")


@functools.cache
def get_shared_pool(threads: int | None = None, numa_nodes: tuple[int, ...] | None = None) -> Pool:
    """Return the pool of this process with these settings; equal settings give the same pool."""
    return Pool(threads, numa_nodes=numa_nodes)


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close()


class Job:
    """A forward or a copy that runs in the background.

    pointer      the ktq_job
    check_reads  raises InputError if weights could not be read
    keep         objects that must live as long as the job; all arrays must live until wait() has returned
    """

    # Attributes of the class because at exit globals of the module may be cleared before the last jobs are freed.
    _free = staticmethod(lib.ktq_job_free)
    _join = staticmethod(lib.ktq_job_wait)

    def __init__(self, pointer: Any, check_reads: Callable[[], None], keep: tuple[object, ...]) -> None:
        self.pointer, self._check_reads, self._keep = pointer, check_reads, keep

    def submit(self) -> None:
        """Queue the job, after its previous run has ended. The job keeps its experts alive, even if they are closed."""
        lib.ktq_job_submit(self.pointer)

    def wait(self) -> None:
        """Wait for the job. Raises forward()'s errors, and RuntimeError in a child forked while it was pending."""
        self.join()
        check_error(lib.ktq_job_result(self.pointer))
        self._check_reads()

    def join(self) -> None:
        """Wait for the job, whatever its result."""
        self._join(self.pointer)

    def __del__(self) -> None:
        self._free(self.pointer)


def check_error(error: int) -> None:
    """Raise the error of a code as raise_error does, but ResourceError if the system starts no more threads."""
    if error == lib.KTQ_ESYSTEM:
        remedy = "ask for fewer, or raise its limits (ulimit -u, ulimit -v)"
        raise ResourceError(f"the system starts no more threads for this process; {remedy}.")
    raise_error(error)
