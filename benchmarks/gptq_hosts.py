"""Hours of `ktconvert cpu --scale gptq` for large models on several hosts, calculated from a few measured numbers: the
table of docs/how-to/many-machines.md. Nothing of it was measured on several hosts.

    python benchmarks/gptq_hosts.py [--write]
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pages

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "many-machines.md"

# Measured, CPU time of one core (AMD EPYC with AVX-512 and BF16): seconds for an expert of 7168 x 2048, AMXINT4, by
# gptq.py; products of matrices, in FLOP/s; SHA-256, in bytes/s (docs/explanation/resume.md).
SECONDS = {"plain": 5.6, "descent": 8.4, "full": 15.2}
BF16, FLOAT32, HASH = 207e9, 84e9, 1.1e9
# Assumed: a host's cores, the part of their speed that they reach together, bytes/s of the file system.
CORES, TOGETHER, FILES = 64, 0.5, 20e9
SAMPLES, LENGTH, TOP_K = (128, 512), 2048, 8
HIDDEN, WIDTH, HEAD = 7168, 2048, 192 + 128  # HEAD: values of q and k, and of v
HOSTS = (1, 4, 16)


class Model(NamedTuple):
    """Layers with experts, experts of each, attention's heads, and weights of a layer beside routed experts."""

    layers: int
    experts: int
    heads: int
    rest: float


MODELS = {"DeepSeek-V3.1": Model(58, 256, 128, 231e6), "Kimi-K2": Model(60, 384, 64, 145e6)}


def seconds(bf16: float, float32: float) -> float:
    """For so many operations on one host."""
    return (bf16 / BF16 + float32 / FLOAT32) / (CORES * TOGETHER)


def walk(model: Model, samples: int) -> float:
    """Seconds of a layer in the coordinator: attention twice, the Hessian of gate and up, the experts' outputs."""
    attention = 2 * (2 * model.rest + 2 * LENGTH * model.heads * HEAD)
    return samples * LENGTH * seconds(attention + TOP_K * 6 * HIDDEN * WIDTH, 2 * HIDDEN**2)


def work(model: Model, samples: int, steps: str) -> float:
    """Return the seconds of a layer on the workers: inputs of down, its Hessians (and slopes), and all experts."""
    gathered = 2 * WIDTH**2 + (2 * (2 * WIDTH) ** 2 if steps == "full" else 0)
    each = samples * LENGTH * TOP_K * seconds(4 * HIDDEN * WIDTH, gathered)
    return each + model.experts * SECONDS[steps] / (CORES * TOGETHER)


def files(model: Model, samples: int, hosts: int) -> float:
    """Seconds of a layer for its rows, which every host reads, and what is left of experts: written, read, hashed."""
    rows, left = 2 * samples * LENGTH * HIDDEN, model.experts * 3 * HIDDEN * WIDTH * 2.5
    return (hosts * rows + 2 * left) / FILES + left / HASH if hosts > 1 else 0.0


def table() -> str:
    rows = []
    for (name, model), samples, steps in product(MODELS.items(), SAMPLES, SECONDS):
        own, shared = walk(model, samples), work(model, samples, steps)
        parts = own, shared, *(own + shared / n + files(model, samples, n) for n in HOSTS)
        hours = (f"{model.layers * part / 3600:.1f}" for part in parts)
        rows.append((name, str(samples), steps, *hours, f"{100 * own / (own + shared):.0f} %"))
    hosts = (f"{n} host{'s' * (n > 1)}" for n in HOSTS)
    head = ("", "samples", "`--gptq-steps`", "coordinator", "workers", *hosts)
    return pages.table((*head, "coordinator's share"), rows)


if __name__ == "__main__":
    print(table())
    if "--write" in sys.argv:
        pages.write(PAGE, "hours of GPTQ", table())
