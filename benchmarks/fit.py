#!/usr/bin/env python3
"""Time, memory and predictions of `ktconvert fit` for the shapes of released models, from headers without weights.

python benchmarks/fit.py                          all shapes; two minutes, 100 MB of disk
python benchmarks/fit.py --models DeepSeek-V3
python benchmarks/fit.py --speed                  predicted and measured speed of experts; minutes, 6 GB of disk

Each row is a process of its own. The plan of `cpu --dry-run` for the recommended method has the same size, or the row
says so.

--speed writes two layers in the shape of Qwen3-30B-A3B with random weights, converts them, and compares the time of a
layer at one token that `ktconvert bench` measures with the one that `fit` predicts for the bandwidth in that moment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import models
import shapes
import timing

from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.pipeline.fit.estimate import SGLANG, ExpertForm, predict_cpu_rate
from ktconvert.pipeline.fit.model_shape import read_shape

MACHINE = ("--ram", "768GB", "--gpu", "2x4090", "--numa", "2", "--disk", "4TB", "--bandwidth", "400GB")
METHODS = ("int4", "int8", "bf16", "mxfp4", "fp8", "rawint4")
LAYERS = 2
REPEATS = 5  # other programs disturb single measurements
PROGRAM = (sys.executable, "-m", "ktconvert.pipeline.cli")


def main() -> None:
    """Measure and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=shapes.SHAPES, default=[*shapes.SHAPES])
    parser.add_argument("--dir", type=Path, help="where the temporary directory is created")
    parser.add_argument("--speed", action="store_true", help="compare speeds instead")
    parser.add_argument("--threads", type=int, default=1, help="for --speed")
    options = parser.parse_args()
    if options.speed:
        with tempfile.TemporaryDirectory(prefix="ktconvert-fit-", dir=options.dir) as scratch:
            compare_speeds(Path(scratch), options.threads)
        return
    print(f"{'model':22} {'tensors':>8} {'CPU s':>6} {'wall s':>6} {'MB':>5}  recommended")
    with tempfile.TemporaryDirectory(prefix="ktconvert-fit-", dir=options.dir) as scratch:
        for name in options.models:
            folder = Path(scratch) / name
            shapes.write_headers(name, folder)
            count = len(shapes.list_tensors(shapes.SHAPES[name])[0])
            run = timing.run([*PROGRAM, "fit", str(folder), *MACHINE, "--json"])
            document = json.loads(run.output)
            best = document["choices"][0]
            where = f"{best['gpu_experts']} on the GPU, RAM {best['ram'] / 1e9:.0f} GB"
            text = (
                f"{best['method']}, {where}, {best['tokens_per_second']:.1f} tokens/s{compare_with_plan(folder, best)}"
            )
            figures = f"{run.user + run.system:6.1f} {run.wall:6.1f} {run.max_rss / 1e6:5.0f}"
            print(f"{name:22} {count:8} {figures}  {text}", flush=True)


def compare_with_plan(folder: Path, best: dict[str, object]) -> str:
    """Return a remark if the plan of the method has a different size."""
    if best["quant_method"] is None:
        return ""
    words = ("cpu", "-i", folder, "-o", f"{folder}-out", "--quant-method", best["quant_method"], "--dry-run", "--json")
    run = timing.run([*PROGRAM, *map(str, words), "--threadpool-count", "2", "-q"])
    lines = (line for line in run.output.splitlines() if line.startswith("{"))  # the output has warnings, too
    plan = next(event for event in map(json.loads, lines) if event["event"] == "plan")
    return "" if plan["bytes_out"] == best["output"] else f"; the plan has {plan['bytes_out']} bytes"


def compare_speeds(folder: Path, threads: int) -> None:
    """Print the predicted and the measured milliseconds of a layer at one token, for each method."""
    tensors, config = shapes.list_tensors(shapes.SHAPES["Qwen3-30B-A3B"], layers=LAYERS)
    model = folder / "model"
    models.write_model(model, [t for t in tensors if ".mlp." in t.name], config, 1, models.gaussian())
    forms = {form.option: form for form in read_shape(recognize(open_checkpoint(model)), 1, SGLANG).forms}
    print(f"{'method':6} {'GB/s':>5} {'predicted ms':>12} {'measured ms':>11} {'best ms':>8} {'difference':>10}")
    for method in METHODS:
        output = folder / method
        timing.run(
            [*PROGRAM, "cpu", "-i", str(model), "-o", str(output), "--quant-method", method, "--numa", "1", "-q"]
        )
        rows = [measure_layer(output, layer, forms[method], threads) for _ in range(REPEATS) for layer in range(LAYERS)]
        bandwidth, predicted, measured, best = (statistics.median(column) for column in zip(*rows, strict=True))
        difference = f"{predicted / measured - 1:+10.0%}"
        print(f"{method:6} {bandwidth:5.1f} {predicted:12.2f} {measured:11.2f} {best:8.2f} {difference}", flush=True)


def measure_layer(output: Path, layer: int, form: ExpertForm, threads: int) -> tuple[float, float, float, float]:
    """Return GB/s of memory, and milliseconds of a layer at one token: predicted, median and best."""
    words = ("bench", output, "--layer", layer, "--tokens", "1", "--threads", threads, "--json")
    document = json.loads(timing.run([*PROGRAM, *map(str, words)]).output)
    rate = predict_cpu_rate(form, document["memory_bytes_per_second"], threads)
    predicted = document["experts_per_token"] * document["expert_bytes"] / rate
    (measured,) = document["timings"]
    seconds = predicted, measured["seconds_median"], measured["seconds_best"]
    return document["memory_bytes_per_second"] / 1e9, *(1e3 * each for each in seconds)


if __name__ == "__main__":
    main()
