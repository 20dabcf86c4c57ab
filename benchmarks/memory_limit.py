#!/usr/bin/env python3
"""Decoding with mapped weights that exceed the memory: tokens per second, by the share of the weights that fits.

sudo python benchmarks/memory_limit.py          eight layers in the shape of Qwen3-30B-A3B; five minutes, 8 GB of disk
sudo python benchmarks/memory_limit.py --llama-bench PATH           also llama.cpp; ten minutes, 11 GB of disk

Each cell is a process in a memory cgroup (version 1 or 2) whose limit is the share of the weights, and 150 MB for the
process. Experts are drawn evenly, which is the worst case for a cache. "requested" is what ktconvert does: before a
forward computes, it requests the pages of all its experts; "on demand" leaves reading to page faults. With
--llama-bench, llama.cpp maps as many layers in Q4_0 under the same share of its experts, without --repack, which would
copy the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import llama_cpp
import mixtures
import numpy as np

from ktconvert.native_quant.runtime.converted_experts import open_converted
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import Pool

CGROUPS = Path("/sys/fs/cgroup")
PROCESS = 150 << 20  # bytes of the process without weights
SHAPE = mixtures.SHAPES["qwen3"]


def main() -> None:
    """Measure and print a line for each share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", nargs="+", type=int, default=[100, 75, 50], help="percent of the weights")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60, help="tokens to compute; the first third is not timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's program")
    parser.add_argument("--dir", type=Path, help="where the temporary directory is created")
    parser.add_argument("--decode", help=argparse.SUPPRESS)  # the arguments of a cell's process
    options = parser.parse_args()
    if options.decode:
        print(decode(**json.loads(options.decode)))
        return
    with tempfile.TemporaryDirectory(prefix="ktconvert-limit-", dir=options.dir) as scratch:
        path = write_weights(Path(scratch), options.layers)
        size = sum(open_converted(path).slice_bytes)
        print(f"{options.layers} layers of {SHAPE.name} in INT4, {size / 1e9:.2f} GB, {options.threads} threads")
        columns = ["requested", "on demand", *(["llama.cpp"] if options.llama_bench else [])]
        print(f"{'in memory':>9} " + " ".join(f"{column:>14}" for column in columns))
        for share in options.shares:
            rates = []
            for requested in (True, False):
                arguments = {"path": str(path), "limit": size * share // 100 + PROCESS, "requested": requested}
                arguments |= {"tokens": options.tokens, "threads": options.threads}
                command = [sys.executable, __file__, "--decode", json.dumps(arguments)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(done.stderr[-1000:])
                rates.append(float(done.stdout))
            if options.llama_bench is not None:
                rates.append(
                    measure_llama_cpp(options.llama_bench, Path(scratch), options.layers, share, options.threads)
                )
            print(f"{share:7} % " + " ".join(f"{rate:8.1f} tok/s" for rate in rates), flush=True)


def write_weights(scratch: Path, layers: int) -> Path:
    """Write the converted layers and return their directory."""
    mixtures.write_source(scratch, SHAPE)
    tensors = [np.load(scratch / f"{name}.npy") for name in mixtures.PROJECTIONS]
    with KTExperts.from_bf16(*tensors) as experts:
        experts._save(scratch / "loose")
    mixtures.merge_layers(scratch / "loose", scratch / "int4", layers)
    shutil.rmtree(scratch / "loose")
    return scratch / "int4"


def measure_llama_cpp(program: Path, scratch: Path, layers: int, share: int, threads: int) -> float:
    """Return the tokens per second of llama.cpp under a limit of a share of its experts, and of all else."""
    path = scratch / "q4_0.gguf"
    if not path.exists():
        llama_cpp.write_model(path, "Q4_0", experts=True, layers=layers)
    experts = layers * 3 * SHAPE.experts * SHAPE.hidden * SHAPE.intermediate // 32 * 18  # bytes of Q4_0
    forget_pages(path)
    with limit_memory(experts * share // 100 + path.stat().st_size - experts + PROCESS):
        return 1 / llama_cpp.run_llama_bench(program, path, 1, threads, "--repack", 0)


def forget_pages(path: Path) -> None:
    """Remove a file from the page cache: its pages belong to another cgroup."""
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def limit_memory(limit: int) -> Iterator[None]:
    """Move this process into a new memory cgroup, and back in the end."""
    root, name = CGROUPS / "memory", "memory.limit_in_bytes"
    if not root.is_dir():
        root, name = CGROUPS, "memory.max"
    group = root / f"ktconvert-{os.getpid()}"
    group.mkdir()
    try:
        (group / name).write_text(str(limit))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def decode(path: str, limit: int, requested: bool, tokens: int, threads: int) -> float:
    """Compute tokens one after the other under a limit of memory, and return the tokens per second."""
    for file in Path(path).glob("*.safetensors"):
        forget_pages(file)
    with limit_memory(limit):
        pool = Pool(threads)
        layers = [KTExperts.load(path, layer, memory="map", pool=pool) for layer in open_converted(Path(path)).layers]
        if not requested:
            layers = [KTExperts(replace(layer._packed, read_ahead=False), pool=pool) for layer in layers]
        rng = np.random.default_rng(0)
        hidden = (rng.standard_normal((1, SHAPE.hidden), np.float32).view(np.uint32) >> 16).astype(np.uint16)
        weights = np.full((1, mixtures.TOPK), 1 / mixtures.TOPK, np.float32)
        start = 0.0
        for token in range(tokens):
            if token == tokens // 3:
                start = time.perf_counter()
            for layer in layers:
                ids = rng.permutation(SHAPE.experts)[None, : mixtures.TOPK].astype(np.int64)
                layer.forward(hidden, ids, weights)
        return (tokens - tokens // 3) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
