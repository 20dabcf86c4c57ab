#!/usr/bin/env python3
"""The experts of a GGUF file, ours compared with llama.cpp's own bench, in turns: milliseconds per layer.

python benchmarks/llama_cpp.py --llama-bench PATH           five types of ggml; half an hour, 2 GB of disk
python benchmarks/llama_cpp.py --llama-bench PATH --types Q4_K --tokens 1 64

llama-bench computes whole models. It therefore gets two of three layers in the shape of Qwen3-30B-A3B: one with experts
(128 of 768 columns, 8 per token), and one with a linear of 32 columns in their place, with the same attention and
output. A third of the difference of their times is the time of the experts of a layer, including the router (3 % of the
operations). Attention adds nothing to a token, because its output is zero, so that random tokens are routed as evenly
as in ours, which computes the layers of the same file in turn. For one token, steps of generation are timed.

Each round runs llama.cpp's two models (the better of two runs each) and ours (the median of its calls), one after the
other. The table compares the fastest rounds, since other programs on the machine can only add time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import mixtures
import numpy as np
from blocks import random_blocks

from ktconvert.native_quant.matrix import GGML
from ktconvert.native_quant.runtime.experts import ACTIVATIONS, AUTO, KTExperts
from ktconvert.native_quant.runtime.pool import Pool

SHAPE = mixtures.SHAPES["qwen3"]
LAYERS, HEADS, KV_HEADS, HEAD = 3, 32, 4, 128
VOCABULARY = 4096
TINY = 32  # columns of the linear in place of the experts
TYPES = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "MXFP4")
ZEROS = "zeros"  # blocks of Q8_0
STEPS = 32  # steps of generation, for one token


def main() -> None:
    """Measure and print a line for each type and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", type=Path, required=True, help="llama.cpp's program")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 1024])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--activations", choices=ACTIVATIONS, default=AUTO, help="as for `ktconvert run`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where the temporary directory is created")
    options = parser.parse_args()
    print(f"{options.threads} threads, {options.rounds} rounds; ms per layer: fastest (median), ratio of the fastest")
    print(f"{'type':6} {'tokens':>6} {'ours':>16} {'llama.cpp':>16} {'ratio':>6}")
    pool = Pool(options.threads)
    with tempfile.TemporaryDirectory(prefix="ktconvert-llama-", dir=options.dir) as folder:
        for name in options.types:
            models = [Path(folder) / f"{name}-{experts}.gguf" for experts in ("experts", "tiny")]
            for path in models:
                write_model(path, name, experts=path == models[0])
            layers = [
                KTExperts.load(models[0], layer, memory="copy", pool=pool, activations=options.activations)
                for layer in range(LAYERS)
            ]
            for tokens in options.tokens:
                batch = mixtures.make_batch(Path(folder), SHAPE, tokens, "balanced").folder
                inputs = [np.load(batch / f"{what}.npy") for what in ("hidden", "ids", "weights")]
                ours, with_experts, without_experts = [], [], []
                for _ in range(options.rounds):
                    for path, times in zip(models, (with_experts, without_experts), strict=True):
                        times.append(run_llama_bench(options.llama_bench, path, tokens, options.threads))
                    ours.append(time_layers(layers, inputs))
                least, median = min(ours), statistics.median(ours)
                their_least, their_median = (
                    subtract(choose, with_experts, without_experts) for choose in (min, statistics.median)
                )
                times = f"{format_times(least, median):>16} {format_times(their_least, their_median):>16}"
                print(f"{name:6} {tokens:6} {times} {their_least / least:6.2f}", flush=True)
            for path in models:
                path.unlink()


def subtract(choose: Callable[[list[float]], float], with_experts: list[float], without_experts: list[float]) -> float:
    """Return the seconds of a layer's experts, from those of two models of LAYERS layers in each round."""
    return (choose(with_experts) - choose(without_experts)) / LAYERS


def format_times(least: float, median: float) -> str:
    """Return both times in milliseconds."""
    return f"{1e3 * least:.2f} ({1e3 * median:.2f})"


