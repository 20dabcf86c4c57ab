"""Shapes of released models, for headers without weights: sizes as published, names of tensors as their loaders read.

A row has what decides memory: experts, attention, vocabulary. Norms and small tensors are left out.

python benchmarks/shapes.py Qwen3-235B-A22B    writes the directory Qwen3-235B-A22B, which takes 8 MB of disk
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
from models import Tensor


@dataclass(frozen=True)
class Shape:
    """A released model.

    name     its name on the hub
    config   its config.json, as far as it decides sizes
    dtype    of its routed experts: BF16, F8_E4M3, MXFP4, or INT4
    block    what precedes "experts." in the names of tensors
    names    names of gate, up and down; () for two fused tensors
    major    whether fused tensors are [E, out, in]; otherwise [E, in, out]
    prefix   what precedes "layers."
    dense    number of dense layers at the beginning
    """

    name: str
    config: dict[str, Any]
    dtype: str = "BF16"
    block: str = "mlp."
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    major: bool = True
    prefix: str = "model."
    dense: int = 0

    @property
    def sizes(self) -> dict[str, Any]:
        """The part of the config that describes the text model."""
        inner: dict[str, Any] = self.config.get("text_config", self.config)
        return inner


def _config(kind: str, layers: int, hidden: int, vocabulary: int, **values: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocabulary, "hidden_act": "silu"}
    return {"model_type": kind, **sizes, **values}


def _gqa(heads: int, kv_heads: int, head: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head}


def _experts(key: str, count: int, topk: int, width: int, width_key: str = "moe_intermediate_size") -> dict[str, int]:
    return {key: count, "num_experts_per_tok": topk, width_key: width}


MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [models.BLOCK, models.BLOCK]}}
LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
}
OSS_LAYERS = ["sliding_attention", "full_attention"] * 18
SCOUT_LAYERS = (["chunked_attention"] * 3 + ["full_attention"]) * 12

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "Qwen3-30B-A3B",
            _config("qwen3_moe", 48, 2048, 151936, **_experts("num_experts", 128, 8, 768), **_gqa(32, 4, 128)),
        ),
        Shape(
            "Qwen3-235B-A22B",
            _config("qwen3_moe", 94, 4096, 151936, **_experts("num_experts", 128, 8, 1536), **_gqa(64, 4, 128)),
        ),
        Shape(
            "Qwen3-Coder-480B-A35B",
            _config("qwen3_moe", 62, 6144, 151936, **_experts("num_experts", 160, 8, 2560), **_gqa(96, 8, 128)),
        ),
        Shape(
            "Qwen3.5-397B-A17B",
            {
                "model_type": "qwen3_5_moe",
                "text_config": _config(
                    *("qwen3_5_moe_text", 60, 4096, 248320),
                    **_experts("num_experts", 512, 10, 1024),
                    **_gqa(32, 2, 256),
                    **LINEAR,
                ),
            },
            names=(),
            prefix="model.language_model.",
        ),
        Shape(
            "DeepSeek-V3",
            _config(
                *("deepseek_v3", 61, 7168, 129280),
                **_experts("n_routed_experts", 256, 8, 2048),
                **_gqa(128, 128, 128),
                **MLA,
                **FP8,
                first_k_dense_replace=3,
                intermediate_size=18432,
            ),
            "F8_E4M3",
            dense=3,
        ),
        Shape(
            "Kimi-K2-Instruct",
            _config(
                *("kimi_k2", 61, 7168, 163840),
                **_experts("n_routed_experts", 384, 8, 2048),
                **_gqa(64, 64, 128),
                **MLA,
                **FP8,
                first_k_dense_replace=1,
                intermediate_size=18432,
            ),
            "F8_E4M3",
            dense=1,
        ),
        Shape(
            "MiniMax-M2",
            _config(
                *("minimax_m2", 62, 3072, 200064),
                **_experts("num_local_experts", 256, 8, 1536, "intermediate_size"),
                **_gqa(48, 8, 128),
                **FP8,
            ),
            "F8_E4M3",
            "block_sparse_moe.",
            ("w1", "w3", "w2"),
        ),
        Shape(
            "GLM-4.5-Air",
            _config(
                *("glm4_moe", 46, 4096, 151552),
                **_experts("n_routed_experts", 128, 8, 1408),
                **_gqa(96, 8, 128),
                first_k_dense_replace=1,
                intermediate_size=10944,
            ),
            dense=1,
        ),
        Shape(
            "gpt-oss-120b",
            _config(
                *("gpt_oss", 36, 2880, 201088),
                **_experts("num_local_experts", 128, 4, 2880, "intermediate_size"),
                **_gqa(64, 8, 64),
                sliding_window=128,
                layer_types=OSS_LAYERS,
                quantization_config={"quant_method": "mxfp4"},
            ),
            "MXFP4",
            names=(),
        ),
        Shape(
            "Llama-4-Scout-17B-16E",
            {
                "model_type": "llama4",
                "text_config": _config(
                    *("llama4_text", 48, 5120, 202048),
                    **_experts("num_local_experts", 16, 1, 8192, "intermediate_size"),
                    **_gqa(40, 8, 128),
                    attention_chunk_size=8192,
                    layer_types=SCOUT_LAYERS,
                ),
            },
            block="feed_forward.",
            names=(),
            major=False,
            prefix="language_model.model.",
        ),
    )
}


def list_tensors(shape: Shape, layers: int | None = None) -> tuple[list[Tensor], dict[str, Any]]:
    """Return tensors and config of a model, or of its first layers."""
    sizes = {**shape.sizes}
    sizes["num_hidden_layers"] = layers = layers or sizes["num_hidden_layers"]
    config = {**shape.config, "text_config": sizes} if "text_config" in shape.config else sizes
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    embedding = Tensor(f"{shape.prefix}embed_tokens.weight", "BF16", (vocabulary, hidden))
    tensors = [embedding, Tensor("lm_head.weight", "BF16", (vocabulary, hidden))]
    for layer in range(layers):
        base = f"{shape.prefix}layers.{layer}."
        tensors += _attention(base, sizes)
        if layer < shape.dense:
            tensors += models.mlp(f"{base}mlp", hidden, sizes["intermediate_size"], "BF16")
        else:
            tensors += _layer_experts(shape, base, sizes)
    return tensors, config


def _attention(base: str, sizes: dict[str, Any]) -> Iterator[Tensor]:
    hidden, heads, head = sizes["hidden_size"], sizes["num_attention_heads"], sizes["head_dim"]
    kv = sizes["num_key_value_heads"] * head
    rows = {"q_proj": heads * head, "k_proj": kv, "v_proj": kv}
    if "kv_lora_rank" in sizes:
        latent = sizes["kv_lora_rank"]
        rows = {"q_a_proj": sizes["q_lora_rank"], "kv_a_proj_with_mqa": latent + sizes["qk_rope_head_dim"]}
        query = heads * (sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"])
        yield Tensor(f"{base}self_attn.q_b_proj.weight", "BF16", (query, sizes["q_lora_rank"]))
        yield Tensor(f"{base}self_attn.kv_b_proj.weight", "BF16", (2 * heads * head, latent))
    yield from (Tensor(f"{base}self_attn.{name}.weight", "BF16", (n, hidden)) for name, n in rows.items())
    yield Tensor(f"{base}self_attn.o_proj.weight", "BF16", (hidden, heads * head))


def _layer_experts(shape: Shape, base: str, sizes: dict[str, Any]) -> Iterator[Tensor]:
    hidden, keys = sizes["hidden_size"], ("num_experts", "n_routed_experts", "num_local_experts")
    count = next(sizes[key] for key in keys if key in sizes)
    width = sizes.get("moe_intermediate_size") or sizes["intermediate_size"]
    block = f"{base}{shape.block}"
    router = "gate" if shape.names else "router"
    yield Tensor(f"{block}{router}.weight", "BF16", (count, hidden))
    if shape.dtype == "MXFP4":
        yield from _packed_experts(block, count, hidden, width)
    elif not shape.names:
        pairs = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
        for name, matrix in pairs.items():
            yield Tensor(f"{block}experts.{name}", shape.dtype, (count, *(matrix if shape.major else matrix[::-1])))
    else:
        gate, up, down = shape.names
        for expert in range(count):
            for name, matrix in ((gate, (width, hidden)), (up, (width, hidden)), (down, (hidden, width))):
                yield from models.linear(f"{block}experts.{expert}.{name}.weight", matrix, shape.dtype)


def _packed_experts(block: str, count: int, hidden: int, width: int) -> Iterator[Tensor]:
    """Yield the experts of gpt-oss: blocks of 32 codes, a scale for each, and biases."""
    for name, (n, k) in {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}.items():
        yield Tensor(f"{block}experts.{name}_blocks", "U8", (count, n, k // 32, 16))
        yield Tensor(f"{block}experts.{name}_scales", "U8", (count, n, k // 32))
        yield Tensor(f"{block}experts.{name}_bias", "BF16", (count, n))


def write_headers(name: str, folder: Path) -> None:
    """Write the config and the headers of a model, in shards of about 5 GB whose weights are holes."""
    tensors, config = list_tensors(SHAPES[name])
    models.write_model(folder, tensors, config, max(1, sum(tensor.nbytes for tensor in tensors) // 5_000_000_000))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    model = parser.parse_args().model
    write_headers(model, Path(model))
