"""The CPUs that this process may use, whatever its threads are bound to meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

# Of the first thread, when ktconvert is imported: what the process was started with (taskset, numactl, a cpuset).
_AT_IMPORT = frozenset(os.sched_getaffinity(os.getpid()))
# With one of these, GNU OpenMP (torch's) binds the thread that loads it to its first place.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


def own_cpus() -> frozenset[int]:
    """The CPUs of the first thread at import; if OpenMP had bound it before, also those of OpenMP's places."""
    return _AT_IMPORT | (_openmp_cpus() if any(map(os.environ.get, _BINDING)) else frozenset())


def use_own_cpus() -> None:
    """Let the calling thread run on all of own_cpus(); a thread starts with the CPUs of the one that started it."""
    with contextlib.suppress(OSError):  # best effort: a container may forbid it
        os.sched_setaffinity(0, own_cpus())


def _openmp_cpus() -> frozenset[int]:
    """The CPUs of the places of each GNU OpenMP library that is loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    cpus: set[int] = set()
    for path in {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}:
        with contextlib.suppress(OSError, AttributeError):
            gomp = ctypes.CDLL(path, os.RTLD_NOLOAD)
            for place in range(gomp.omp_get_num_places()):
                numbers = (ctypes.c_int * gomp.omp_get_place_num_procs(place))()
                gomp.omp_get_place_proc_ids(place, numbers)
                cpus.update(numbers)
    return frozenset(cpus)
