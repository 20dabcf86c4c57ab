"""Converts like kt-kernel's script, through its API; runs in a Python that has kt-kernel.

    peer_convert.py MODEL OUT METHOD NUMA THREADS

For each layer, experts are read and stacked, KTMoEWrapper quantizes them and writes loose .kt files (to /dev/shm, like
the script), and these are read back and saved as one safetensors shard. Omitted are the script's directory searches,
non-expert tensors, and FP8 on a GPU.
"""

import json
import os
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import cpu_only_torch  # noqa: F401  # before kt_kernel
import numpy as np
import torch
from kt_kernel import KTMoEWrapper
from safetensors import safe_open
from safetensors.torch import save_file

SHARED = Path("/dev/shm")


def main(model: Path, out: Path, method: str, numa: int, threads: int) -> None:
    """Convert every layer."""
    config = json.loads((model / "config.json").read_text())
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: safe_open(model / name, framework="pt") for name in sorted(set(index.values()))}
    out.mkdir()
    layers = config["num_hidden_layers"]
    scratch = (SHARED if SHARED.is_dir() else out) / f"ktconvert-bench-{os.getpid()}"
    try:
        for layer in range(layers):
            quantize(config, index, files, scratch, layer, method, numa, threads)
            save_file(merge(scratch, layer), out / f"model-{layer + 1:05d}-of-{layers:05d}.safetensors")
            shutil.rmtree(scratch / f"_layer_{layer}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def quantize(config, index, files, scratch: Path, layer: int, method: str, numa: int, threads: int) -> None:
    """Let kt-kernel write one layer's loose files."""
    experts = config["num_experts"]

    def stack(projection: str) -> torch.Tensor:
        names = [f"model.layers.{layer}.mlp.experts.{e}.{projection}_proj.weight" for e in range(experts)]
        return torch.stack([files[index[name]].get_tensor(name) for name in names]).contiguous()

    scratch.mkdir(exist_ok=True)
    wrapper = KTMoEWrapper(
        layer_idx=layer,
        num_experts=experts,
        num_experts_per_tok=config["num_experts_per_tok"],
        hidden_size=config["hidden_size"],
        moe_intermediate_size=config["moe_intermediate_size"],
        gpu_experts_mask=torch.zeros(experts, dtype=torch.bool),
        cpuinfer_threads=threads,
        threadpool_count=numa,
        weight_path=str(scratch),
        chunked_prefill_size=512,
        cpu_save=True,
        method=method,
    )
    gate, up, down = (stack(p) for p in ("gate", "up", "down"))
    wrapper.load_weights_from_tensors(gate, up, down, torch.arange(experts, dtype=torch.int64))


def merge(scratch: Path, layer: int) -> dict[str, torch.Tensor]:
    """Return the layer's loose files under the names that the loader expects."""
    tensors: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = defaultdict(int)
    for path in sorted((scratch / f"_layer_{layer}").rglob("*.kt")):
        _, projection, expert, _, content, _ = path.name.split("_")
        kind, dtype = ("weight", np.int8) if content == "quant" else ("scale", np.float32)
        node = path.parent.name.removeprefix("_numa_")
        key = f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.{node}.{kind}"
        tensors[key] = torch.from_numpy(np.fromfile(path, dtype))
        counts[kind] += 1
    assert counts["weight"] == counts["scale"] > 0, f"{scratch}: kt-kernel wrote {dict(counts)}"
    return tensors


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
