"""A worker of forward.py: our runtime, and the machine's ceilings. KTCONVERT_ISA chooses the instruction set.

python our_forward.py SCRATCH THREADS         SCRATCH contains state.so
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from ceilings import Ceilings
from mixtures import PROJECTIONS
from state import LIBRARY, Detector
from turns import serve, tasks, time_calls, touch_memory

from ktconvert.native_quant import kernels
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import Pool


class Ours:
    """The loaded layers and the inputs of the current cell."""

    def __init__(self, scratch: Path, threads: int) -> None:
        self.scratch = scratch
        earlier = tasks()
        self.pool = Pool(threads)
        self.helpers = [task for task in tasks() if task not in earlier]
        self.detector: Detector | None = None
        self.layers: list[KTExperts] = []
        self.inputs: tuple[Any, Any, Any] = (None, None, None)
        self.out: Any = None
        self.ceilings: Ceilings | None = None

    def describe(self) -> str:
        """Return the library and its instruction set."""
        return f"ktconvert with {kernels.isa()}"

    def quantize(self, source: str, method: str, out: str) -> None:
        """Write the loose files of layer 0."""
        with KTExperts.from_bf16(*_source(source), method=method, pool=self.pool) as experts:
            experts._save(out)

    def load_source(self, source: str, method: str, scratch: str) -> dict[str, float]:
        """Return the seconds of from_bf16, and of from_bf16 with save(), which also waits for the disk."""
        tensors = _source(source)
        touch_memory(2 * sum(tensor.nbytes for tensor in tensors))
        start, cpu = time.perf_counter(), time.process_time()
        with KTExperts.from_bf16(*tensors, method=method, pool=self.pool) as experts:
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            experts._save(scratch)
        return {"unsaved": wall, "unsaved_cpu": cpu, "saved": time.perf_counter() - start}

    def open(self, folder: str, layers: int, method: str, memory: str, **shape: int) -> None:
        """Load the layers that calls rotate over."""
        self.detector = Detector(self.scratch / LIBRARY, self.helpers, caller_computes=True)
        options: dict[str, Any] = {"method": method, "memory": memory, "pool": self.pool}
        self.layers = [
            KTExperts.load(
                folder,
                layer,
                num_experts=shape["experts"],
                hidden=shape["hidden"],
                intermediate=shape["intermediate"],
                **options,
            )
            for layer in range(layers)
        ]

    def batch(self, folder: str) -> None:
        """Load the inputs of a cell."""
        hidden, ids, weights = (np.load(Path(folder) / f"{name}.npy") for name in ("hidden", "ids", "weights"))
        self.inputs = hidden, ids, weights
        self.out = np.empty_like(hidden[0])

    def call(self, number: int) -> None:
        """Run one forward. Calls rotate over the layers, and use the next variant after each rotation."""
        self._forward(self.layers[number % len(self.layers)], number // len(self.layers))

    def probe(self, count: int) -> list[float]:
        """Return a number of states of the cores."""
        assert self.detector is not None
        return [self.detector.probe() for _ in range(count)]

    def time(self, first: int, count: int, warm: bool) -> dict[str, Any]:
        """Return the seconds of each call, and the states between them."""
        assert self.detector is not None
        return time_calls(self.call, first, count, warm, self.detector)

    def answer(self, path: str, exact: bool) -> dict[str, Any]:
        """Write layer 0's output for variant 0, and return the seconds of this call."""
        self.layers[0]._exact = exact
        seconds = self.time(0, 1, False)
        self.layers[0]._exact = False
        np.save(path, self.out)
        return seconds

    def read(self) -> dict[str, float]:
        """Return the bytes that this machine reads per second, by streams, and per CPU second."""
        return self._ceilings().read()

    def operations(self) -> dict[str, float]:
        """Return the INT8 operations per second of this machine."""
        return self._ceilings().operations()

    def _forward(self, experts: KTExperts, variant: int) -> None:
        hidden, ids, weights = self.inputs
        v = variant % len(hidden)
        experts.forward(hidden[v], ids[v], weights[v], out=self.out)

    def _ceilings(self) -> Ceilings:
        if self.ceilings is None:
            self.ceilings = Ceilings(self.scratch, self.pool.threads)
        return self.ceilings


def _source(folder: str) -> list[Any]:
    return [np.load(Path(folder) / f"{name}.npy") for name in PROJECTIONS]


if __name__ == "__main__":
    ours = Ours(Path(sys.argv[1]), int(sys.argv[2]))
    verbs = ("describe", "quantize", "load_source", "open", "batch", "probe", "time", "answer", "read", "operations")
    serve({name: getattr(ours, name) for name in verbs})
