#!/usr/bin/env python3
"""One conversion with several workers: measured with Dask on this host, calculated for 1 to 64 hosts.

Writes tables and figure of docs/explanation/speed.md.

python benchmarks/scale.py                     measure and calculate; 15 GB of disk, some minutes
python benchmarks/scale.py --write             and put tables, data and figures into docs/
python benchmarks/scale.py --size small        one small layer, to try the script; its figures mean nothing

Needs `.[dask,plot,dev]`, because the tests' rig starts its workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import convert
import models
import pages
import scale_hosts
import timing
from scale_hosts import HOSTS, MODELS, Host, Model

from ktconvert.layouts.files import publish

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "speed.md"
sys.path.append(str(ROOT / "tests"))  # the rig
CPUS = sorted(os.sched_getaffinity(0))
SHARDS = "16M"  # makes small units, which show the cost of a unit
BITS = {"int8": 8, "int4": 4}
LARGE = 16  # assumed speed of a large host relative to the measured one
LINK = 3e9  # bytes per second of the link of a host: 25 Gbit/s
SHARED = {"2 GB/s": 2e9, "20 GB/s": 20e9}  # of a file system: one server with 25 Gbit/s; several servers in parallel


@dataclass
class Conversion:
    """One conversion: seconds of the whole command with its sync, and its events as (when, event)."""

    wall: float
    events: list[tuple[float, dict[str, Any]]] = field(repr=False)

    @property
    def units(self) -> list[float]:
        """Seconds of each unit, as its worker has measured them."""
        return [event["seconds"] for _, event in self.events if event["event"] == "done"]

    @property
    def between(self) -> float:
        """Seconds between two units of one worker."""
        ends = [when for when, event in self.events if event["event"] == "done"]
        return (ends[-1] - ends[0] - sum(self.units[1:])) / (len(ends) - 1)


# Title of a row -> CPUs of each Dask worker; none: threads of the command itself.
SETUPS: dict[str, Sequence[Sequence[int]]] = {
    "threads": (),
    "1 worker, all CPUs": (CPUS,),
    "2 workers, half the CPUs each": (CPUS[: len(CPUS) // 2], CPUS[len(CPUS) // 2 :]),
}


@contextlib.contextmanager
def start_executor(folder: Path, workers: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield the value of --executor for a cluster with workers on these CPUs, which ends afterwards."""
    if not workers:
        yield "threads"
        return
    from rig.dask_cluster import Cluster

    with contextlib.redirect_stdout(None), Cluster(folder) as cluster:
        for number, cpus in enumerate(workers):
            cluster.start(f"w{number}", nanny=True, prefix=["taskset", "-c", ",".join(map(str, cpus))])
        yield f"dask:{cluster.file}"


