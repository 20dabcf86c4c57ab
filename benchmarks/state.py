"""Probes that show whether cores are quiet: they use registers, and run between timed calls. Standard library only."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

LIBRARY = "state.so"  # state.c, compiled
PROCESSOR = 36  # field of /proc/PID/stat after the name: the last CPU of a thread


def build(source: Path, folder: Path) -> Path:
    """Compile a C file for this machine. Raises RuntimeError without a C compiler."""
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
    """Probes the cores on which threads of this process run, all at the same time.

    library          state.c, compiled
    threads          thread ids
    caller_computes  whether the thread that calls probe() computes too

    Raises RuntimeError if the system starts no more threads.
    """

    def __init__(self, library: Path, threads: Sequence[int], *, caller_computes: bool) -> None:
        self._c = ctypes.CDLL(str(library))
        self._current_cpu = ctypes.CDLL(None).sched_getcpu
        self._c.state_cpu.restype = ctypes.c_double
        self._caller_computes = caller_computes
        self._caller_seconds = 0.0
        self._threads = [os.open(f"/proc/self/task/{thread}/stat", os.O_RDONLY) for thread in threads]
        if self._c.state_start(len(threads)) != 0:
            raise RuntimeError("the system starts no more threads to probe the cores with")

    def cores(self) -> list[int]:
        """Return a CPU for each thread, all different. The first is -1, the caller's CPU, if the caller computes."""
        last_cpus = [int(os.pread(stat, 1024, 0).rpartition(b")")[2].split()[PROCESSOR]) for stat in self._threads]
        return choose_cpus(
            self._current_cpu() if self._caller_computes else None, last_cpus, sorted(os.sched_getaffinity(0))
        )

    def probe(self) -> float:
        """Return the state of the busiest core: the smaller, the quieter.

        Takes 35 microseconds, or about 100 if a thread must wake.
        """
        start = time.thread_time()
        cores = self.cores()
        states = (ctypes.c_double * len(cores))()
        self._c.state_probe(len(cores), (ctypes.c_int * len(cores))(*cores), states)
        self._caller_seconds += time.thread_time() - start
        return max(states)

    def cpu(self) -> float:
        """Return the CPU seconds of all probes so far."""
        return self._caller_seconds + float(self._c.state_cpu())


def choose_cpus(caller_cpu: int | None, last_cpus: Sequence[int], allowed: Sequence[int]) -> list[int]:
    """Return different CPUs to probe for threads that last ran on `last_cpus`; -1 means the caller's CPU.

    If two threads ran on the same CPU, one of them must have slept, and a different allowed CPU takes its place.
    """
    chosen = [] if caller_cpu is None else [caller_cpu]
    for cpu in last_cpus:
        free = [cpu, *allowed]
        chosen += [candidate for candidate in free if candidate not in chosen][:1]
    return chosen if caller_cpu is None else [-1, *chosen[1:]]
