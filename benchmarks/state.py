"""Whether the cores are quiet: probes on registers alone, between timed calls. Standard library only, for any venv."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

LIBRARY = "state.so"  # state.c, compiled
PROCESSOR = 36  # of /proc/PID/stat, counted after the name: the CPU that a thread is or was last on


def build(source: Path, folder: Path) -> Path:
    """Compile a C file for this machine. RuntimeError without a C compiler."""
    library = folder / f"{source.stem}.so"
    options = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread")
    command = [os.environ.get("CC", "cc"), *options, str(source), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"no C compiler {command[0]} for {source.name}: install one, or set CC") from None
    if done.returncode:
        raise RuntimeError(f"{source.name} was not compiled: {done.stderr[-500:]}")
    return library


class Detector:
    """Probes the cores that these threads of this process are on, all at the same time.

    library  state.c, compiled
    threads  thread ids
    own      whether the thread that calls probe() computes too
    RuntimeError if the system starts no more threads.
    """

    def __init__(self, library: Path, threads: Sequence[int], *, own: bool) -> None:
        self._c = ctypes.CDLL(str(library))
        self._here = ctypes.CDLL(None).sched_getcpu
        self._c.state_cpu.restype = ctypes.c_double
        self._own = own
        self._callers = 0.0
        self._threads = [os.open(f"/proc/self/task/{thread}/stat", os.O_RDONLY) for thread in threads]
        if self._c.state_start(len(threads)) != 0:
            raise RuntimeError("the system starts no more threads to probe the cores with")

    def cores(self) -> list[int]:
        """A CPU for each thread, all different; -1: the caller's own, first."""
        at = [int(os.pread(stat, 1024, 0).rpartition(b")")[2].split()[PROCESSOR]) for stat in self._threads]
        return different(self._here() if self._own else None, at, sorted(os.sched_getaffinity(0)))

    def probe(self) -> float:
        """The state of the busiest of the cores; the smaller, the quieter. Takes 35 microseconds, or about 100 where a
        thread has to wake for it.
        """
        begun = time.thread_time()
        cores = self.cores()
        states = (ctypes.c_double * len(cores))()
        self._c.state_probe(len(cores), (ctypes.c_int * len(cores))(*cores), states)
        self._callers += time.thread_time() - begun
        return max(states)

    def cpu(self) -> float:
        """CPU seconds that all probes took so far."""
        return self._callers + float(self._c.state_cpu())


def different(own: int | None, at: Sequence[int], allowed: Sequence[int]) -> list[int]:
    """The CPUs to probe for threads that were last seen at `at`; -1 for the caller's own.

    Where two were on the same one, of which one must have slept, another of the allowed takes its place, if there is.
    """
    taken = [] if own is None else [own]
    for cpu in at:
        free = [cpu, *allowed]
        taken += [one for one in free if one not in taken][:1]
    return taken if own is None else [-1, *taken[1:]]
