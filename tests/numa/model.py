"""The model of the checks, 24 layers of four random experts, H = I = 1024: `model.py OUTPUT SOURCE` writes

OUTPUT  AMXINT8 in two NUMA parts of 150 MiB
SOURCE  a BF16 checkpoint of that size, all zeros, which takes no room on the disk
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np

from ktconvert.native_quant.runtime.experts import Experts

LAYERS, EXPERTS, SIZE = 24, 4, 1024


def write_output(path: Path) -> None:
    """Converted layers, merged."""
    rng, loose = np.random.default_rng(0), path.with_suffix(".loose")
    shutil.rmtree(loose, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)
    for layer in range(LAYERS):
        # BF16 bits of numbers between 0.0078 and 0.047, of either sign
        shape = (3, EXPERTS, SIZE, SIZE)
        bits = (rng.integers(0, 2, shape) << 15 | rng.integers(0x3C00, 0x3D40, shape)).astype(np.uint16)
        Experts.from_bf16(*bits, method="AMXINT8", parts=2, layer=layer).save(loose)
    subprocess.run([sys.executable, "-m", "ktconvert.pipeline.cli", "merge", "-i", loose, "-o", path, "-q"], check=True)
    shutil.rmtree(loose)


def write_source(path: Path) -> None:
    """A checkpoint whose one shard is a hole after its header."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu"}
    config |= {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": 2, "mlp_only_layers": []}
    (path / "config.json").write_text(json.dumps(config | {"hidden_size": SIZE, "moe_intermediate_size": SIZE}))
    header, each = {}, 2 * SIZE * SIZE
    for n, (layer, expert, name) in enumerate(product(range(LAYERS), range(EXPERTS), ("gate", "up", "down"))):
        entry = {"dtype": "BF16", "shape": [SIZE, SIZE], "data_offsets": [n * each, (n + 1) * each]}
        header[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] = entry
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + len(header) * each)


if __name__ == "__main__":
    write_output(Path(sys.argv[1]))
    write_source(Path(sys.argv[2]))
