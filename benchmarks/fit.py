#!/usr/bin/env python3
"""Time, memory and predictions of `ktconvert fit` for the shapes of released models, from headers without weights.

python benchmarks/fit.py                          all shapes; two minutes, 100 MB of disk
python benchmarks/fit.py --models DeepSeek-V3

Each row is a process of its own. The plan of `cpu --dry-run` for the recommended method has the same size, or the row
says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import models
import shapes
import timing

MACHINE = ("--ram", "768GB", "--gpu", "2x4090", "--numa", "2", "--disk", "4TB", "--bandwidth", "400GB")
PROGRAM = (sys.executable, "-m", "ktconvert.pipeline.cli")


def main() -> None:
    """Measure and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=shapes.SHAPES, default=[*shapes.SHAPES])
    parser.add_argument("--dir", type=Path, help="where the temporary directory is created")
    options = parser.parse_args()
    print(f"{'model':22} {'tensors':>8} {'CPU s':>6} {'wall s':>6} {'MB':>5}  recommended")
    with tempfile.TemporaryDirectory(prefix="ktconvert-fit-", dir=options.dir) as scratch:
        for name in options.models:
            tensors, config = shapes.list_tensors(shapes.SHAPES[name])
            folder = Path(scratch) / name
            models.write_model(folder, tensors, config, max(1, sum(t.nbytes for t in tensors) // 5_000_000_000))
            run = timing.run([*PROGRAM, "fit", str(folder), *MACHINE, "--json"])
            document = json.loads(run.output)
            best = document["choices"][0]
            where = f"{best['gpu_experts']} on the GPU, RAM {best['ram'] / 1e9:.0f} GB"
            text = (
                f"{best['method']}, {where}, {best['tokens_per_second']:.1f} tokens/s{compare_with_plan(folder, best)}"
            )
            figures = f"{run.user + run.system:6.1f} {run.wall:6.1f} {run.max_rss / 1e6:5.0f}"
            print(f"{name:22} {len(tensors):8} {figures}  {text}", flush=True)


def compare_with_plan(folder: Path, best: dict[str, object]) -> str:
    """Return a remark if the plan of the method has a different size."""
    if best["quant_method"] is None:
        return ""
    words = ("cpu", "-i", folder, "-o", f"{folder}-out", "--quant-method", best["quant_method"], "--dry-run", "--json")
    run = timing.run([*PROGRAM, *map(str, words), "--threadpool-count", "2", "-q"])
    plan = next(event for event in map(json.loads, run.output.splitlines()) if event["event"] == "plan")
    return "" if plan["bytes_out"] == best["output"] else f"; the plan has {plan['bytes_out']} bytes"


if __name__ == "__main__":
    main()
