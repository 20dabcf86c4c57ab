"""Ceilings of this machine, measured in the same run: bytes read from memory and INT8 operations, per second."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from state import build

from ktconvert.native_quant.runtime.benchmark import STREAMS, read_memory

MIB = 1 << 20
TURN = 64 * MIB  # bytes that one thread reads at a time
OPERATIONS = 4 * 10**9  # approximate number per thread and turn
TURNS = 8


class Ceilings:
    """Measures with a number of threads; builds its C code in `scratch`.

    Raises RuntimeError without a C compiler.
    """

    def __init__(self, scratch: Path, threads: int) -> None:
        self._c = ctypes.CDLL(str(build(Path(__file__).with_name("ceilings.c"), scratch)))
        self.threads = threads
        turns = max(8, 3 * l3_bytes() // TURN)
        self._areas = [np.ones((turns, TURN), np.uint8) for _ in range(threads)]
        self._turn = 0
        self._amx = hasattr(self._c, "amx_int8") and self._c.amx_permit() == 0

    def read(self) -> dict[str, float]:
        """Return the bytes per second that all threads read of uncached memory, by the streams of each thread.

        "cpu" is the largest rate per CPU second.
        """
        rates = {"cpu": 0.0}
        for streams in STREAMS:
            slices = [area[self._turn % len(area)] for area in self._areas]
            self._turn += 1
            wall, cpu = self._run_together(lambda part, streams=streams: read_memory(part, streams), slices)
            rates[str(streams)] = self.threads * TURN / wall
            rates["cpu"] = max(rates["cpu"], self.threads * TURN / cpu)
        return rates

    def operations(self) -> dict[str, float]:
        """Return the INT8 operations per second of all threads in the best turn.

        "amx" has operands in L2, "amx registers" and "vnni" in registers.
        """
        rates = {}
        if self._amx:
            self._c.amx_int8.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
            per_round = 4 * 4 * 64 * 4 * 32768
            rates["amx"] = self._best_rate(
                lambda area, rounds: self._c.amx_int8(area.ctypes.data, rounds), OPERATIONS * 4, per_round
            )
            self._c.amx_int8_registers.argtypes = (ctypes.c_uint64,)
            rates["amx registers"] = self._best_rate(
                lambda area, rounds: self._c.amx_int8_registers(rounds), OPERATIONS * 4, 4 * 32768
            )
        if hasattr(self._c, "vnni_int8"):
            self._c.vnni_int8.argtypes = (ctypes.c_uint64,)
            rates["vnni"] = self._best_rate(lambda area, rounds: self._c.vnni_int8(rounds), OPERATIONS, 16 * 128)
        return rates

    def _best_rate(self, work: Callable[[Any, int], object], operations: int, per_round: int) -> float:
        rounds = operations // per_round
        seconds = min(self._run_together(lambda area: work(area, rounds), self._areas)[0] for _ in range(TURNS))
        return self.threads * rounds * per_round / seconds

    def _run_together(self, work: Callable[[Any], object], parts: list[Any]) -> tuple[float, float]:
        """Run work in a thread for each part; return seconds from the first start to the last end, and CPU seconds."""
        gate = threading.Barrier(len(parts))
        starts, ends, cpu_seconds = [], [], []

        def run_part(part: Any) -> None:
            gate.wait()
            cpu = time.thread_time()
            starts.append(time.perf_counter())
            work(part)
            ends.append(time.perf_counter())
            cpu_seconds.append(time.thread_time() - cpu)

        threads = [threading.Thread(target=run_part, args=(part,)) for part in parts[1:]]
        for thread in threads:
            thread.start()
        run_part(parts[0])
        for thread in threads:
            thread.join()
        return max(ends) - min(starts), sum(cpu_seconds)


def l3_bytes() -> int:
    """Return the size of the last-level cache, or 32 MiB if the kernel does not report it."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": MIB}[text[-1]])
    return max(sizes, default=32 * MIB)
