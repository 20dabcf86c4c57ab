"""Speed of a layer's experts and of memory reads, which limit decoding, for `ktconvert bench`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ktconvert.native_quant import machine
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.arrays import F32, I64, U16, Array
from ktconvert.native_quant.instruction_sets import raise_error
from ktconvert.native_quant.machine import unbind_thread
from ktconvert.native_quant.runtime.experts import KTExperts

# Numbers of sections of an array that one thread can read in parallel. More are no faster; which number is fastest
# depends on the machine.
STREAMS = (1, 2, 4)
LEAST_RUNS, MOST_RUNS = 3, 1000
SECONDS = 1.0  # time for each figure
SLICE = 64 << 20  # bytes that each thread reads per round: this takes milliseconds, so that some rounds are undisturbed
CACHES = 4  # size of the memory to read, in last-level caches


def read_memory(block: Array, streams: int) -> int:
    """Read each cache line of an array in parallel streams (STREAMS); return the XOR of their first 8 bytes."""
    if streams not in STREAMS:
        raise ValueError(f"streams must be {', '.join(map(str, STREAMS[:-1]))} or {STREAMS[-1]}, not {streams}")
    if not block.flags.c_contiguous:
        raise ValueError("the array must be contiguous")
    total = ffi.new("uint64_t *")
    raise_error(lib.ktq_read(streams, block.nbytes, ffi.from_buffer(block), total))
    return int(total[0])


@dataclass(frozen=True)
class Timing:
    """Forwards of one batch size: times in seconds, and averages per forward.

    touched  number of different experts
    nbytes   bytes of their weights
    """

    tokens: int
    runs: int
    median: float
    best: float
    touched: float
    nbytes: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.median

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.median


def last_level_cache(root: Path = Path("/")) -> int:
    """Return the bytes of level-3 cache (else level 2) of this process's CPUs together; 0 if unknown."""
    levels: dict[int, dict[str, int]] = {}
    for cpu in machine.affinity():
        for folder in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*"):
            files = (machine.read_text(folder / name) or "" for name in ("level", "size", "shared_cpu_list"))
            level, size, shared = map(str.strip, files)
            if shared and level.isdecimal() and size.removesuffix("K").isdecimal():
                levels.setdefault(int(level), {})[shared] = int(size.removesuffix("K")) << 10
    return sum(levels[max(levels)].values()) if levels else 0


def read_bandwidth(threads: int) -> dict[int, float]:
    """Return the bytes per second that this number of threads read together in the best round, for each of STREAMS.

    Threads read one slice of memory after the other, together more than the last-level cache holds. Each thread reads
    memory that it wrote itself, so that the pages are on its NUMA node, and is pinned to its own core if there are
    enough cores.
    """
    available = machine.memory_available() // 4 // threads
    size = min(SLICE, max(1 << 20, available))
    slices = max(1, min(CACHES * last_level_cache() // threads, available) // size)
    cpus = [cpu for node in machine.core_cpus().values() for cpu in node]
    spans = np.zeros((threads, 2))  # times at which each thread began and ended its slice of the round
    best = dict.fromkeys(STREAMS, float("inf"))  # seconds
    rounds = 0
    end = time.perf_counter() + SECONDS
    running = True

    def finish_round() -> None:
        """Evaluate a round, in one thread, while the others wait."""
        nonlocal running, rounds
        if spans.any():
            streams = STREAMS[rounds % len(STREAMS)]
            best[streams] = min(best[streams], float(spans[:, 1].max() - spans[:, 0].min()))
            rounds += 1
        running = rounds < LEAST_RUNS * len(STREAMS) or time.perf_counter() < end

    barrier = threading.Barrier(threads, action=finish_round)

    def read(number: int) -> None:
        if threads <= len(cpus):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {cpus[number]})  # only for this thread
        block = np.ones((slices, size), np.uint8)
        barrier.wait()
        while running:
            begin = time.perf_counter()
            read_memory(block[rounds % slices], STREAMS[rounds % len(STREAMS)])
            spans[number] = begin, time.perf_counter()
            barrier.wait()

    with ThreadPoolExecutor(threads, initializer=unbind_thread) as executor:
        try:
            readers = executor.map(read, range(threads))
        except RuntimeError:  # no more threads can be started; the others would wait for them
            barrier.abort()
            raise
        list(readers)
    return {streams: threads * size / seconds for streams, seconds in best.items()}


def random_bf16(rng: np.random.Generator, *shape: int) -> U16:
    """Return normally distributed numbers as BF16 bits."""
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def random_routing(rng: np.random.Generator, tokens: int, topk: int, experts: int) -> I64:
    """Return `topk` different experts for each token, all equally likely: int64 [tokens, topk]."""
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :topk].astype(np.int64)


def every_expert(topk: int, experts: int) -> I64:
    """Return a routing of as few tokens as possible that uses every expert: int64 [tokens, topk]."""
    tokens = -(-experts // topk)
    return np.arange(tokens * topk, dtype=np.int64).reshape(tokens, topk) % experts


def time_forward(experts: KTExperts, tokens: int, topk: int, *, seed: int = 0) -> Timing:
    """Time forwards of a layer for about a second, with new random routing each time so that weights are not cached."""
    rng = np.random.default_rng(seed)
    hidden = random_bf16(rng, tokens, experts.hidden)
    out = np.empty((tokens, experts.hidden), np.uint16)
    weights = np.full((tokens, topk), 1 / topk, np.float32)
    norm = _make_norm(experts)
    times: list[float] = []
    touched = 0
    while len(times) < LEAST_RUNS or (sum(times) < SECONDS and len(times) < MOST_RUNS):
        ids = random_routing(rng, tokens, topk, experts.num_experts)
        begin = time.perf_counter()
        experts.forward(hidden, ids, weights, out=out, norm=norm)
        times.append(time.perf_counter() - begin)
        touched += np.unique(ids).size
    mean = touched / len(times)
    nbytes = mean * experts.nbytes / experts.num_experts
    return Timing(tokens, len(times), float(np.median(times)), min(times), mean, nbytes)


def warm_up(experts: KTExperts, topk: int) -> None:
    """Compute every expert once, so that mapped weights are in memory and the pool's threads have started."""
    ids = every_expert(topk, experts.num_experts)
    hidden = random_bf16(np.random.default_rng(0), len(ids), experts.hidden)
    experts.forward(hidden, ids, np.full(ids.shape, 1 / topk, np.float32), norm=_make_norm(experts))


def _make_norm(experts: KTExperts) -> tuple[F32, float] | None:
    """Return a norm for experts that need one: the model has it, not their files."""
    return (np.ones(experts.hidden, np.float32), 1e-6) if experts._function.output_norm else None
