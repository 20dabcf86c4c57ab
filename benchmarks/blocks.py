"""Random blocks of ggml with scales of typical weights, and GGUF models made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.native_quant.matrix import GGML

# Positions of FP16 scales in a block. An MXFP4 block starts with its E8M0 scale.
SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(name: str, count: int, seed: int = 0) -> Any:
    """Return random blocks as uint8 [count, bytes per block]."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, GGML[name].items), np.uint8)
    for at in SCALES.get(name, ()):
        blocks[:, at : at + 2] = rng.uniform(-1e-3, 1e-3, count).astype(np.float16)[:, None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(115, 121, count)
    return blocks


def write_gguf(path: Path, layers: int, experts: int, name: str, shape: tuple[int, int] = (2048, 768)) -> None:
    """Write experts of one type under the names of llama.cpp, unless the file exists."""
    import gguf

    if path.exists():
        return
    hidden, width = shape
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    keys = {"block_count": layers, "embedding_length": hidden, "expert_count": experts}
    for key, value in (keys | {"expert_feed_forward_length": width}).items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    kind = gguf.GGMLQuantizationType[name]
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    tensors = [
        (f"blk.{layer}.ffn_{projection}_exps.weight", (experts, n, k))
        for layer in range(layers)
        for projection, (n, k) in shapes.items()
    ]
    columns, items = GGML[name].columns, GGML[name].items
    for tensor, (e, n, k) in tensors:
        nbytes = e * n * k // columns * items
        writer.add_tensor_info(tensor, (e, n, k // columns * items), np.dtype(np.uint8), nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for seed, (_, (e, n, k)) in enumerate(tensors):
        writer.write_tensor_data(random_blocks(name, e * n * k // columns, seed).reshape(e, n, -1))
    writer.close()
    partial.rename(path)
