#!/usr/bin/env python3
"""`ktconvert gpu` compared with llmcompressor, whose arithmetic it follows: wall time and memory of RTN and GPTQ.

With GPTQ, `ktconvert cpu --scale gptq` is measured, too.

python benchmarks/gpu.py                      RTN on 1 GB, GPTQ on 0.2 GB; 5 GB of disk, some minutes
python benchmarks/gpu.py --methods RTN        compared with model_free_ptq and oneshot
python benchmarks/gpu.py --tiny               the bundled model, to try the script; its figures mean nothing
python benchmarks/gpu.py --model /models/x    a different checkpoint; oneshot holds all of it in memory
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
from same_tensors import same_tensors
from timing import Run

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
TINY = ROOT / "examples" / "qwen3-moe-small"
LAYERS, EXPERT = 2, 3 * 2048 * 768 * 2  # layers of the synthetic model, and bytes of an expert in BF16
OURS = "ktconvert"
IMPORT = "only its import"  # the cost of importing llmcompressor
FOR_CPU = "cpu --scale gptq"  # INT4 or INT8 with --calibrate mixed
PEERS = {"RTN": ("model_free_ptq", "oneshot-RTN"), "GPTQ": (FOR_CPU, "oneshot-GPTQ")}
# Targets: figure -> smallest ratio of model_free_ptq's figure to ours.
TARGETS = {"wall": 3.0, "RSS": 2.0}


@dataclass(frozen=True)
class Bench:
    """Paths and settings of all runs."""

    folder: Path
    kind: str
    samples: int
    length: int
    threads: int  # threads of torch on both sides; our RTN and model_free_ptq use all CPUs

    @property
    def out(self) -> Path:
        """Folder to which every run writes."""
        return self.folder / "out"

    @property
    def data(self) -> Path:
        """File of calibration texts."""
        return self.folder / "texts.jsonl"

    def command(self, side: str, method: str, model: Path) -> list[str]:
        """Return the command line of one run."""
        data = [str(self.data), str(self.samples), str(self.length)] if method == "GPTQ" else []
        if side == IMPORT:
            return [sys.executable, "-c", "import llmcompressor"]
        if side not in (OURS, FOR_CPU):
            script = str(Path(__file__).with_name("peer_gpu.py"))
            return [sys.executable, script, side, str(model), str(self.out), self.kind, *data]
        command = [sys.executable, "-m", "ktconvert.pipeline.cli"]
        command += FOR_CPU.split() if side == FOR_CPU else ["gpu", "--quant-type", self.kind]
        command += ["--quant-method", f"int{self.kind[1]}" if side == FOR_CPU else method]
        command += ["-i", str(model), "-o", str(self.out), "-q", "--force-cpu"]
        names = ("--dataset", "--num-calibration-samples", "--sequence-length", "--cpuinfer-threads")
        data += [str(self.threads)] if data else []
        return command + [word for pair in zip(names, data, strict=False) for word in pair]

    def time_run(self, side: str, method: str, model: Path) -> Run:
        """Time one run and its sync, from a warm cache; its output stays until clear()."""
        self.clear()
        timing.fill_caches(sorted(model.glob("*.safetensors")))
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        return timing.run(
            self.command(side, method, model), env=quiet | {"OMP_NUM_THREADS": str(self.threads)}, sync=True
        )

    def clear(self) -> None:
        """Remove the output of the last run."""
        shutil.rmtree(self.out, ignore_errors=True)
        os.sync()


def main() -> None:
    """Create the models, then measure in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="models are created and kept here; default: a temporary directory")
    parser.add_argument("--gb", type=float, default=1.0, help="size of the synthetic model for RTN")
    parser.add_argument("--gptq-gb", type=float, default=0.2, help="size of the model for GPTQ, where oneshot is slow")
    parser.add_argument("--tiny", action="store_true", help="the bundled model for both, and 8 samples of 128 tokens")
    parser.add_argument("--model", type=Path, help="this checkpoint for both")
    parser.add_argument("--methods", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--quant-type", choices=["W4A16", "W8A16"], default="W4A16")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; more were slower on a busy machine")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all sides in turn")
    parser.add_argument("--gptq-rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.samples, options.length = TINY, 8, 128
    with tempfile.TemporaryDirectory(prefix="ktconvert-bench-") as temporary:
        folder = options.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, options.quant_type, options.samples, options.length, options.threads)
        timing.in_subprocess(write_texts, bench.data, bench.samples, bench.length)
        try:
            figures = measure_all(bench, options)
        finally:
            bench.clear()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure_all(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods, and print each."""
    machine = timing.machine() | {"file_system": timing.filesystem(bench.folder), "type": bench.kind}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    figures: dict[str, Any] = {"machine": machine, "runs": {}}
    for method in options.methods:
        size, rounds = (options.gb, options.rounds) if method == "RTN" else (options.gptq_gb, options.gptq_rounds)
        model = options.model or bench.folder / f"qwen3-{size:g}GB"
        if not options.model:
            timing.in_subprocess(write_random_model, model, size)
        runs = measure_method(bench, method, model, rounds)
        figures["runs"][method] = {side: [timing.figures_of(run) for run in group] for side, group in runs.items()}
        print_targets(runs)
    return figures


def measure_method(bench: Bench, method: str, model: Path, rounds: int) -> dict[str, list[Run]]:
    """Measure ours and each peer in turn, and print a table; compare RTN's bytes first."""
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    samples = f", {bench.samples} samples of {bench.length} tokens" if method == "GPTQ" else ""
    print(f"\n{method} {bench.kind}, {model.name}: {weights / 1e9:.2f} GB{samples}", flush=True)
    if method == "RTN":
        print(compare_outputs(bench, model), flush=True)
    runs: dict[str, list[Run]] = {side: [] for side in (OURS, *PEERS[method], IMPORT)}
    for _ in range(rounds):
        for side, group in runs.items():
            group.append(bench.time_run(side, method, model))
    print(f"{'':16} {'wall s':>20} {'x ours':>7} {'CPU s':>8} {'x ours':>7} {'RSS MiB':>8} {'x ours':>7}")
    ours = runs[OURS]
    for side, group in runs.items():
        walls = [run.wall for run in group]
        wall = f"{statistics.median(walls):.2f} ({min(walls):.2f}-{max(walls):.2f})"
        figures = [
            (timing.median(group, f), timing.median(group, f) / timing.median(ours, f))
            for f in ("wall", "cpu", "max_rss")
        ]
        (_, times), (cpu, cpu_times), (rss, rss_times) = figures
        print(f"{side:16} {wall:>20} {times:7.2f} {cpu:8.2f} {cpu_times:7.2f} {rss / MIB:8.0f} {rss_times:7.2f}")
    return runs


def compare_outputs(bench: Bench, model: Path) -> str:
    """Compare the tensors of ours and model_free_ptq. Raises RuntimeError at the first difference."""
    bench.time_run("model_free_ptq", "RTN", model)
    peer_out = bench.folder / "peer-out"
    shutil.rmtree(peer_out, ignore_errors=True)
    bench.out.rename(peer_out)
    bench.time_run(OURS, "RTN", model)
    try:
        return str(timing.in_subprocess(same_tensors, peer_out, bench.out, "model_free_ptq"))
    finally:
        shutil.rmtree(peer_out)


def write_random_model(folder: Path, gigabytes: float) -> None:
    """Write a random qwen3_moe of this size that transformers can load, with the bundled model's tokenizer."""
    import models

    # Attention and router have 38 MB per layer; each expert adds 512 rows to the embedding.
    experts = max(8, round((gigabytes * 1e9 / LAYERS - 38e6) / (EXPERT + 512 * 2048 * 2 / LAYERS)))
    tensors, config = models.qwen3(LAYERS, experts)
    for layer in range(LAYERS):
        for norm in ("q_norm", "k_norm"):
            tensors.append(models.Tensor(f"model.layers.{layer}.self_attn.{norm}.weight", "BF16", (128,)))
    config |= {
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    }
    models.write_model(folder, tensors, config, max(1, round(gigabytes * 4)), models.gaussian())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / name, folder / name)


def write_texts(path: Path, samples: int, length: int) -> None:
    """Write rows of the bundled held-out text, each with more tokens than are used."""
    text = (ROOT / "examples" / "heldout.txt").read_text()
    starts = [(997 * n) % max(1, len(text) // 2) for n in range(samples)]
    rows = [(text[start:] + text) * (1 + 8 * length // len(text)) for start in starts]
    path.write_text("".join(json.dumps({"text": row[: 8 * length]}) + "\n" for row in rows))


def print_targets(runs: dict[str, list[Run]]) -> None:
    """Print the targets against model_free_ptq."""
    if "model_free_ptq" not in runs:
        return
    for name, figure in (("wall", "wall"), ("RSS", "max_rss")):
        value = timing.median(runs["model_free_ptq"], figure) / timing.median(runs[OURS], figure)
        verdict = "met" if value >= TARGETS[name] else "MISSED"
        print(f"  model_free_ptq's {name}: {value:.2f} x ours (at least {TARGETS[name]:g}: {verdict})")


if __name__ == "__main__":
    main()
