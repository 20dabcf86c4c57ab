"""Pools as on machines with several NUMA nodes, on any machine."""

from unittest import mock

from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime.pool import Pool


def grouped(threads: int, groups: int) -> Pool:
    """A pool with a group of threads for each of so many nodes, on all CPUs where there is no such node."""
    with mock.patch.object(machine, "numa_nodes", lambda: tuple(range(groups))):
        return Pool(threads, numa_nodes=range(groups))
