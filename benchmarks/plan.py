#!/usr/bin/env python3
"""Seconds of a plan: --dry-run and inspect on 160 shards with 101,000 tensors, which consist of headers and holes.

python benchmarks/plan.py [--rounds 3] [--dir DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import models
import timing

LAYERS, EXPERTS, SHARDS = 67, 256, 160  # DeepSeek-V3 has 61, 256 and 163
TARGET_SECONDS = 5.0
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "qwen3-moe-small"
CLI = (sys.executable, "-m", "ktconvert.pipeline.cli")


def commands(model: Path, scratch: Path) -> dict[str, list[str]]:
    """Return the commands to measure for one checkpoint."""
    dry_run = [*CLI, "cpu", "-i", str(model), "-o", str(scratch / "never-made"), "--dry-run"]
    return {"cpu --dry-run": dry_run, "inspect": [*CLI, "inspect", str(model)]}


def main() -> None:
    """Create the checkpoint, run each command, print seconds and bytes with the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dir", type=Path, help="the checkpoint is created and kept here; default: a temporary directory"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ktconvert-bench-") as temporary:
        scratch = options.dir or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        model = scratch / "headers-only"
        tensors, config = models.deepseek(LAYERS, EXPERTS)
        models.write_model(model, tensors, config, SHARDS)
        shards = list(model.glob("*.safetensors"))
        headers = sum(8 + int.from_bytes(path.open("rb").read(8), "little") for path in shards)
        headers += (model / "model.safetensors.index.json").stat().st_size
        print(
            f"{len(shards)} shards, {len(tensors)} tensors, {sum(t.nbytes for t in tensors) / 1e9:.0f} GB of holes; "
            f"headers and index {headers / 1e6:.1f} MB"
        )
        figures = {}
        baseline_commands = commands(EXAMPLE, scratch)
        for name, command in commands(model, scratch).items():
            baseline = timing.run(baseline_commands[name])  # includes the bytes that Python itself reads
            runs = [timing.run(command) for _ in range(options.rounds)]
            wall, cpu = statistics.median(r.wall for r in runs), statistics.median(r.cpu for r in runs)
            read = runs[-1].read - baseline.read if runs[-1].read is not None and baseline.read is not None else None
            met = "met" if wall < TARGET_SECONDS else "MISSED"
            print(
                f"{name:14} {wall:.2f} s wall (target < {TARGET_SECONDS:.0f} s: {met}), {cpu:.2f} s CPU, "
                f"{max(r.max_rss for r in runs) >> 20} MiB RSS; read "
                + (f"{read / 1e6:.1f} MB ({read / headers:.2f} of headers and index)" if read else "unknown")
            )
            figures[name] = {"wall": wall, "cpu": cpu, "read": read, "target_wall": TARGET_SECONDS}
        if options.json:
            document = {"machine": timing.machine(), "headers": headers, "commands": figures}
            options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
