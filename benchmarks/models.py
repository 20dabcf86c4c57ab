"""Writes checkpoints for benchmarks: random weights shaped like Qwen3-30B-A3B, only headers shaped like DeepSeek-V3."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

BITS = {"BF16": 16, "F8_E4M3": 8, "F32": 32, "U8": 8, "F8_E8M0": 8, "I32": 32, "I64": 64}
BLOCK = 128  # rows and columns that share one FP8 scale
GROUP = 32  # columns that share one scale of MXFP4 or INT4
PIECE = 1 << 20  # values generated at a time
SPREAD = 0.02  # standard deviation of the weights

Fill = Callable[["Tensor"], Iterable[bytes]]


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written; `values` is its content, if given."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: npt.NDArray[np.generic] | None = None

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


def qwen3(layers: int, experts: int, dtype: str = "BF16") -> tuple[list[Tensor], dict[str, Any]]:
    """Return tensors and config in the shape of Qwen3-30B-A3B (H 2048, I 768).

    The embedding is smaller, so that 5 to 7 % of the weights are outside the experts, as in the model.
    """
    hidden, width, vocabulary, heads = 2048, 768, 512 * experts, 4096
    tensors = [Tensor("model.embed_tokens.weight", "BF16", (vocabulary, hidden))]
    for n in range(layers):
        base = f"model.layers.{n}"
        for name, shape in (
            ("q_proj", (heads, hidden)),
            ("k_proj", (512, hidden)),
            ("v_proj", (512, hidden)),
            ("o_proj", (hidden, heads)),
        ):
            tensors.append(Tensor(f"{base}.self_attn.{name}.weight", "BF16", shape))
        tensors += [
            Tensor(f"{base}.{norm}.weight", "BF16", (hidden,))
            for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        tensors.append(Tensor(f"{base}.mlp.gate.weight", "BF16", (experts, hidden)))
        tensors += _experts(base, experts, hidden, width, dtype)
    tensors.append(Tensor("model.norm.weight", "BF16", (hidden,)))
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    if dtype == "F8_E4M3":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    return tensors, config


def deepseek(layers: int, experts: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Return tensors and config of DeepSeek-V3 (H 7168, I 2048, FP8): first 3 dense layers, last an MTP layer."""
    hidden, width, dense = 7168, 2048, 18432
    vocabulary = ("lm_head.weight", "model.embed_tokens.weight")
    tensors = [Tensor(name, "BF16", (129280, hidden)) for name in vocabulary]
    tensors.append(Tensor("model.norm.weight", "BF16", (hidden,)))
    for n in range(layers + 1):
        base = f"model.layers.{n}"
        for name, shape in (
            ("q_a_proj", (1536, hidden)),
            ("q_b_proj", (24576, 1536)),
            ("kv_a_proj_with_mqa", (576, hidden)),
            ("kv_b_proj", (32768, 512)),
            ("o_proj", (hidden, 16384)),
        ):
            tensors += linear(f"{base}.self_attn.{name}.weight", shape, "F8_E4M3")
        for norm, size in (
            ("self_attn.q_a_layernorm", 1536),
            ("self_attn.kv_a_layernorm", 512),
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
        ):
            tensors.append(Tensor(f"{base}.{norm}.weight", "BF16", (size,)))
        if n < 3:
            tensors += mlp(f"{base}.mlp", hidden, dense, "F8_E4M3")
            continue
        tensors.append(Tensor(f"{base}.mlp.gate.weight", "BF16", (experts, hidden)))
        tensors.append(Tensor(f"{base}.mlp.gate.e_score_correction_bias", "F32", (experts,)))
        tensors += mlp(f"{base}.mlp.shared_experts", hidden, width, "F8_E4M3")
        tensors += _experts(base, experts, hidden, width, "F8_E4M3")
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": dense,
        "moe_intermediate_size": width,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    }
    return tensors, config


def write_model(
    folder: Path, tensors: Sequence[Tensor], config: dict[str, Any], shards: int, fill: Fill | None = None
) -> None:
    """Write a sharded checkpoint with its index, unless it exists. Without `fill`, weights are holes (no disk)."""
    recipe = json.dumps(config, indent=2) + "\n"
    marker = folder / "config.json"  # written last
    if marker.exists() and marker.read_text() == recipe:
        return
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    groups = _split_into_shards(tensors, shards)
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_shard(folder / name, group, fill)
        index.update((t.name, name) for t in group)
    total = sum(t.nbytes for t in tensors)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    marker.write_text(recipe)


