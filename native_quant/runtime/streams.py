"""CPU work in the order of a CUDA stream: pinned buffers for copies, and C functions that the stream calls.

cudaLaunchHostFunc calls ktq_job_submit and ktq_job_wait when all earlier work on the stream is done. Graph capture
records these calls like any other work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.pool import Job

DEPTH = 2  # sets of buffers, which layers use in turn: deferred experts may still run during the next layer
# The addresses of two functions of ktq.h.
SUBMIT, WAIT = (int(ffi.cast("uintptr_t", ffi.addressof(lib, f"ktq_job_{name}"))) for name in ("submit", "wait"))


@functools.cache
def _cudart() -> Any:
    """Return the CUDA runtime that torch has loaded, in any version."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libcudart" in line}
    if not paths:
        raise RuntimeError("torch has loaded no libcudart.so; install a torch that is built for CUDA")
    cudart = ctypes.CDLL(min(paths))
    cudart.cudaLaunchHostFunc.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    cudart.cudaGetErrorString.restype = ctypes.c_char_p
    return cudart


def launch(stream: int, function: int, job: Job) -> None:
    """Call SUBMIT or WAIT with the job when the stream reaches this point. Raises RuntimeError if CUDA refuses."""
    cudart = _cudart()
    error = cudart.cudaLaunchHostFunc(stream, function, int(ffi.cast("uintptr_t", job.pointer)))
    if error:
        raise RuntimeError(f"CUDA accepts no host function on this stream: {cudart.cudaGetErrorString(error).decode()}")


@contextlib.contextmanager
def use_stream(device: torch.device, stream: Any) -> Iterator[int]:
    """Make a stream (its number, a torch stream, or None for torch's current one) torch's current one.

    Yields the number of the stream.
    """
    with torch.cuda.device(device):
        current = torch.cuda.current_stream(device).cuda_stream
        number = current if stream is None else int(getattr(stream, "cuda_stream", stream))
        if number == current:
            yield number
        else:
            external = torch.cuda.ExternalStream(number, device=device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(external):
                yield number


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Buffers:
    """Pinned memory for `tokens` tokens: two sets, which layers use alternately.

    deferred_ids  ids of experts that are deferred to the next layer
    pending       jobs of each set that nothing has waited for
    """

    def __init__(self, tokens: int, hidden: int, topk: int) -> None:
        def allocate(columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
            pin = torch.cuda.is_available()
            return [torch.zeros((tokens, columns), dtype=dtype, device="cpu", pin_memory=pin) for _ in range(DEPTH)]

        self.pending: list[list[Job]] = [[] for _ in range(DEPTH)]
        self.hidden, self.out = allocate(hidden, torch.bfloat16), allocate(hidden, torch.bfloat16)
        self.ids, self.deferred_ids = allocate(topk, torch.int64), allocate(topk, torch.int64)
        self.weights = allocate(topk, torch.float32)

    def __del__(self) -> None:
        for jobs in self.pending:
            for job in jobs:
                job.join()  # it writes to the tensors


class BufferCache:
    """The buffers of one model: all buffers of captured graphs, and the last used ones."""

    captured_sizes: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], Buffers] = {}
        self.last: dict[tuple[Any, ...], tuple[int, Buffers]] = {}

    def get(self, device: torch.device, tokens: int, hidden: int, topk: int) -> Buffers:
        """Return buffers for this number of tokens. Those used under graph capture are kept until clear()."""
        key = (device, hidden, topk)
        if (buffers := self.kept.get((*key, tokens))) is not None:
            return buffers
        in_graph = is_capturing()
        last_tokens, last_buffers = self.last.get(key, (None, None))
        if last_tokens == tokens and last_buffers is not None:
            buffers = last_buffers
        else:
            if last_buffers is not None and not in_graph:
                synchronize(device)  # the old buffers may still be in use
            buffers = Buffers(tokens, hidden, topk)
        if in_graph or tokens in self.captured_sizes:
            self.kept[(*key, tokens)] = buffers
            if buffers is last_buffers:
                del self.last[key]
        elif buffers is not last_buffers:
            self.last[key] = (tokens, buffers)
        return buffers

    def clear(self) -> None:
        """Free all buffers when the GPU is done with them. Graphs captured with them must not be replayed any more."""
        for device in {key[0] for key in (*self.kept, *self.last)}:
            synchronize(device)
        self.kept.clear()
        self.last.clear()


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU; do nothing for the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
