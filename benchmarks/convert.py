#!/usr/bin/env python3
"""Conversion compared with copying: `cp -r`, `ktconvert cpu` with several formats and quantizers, and kt-kernel.

python benchmarks/convert.py                       all of it; 15 GB of disk, some minutes
python benchmarks/convert.py --size small          one small layer, to try the script; its figures mean nothing
KTCONVERT_PEER_PYTHON=/venv/bin/python python benchmarks/convert.py     with kt-kernel from that venv

Without KTCONVERT_PEER_PYTHON, kt-kernel is looked for in build/peer, and left out if it is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
from same_tensors import same_tensors
from timing import Run

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
METHODS = ("int4", "int8")
SCALED = ("int4 mse", "int4 imatrix")  # method and --scale
TIMED = ("cp", *METHODS, "mxfp4", *SCALED)
NUMA = 2
HIDDEN, WIDTH = 2048, 768  # sizes of the models
SIZES = {"full": (3, 128, 4), "small": (1, 16, 2)}  # layers, experts, shards
# Inputs that are compared with BF16, and their names in models.py or ggml.
INPUTS = {"FP8": "F8_E4M3", "MXFP4": "MXFP4", "INT4": "INT4", "Q4_K": "Q4_K"}
KEPT = {"MXFP4": "mxfp4", "FP8": "fp8"}  # input -> method that keeps its codes and scales

# Targets: figure -> (limit, unit). Wall and CPU are ratios to cp in the same rounds.
TARGETS = {
    "int4 wall": (0.6, "x cp"),
    "int4 CPU": (0.8, "x cp"),
    "int8 wall": (0.9, "x cp"),
    "int8 CPU": (1.0, "x cp"),
    "mxfp4 wall": (0.9, "x cp"),
    **{f"{what} wall": (1.0, "x cp") for what in SCALED},
    **{f"{method} {name} kept": (1.0, "x cp of it") for name, method in KEPT.items()},
    "int4 cold wall": (1.0, "x cp"),
    "int8 cold wall": (1.0, "x cp"),
    "anonymous": (300, "MiB"),
    "RSS": (600, "MiB"),
    **{f"{method} {name} wall": (1.5, "x BF16, per output byte") for name in INPUTS for method in METHODS},
}

HEADING = (
    f"{'warm':16} {'wall s':>20} {'x cp':>6} {'CPU s':>7} {'user':>6} {'sys':>6} {'hashing':>8} {'x cp':>6} "
    f"{'without':>8} {'RSS MiB':>8}"
)


@dataclass(frozen=True)
class Bench:
    """Paths of one run, models by the names of INPUTS, and the Python with kt-kernel if it is installed."""

    folder: Path
    bf16: Path
    imatrix: Path
    inputs: dict[str, Path]
    peer: str | None

    @property
    def out(self) -> Path:
        """Folder to which every run writes."""
        return self.folder / "out"

    def command(self, case: str, source: Path) -> list[str]:
        """Return the command line of cp, of a method with its --scale, or of peer-int4 or peer-int8."""
        if case == "cp":
            return ["cp", "-r", "--reflink=never", str(source), str(self.out)]
        if case.startswith("peer-"):
            method, threads = f"AMX{case[5:].upper()}", str(max(NUMA, len(os.sched_getaffinity(0))))
            script = str(ROOT / "benchmarks" / "peer_convert.py")
            return [str(self.peer), script, str(source), str(self.out), method, str(NUMA), threads]
        command = [sys.executable, "-m", "ktconvert.pipeline.cli", "cpu", "-i", str(source), "-o", str(self.out)]
        method, *scale = case.split()
        options = ["--scale", *scale] if scale else []
        options += ["--imatrix", str(self.imatrix)] if scale == ["imatrix"] else []
        return [*command, "--quant-method", method, "--threadpool-count", str(NUMA), *options]

    def time_run(self, case: str, source: Path, *, cold: bool = False, sample: bool = False) -> Run:
        """Time one run and its sync, from a warm or cold cache; its output stays until clear()."""
        self.clear()
        files = sorted([*source.glob("*.safetensors"), *source.glob("*.gguf")])
        (timing.drop_caches if cold else timing.fill_caches)(files)
        # pip compiles Python's modules; here the untimed first run of each method does.
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(self.folder / "pycache")}
        return timing.run(self.command(case, source), env=compiled, sync=True, sample=sample)

    def clear(self) -> None:
        """Remove the output of the last run."""
        shutil.rmtree(self.out, ignore_errors=True)
        os.sync()

    def out_bytes(self) -> int:
        """Return the bytes of weights that the last run wrote."""
        return sum(path.stat().st_size for path in self.out.glob("*.safetensors"))


def main() -> None:
    """Create the models, check the bytes, then measure in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="models are created and kept here; default: a temporary directory")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of cp and of each method in turn")
    parser.add_argument("--input-rounds", type=int, default=3, help="rounds of each other input and BF16 in turn")
    parser.add_argument("--inputs", nargs="*", choices=INPUTS, default=list(INPUTS))
    parser.add_argument("--cold", type=int, default=3, metavar="ROUNDS", help="rounds that start with a cold cache")
    parser.add_argument("--peer-rounds", type=int, default=1, help="rounds of kt-kernel, which is slow; 0: without it")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ktconvert-bench-") as temporary:
        inputs = options.inputs if options.input_rounds else []
        bench = prepare(options.dir or Path(temporary), options.size, inputs, with_peer=options.peer_rounds > 0)
        try:
            figures = measure_all(bench, options)
        finally:
            bench.clear()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def prepare(folder: Path, size: str, inputs: list[str], *, with_peer: bool) -> Bench:
    """Create missing models, in a separate process so that this one needs little memory."""
    layers, experts, shards = SIZES[size]
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"qwen3-{name.lower()}-{layers}x{experts}" for name in ("BF16", *inputs)}
    for name, path in paths.items():
        timing.in_subprocess(write_random_model, path, layers, experts, shards, INPUTS.get(name, name))
    imatrix = folder / f"qwen3-{layers}x{experts}.imatrix.gguf"
    if not imatrix.exists():
        timing.in_subprocess(write_random_imatrix, imatrix, layers, experts)
    python = os.environ.get("KTCONVERT_PEER_PYTHON") or str(ROOT / "build" / "peer" / "bin" / "python")
    peer = python if with_peer and Path(python).exists() else None
    return Bench(folder, paths.pop("BF16"), imatrix, paths, peer)


