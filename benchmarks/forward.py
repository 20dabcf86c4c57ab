#!/usr/bin/env python3
"""The forward of routed experts, ours and kt-kernel's, in turns with the same weights and inputs.

python benchmarks/forward.py                    both shapes and methods; about ten minutes, 8 GB of memory, 8 GB of disk
python benchmarks/forward.py --quick            one shape, a minute
python benchmarks/forward.py --methods bf16 fp8 mxfp4      floating-point experts; 10 GB more disk
python benchmarks/forward.py --methods fp8_perchannel mxfp8 nvfp4 rawint4 gptq_int4     methods of checkpoints
python benchmarks/forward.py --methods gguf_q4_k gguf_q6_k gguf_q8_0 gguf_q4_0     LLAMAFILE, by types of ggml
python benchmarks/forward.py --methods int4 moe_int4 int8 moe_int8     moe_* (only ours) has the same kernels
python benchmarks/forward.py --vary isa         only ours, instruction sets compared
python benchmarks/forward.py --vary memory      only ours, mapped files compared with a copy on huge pages

kt-kernel is taken from --peer PYTHON, KTCONVERT_PEER_PYTHON or build/peer (`make peer`); without it, only ours is
measured. It has no AMXINT4 and AMXINT8 on a CPU with only AVX2, or with --isa avx2: then bf16, fp8 and mxfp4 are
compared, unless --methods names others. Methods that it lacks are measured without it. Outputs are compared first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import forward_report
import mixtures
import numpy as np
import timing
from ceilings import l3_bytes
from forward_cells import Cell, Figures, Run, cell_document
from forward_report import Load
from mixtures import Batch, Shape
from state import build
from turns import LONG, Worker

from ktconvert.native_quant import kernels
from ktconvert.native_quant.instruction_sets import VARIANTS

HERE = Path(__file__).resolve().parent
PEER = "kt"
MAX_CALLS = 400
PROBES = 1000
# Default methods: the first group that kt-kernel has.
PREFERRED = (("int4", "int8"), ("bf16", "fp8", "mxfp4", "rawint4", "gptq_int4"))
MAX_SECONDS = 4.0  # a longer call is only timed once, when outputs are compared


@dataclass(frozen=True)
class Side:
    """A process that takes turns with others.

    memory  how ours holds the weights; None for kt-kernel
    lacks   methods that it does not support on this CPU
    """

    name: str
    python: str
    env: dict[str, str]
    memory: str | None
    lacks: frozenset[str] = frozenset()

    def start(self, scratch: Path, threads: int) -> Worker:
        """Start its process."""
        script = HERE / ("our_forward.py" if self.memory else "peer_forward.py")
        command = [self.python, str(script), str(scratch), str(threads)]
        return Worker(self.name, command, scratch / f"{self.name}.log", self.env)


def main() -> None:
    """Measure and report."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the temporary directory is removed
    machine = timing.machine() | {"l3_bytes": str(l3_bytes())}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    with tempfile.TemporaryDirectory(prefix="ktconvert-forward-", dir=options.dir) as scratch:
        build(HERE / "state.c", Path(scratch))
        sides = choose_sides(options, Path(scratch))
        unsupported = frozenset[str]().union(*(side.lacks for side in sides))
        options.methods = options.methods or next((m for m in PREFERRED if not unsupported & set(m)), PREFERRED[0])
        run, cells, loads = Run(), [], []
        for name in options.shapes:
            for result in measure_shape(Path(scratch), mixtures.SHAPES[name], sides, options, run):
                (cells if isinstance(result, Cell) else loads).append(result)
    print()
    cells = [run.update_cell(cell) for cell in cells]
    forward_report.print_targets(cells, loads)
    if options.json:
        figures = {
            "machine": machine,
            "probes": {"limit": run.limit, "count": len(run.probes)},
            "reads": run.reads,
            "cells": [cell_document(cell) for cell in cells],
            "loads": [asdict(load) for load in loads],
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--shapes", nargs="+", choices=mixtures.SHAPES, default=["qwen3", "deepseek"])
    parser.add_argument("--methods", nargs="+", choices=mixtures.METHODS, help="default: int4 and int8")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument(
        "--routing", nargs="+", choices=["balanced", "concentrated"], default=["balanced", "concentrated"]
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2] if cores > 1 else [1])
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each; at most three if a call takes a quarter of a second"
    )
    parser.add_argument("--slice", type=float, default=0.12, metavar="SECONDS", help="duration of one turn")
    parser.add_argument("--loads", type=int, default=2, help="rounds of quantizing a layer from tensors; 0: none")
    parser.add_argument(
        "--layers", type=int, help="number of layers in turn; default: four times the last-level cache, at least 3"
    )
    parser.add_argument(
        "--isa", choices=kernels.available_isas(), help="instruction set of ours; kt-kernel uses the matching variant"
    )
    parser.add_argument("--memory", choices=["map", "copy"], default="map", help="how ours holds the weights")
    parser.add_argument("--vary", choices=["isa", "memory"], help="compare ours with itself")
    parser.add_argument("--peer", metavar="PYTHON", help="Python of a venv that has kt-kernel; 'none': only ours")
    parser.add_argument("--dir", type=Path, help="where the temporary directory is created")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="few cells and short turns, to try the script")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.tokens, options.routing = (
            options.shapes[:1],
            options.tokens[:1] + options.tokens[2:5:2],
            ["balanced"],
        )
        options.rounds, options.slice, options.loads = 3, 0.05, min(options.loads, 1)
    return options


