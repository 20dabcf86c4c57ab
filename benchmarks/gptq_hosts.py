"""Hours of `ktconvert cpu --scale gptq` for large models on several hosts, calculated from a few measured numbers.

This is the table of docs/how-to/many-machines.md. Nothing in it was measured on several hosts.

    python benchmarks/gptq_hosts.py [--write]
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pages

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "many-machines.md"

# Measured: CPU time of one core (AMD EPYC with AVX-512 and BF16): seconds for an expert of 7168 x 2048, AMXINT4, by
# gptq.py; products of matrices, in FLOP/s; SHA-256, in bytes/s (docs/explanation/resume.md).
SECONDS = {"plain": 5.6, "descent": 8.4, "full": 15.2}
BF16, FLOAT32, HASH = 207e9, 84e9, 1.1e9
# Assumed: a host's cores, the fraction of their speed that they reach together, bytes/s of the file system.
CORES, PARALLEL_SPEED, FILE_RATE = 64, 0.5, 20e9
SAMPLES, LENGTH, TOP_K = (128, 512), 2048, 8
HIDDEN, WIDTH, HEAD = 7168, 2048, 192 + 128  # HEAD: values of q and k plus those of v
HOSTS = (1, 4, 16)


class Model(NamedTuple):
    """Layers with experts, experts per layer, attention heads, and weights of a layer outside the routed experts."""

    layers: int
    experts: int
    heads: int
    other_weights: float


MODELS = {"DeepSeek-V3.1": Model(58, 256, 128, 231e6), "Kimi-K2": Model(60, 384, 64, 145e6)}


def seconds(bf16: float, float32: float) -> float:
    """Return the seconds of this number of operations on one host."""
    return (bf16 / BF16 + float32 / FLOAT32) / (CORES * PARALLEL_SPEED)


def coordinator_seconds(model: Model, samples: int) -> float:
    """Return the seconds of a layer in the coordinator: attention twice, Hessian of gate and up, outputs of experts."""
    attention = 2 * (2 * model.other_weights + 2 * LENGTH * model.heads * HEAD)
    return samples * LENGTH * seconds(attention + TOP_K * 6 * HIDDEN * WIDTH, 2 * HIDDEN**2)


def worker_seconds(model: Model, samples: int, steps: str) -> float:
    """Return the seconds of a layer on the workers: inputs of down, its Hessians (and slopes), and all experts."""
    hessian_operations = 2 * WIDTH**2 + (2 * (2 * WIDTH) ** 2 if steps == "full" else 0)
    gathering = samples * LENGTH * TOP_K * seconds(4 * HIDDEN * WIDTH, hessian_operations)
    return gathering + model.experts * SECONDS[steps] / (CORES * PARALLEL_SPEED)


def file_seconds(model: Model, samples: int, hosts: int) -> float:
    """Return the seconds of a layer for files: every host reads rows; experts are written, read and hashed."""
    rows, attempt_bytes = 2 * samples * LENGTH * HIDDEN, model.experts * 3 * HIDDEN * WIDTH * 2.5
    return (hosts * rows + 2 * attempt_bytes) / FILE_RATE + attempt_bytes / HASH if hosts > 1 else 0.0


def table() -> str:
    rows = []
    for (name, model), samples, steps in product(MODELS.items(), SAMPLES, SECONDS):
        coordinator, workers = coordinator_seconds(model, samples), worker_seconds(model, samples, steps)
        columns = coordinator, workers, *(coordinator + workers / n + file_seconds(model, samples, n) for n in HOSTS)
        hours = (f"{model.layers * column / 3600:.1f}" for column in columns)
        rows.append((name, str(samples), steps, *hours, f"{100 * coordinator / (coordinator + workers):.0f} %"))
    hosts = (f"{n} host{'s' * (n > 1)}" for n in HOSTS)
    head = ("", "samples", "`--gptq-steps`", "coordinator", "workers", *hosts)
    return pages.table((*head, "coordinator's share"), rows)


if __name__ == "__main__":
    print(table())
    if "--write" in sys.argv:
        pages.write(PAGE, "hours of GPTQ", table())
