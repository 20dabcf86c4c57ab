"""Inputs of forward.py: layers of random experts on disk, hidden states, and the routing of their tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blocks
import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.matrix import GGML


@dataclass(frozen=True)
class Method:
    """A format of experts.

    name    name on both sides
    bits    bits per weight, including scales of groups, but not those of rows
    rows    whether each row has a float32 scale
    source  "tensors": packed by our runtime; "cpu": converted from a checkpoint; "stored" and "gguf": files that both
            sides load; "plain": converted from a checkpoint, only for ours
    env     environment of kt-kernel's process
    """

    name: str
    bits: float
    rows: bool = False
    source: str = "cpu"
    env: Mapping[str, str] = field(default_factory=dict)


METHODS = {
    "int4": Method("AMXINT4", 4, rows=True, source="tensors"),
    "int8": Method("AMXINT8", 8, rows=True, source="tensors"),
    "moe_int4": Method("MOE_INT4", 4, rows=True, source="plain"),
    "moe_int8": Method("MOE_INT8", 8, rows=True, source="plain"),
    "bf16": Method("BF16", 16),
    "fp8": Method("FP8", 8 + 32 / 128**2),
    "mxfp4": Method("MXFP4", 4 + 8 / 32),
    "fp8_perchannel": Method("FP8_PERCHANNEL", 8, rows=True, source="stored"),
    "mxfp8": Method("MXFP8", 8 + 8 / 32, source="stored"),
    # kt-kernel has no other backend for NVFP4.
    "nvfp4": Method("NVFP4", 4 + 8 / 16, source="stored", env={"KT_MXFP4_BACKEND": "avx2"}),
    "rawint4": Method("RAWINT4", 4 + 16 / 32, source="stored"),
    "gptq_int4": Method("GPTQ_INT4", 4 + 32 / 128, source="stored"),
    **{
        f"gguf_{name.lower()}": Method("LLAMAFILE", 8 * GGML[name].items / GGML[name].columns, source="gguf")
        for name in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
    },
}
TOPK = 8
ZIPF = 1.5  # concentrated: the expert of rank r is as likely as r ** -1.5
PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Shape:
    """The experts of one layer."""

    name: str
    hidden: int
    intermediate: int
    experts: int

    def expert_bytes(self, method: str) -> int:
        """Return the bytes of one expert's weights and scales in the file."""
        entry = METHODS[method]
        scales = 4 * (2 * self.intermediate + self.hidden) if entry.rows else 0
        return int(3 * self.hidden * self.intermediate * entry.bits / 8) + scales

    @property
    def token_operations(self) -> int:
        """Number of multiplications and additions per token."""
        return 2 * 3 * self.hidden * self.intermediate * TOPK


SHAPES = {
    "qwen3": Shape("Qwen3-30B-A3B", 2048, 768, 128),
    "deepseek": Shape("DeepSeek-V3", 7168, 2048, 16),
    "small": Shape("a small mixture", 512, 256, 16),  # to try the script
}


@dataclass(frozen=True)
class Batch:
    """Inputs of a forward in several variants, in files that every worker reads.

    folder    hidden.npy uint16 [V, T, H] (BF16 bits), ids.npy int64 [V, T, k], weights.npy float32 [V, T, k]
    distinct  average number of experts that a variant uses
    busiest   average number of tokens of a variant's busiest expert
    """

    folder: Path
    tokens: int
    routing: str
    distinct: float
    busiest: float


