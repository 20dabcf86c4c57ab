#!/usr/bin/env python3
"""Downloading a model and then converting it, against `cpu --stream`: wall time, and disk space besides the output.

A local hub sends a model in the shape of Qwen3-30B-A3B with a few layers at a limited rate. Target: the whole takes at
most 1.1 times as long as the bytes of the experts need on the line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from rig import conversion  # noqa: E402
from rig.hub_server import serve_hub  # noqa: E402


def used_bytes(folder: Path) -> int:
    """Return the bytes that files use on the folder's disk, those without a name included."""
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def measure(command: list[str], environment: dict[str, str], folder: Path) -> tuple[float, int]:
    """Return the seconds that a command takes, and the most bytes that the disk held more than before."""
    before, most, done = used_bytes(folder), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, used_bytes(folder) - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return seconds, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=50, help="MB/s of the line")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    sizes = {"layers": arguments.layers, "experts": arguments.experts, "hidden": 2048, "width": 768}
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        model = conversion.checkpoint(folder / "model", **sizes)
        source = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        with serve_hub({"org/model": model}) as hub:
            hub.rate = int(arguments.rate * 1e6)
            print(f"source {source / 1e6:.0f} MB, on the line {source / hub.rate:.1f} s")
            for name, extra in (("download, then convert", ()), ("--stream", ("--stream",))):
                environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / f"hf{len(extra)}")}
                environment["XDG_CACHE_HOME"] = str(folder / f"cache{len(extra)}")
                output = folder / f"out{len(extra)}"
                command = [*conversion.KTCONVERT, "cpu", "-i", "org/model", "-o", str(output), *extra]
                seconds, most = measure([*command, "--quant-method", "int4"], environment, folder)
                written = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
                ratio = seconds / (source / hub.rate)
                print(f"{name}: {seconds:.1f} s ({ratio:.2f} of the line), {(most - written) / 1e6:.0f} MB besides OUT")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
