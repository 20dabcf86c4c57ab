"""What the kernel says about a process's threads and pages, and processes of their own to look at from the checks."""

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
# x86-64's numbers of the calls that libc lacks, and <linux/mempolicy.h>.
SET_MEMPOLICY, MOVE_PAGES = 238, 279
MPOL_BIND = 2

libc = ctypes.CDLL(None, use_errno=True)


def nodes_of(arrays: Iterable[npt.NDArray[Any]]) -> dict[int, int]:
    """Node -> number of pages that these arrays have there; pages that were never touched are left out."""
    count: Counter[int] = Counter()
    for array in arrays:
        array.reshape(-1).view(np.uint8)[::PAGE].max()  # where NUMA balancing took a page's mapping, it comes back
        first, last = array.ctypes.data // PAGE, (array.ctypes.data + array.nbytes - 1) // PAGE
        pages = np.arange(first, last + 1, dtype=np.uint64) * np.uint64(PAGE)
        status = np.full(len(pages), -1, np.int32)
        addresses = (ctypes.c_void_p(x.ctypes.data) for x in (pages, status))
        if libc.syscall(MOVE_PAGES, 0, ctypes.c_ulong(len(pages)), next(addresses), None, next(addresses), 0):
            raise OSError(ctypes.get_errno(), "move_pages")
        count.update(int(node) for node in status[status >= 0])
    return dict(sorted(count.items()))


def parts_of(experts: Any) -> list[dict[int, int]]:
    """nodes_of each NUMA slice of an Experts."""
    arrays: list[list[npt.NDArray[Any]]] = [[] for _ in range(experts.parts)]
    for part, pair in experts.packed.arrays.items():
        arrays[part.node] += pair
    return [nodes_of(each) for each in arrays]


def threads() -> dict[int, list[int]]:
    """The CPUs on which each thread of this process may run, by thread number."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        line = next(line for line in status.splitlines() if line.startswith("Cpus_allowed_list:"))
        found[int(task.name)] = sorted(parse_list(line.split()[1]))
    return found


class New:
    """The CPUs of the threads that are started after this was made."""

    def __init__(self) -> None:
        self.before = set(threads())

    def cpus(self) -> list[list[int]]:
        return [cpus for thread, cpus in sorted(threads().items()) if thread not in self.before]


def run(
    *command: object, cpus: Collection[int] = (), membind: Collection[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command on these CPUs only, with memory of these nodes only."""

    def begin() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)
        mask = ctypes.c_ulong(sum(1 << node for node in membind))
        if membind and libc.syscall(SET_MEMPOLICY, MPOL_BIND, ctypes.byref(mask), 64):
            raise OSError(ctypes.get_errno(), "set_mempolicy")

    words, env = list(map(str, command)), {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(words, capture_output=True, text=True, timeout=600, env=env, preexec_fn=begin)


PRELUDE = """
import json, os, sys, warnings
import numpy as np
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.pool import Pool, get_shared_pool
from pathlib import Path
from numa.see import *
rng = np.random.default_rng(0)
def pack(parts, pool=None, layer=0, width=1024, hidden=1024, experts=4):
    shapes = (experts, width, hidden), (experts, width, hidden), (experts, hidden, width)
    bits = [rng.integers(0x3C00, 0x3D00, shape, np.uint16) for shape in shapes]
    return Experts.from_bf16(*bits, method="AMXINT8", parts=parts, pool=pool, layer=layer)
def call(experts, tokens=8):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((tokens, experts.hidden)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ids = rng.integers(0, experts.num_experts, (tokens, 2))
    return x, ids, rng.random((tokens, 2)).astype(np.float32)
def say(**facts):
    print(json.dumps(facts))
"""


def seen_by(code: str, **how: Any) -> Any:
    """What a Python program says (`say(name=value)`, once), run as `run` does, with PRELUDE before it."""
    done = run(sys.executable, "-W", "always", "-c", PRELUDE + textwrap.dedent(code), **how)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])
