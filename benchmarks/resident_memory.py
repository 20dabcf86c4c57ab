#!/usr/bin/env python3
"""The memory of a process with KTMoEWrapper, by the share of experts that the GPU has, beside the calculated bytes.

python benchmarks/resident_memory.py            six layers in the shape of Qwen3-30B-A3B; five minutes, 16 GB of disk
python benchmarks/resident_memory.py --methods int4 --shares 0 50

Each cell is a process of its own that loads the layers with a random mask of GPU experts. Its figure is the growth of
its RSS by load_weights, after torch was imported and the headers of the weights were read. INT4 is converted; MXFP4 and
FP8 are checkpoints as released models have them; Q4_K is a GGUF.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import mixtures
import numpy as np

TARGET = 0.03  # largest difference from the calculated bytes
METHODS = ("int4", "mxfp4", "fp8", "gguf_q4_k")


def main() -> None:
    """Measure and print a line for each method and share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--shares", nargs="+", type=int, default=[0, 25, 50, 75, 100], help="GPU experts, in percent")
    parser.add_argument("--shape", choices=mixtures.SHAPES, default="qwen3")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dir", type=Path, help="where the temporary directory is created")
    parser.add_argument("--load", help=argparse.SUPPRESS)  # the arguments of a cell's process
    options = parser.parse_args()
    if options.load:
        print(*load_layers(**json.loads(options.load)))
        return
    shape = mixtures.SHAPES[options.shape]
    print(f"{options.layers} layers of {shape.name}: {shape.experts} experts, H {shape.hidden}, I {shape.intermediate}")
    print(f"{'method':10} {'GPU experts':>11} {'calculated':>11} {'RSS':>11} {'difference':>10}")
    with tempfile.TemporaryDirectory(prefix="ktconvert-memory-", dir=options.dir) as scratch:
        for method in options.methods:
            path = write_weights(Path(scratch), shape, method, options.layers)
            for share in options.shares:
                count = shape.experts * share // 100
                sizes = (options.layers, count, shape.experts, shape.hidden, shape.intermediate)
                arguments = {"path": str(path), "method": mixtures.METHODS[method].name, "sizes": sizes}
                command = [sys.executable, __file__, "--load", json.dumps(arguments)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(done.stderr[-1000:])
                print_cell(method, count, *map(int, done.stdout.split()))


def print_cell(method: str, count: int, calculated: int, measured: int) -> None:
    """Print the line of a cell, with a mark if it misses the target."""
    difference = measured / calculated - 1 if calculated else 0.0
    mark = "" if abs(difference) <= TARGET else "  more than 3 %"
    figures = f"{calculated / 1e6:8.1f} MB {measured / 1e6:8.1f} MB"
    print(f"{method:10} {count:11} {figures} {100 * difference:+8.1f} %{mark}", flush=True)


def write_weights(scratch: Path, shape: mixtures.Shape, method: str, layers: int) -> Path:
    """Write the layers and return their directory or file."""
    out = scratch / method
    if mixtures.METHODS[method].source == "gguf":
        mixtures.write_gguf(out, shape, layers, method)
        return out / "model.gguf"
    checkpoint = scratch / "checkpoint"
    if not checkpoint.exists():
        (scratch / "tensors").mkdir()
        mixtures.write_source(scratch / "tensors", shape)
        mixtures.write_checkpoint(scratch / "tensors", checkpoint, shape, layers)
    layout = () if method == "int4" else ("--layout", "kt")
    convert = ("cpu", "-i", checkpoint, "-o", out, "--quant-method", method, "--threadpool-count", 1)
    mixtures.ktconvert(*convert, *layout)
    return out


def load_layers(path: str, method: str, sizes: list[int]) -> tuple[int, int]:
    """Load layers with a random mask of GPU experts.

    Return the bytes of the other experts in the kernels' formats, and the bytes by which this process grew.
    """
    import torch

    from ktconvert.native_quant import KTMoEWrapper, machine
    from ktconvert.native_quant.runtime.experts import open_experts

    layers, count, experts, hidden, intermediate = sizes
    KTMoEWrapper.memory = "copy"
    rng = np.random.default_rng(0)
    wrappers = []
    for layer in range(layers):
        mask = torch.zeros(experts, dtype=torch.bool)
        mask[torch.from_numpy(rng.permutation(experts)[:count])] = True
        arguments = (layer, experts, mixtures.TOPK, hidden, intermediate, mask, 2, 1, path, 512)
        wrappers.append(KTMoEWrapper(*arguments, method=method))
    open_experts(Path(path)).require_computable()
    before = machine.rss()
    for wrapper in wrappers:
        wrapper.load_weights()
    grown = machine.rss() - before
    rows = wrappers[0].moe._packed.methods
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    of_expert = sum(tensor.nbytes for name, shape in shapes.items() for tensor in rows[name].tensors(*shape))
    return layers * (experts - count) * of_expert, grown


if __name__ == "__main__":
    main()
