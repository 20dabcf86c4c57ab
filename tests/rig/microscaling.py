"""Tiny checkpoints of MXFP4, MXFP8 and NVFP4, stored by the formula of each, with the value of every weight."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.quantizers import reference
from rig.safetensors import write_file

E, H, I = 2, 384, 256  # noqa: E741
Bits = Any

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.array(
    [
        (-1 if b & 128 else 1) * ((8 + b % 8) * 2.0 ** ((b >> 3 & 15) - 10) if b & 0x78 else b % 8 * 2.0**-9)
        for b in range(256)
    ]
)  # as far as they are numbers


def fp4(rng: np.random.Generator, n: int, k: int) -> tuple[Bits, Any]:
    """Codes in bytes, the even column in the lower half, and their values."""
    codes = rng.integers(0, 16, (n, k))
    codes[0] = 8  # -0
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), E2M1[codes]


def e8m0(rng: np.random.Generator, *shape: int) -> tuple[Bits, Any]:
    exponents = rng.integers(100, 130, shape).astype(np.uint8)
    exponents[-1, 0] = 0
    return exponents, 2.0 ** (exponents.astype(np.float64) - 127)


def spread(scales: Any, n: int, k: int) -> Any:
    rows, columns = scales.shape
    return np.repeat(np.repeat(scales, -(-n // rows), axis=0), -(-k // columns), axis=1)[:n, :k]


def mxfp4(dtype: str, values: str, scale: str, scale_dtype: str) -> Callable[..., tuple[dict[str, Any], Bits]]:
    def make(rng: np.random.Generator, n: int, k: int) -> tuple[dict[str, Any], Bits]:
        codes, x = fp4(rng, n, k)
        exponents, scales = e8m0(rng, n, k // 32)
        exact = (x * spread(scales, n, k)).astype(np.float32)
        return {values: (dtype, codes), scale: (scale_dtype, exponents)}, reference.f32_to_bf16(exact)

    return make


def mxfp8(block: tuple[int, int], scale: str, scale_dtype: str) -> Callable[..., tuple[dict[str, Any], Bits]]:
    def make(rng: np.random.Generator, n: int, k: int) -> tuple[dict[str, Any], Bits]:
        codes = (rng.integers(0, 127, (n, k)) | rng.integers(0, 2, (n, k)) << 7).astype(np.uint8)
        exponents, scales = e8m0(rng, -(-n // block[0]), -(-k // block[1]))
        each = np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)[:n, :k]
        exact = (E4M3[codes] * each).astype(np.float32)
        return {".weight": ("F8_E4M3", codes), scale: (scale_dtype, exponents)}, reference.f32_to_bf16(exact)

    return make


def nvfp4(dtype: str, values: str, whole: str, divides: bool) -> Callable[..., tuple[dict[str, Any], Bits]]:
    def make(rng: np.random.Generator, n: int, k: int) -> tuple[dict[str, Any], Bits]:
        codes, x = fp4(rng, n, k)
        steps = rng.integers(1, 127, (n, k // 16)).astype(np.uint8)
        one = np.float32(8095.6 if divides else 1.235e-4) + np.float32(rng.random())
        s = E4M3[steps].astype(np.float32)
        scales = s / one if divides else s * one
        exact = x.astype(np.float32) * np.repeat(scales, 16, axis=1)
        stored = {values: (dtype, codes), ".weight_scale": ("F8_E4M3", steps)}
        stored[whole] = ("F32", np.full((1,) if divides else (), one, np.float32))
        return stored, reference.f32_to_bf16(exact)

    return make


@dataclass(frozen=True)
class Kind:
    """An encoding: its name in facts and in --input-type, how a linear is made, and its config."""

    name: str
    claim: str
    make: Callable[..., tuple[dict[str, Any], Bits]]
    v4: bool = False
    stacked: bool = False
    quantization: tuple[tuple[str, Any], ...] = ()


KINDS = {
    "DeepSeek-V4": Kind("MXFP4", "fp4", mxfp4("I8", ".weight", ".scale", "F8_E8M0"), v4=True),
    "V4 in unsigned bytes": Kind("MXFP4", "mxfp4", mxfp4("U8", ".weight", ".scale", "U8"), v4=True),
    "compressed-tensors MXFP4": Kind("MXFP4", "mxfp4", mxfp4("U8", ".weight_packed", ".weight_scale", "U8")),
    "blocks": Kind("MXFP4", "mxfp4", mxfp4("U8", "_blocks", "_scales", "U8"), stacked=True),
    "MXFP8": Kind("MXFP8", "mxfp8", mxfp8((1, 32), ".weight_scale_inv", "U8")),
    "E8M0 of 128x128": Kind(
        "MXFP8",
        "fp8",
        mxfp8((128, 128), ".weight_scale_inv", "F8_E8M0"),
        quantization=(("quant_method", "fp8"), ("weight_block_size", [128, 128])),
    ),
    "E8M0 of 128x128, DeepSeek-V4": Kind("MXFP8", "fp8", mxfp8((128, 128), ".scale", "F8_E8M0"), v4=True),
    "E8M0 of 32x64": Kind("MXFP8", "mxfp8", mxfp8((32, 64), ".weight_scale", "F8_E8M0")),
    "modelopt NVFP4": Kind("NVFP4", "nvfp4", nvfp4("U8", ".weight", ".weight_scale_2", False)),
    "compressed-tensors NVFP4": Kind("NVFP4", "nvfp4", nvfp4("U8", ".weight_packed", ".weight_global_scale", True)),
}


def config_of(kind: Kind) -> dict[str, Any]:
    document = {"model_type": "deepseek_v4" if kind.v4 else "qwen3_moe", "num_hidden_layers": 1}
    document |= {"num_experts": E, "num_experts_per_tok": 1, "hidden_size": H, "moe_intermediate_size": I}
    return document | ({"quantization_config": dict(kind.quantization)} if kind.quantization else {})


W132 = {"gate": "w1", "up": "w3", "down": "w2"}


def base_of(kind: Kind, expert: int, projection: str) -> str:
    if kind.v4:
        return f"layers.0.ffn.experts.{expert}.{W132[projection]}"
    return f"model.layers.0.mlp.experts.{expert}.{projection}_proj"


def make(kind: Kind, folder: Path, seed: int = 0) -> tuple[Path, dict[tuple[int, str], Bits]]:
    """A checkpoint of one layer, and the BF16 value of each linear."""
    rng = np.random.default_rng(seed)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    made = {(e, p): kind.make(rng, *shape) for e in range(E) for p, shape in shapes.items()}
    tensors: dict[str, Any] = {}
    if kind.stacked:
        for part, projections in (("gate_up", ("gate", "up")), ("down", ("down",))):
            for suffix, (dtype, _) in made[0, "gate"][0].items():
                each = [np.concatenate([made[e, p][0][suffix][1] for p in projections]) for e in range(E)]
                bits = np.stack(each)
                if suffix == "_blocks":
                    bits = bits.reshape(*bits.shape[:2], -1, 16)
                tensors[f"model.layers.0.mlp.experts.{part}_proj{suffix}"] = (dtype, bits)
    else:
        for (e, p), (stored, _) in made.items():
            tensors |= {f"{base_of(kind, e, p)}{suffix}": tensor for suffix, tensor in stored.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(kind)))
    tensors["model.layers.0.mlp.gate.weight"] = ("BF16", np.zeros((E, H), np.uint16))
    write_file(folder / "model.safetensors", tensors)
    return folder, {key: bits for key, (_, bits) in made.items()}