def choose_sides(options: argparse.Namespace, scratch: Path) -> list[Side]:
    """Return the sides that take turns; all others are compared with the first."""
    if options.vary == "isa":
        isas = [isa for isa in reversed(kernels.available_isas()) if isa != "scalar"]
        return [Side(isa, sys.executable, {"KTCONVERT_ISA": isa}, options.memory) for isa in isas]
    env = {"KTCONVERT_ISA": options.isa} if options.isa else {}
    if options.vary == "memory":
        return [Side(memory, sys.executable, env, memory) for memory in ("map", "copy")]
    ours = Side("ours", sys.executable, env, options.memory)
    python = (
        options.peer
        or os.environ.get("KTCONVERT_PEER_PYTHON")
        or str(HERE.parent / "build" / "peer" / "bin" / "python")
    )
    if python == "none" or not Path(python).exists():
        print("kt-kernel is not installed: measuring only ours")
        return [ours]
    variant = {"KT_KERNEL_CPU_VARIANT": VARIANTS.get(options.isa, "")} if options.isa else {}
    peer = Side(PEER, python, variant, None)
    try:
        with start_workers([ours, peer], scratch, 1) as workers:
            for worker in workers:
                print(worker.ask("describe"))
            unsupported = workers[1].ask(
                "list_unsupported", methods=sorted({entry.name for entry in mixtures.METHODS.values()})
            )
            lacks = frozenset(method for method, entry in mixtures.METHODS.items() if entry.name in unsupported)
    except RuntimeError as error:
        print(f"kt-kernel does not run, measuring only ours: {error}")
        return [ours]
    if lacks:
        print(f"kt-kernel has no {', '.join(sorted(lacks))} on this CPU")
    return [ours, replace(peer, lacks=lacks)]


