"""Work of ours in the order of a CUDA stream: pinned buffers that copies go through, and C functions called between them.

cudaLaunchHostFunc calls ktq_job_submit and ktq_job_wait when everything before them on the stream is done. Graph capture records it
like any other work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.experts import Job

if TYPE_CHECKING:
    import torch

DEPTH = 2  # layers take the two sets of buffers in turn, so that one's deferred experts may run into the next


def address_of(function: str) -> int:
    """Where a C function of ktq.h begins."""
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, function)))


SUBMIT, WAIT = address_of("ktq_job_submit"), address_of("ktq_job_wait")


@functools.cache
def _cudart() -> Any:
    """The CUDA runtime that torch has loaded, whatever its version."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libcudart" in line}
    if not paths:
        raise RuntimeError("torch has loaded no libcudart.so; install a torch that is built for CUDA")
    cudart = ctypes.CDLL(min(paths))
    cudart.cudaLaunchHostFunc.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    cudart.cudaGetErrorString.restype = ctypes.c_char_p
    return cudart


def launch(stream: int, function: int, job: Job) -> None:
    """Call SUBMIT or WAIT with the job once the stream has come this far. RuntimeError with CUDA's words if it refuses."""
    cudart = _cudart()
    error = cudart.cudaLaunchHostFunc(stream, function, int(ffi.cast("uintptr_t", job.pointer)))
    if error:
        raise RuntimeError(f"CUDA takes no host function on this stream: {cudart.cudaGetErrorString(error).decode()}")


@contextlib.contextmanager
def current(device: torch.device, stream: Any) -> Iterator[int]:
    """Make a stream (its number, a torch stream, or None for torch's own) torch's current one; gives its number."""
    import torch

    with torch.cuda.device(device):
        own = torch.cuda.current_stream(device).cuda_stream
        number = own if stream is None else int(getattr(stream, "cuda_stream", stream))
        if number == own:
            yield number
        else:
            external = torch.cuda.ExternalStream(number, device=device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(external):
                yield number


def capturing() -> bool:
    """A CUDA graph is being recorded in this thread."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass(eq=False)
class Buffers:
    """Pinned memory for `tokens` tokens of one model: two sets, used in turn by its layers.

    hidden, out: BF16 [tokens, H]; ids, late_ids: int64 [tokens, k]; weights: float32 [tokens, k]. A set's `readers` are the jobs that
    may still read or write it and that nobody has waited for.
    """

    hidden: list[torch.Tensor]
    ids: list[torch.Tensor]
    late_ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    out: list[torch.Tensor]
    readers: list[list[Job]] = field(default_factory=lambda: [[] for _ in range(DEPTH)])

    # Sizes that graphs are captured for keep their buffers; of the others each model keeps those it used last.
    captured_sizes: ClassVar[list[int]] = []
    kept: ClassVar[dict[tuple[Any, ...], Buffers]] = {}
    last: ClassVar[dict[tuple[Any, ...], tuple[int, Buffers]]] = {}

    @classmethod
    def get(cls, model: str, device: torch.device, tokens: int, hidden: int, topk: int) -> Buffers:
        """The model's buffers for so many tokens. Under graph capture they live from now on until clear()."""
        key = (model, device, hidden, topk)
        found = cls.kept.get((*key, tokens))
        if found is not None:
            return found
        in_graph = capturing()
        have, old = cls.last.get(key, (None, None))
        if have == tokens and old is not None:
            made = old
        else:
            if old is not None and not in_graph:
                finish(device)  # the old ones may still be in use
            made = cls._make(tokens, hidden, topk)
        if in_graph or tokens in cls.captured_sizes:
            cls.kept[(*key, tokens)] = made
            if made is old:
                del cls.last[key]
        elif made is not old:
            cls.last[key] = (tokens, made)
        return made

    @classmethod
    def _make(cls, tokens: int, hidden: int, topk: int) -> Buffers:
        import torch

        def pinned(columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
            pin = torch.cuda.is_available()
            return [torch.zeros((tokens, columns), dtype=dtype, device="cpu", pin_memory=pin) for _ in range(DEPTH)]

        ids, late = pinned(topk, torch.int64), pinned(topk, torch.int64)
        return cls(
            pinned(hidden, torch.bfloat16), ids, late, pinned(topk, torch.float32), pinned(hidden, torch.bfloat16)
        )

    @classmethod
    def clear(cls) -> None:
        """Let go of all buffers once the GPU is done with them. Graphs captured with them must not be replayed any more."""
        for device in {key[1] for key in (*cls.kept, *cls.last)}:
            finish(device)
        cls.kept.clear()
        cls.last.clear()


def finish(device: torch.device) -> None:
    """Wait for everything that was given to a GPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
