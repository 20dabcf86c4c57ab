"""Queries to the kernel about threads and pages of a process, and new processes in which the checks run."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.machine import parse_list

TESTS = Path(__file__).resolve().parents[1]
PAGE = os.sysconf("SC_PAGE_SIZE")
# Numbers of system calls of x86-64 that libc lacks, and a constant of <linux/mempolicy.h>.
SET_MEMPOLICY, MOVE_PAGES = 238, 279
MPOL_BIND = 2

libc = ctypes.CDLL(None, use_errno=True)


def count_pages(arrays: Iterable[npt.NDArray[Any]]) -> dict[int, int]:
    """Return node -> number of pages of these arrays; pages that were never touched do not count."""
    count: Counter[int] = Counter()
    for array in arrays:
        array.reshape(-1).view(np.uint8)[::PAGE].max()  # restores mappings that NUMA balancing has removed
        first, last = array.ctypes.data // PAGE, (array.ctypes.data + array.nbytes - 1) // PAGE
        pages = np.arange(first, last + 1, dtype=np.uint64) * np.uint64(PAGE)
        status = np.full(len(pages), -1, np.int32)
        addresses = (ctypes.c_void_p(x.ctypes.data) for x in (pages, status))
        if libc.syscall(MOVE_PAGES, 0, ctypes.c_ulong(len(pages)), next(addresses), None, next(addresses), 0):
            raise OSError(ctypes.get_errno(), "move_pages")
        count.update(int(node) for node in status[status >= 0])
    return dict(sorted(count.items()))


def count_pages_of_slices(experts: Any) -> list[dict[int, int]]:
    """Return count_pages of each NUMA slice of a KTExperts."""
    arrays: list[list[npt.NDArray[Any]]] = [[] for _ in range(experts.parts)]
    for numa_slice, pair in experts._packed.arrays.items():
        arrays[numa_slice.node] += pair
    return [count_pages(each) for each in arrays]


def allowed_cpus() -> dict[int, list[int]]:
    """Return thread number -> CPUs on which that thread of this process may run."""
    cpus_by_thread = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        line = next(line for line in status.splitlines() if line.startswith("Cpus_allowed_list:"))
        cpus_by_thread[int(task.name)] = sorted(parse_list(line.split()[1]))
    return cpus_by_thread


class NewThreads:
    """The threads that start after this object was made."""

    def __init__(self) -> None:
        self.before = set(allowed_cpus())

    def cpus(self) -> list[list[int]]:
        """Return the CPUs on which each of these threads may run."""
        return [cpus for thread, cpus in sorted(allowed_cpus().items()) if thread not in self.before]


def run(
    *command: object, cpus: Collection[int] = (), membind: Collection[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command on only these CPUs, with memory of only these nodes."""

    def restrict() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)
        mask = ctypes.c_ulong(sum(1 << node for node in membind))
        if membind and libc.syscall(SET_MEMPOLICY, MPOL_BIND, ctypes.byref(mask), 64):
            raise OSError(ctypes.get_errno(), "set_mempolicy")

    arguments, env = list(map(str, command)), {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(arguments, capture_output=True, text=True, timeout=600, env=env, preexec_fn=restrict)


PRELUDE = """
import json, os, sys, warnings
import numpy as np
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import Pool, get_shared_pool
from pathlib import Path
from numa.processes import *
rng = np.random.default_rng(0)
def pack(parts, pool=None, layer=0, width=1024, hidden=1024, experts=4):
    shapes = (experts, width, hidden), (experts, width, hidden), (experts, hidden, width)
    bits = [rng.integers(0x3C00, 0x3D00, shape, np.uint16) for shape in shapes]
    return KTExperts.from_bf16(*bits, method="AMXINT8", parts=parts, pool=pool, layer=layer)
def call(experts, tokens=8):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((tokens, experts.hidden)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ids = rng.integers(0, experts.num_experts, (tokens, 2))
    return x, ids, rng.random((tokens, 2)).astype(np.float32)
def report(**facts):
    print(json.dumps(facts))
"""


def run_program(code: str, **restrictions: Any) -> Any:
    """Run a Python program after PRELUDE, as `run` does; return the values that it passes to `report`, once."""
    result = run(sys.executable, "-W", "always", "-c", PRELUDE + textwrap.dedent(code), **restrictions)
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])
