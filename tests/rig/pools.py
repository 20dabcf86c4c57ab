"""Thread pools as on machines with several NUMA nodes."""

from unittest import mock

from ktconvert.native_quant import machine
from ktconvert.native_quant.runtime.pool import Pool


def make_grouped_pool(threads: int, groups: int) -> Pool:
    """Return a pool with one group of threads per node; groups of missing nodes use all CPUs."""
    with mock.patch.object(machine, "numa_nodes", lambda: tuple(range(groups))):
        return Pool(threads, numa_nodes=range(groups))
