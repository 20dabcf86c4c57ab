"""The ceilings of this machine, measured in the same run: bytes read from memory, INT8 operations."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
TURN = 128 * MIB  # bytes that one thread reads at a time
OPERATIONS = 4 * 10**10  # per thread and turn, about


class Ceilings:
    """Measures with `threads` threads; the C code is built in `scratch`. RuntimeError without a C compiler."""

    def __init__(self, scratch: Path, threads: int) -> None:
        library = scratch / f"ceilings-{os.getpid()}.so"
        source = Path(__file__).with_name("ceilings.c")
        command = [
            os.environ.get("CC", "cc"),
            "-O3",
            "-march=native",
            "-shared",
            "-fPIC",
            str(source),
            "-o",
            str(library),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise RuntimeError(f"no C compiler {command[0]} for the ceilings: install one, or set CC") from None
        if done.returncode:
            raise RuntimeError(f"{source.name} was not compiled: {done.stderr[-500:]}")
        self._c = ctypes.CDLL(str(library))
        self._c.read_bytes.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.threads = threads
        size = max(4 * TURN, 3 * l3_bytes()) // TURN * TURN
        self._areas = [_Area(size) for _ in range(threads)]
        self._turn = 0
        self._amx = hasattr(self._c, "amx_int8") and self._c.amx_permit() == 0

    def read(self) -> dict[str, float]:
        """Bytes per second ("wall", all threads together) and per CPU second ("cpu"): one stream a thread, uncached."""
        at = self._turn * TURN % self._areas[0].size
        self._turn += 1
        areas = iter(self._areas)
        cpu = time.process_time()
        wall = self._together(lambda: self._c.read_bytes(next(areas).address + at, TURN))
        size = self.threads * TURN
        return {"wall": size / wall, "cpu": size / (time.process_time() - cpu)}

    def operations(self) -> dict[str, float]:
        """INT8 operations per second of all threads: "amx" with operands in L2, "vnni" on registers."""
        rates = {}
        if self._amx:
            self._c.amx_int8.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
            per_round = 4 * 4 * 64 * 4 * 32768
            rounds = OPERATIONS * 4 // per_round
            areas = iter(self._areas)
            seconds = self._together(lambda: self._c.amx_int8(next(areas).address, ctypes.c_uint64(rounds)))
            rates["amx"] = self.threads * rounds * per_round / seconds
        if hasattr(self._c, "vnni_int8"):
            rounds = OPERATIONS // (16 * 128)
            seconds = self._together(lambda: self._c.vnni_int8(ctypes.c_uint64(rounds)))
            rates["vnni"] = self.threads * rounds * 16 * 128 / seconds
        return rates

    def _together(self, work: Callable[[], object]) -> float:
        """Seconds from the first thread's start to the last one's end."""
        gate = threading.Barrier(self.threads)
        begun, ended = [], []

        def one() -> None:
            gate.wait()
            begun.append(time.perf_counter())
            work()
            ended.append(time.perf_counter())

        threads = [threading.Thread(target=one) for _ in range(self.threads - 1)]
        for thread in threads:
            thread.start()
        one()
        for thread in threads:
            thread.join()
        return max(ended) - min(begun)


class _Area:
    """Anonymous memory, in huge pages if available, all of it written."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size + 2 * MIB)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-start // (2 * MIB)) * 2 * MIB
        ctypes.memset(self.address, 1, size)


def l3_bytes() -> int:
    """The size of the last-level cache; 32 MiB where the kernel does not report it."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": MIB}[text[-1]])
    return max(sizes, default=32 * MIB)