def run_llama_bench(program: Path, model: Path, tokens: int, threads: int, *more: object) -> float:
    """Return the seconds that llama-bench takes for a prompt of this length, or for one token of generation.

    more  further options of llama-bench
    """
    sizes = ("-p", 0, "-n", STEPS) if tokens == 1 else ("-p", tokens, "-n", 0)
    batch_size = max(tokens, 32)
    options = ("-b", batch_size, "-ub", batch_size, "-t", threads, "-r", 2, "-ngl", 0, "-o", "json")
    command = [str(each) for each in (program, "-m", model, *sizes, *options, *more)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-1000:]}")
    (row,) = json.loads(done.stdout)
    return min(row["samples_ns"]) / 1e9 / (STEPS if tokens == 1 else 1)


def time_layers(layers: list[KTExperts], inputs: list[Any]) -> float:
    """Return the seconds of a layer: the median of calls for a quarter of a second, or of three calls."""
    out = np.empty_like(inputs[0][0])
    walls: list[float] = []
    for number in range(400):
        layer, variant = layers[number % LAYERS], number // LAYERS % len(inputs[0])
        start = time.perf_counter()
        layer.forward(*(array[variant] for array in inputs), out=out)
        walls.append(time.perf_counter() - start)
        if len(walls) > LAYERS and sum(walls) > 0.25:
            break
    return statistics.median(walls[LAYERS:])  # the first calls are cold


# --- synthetic models -----------------------------------------------------------------------------


def write_model(path: Path, name: str, experts: bool, layers: int = LAYERS) -> None:
    """Write a model that llama.cpp loads: experts of this type, or one small linear in their place.

    Attention, embeddings and output are Q8_0.
    """
    arch = "qwen3moe" if experts else "qwen3"
    writer = gguf.GGUFWriter(path, arch)
    for key, value in make_metadata(experts, layers).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{arch}.{key}", value)
    writer.add_tokenizer_model("none")
    for seed, (tensor, kind, shape) in enumerate(list_tensors(name, experts, layers)):
        stored = gguf.GGMLQuantizationType["Q8_0" if kind == ZEROS else kind]
        writer.add_tensor(tensor, make_values(kind, shape, seed), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_metadata(experts: bool, layers: int) -> dict[str, int | float]:
    """Return the metadata that llama.cpp needs for such a model."""
    common: dict[str, int | float] = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": SHAPE.hidden,
        "feed_forward_length": TINY,
        "vocab_size": VOCABULARY,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    of_experts = {
        "expert_count": SHAPE.experts,
        "expert_used_count": mixtures.TOPK,
        "expert_feed_forward_length": SHAPE.intermediate,
    }
    return common | (of_experts if experts else {})


def list_tensors(name: str, experts: bool, layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, type and shape of each tensor."""
    hidden, width, count = SHAPE.hidden, SHAPE.intermediate, SHAPE.experts
    yield "token_embd.weight", "Q8_0", (VOCABULARY, hidden)
    yield "output.weight", "Q8_0", (VOCABULARY, hidden)
    yield "output_norm.weight", "F32", (hidden,)
    for layer in range(layers):
        block = f"blk.{layer}"
        for norm, size in (("attn", hidden), ("ffn", hidden), ("attn_q", HEAD), ("attn_k", HEAD)):
            yield f"{block}.{norm}_norm.weight", "F32", (size,)
        for linear, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{block}.attn_{linear}.weight", "Q8_0", (heads * HEAD, hidden)
        yield f"{block}.attn_output.weight", ZEROS, (hidden, HEADS * HEAD)
        if experts:
            yield f"{block}.ffn_gate_inp.weight", "F32", (count, hidden)
            for linear, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                yield f"{block}.ffn_{linear}_exps.weight", name, (count, *shape)
        else:
            for linear, shape in (("gate", (TINY, hidden)), ("up", (TINY, hidden)), ("down", (hidden, TINY))):
                yield f"{block}.ffn_{linear}.weight", "Q8_0", shape


def make_values(kind: str, shape: tuple[int, ...], seed: int) -> Any:
    """Return numbers near 1 for norms and near 0.02 for the router, zeros, or random blocks."""
    if kind == "F32":
        normal = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        return 1 + normal / 100 if len(shape) == 1 else normal / 50
    *rows, columns = shape
    if kind == ZEROS:
        return np.zeros((*rows, columns // GGML["Q8_0"].columns * GGML["Q8_0"].items), np.uint8)
    blocks_per_row = columns // GGML[kind].columns
    return random_blocks(kind, int(np.prod(rows)) * blocks_per_row, seed).reshape(*rows, -1)


if __name__ == "__main__":
    main()