def write_random_model(folder: Path, layers: int, experts: int, shards: int, dtype: str) -> None:
    """Write one random model."""
    import blocks
    import models

    if dtype in blocks.GGML:
        blocks.write_gguf(folder / "model.gguf", layers, experts, dtype)
        return
    tensors, config = models.qwen3(layers, experts, dtype)
    models.write_model(folder, tensors, config, shards, models.gaussian())


def write_random_imatrix(path: Path, layers: int, experts: int) -> None:
    """Write an importance matrix whose squares of inputs are exponentially distributed."""
    import numpy as np

    from ktconvert.layouts.statistics.imatrix import LayerSums, write_imatrix

    def draw_sums(layer: int) -> LayerSums:
        rng = np.random.default_rng(layer)
        sums = (rng.standard_exponential((experts, size), np.float32) for size in (HIDDEN, WIDTH))
        return LayerSums(np.full(experts, 512), *sums)

    shapes = dict.fromkeys(range(layers), (experts, HIDDEN, WIDTH))
    write_imatrix(path, shapes, draw_sums, datasets=["random"], chunks=1, chunk_size=512)


def measure_all(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Take all measurements in order, and print each."""
    machine = timing.machine() | {"file_system": timing.filesystem(bench.folder), "size": options.size}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    hash_rate = timing.in_subprocess(sha256_rate)
    source_bytes = sum(p.stat().st_size for p in bench.bf16.glob("*.safetensors"))
    print(f"{bench.bf16.name}: {source_bytes / 1e9:.2f} GB; sha256 {hash_rate / 1e9:.2f} GB/s on one core\n")

    peers, checks, memory, sizes = check_bytes(bench, options.peer_rounds)
    rounds: dict[str, list[Run]] = {label: [] for label in TIMED}
    for _ in range(options.rounds):
        for label, runs in rounds.items():
            runs.append(bench.time_run(label, bench.bf16))
            if label not in ("cp", *METHODS):
                sizes[label] = bench.out_bytes()
    cold: dict[str, list[Run]] = {label: [] for label in TIMED}
    for _ in range(options.cold):
        for label, runs in cold.items():
            runs.append(bench.time_run(label, bench.bf16, cold=True))
    inputs: dict[str, list[Run]] = {}
    bf16_runs: dict[str, list[Run]] = {}  # runs with BF16 in turn with each
    for name, path in bench.inputs.items():
        for method in METHODS:
            case = f"{method} {name}"
            inputs[case], bf16_runs[case] = [], []
            for _ in range(options.input_rounds):
                inputs[case].append(bench.time_run(method, path))
                sizes[case] = bench.out_bytes()
                bf16_runs[case].append(bench.time_run(method, bench.bf16))
                sizes[f"{case}, BF16"] = bench.out_bytes()

    kept: dict[str, list[Run]] = {}
    for name in (name for name in bench.inputs if name in KEPT):
        for label in options.input_rounds * ("cp", KEPT[name]):
            kept.setdefault(f"{label} {name}", []).append(bench.time_run(label, bench.inputs[name]))
            sizes[f"{label} {name}"] = bench.out_bytes() if label != "cp" else 0

    warm = {**rounds, **{f"peer-{m}": runs for m, runs in peers.items()}}
    print(HEADING)
    print_rows(warm, sizes, hash_rate)
    if options.cold:
        print("\ncold")
        print_rows(cold, sizes, hash_rate)
    if inputs:
        print("\nother inputs, and BF16 in turn with each")
        turns = {f"{case}{of}": runs[case] for case in inputs for of, runs in (("", inputs), (", BF16", bf16_runs))}
        print_rows(turns, sizes, hash_rate, "")
    if kept:
        print("\ninputs that an output keeps, and cp of each")
        print_rows(kept, sizes, hash_rate, "")
    targets = compute_targets(rounds, cold, inputs, bf16_runs, memory, sizes)
    for name in (name for name in bench.inputs if name in KEPT):
        ours, copies = kept[f"{KEPT[name]} {name}"], kept[f"cp {name}"]
        targets[f"{KEPT[name]} {name} kept"] = timing.median(ours, "wall") / timing.median(copies, "wall")
    print("\ntargets")
    for name, value in targets.items():
        limit, unit = TARGETS[name]
        print(f"  {name:17} {value:7.2f} {unit:24} (at most {limit}: {'met' if value <= limit else 'MISSED'})")
    groups = {"warm": warm, "cold": cold, "inputs": inputs, "bf16_beside_inputs": bf16_runs, "kept": kept}
    return {
        "machine": machine,
        "sha256_bytes_per_second": hash_rate,
        "source_bytes": source_bytes,
        "output_bytes": sizes,
        "checked": checks,
        "anonymous_bytes": memory,
        "runs": {
            kind: {label: [timing.figures_of(r) for r in runs] for label, runs in group.items()}
            for kind, group in groups.items()
        },
        "targets": {name: {"value": value, "at_most": TARGETS[name][0]} for name, value in targets.items()},
    }


def check_bytes(
    bench: Bench, peer_rounds: int
) -> tuple[dict[str, list[Run]], dict[str, str], dict[str, int], dict[str, int]]:
    """Convert once with each method, sample its memory, and compare the bytes with kt-kernel's or the source's.

    Return kt-kernel's runs, how each method was checked, and anonymous bytes and output bytes by method.
    """
    peers: dict[str, list[Run]] = {}
    checks, memory, sizes = {}, {}, {}
    peer_out = bench.folder / "peer-out"
    for method in METHODS:
        shutil.rmtree(peer_out, ignore_errors=True)
        if bench.peer:
            peers[method] = [bench.time_run(f"peer-{method}", bench.bf16) for _ in range(peer_rounds)]
            bench.out.rename(peer_out)
        run = bench.time_run(method, bench.bf16, sample=True)
        memory[method], sizes[method] = run.anonymous, bench.out_bytes()
        if bench.peer:
            checks[method] = timing.in_subprocess(same_tensors, peer_out, bench.out, "kt-kernel")
            sizes[f"peer-{method}"] = 0  # kt-kernel hashes nothing
        else:
            cli = [
                sys.executable,
                "-m",
                "ktconvert.pipeline.cli",
                "verify",
                str(bench.out),
                "--against",
                str(bench.bf16),
            ]
            timing.run(cli)
            checks[method] = "equal to the source quantized again (ktconvert verify --against)"
        print(
            f"{method}: {checks[method]}; {memory[method] / MIB:.0f} MiB anonymous at most, "
            f"{run.max_rss / MIB:.0f} MiB RSS"
        )
    shutil.rmtree(peer_out, ignore_errors=True)
    print()
    return peers, checks, memory, sizes


def sha256_rate() -> float:
    """Return the bytes of SHA-256 per CPU second on one core, for 64 MiB, the best of five."""
    buffer = bytes(range(256)) * (64 * MIB // 256)
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        hashlib.sha256(buffer).digest()
        best = min(best, time.process_time() - start)
    return len(buffer) / best


def print_rows(runs: dict[str, list[Run]], sizes: dict[str, int], hash_rate: float, base: str = "cp") -> None:
    """Print one line for each case: median (minimum - maximum) and ratios to `base`."""
    reference = runs.get(base, [])
    for case, group in runs.items():
        if not group:
            continue
        walls = [r.wall for r in group]
        wall_ratio = f"{timing.median(group, 'wall') / timing.median(reference, 'wall'):6.2f}" if reference else ""
        hashing = sizes.get(case, 0) / hash_rate
        cpu_ratio = f"{timing.median(group, 'cpu') / timing.median(reference, 'cpu'):6.2f}" if reference else ""
        unhashed = timing.median(group, "cpu") - hashing
        unhashed_ratio = f"{unhashed / timing.median(reference, 'cpu'):8.2f}" if reference else ""
        spread = f"{statistics.median(walls):.2f} ({min(walls):.2f}-{max(walls):.2f})"
        print(
            f"{case:16} {spread:>20} {wall_ratio:>6} {timing.median(group, 'cpu'):7.2f} "
            f"{timing.median(group, 'user'):6.2f} {timing.median(group, 'system'):6.2f} {hashing:8.2f} {cpu_ratio:>6} "
            f"{unhashed_ratio:>8} {max(r.max_rss for r in group) / MIB:8.0f}"
        )


def compute_targets(
    warm: dict[str, list[Run]],
    cold: dict[str, list[Run]],
    inputs: dict[str, list[Run]],
    bf16_runs: dict[str, list[Run]],
    memory: dict[str, int],
    sizes: dict[str, int],
) -> dict[str, float]:
    """Return the measured figures that have a target, in the target's unit."""
    values: dict[str, float] = {}
    for method in TIMED[1:]:
        if warm["cp"]:
            values[f"{method} wall"] = timing.median(warm[method], "wall") / timing.median(warm["cp"], "wall")
            values[f"{method} CPU"] = timing.median(warm[method], "cpu") / timing.median(warm["cp"], "cpu")
        if cold["cp"]:
            values[f"{method} cold wall"] = timing.median(cold[method], "wall") / timing.median(cold["cp"], "wall")
    for case, runs in inputs.items():
        per_byte = timing.median(runs, "wall") / sizes[case]
        values[f"{case} wall"] = per_byte / (timing.median(bf16_runs[case], "wall") / sizes[f"{case}, BF16"])
    ours = [r for group in (warm, cold) for method in TIMED[1:] for r in group[method]]
    ours += [r for runs in inputs.values() for r in runs]
    values["anonymous"] = max(memory.values()) / MIB
    if ours:
        values["RSS"] = max(r.max_rss for r in ours) / MIB
    return {name: values[name] for name in TARGETS if name in values}


if __name__ == "__main__":
    main()