def gaussian(seed: int = 0) -> Fill:
    """Return a function that draws normal weights independently, so that no two matrices are equal.

    Scales differ between blocks; codes of four bits are uniform.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)], np.float32)
    bf16 = ((quantiles * SPREAD).view(np.uint32) >> 16).astype(np.uint16)
    fp8 = _to_fp8(quantiles * 100)

    def fill(tensor: Tensor) -> Iterable[bytes]:
        if tensor.values is not None:
            yield tensor.values.tobytes()
            return
        remaining = math.prod(tensor.shape)
        while remaining:
            count = min(remaining, PIECE)
            remaining -= count
            yield _draw(rng, count, tensor.dtype, bf16, fp8)

    return fill


def _draw(
    rng: np.random.Generator, count: int, dtype: str, bf16: npt.NDArray[np.uint16], fp8: npt.NDArray[np.uint8]
) -> bytes:
    if dtype == "F32":
        return (rng.uniform(0.5, 1.5, count) * SPREAD / 100).astype(np.float32).tobytes()
    if dtype == "I32":
        return rng.bytes(4 * count)
    if dtype in ("U8", "F8_E8M0"):
        low, high = (0, 256) if dtype == "U8" else (118, 122)
        return rng.integers(low, high, count, np.uint8).tobytes()
    indices = rng.integers(0, 1 << 16, count, np.uint16)
    return bytes((bf16 if dtype == "BF16" else fp8)[indices].data)


def _to_fp8(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the nearest E4M3 codes."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    magnitudes = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    nearest = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, np.abs(values))
    return (nearest + 128 * (values < 0)).astype(np.uint8)


def linear(name: str, shape: tuple[int, int], dtype: str) -> list[Tensor]:
    if dtype == "MXFP4":
        codes, scales = (shape[0], shape[1] // 2), (shape[0], shape[1] // GROUP)
        return [Tensor(f"{name}_packed", "U8", codes), Tensor(f"{name}_scale", "F8_E8M0", scales)]
    if dtype == "INT4":  # packed by compressed-tensors
        codes, scales = (shape[0], shape[1] // 8), (shape[0], shape[1] // GROUP)
        return [
            Tensor(f"{name}_packed", "I32", codes),
            Tensor(f"{name}_scale", "BF16", scales),
            Tensor(f"{name}_shape", "I64", (2,), np.array(shape, np.int64)),
        ]
    tensors = [Tensor(name, dtype, shape)]
    if dtype == "F8_E4M3":
        tensors.append(Tensor(f"{name}_scale_inv", "F32", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))))
    return tensors


def mlp(base: str, hidden: int, width: int, dtype: str) -> list[Tensor]:
    shapes = {"down_proj": (hidden, width), "gate_proj": (width, hidden), "up_proj": (width, hidden)}
    return [t for proj, shape in shapes.items() for t in linear(f"{base}.{proj}.weight", shape, dtype)]


def _experts(base: str, experts: int, hidden: int, width: int, dtype: str) -> list[Tensor]:
    return [t for e in range(experts) for t in mlp(f"{base}.mlp.experts.{e}", hidden, width, dtype)]


def _split_into_shards(tensors: Sequence[Tensor], shards: int) -> list[list[Tensor]]:
    """Split tensors into shards of similar size, also within layers, as in released models."""
    groups: list[list[Tensor]] = [[] for _ in range(shards)]
    total, position = sum(t.nbytes for t in tensors), 0
    for tensor in tensors:
        groups[min(position * shards // total, shards - 1)].append(tensor)
        position += tensor.nbytes
    return [sorted(group, key=lambda t: (-BITS[t.dtype], t.name)) for group in groups if group]


def _write_shard(path: Path, tensors: Sequence[Tensor], fill: Fill | None) -> None:
    entries, position = {}, 0
    for t in tensors:
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [position, position + t.nbytes]}
        position += t.nbytes
    head = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        if fill is not None:
            file.writelines(piece for tensor in tensors for piece in fill(tensor))
        file.truncate(8 + len(head) + position)