def measure_shape(
    scratch: Path, shape: Shape, all_sides: Sequence[Side], options: argparse.Namespace, run: Run
) -> Iterator[Cell | Load]:
    """Measure all cells of one shape, and print each."""
    folder = scratch / shape.name.replace(" ", "-")
    source = folder / "tensors"
    source.mkdir(parents=True)
    mixtures.write_source(source, shape)
    batches = [
        mixtures.make_batch(folder, shape, tokens, routing)
        for routing in options.routing
        for tokens in options.tokens
        if routing == "balanced" or tokens > 1  # one token goes to TOPK experts either way
    ]
    for method in options.methods:
        entry = mixtures.METHODS[method]
        sides = [
            replace(side, env=side.env | entry.env) if side.name == PEER else side
            for side in all_sides
            if method not in side.lacks
        ]
        if not options.vary and entry.source == "tensors":
            yield from measure_loads(folder, source, shape, method, sides, max(options.threads), options.loads)
        layers = options.layers or max(3, -(-4 * l3_bytes() // (shape.experts * shape.expert_bytes(method))))
        weights = make_weights(folder, source, shape, method, layers, sides, max(options.threads))
        for threads in options.threads:
            with start_workers(sides, scratch, threads) as workers:
                for worker, side in zip(workers, sides, strict=True):
                    options_of_side = {"memory": side.memory} if side.memory else {}
                    sizes = {"experts": shape.experts, "hidden": shape.hidden, "intermediate": shape.intermediate}
                    worker.ask(
                        "open",
                        folder=str(weights[side.name]),
                        layers=layers,
                        method=entry.name,
                        **sizes,
                        **options_of_side,
                    )
                run.probes += workers[0].ask("probe", count=PROBES)
                for _ in range(options.rounds):
                    run.record_rates(run.operations, threads, workers[0].ask("operations"))
                    run.record_rates(run.reads, threads, workers[0].ask("read"))
                names = [side.name for side in sides]
                forward_report.print_heading(
                    shape, method, threads, layers, run.reads[threads], run.operations[threads], names
                )
                cells = []
                for batch in batches:
                    cells.append(measure_cell(shape, method, threads, batch, workers, options, run))
                    forward_report.print_cell(cells[-1])
                forward_report.print_marks(cells)
                yield from cells
        for path in set(weights.values()):
            shutil.rmtree(path)
    shutil.rmtree(folder)


def make_weights(
    folder: Path, source: Path, shape: Shape, method: str, layers: int, sides: Sequence[Side], threads: int
) -> dict[str, Path]:
    """Write the weights, and return the directory that each side loads.

    AMXINT4, AMXINT8 and weights stored in checkpoints are shared. Otherwise ours has panels, and kt-kernel has its own
    layout, which for BF16 is the checkpoint.
    """
    ours = folder / method
    if write := {"stored": mixtures.write_stored, "gguf": mixtures.write_gguf}.get(mixtures.METHODS[method].source):
        write(ours, shape, layers, method)
        return {side.name: ours for side in sides}
    if mixtures.METHODS[method].source == "tensors":
        with start_workers(sides[:1], folder, threads) as (worker,):
            worker.ask("quantize", source=str(source), method=mixtures.METHODS[method].name, out=str(folder / "loose"))
        mixtures.merge_layers(folder / "loose", ours, layers)
        shutil.rmtree(folder / "loose")
        return {side.name: ours for side in sides}
    checkpoint, theirs = folder / "checkpoint", folder / f"{method}-kt"
    mixtures.write_checkpoint(source, checkpoint, shape, layers)
    convert = ("cpu", "-i", checkpoint, "--quant-method", method, "--threadpool-count", 1)
    if mixtures.METHODS[method].source == "plain":  # kt-kernel has no code for these on x86-64
        mixtures.ktconvert(*convert, "-o", ours, "--layout", "plain")
        shutil.rmtree(checkpoint)
        return {side.name: ours for side in sides}
    mixtures.ktconvert(*convert, "-o", ours)
    if method == "bf16":
        checkpoint.rename(theirs)
    else:
        mixtures.ktconvert(*convert, "-o", theirs, "--layout", "kt")
        shutil.rmtree(checkpoint)
    return {side.name: theirs if side.name == PEER else ours for side in sides}


def measure_cell(
    shape: Shape,
    method: str,
    threads: int,
    batch: Batch,
    workers: Sequence[Worker],
    options: argparse.Namespace,
    run: Run,
) -> Cell:
    """Compare the outputs, then time all sides in turns; measure the read bandwidth in each round."""
    for worker in workers:
        worker.ask("batch", folder=str(batch.folder))
    differing, distance, turns = compare_outputs(batch.folder, workers)
    if mixtures.METHODS[method].source != "tensors":
        differing = None  # only these have a mode with kt-kernel's bits
    first = {name: turn["walls"][0] for name, (turn,) in turns.items()}
    for worker in workers:
        if first[worker.name] < LONG:  # the first call was a cold one
            first[worker.name] = worker.ask("time", first=0, count=1, warm=True)["walls"][0]
        if first[worker.name] < MAX_SECONDS:
            turns[worker.name].clear()
    for number in range(options.rounds if max(first.values()) < LONG else min(options.rounds, 3)):
        run.record_rates(run.reads, threads, workers[0].ask("read"))
        for worker in workers:
            if first[worker.name] < MAX_SECONDS:
                count = max(1, min(MAX_CALLS, int(options.slice / first[worker.name])))
                warm = first[worker.name] < LONG
                turns[worker.name].append(worker.ask("time", first=2 + number * count, count=count, warm=warm))
    run.probes += [probe for side_turns in turns.values() for turn in side_turns for probe in turn["probes"]]
    return Cell(
        shape=shape.name,
        method=method,
        threads=threads,
        tokens=batch.tokens,
        routing=batch.routing,
        distinct=batch.distinct,
        busiest=batch.busiest,
        bytes=batch.distinct * shape.expert_bytes(method),
        operations=batch.tokens * shape.token_operations,
        read=run.read(threads),
        read_cpu=run.reads[threads]["cpu"],
        ceilings=dict(run.operations[threads]),
        limit=run.limit,
        differing=differing,
        elements=batch.tokens * shape.hidden,
        distance=distance,
        figures={name: Figures.from_turns(side_turns) for name, side_turns in turns.items()},
    )


def compare_outputs(folder: Path, workers: Sequence[Worker]) -> tuple[int | None, float | None, dict[str, list[Any]]]:
    """Compare the exact outputs of ours with the other sides, and the default ones with the second side.

    Return the number of different BF16 values, the relative distance |a - b| / |b|, and the seconds of each side.
    """
    ours, *others = workers
    ours.ask("answer", path=str(folder / "exact.npy"), exact=True)
    turns = {ours.name: [ours.ask("answer", path=str(folder / "default.npy"), exact=False)]}
    for worker in others:
        exact_option = {} if worker.name == PEER else {"exact": True}
        turns[worker.name] = [worker.ask("answer", path=str(folder / f"{worker.name}.npy"), **exact_option)]
    if not others:
        return None, None, turns
    exact, default, *rest = (np.load(folder / f"{n}.npy") for n in ("exact", "default", *(w.name for w in others)))
    a, b = ((bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for bits in (default, rest[0]))
    differing = max(int((exact != output).sum()) for output in rest)
    return differing, float(np.linalg.norm(a - b) / np.linalg.norm(b)), turns


def measure_loads(
    folder: Path, source: Path, shape: Shape, method: str, sides: Sequence[Side], threads: int, rounds: int
) -> Iterator[Load]:
    """Time load_weights_from_tensors, each time in a new process."""
    seconds: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            saved = folder / "saved"
            saved.mkdir()
            with start_workers([side], folder, threads) as (worker,):
                name = mixtures.METHODS[method].name
                seconds[side.name].append(
                    worker.ask("load_source", source=str(source), method=name, scratch=str(saved))
                )
            shutil.rmtree(saved)
    if rounds:
        load = Load(shape.name, method, threads, sum(f.stat().st_size for f in source.glob("*.npy")), seconds)
        forward_report.print_load(load)
        yield load


@contextmanager
def start_workers(sides: Sequence[Side], scratch: Path, threads: int) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        workers = []
        for side in sides:
            worker = side.start(scratch, threads)
            stack.callback(worker.close)
            worker.ask("describe")
            workers.append(worker)
        yield workers


if __name__ == "__main__":
    main()