def run_conversion(bench: convert.Bench, source: Path, name: str, *options: str) -> Conversion:
    """Run `ktconvert cpu --json` from a warm cache, with its sync; its output stays until the next run."""
    bench.clear()
    shutil.rmtree(f"{bench.out}.work", ignore_errors=True)  # left by an interrupted run
    timing.fill_caches(sorted(source.glob("*.safetensors")))
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", "cpu", "-i", str(source), "-o", str(bench.out)]
    command += ["--threadpool-count", str(scale_hosts.NUMA), "--json", "--executor", name, *options]
    start = time.perf_counter()
    events = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            events.append((time.perf_counter() - start, json.loads(line)))
        errors = process.stderr.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{errors[-4000:]}")
    os.sync()
    return Conversion(time.perf_counter() - start, events)


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each weight file."""
    return {path.name: publish.sha256_file(path) for path in sorted(folder.glob("*.safetensors"))}


def measure(bench: convert.Bench, rounds: int) -> tuple[list[list[str]], float]:
    """Measure each setup in turn, with a unit for each layer and with many small units.

    Return rows, and the fewest seconds between two units of one worker. Other load only adds time, so that ratios are
    of the best rounds. Raises RuntimeError if bytes differ.
    """
    rows, between = [], []
    for title, options in (("one unit per layer", ()), (f"units of {SHARDS}", ("--max-shard-size", SHARDS))):
        runs: dict[str, list[Conversion]] = {setup: [] for setup in SETUPS}
        expected: dict[str, str] = {}
        for number in range(rounds):
            for setup, workers in SETUPS.items():
                with (
                    tempfile.TemporaryDirectory(dir=bench.folder) as folder,
                    start_executor(Path(folder), workers) as name,
                ):
                    runs[setup].append(run_conversion(bench, bench.bf16, name, "--quant-method", "int8", *options))
                if number == 0:
                    expected = expected or hash_files(bench.out)
                    if hash_files(bench.out) != expected:
                        raise RuntimeError(f"{setup}: writes other bytes than threads")
        threads_wall = min(run.wall for run in runs["threads"])
        for setup, conversions in runs.items():
            walls = sorted(run.wall for run in conversions)
            gap = min(run.between for run in conversions) if options and len(SETUPS[setup]) == 1 else None
            if gap is not None:
                between.append(gap)
            wall = f"{walls[0]:.1f} ({statistics.median(walls):.1f}, {walls[-1]:.1f})"
            figures = [f"{walls[0] / threads_wall:.2f}", "" if gap is None else f"{1e3 * gap:.0f} ms"]
            rows.append([title, setup, str(len(conversions[0].units)), wall, *figures])
            print(*rows[-1], sep=" | ", flush=True)
    return rows, min(between)


def measure_rates(bench: convert.Bench, rounds: int, shape: Model) -> dict[int, float]:
    """Return bits of the output -> bytes of FP8 per second of one worker with all CPUs, one unit at a time.

    The best of some rounds counts.
    """
    samples: dict[int, list[float]] = {bits: [] for bits in BITS.values()}
    for _ in range(rounds):
        for method, bits in BITS.items():
            with tempfile.TemporaryDirectory(dir=bench.folder) as folder, start_executor(Path(folder), (CPUS,)) as name:
                conversion = run_conversion(bench, bench.inputs["FP8"], name, "--quant-method", method)
            samples[bits].append(shape.bytes_in * len(conversion.units) / sum(conversion.units))
    return {bits: max(each) for bits, each in samples.items()}


def plan_seconds(folder: Path) -> float:
    """Return the seconds of the plan of DeepSeek-V3.1, from headers and holes."""
    large = MODELS[0]
    tensors, config = models.deepseek(large.layers + 3, large.experts)
    models.write_model(folder, tensors, config, 163)
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", "cpu", "-i", str(folder), "-o", f"{folder}-never-made"]
    return min(timing.run([*command, "--dry-run"]).wall for _ in range(3))


def calculate_rows(hosts: dict[str, Host]) -> list[list[str]]:
    """Return the rows of the table for 1 to 64 hosts."""
    rows = []
    for model in MODELS:
        for method, bits in BITS.items():
            for title, host in hosts.items():
                for share, bandwidth in SHARED.items():
                    minutes = scale_hosts.curve(model, bits, host, bandwidth, HOSTS)
                    most = scale_hosts.limit(model, bits, host, bandwidth)
                    cells = [f"{m:.0f}" if m >= 10 else f"{m:.1f}" for m in minutes]
                    rows.append([f"{model.name} to {method}", title, share, *cells, f"{most:.0f}"])
    return rows


def figure_lines(hosts: dict[str, Host]) -> list[dict[str, Any]]:
    """Return the data of docs/figures/scale.json: minutes to INT8 for 1 to 64 hosts."""
    return [
        {
            "model": model.name,
            "host": title,
            "file system": share,
            "limit": round(scale_hosts.limit(model, 8, host, bandwidth), 2),
            "minutes": [round(minutes, 3) for minutes in scale_hosts.curve(model, 8, host, bandwidth)],
        }
        for model in MODELS
        for title, host in hosts.items()
        for share, bandwidth in SHARED.items()
    ]


def main() -> None:
    """Create the models, measure, calculate, and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="models are created and kept here; default: a temporary directory")
    parser.add_argument("--size", choices=convert.SIZES, default="full")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put tables, data and figures into docs/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ktconvert-bench-") as temporary:
        folder = options.dir or Path(temporary)
        bench = convert.prepare(folder, options.size, ["FP8"], with_peer=False)
        layers, experts, _ = convert.SIZES[options.size]
        print(", ".join(f"{key} {value}" for key, value in timing.machine().items()), flush=True)
        try:
            rows, between = measure(bench, options.rounds)
            shape = Model("measured", convert.HIDDEN, convert.WIDTH, experts, layers)
            measured = Host(
                measure_rates(bench, options.rounds, shape), LINK, between, plan_seconds(folder / "deepseek-headers")
            )
        finally:
            bench.clear()
            shutil.rmtree(folder / "deepseek-headers", ignore_errors=True)
    faster = {bits: rate * LARGE for bits, rate in measured.rates.items()}
    hosts = {
        f"{len(CPUS)} CPUs, measured": measured,
        f"{LARGE * len(CPUS)} CPUs, assumed": Host(faster, LINK, between, measured.plan),
    }
    gb = {method: f"{measured.rates[bits] / 1e9:.2f} GB/s" for method, bits in BITS.items()}
    inputs = (
        f"Measured here: {', '.join(f'{rate} of FP8 to {method}' for method, rate in gb.items())} on {len(CPUS)} CPUs, "
        f"one unit at a time; {1e3 * between:.0f} ms between two units; {measured.plan:.1f} s for the plan of "
        f"{MODELS[0].name}."
    )
    texts = {
        "measured": pages.table(
            (
                "units",
                "executor",
                "number of units",
                "best wall, s (median, worst)",
                "relative to threads",
                "gap between units",
            ),
            rows,
        ),
        "inputs of the formula": inputs,
        "calculated": pages.table(("", "host", "file system", *map(str, HOSTS), "limit, hosts"), calculate_rows(hosts)),
    }
    for name, body in texts.items():
        print(f"\n{name}\n{body}")
        if options.write:
            pages.write(PAGE, name, body)
    if options.write:
        pages.draw("scale", {"lines": figure_lines(hosts)})


if __name__ == "__main__":
    main()