def make_batch(folder: Path, shape: Shape, tokens: int, routing: str) -> Batch:
    """Write the inputs of one cell. Fewer tokens have more variants, so that decoding does not reuse experts."""
    rng = np.random.default_rng(tokens)
    variants = max(2, min(16, 64 // tokens))
    inputs = folder / f"inputs-{tokens}-{routing}"
    inputs.mkdir(exist_ok=True)
    hidden = rng.standard_normal((variants, tokens, shape.hidden), np.float32)
    ids = np.stack([_draw_experts(rng, shape.experts, tokens, routing) for _ in range(variants)])
    weights = rng.random((variants, tokens, TOPK), np.float32) + 0.1
    np.save(inputs / "hidden.npy", (hidden.view(np.uint32) >> 16).astype(np.uint16))
    np.save(inputs / "ids.npy", ids)
    np.save(inputs / "weights.npy", weights / weights.sum(2, keepdims=True))
    counts = [np.bincount(variant.ravel(), minlength=shape.experts) for variant in ids]
    distinct, busiest = np.mean([(c > 0).sum() for c in counts]), np.mean([c.max() for c in counts])
    return Batch(inputs, tokens, routing, float(distinct), float(busiest))


def _draw_experts(rng: np.random.Generator, experts: int, tokens: int, routing: str) -> npt.NDArray[np.int64]:
    """Return distinct experts for each token: the first TOPK of a random order that favours popular ones."""
    log_odds = np.zeros(experts) if routing == "balanced" else -ZIPF * np.log(1.0 + rng.permutation(experts))
    # Gumbel noise makes this a draw without replacement.
    order = np.argsort(-(log_odds + rng.gumbel(size=(tokens, experts))), axis=1)
    return np.ascontiguousarray(order[:, :TOPK], np.int64)


def write_source(folder: Path, shape: Shape) -> None:
    """Write BF16 bits of random experts: gate.npy and up.npy [E, I, H], down.npy [E, H, I]. No two rows are equal."""
    rng = np.random.default_rng(0)
    piece = ((rng.standard_normal(5_000_011, np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    for name in PROJECTIONS:
        rows, columns = (shape.hidden, shape.intermediate) if name == "down" else (shape.intermediate, shape.hidden)
        np.save(folder / f"{name}.npy", np.resize(np.roll(piece, len(name)), (shape.experts, rows, columns)))


def merge_layers(loose: Path, out: Path, layers: int) -> None:
    """Merge `layers` copies of the layer in `loose` with `ktconvert merge`, so that each has its own pages."""
    for layer in range(1, layers):
        shutil.copytree(loose / "_layer_0", loose / f"_layer_{layer}", copy_function=os.link)
    ktconvert("merge", "-i", loose, "-o", out)


def write_checkpoint(source: Path, out: Path, shape: Shape, layers: int) -> None:
    """Write a BF16 checkpoint whose layers all have the experts of `source`, under the names of Qwen3-MoE."""
    out.mkdir()
    write_config(out, shape, layers)
    stacks = {name: np.load(source / f"{name}.npy", mmap_mode="r") for name in PROJECTIONS}
    experts = [
        (f"mlp.experts.{expert}.{name}_proj.weight", "BF16", stack[expert])
        for name, stack in stacks.items()
        for expert in range(shape.experts)
    ]
    _write_layers(out, layers, experts)


def write_config(out: Path, shape: Shape, layers: int, **more: Any) -> None:
    """Write the config.json of a Qwen3-MoE model."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.intermediate,
        "num_experts": shape.experts,
        "num_experts_per_tok": TOPK,
        "num_hidden_layers": layers,
    }
    (out / "config.json").write_text(json.dumps(config | more))


def write_stored(out: Path, shape: Shape, layers: int, method: str) -> None:
    """Write a checkpoint in a format that no command writes, under the names that kt-kernel reads.

    Codes are random and finite, and scales give weights of about 0.02. All layers have the same experts.
    """
    out.mkdir()
    stored = STORED[method]
    write_config(out, shape, layers, **({} if stored.config is None else {"quantization_config": stored.config}))
    rng = np.random.default_rng(0)
    signs = rng.integers(0, 2, 5_000_011, np.uint8) << 7
    pieces = {
        "e4m3": rng.integers(0x28, 0x40, signs.size).astype(np.uint8) | signs,  # 1/4 to 2
        "bytes": rng.integers(0, 256, signs.size, np.uint8),
        "scales": rng.random(signs.size, np.float32) * 0.01 + 0.01,
    }
    tensors: list[tuple[str, str, Array]] = []
    for expert in range(shape.experts):
        for name, mixtral_name in zip(PROJECTIONS, ("w1", "w3", "w2"), strict=True):
            n, k = (shape.hidden, shape.intermediate) if name == "down" else (shape.intermediate, shape.hidden)
            shift, base = 7919 * len(tensors), stored.base.format(expert=expert, name=name, mixtral_name=mixtral_name)

            def draw(piece: str, *of: int, shift: int = shift) -> Array:
                return np.resize(np.roll(pieces[piece], shift), of)

            tensors += [(base + suffix, dtype, values) for suffix, dtype, values in stored.tensors(draw, n, k)]
    _write_layers(out, layers, tensors)


def write_gguf(out: Path, shape: Shape, layers: int, method: str) -> None:
    """Write such a model as GGUF, with random blocks of a type of ggml."""
    kind = method.removeprefix("gguf_").upper()
    blocks.write_gguf(out / "model.gguf", layers, shape.experts, kind, (shape.hidden, shape.intermediate))


Array = npt.NDArray[Any]
Draw = Callable[..., Array]  # (name of random numbers, shape) -> array


@dataclass(frozen=True)
class Stored:
    """Storage of a linear [n, k] in a checkpoint.

    tensors  suffix, dtype and values of each tensor
    base     name without suffix
    config   quantization_config
    """

    tensors: Callable[[Draw, int, int], Sequence[tuple[str, str, Array]]]
    base: str = "mlp.experts.{expert}.{name}_proj"
    config: Mapping[str, object] | None = None


STORED = {
    "fp8_perchannel": Stored(
        lambda draw, n, k: [
            (".weight", "F8_E4M3", draw("e4m3", n, k)),
            (".weight_scale", "F32", draw("scales", n, 1)),
        ]
    ),
    "mxfp8": Stored(
        lambda draw, n, k: [
            (".weight", "F8_E4M3", draw("e4m3", n, k)),
            (".weight_scale_inv", "U8", draw("bytes", n, k // 32) % 3 + 120),
        ],
        base="block_sparse_moe.experts.{expert}.{mixtral_name}",
    ),
    "nvfp4": Stored(
        lambda draw, n, k: [
            (".weight", "U8", draw("bytes", n, k // 2)),
            (".weight_scale", "F8_E4M3", draw("e4m3", n, k // 16) & 0x7F),
            (".weight_scale_2", "F32", np.float32([0.01]).reshape(())),
        ]
    ),
    "rawint4": Stored(
        lambda draw, n, k: [
            (".weight_packed", "I32", draw("bytes", n, k // 2).view(np.int32)),
            (".weight_scale", "BF16", (draw("scales", n, k // 32).view(np.uint32) >> 16).astype(np.uint16)),
            (".weight_shape", "I32", np.int32([n, k])),
        ]
    ),
    "gptq_int4": Stored(
        lambda draw, n, k: [
            (".qweight", "I32", draw("bytes", k // 8, 4 * n).view(np.int32)),
            (".scales", "F16", draw("scales", k // 128, n).astype(np.float16)),
        ],
        config={"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    ),
}


def _write_layers(out: Path, layers: int, tensors: Sequence[tuple[str, str, Array]]) -> None:
    """Write a shard for each layer, all with these tensors: name within the layer, dtype, values."""
    for layer in range(layers):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, dtype, values in tensors:
            header[f"model.layers.{layer}.{name}"] = {
                "dtype": dtype,
                "shape": values.shape,
                "data_offsets": [position, position + values.nbytes],
            }
            position += values.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (out / f"model-{layer + 1:05d}-of-{layers:05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, _, values in tensors:
                values.tofile(file)


def ktconvert(*arguments: object) -> None:
    """Run the program. Raises RuntimeError with the end of its stderr."""
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", *map(str, arguments), "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ktconvert {arguments[0]}: {done.stderr[-1000:]}")
