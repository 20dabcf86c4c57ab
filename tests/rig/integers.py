"""Tiny checkpoints of integer codes, stored by the formula of each format, with the value of every weight.

Nothing here uses the code under test: words are put together code by code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rig.safetensors import write_file

PROJECTIONS = ("gate", "up", "down")
E, H, I = 2, 256, 384  # noqa: E741
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
Stored = dict[str, tuple[str, Any]]


@dataclass(frozen=True)
class Linear:
    """Unsigned codes [n, k], zero points [n, groups] in the same range, float32 scales, and the group of each column."""

    bits: int
    codes: Any
    zeros: Any
    scales: Any
    group_of: Any

    @property
    def values(self) -> Any:
        """BF16 bits [n, k] of (q - z) * s, rounded once from float32."""
        difference = self.codes.astype(np.int64) - self.zeros.astype(np.int64)[:, self.group_of]
        x = difference.astype(np.float32) * self.scales[:, self.group_of]
        u = x.view(np.uint32).astype(np.uint64)
        return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Format:
    """One way to store a linear. config: its quantization_config. store: a linear -> its tensors by suffix."""

    bits: int
    group: int | None
    config: Mapping[str, Any]
    store: Callable[[Linear], Stored]
    zeros: bool = True
    order: bool = False


def random_linear(form: Format, rng: Any, n: int, k: int) -> Linear:
    """Codes of the whole range, zero points too (some are 0), scales that float16 holds."""
    group = form.group or k
    top, groups = 1 << form.bits, k // group
    zeros = rng.integers(0, top, (n, groups)) if form.zeros else np.full((n, groups), top // 2)
    zeros[3] = 0 if form.zeros else top // 2
    scales = rng.uniform(1e-3, 1e-2, (n, groups)).astype(np.float16).astype(np.float32)
    order = np.arange(k) // group
    return Linear(
        form.bits, rng.integers(0, top, (n, k)), zeros, scales, rng.permutation(order) if form.order else order
    )


def words(bits: int, codes: Any) -> Any:
    """[n, k] -> uint32 [n, k * bits / 32], low bits first; k is filled up to whole words."""
    each = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each))).astype(np.uint64).reshape(len(codes), -1, each)
    return (codes << (np.arange(each, dtype=np.uint64) * np.uint64(bits))).sum(axis=2).astype(np.uint32)


def compressed(
    dtype: str = "F16", unit: str = "I32", shape: str = "I64", zeros: bool = False, order: bool = False
) -> Any:
    """compressed-tensors' pack-quantized."""

    def store(linear: Linear) -> Stored:
        n, k = linear.codes.shape
        packed = words(linear.bits, linear.codes)
        scales = linear.scales.astype({"F16": np.float16, "F32": np.float32}[dtype])
        out: Stored = {
            "weight_packed": (unit, packed.view(np.int32) if unit == "I32" else packed.view(np.uint8)),
            "weight_scale": (dtype, scales),
            "weight_shape": (shape, np.array([n, k], {"I64": np.int64, "I32": np.int32}[shape])),
        }
        if zeros:
            out["weight_zero_point"] = (
                "I32",
                np.ascontiguousarray(words(linear.bits, linear.zeros.T).T).view(np.int32),
            )
        if order:
            out["weight_g_idx"] = ("I32", linear.group_of.astype(np.int32))
        return out

    return store


def gptq(zeros: str = "", order: bool = True) -> Any:
    """zeros: the checkpoint_format of qzeros; "": none. order: with g_idx, of whatever order."""

    def store(linear: Linear) -> Stored:
        out: Stored = {
            "qweight": ("I32", np.ascontiguousarray(words(linear.bits, linear.codes).T).view(np.int32)),
            "scales": ("F16", np.ascontiguousarray(linear.scales.T).astype(np.float16)),
        }
        if zeros:
            one = {("gptq", 4): 0x11111111, ("gptq", 8): 0x01010101}.get((zeros, linear.bits), 0)
            out["qzeros"] = ("I32", (words(linear.bits, linear.zeros.T) - np.uint32(one)).view(np.int32))
        if order:
            out["g_idx"] = ("I32", linear.group_of.astype(np.int32))
        return out

    return store


def awq(linear: Linear) -> Stored:
    """AutoAWQ's GEMM version."""

    def rows(values: Any) -> Any:
        shuffled = values.reshape(len(values), -1, 8)[:, :, AWQ]
        return words(4, shuffled.reshape(len(values), -1)).view(np.int32)

    return {
        "qweight": ("I32", rows(linear.codes.T)),
        "qzeros": ("I32", rows(linear.zeros.T)),
        "scales": ("F16", np.ascontiguousarray(linear.scales.T).astype(np.float16)),
    }


def int8(linear: Linear) -> Stored:
    """compressed-tensors' int-quantized."""
    return {
        "weight": ("I8", (linear.codes - 128).astype(np.int8)),
        "weight_scale": ("F32", linear.scales),
        "weight_zero_point": ("I8", (linear.zeros - 128).astype(np.int8)),
    }


def scheme(
    bits: int, group: int | None, symmetric: bool = True, kind: str = "pack-quantized", **others: Any
) -> dict[str, Any]:
    """compressed-tensors' quantization_config."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group, **others}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}


def gptq_config(bits: int, group: int, **others: Any) -> dict[str, Any]:
    """GPTQ's quantization_config."""
    stated = {"bits": bits, "group_size": group, "sym": False, "desc_act": False, "checkpoint_format": "gptq"}
    return {"quant_method": "gptq", **stated, **others}


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FORMATS: dict[str, Format] = {
    "ct 4 zeros": Format(4, 32, scheme(4, 32, False), compressed(zeros=True)),
    "ct 8 zeros": Format(8, None, scheme(8, None, False), compressed("F32", shape="I32", zeros=True)),
    "ct 4 bytes": Format(4, 64, scheme(4, 64), compressed(unit="U8", shape="I32"), zeros=False),
    "ct 4 order": Format(4, 128, scheme(4, 128, actorder="group"), compressed(order=True), zeros=False, order=True),
    "ct W8A8": Format(8, None, scheme(8, None, False, "int-quantized"), int8),
    "gptq 4": Format(4, 128, gptq_config(4, 128, sym=True), gptq(order=False), zeros=False),
    "gptq 4 v1": Format(4, 32, gptq_config(4, 32), gptq("gptq")),
    "gptq 4 v2": Format(4, 128, gptq_config(4, 128, checkpoint_format="gptq_v2"), gptq("gptq_v2", order=False)),
    "gptq 8 v1": Format(8, 64, gptq_config(8, 64, checkpoint_format="gptq"), gptq("gptq")),
    "gptq 4 rows": Format(4, None, gptq_config(4, -1), gptq("gptq")),
    "gptq 4 order": Format(4, 128, gptq_config(4, 128, desc_act=True), gptq("gptq"), order=True),
    "gptq 4 v2 order": Format(4, 64, gptq_config(4, 64, checkpoint_format="gptq_v2"), gptq("gptq_v2"), order=True),
    "gptq 8 order": Format(8, 128, gptq_config(8, 128, desc_act=True), gptq("gptq"), order=True),
    "awq": Format(4, 64, AWQ_CONFIG, awq),
    "awq 128": Format(4, 128, AWQ_CONFIG | {"group_size": 128}, awq),
}


def experts(form: Format, seed: int = 0) -> tuple[Stored, dict[str, Any]]:
    """The tensors of E random experts of layer 0, and each linear's BF16 values by its name without ".weight"."""
    rng = np.random.default_rng(seed)
    tensors: Stored = {}
    values = {}
    for expert in range(E):
        for projection in PROJECTIONS:
            linear = random_linear(form, rng, *((H, I) if projection == "down" else (I, H)))
            base = f"model.layers.0.mlp.experts.{expert}.{projection}_proj"
            tensors |= {f"{base}.{suffix}": stored for suffix, stored in form.store(linear).items()}
            values[base] = linear.values
    return tensors, values


def checkpoint(folder: Path, tensors: Any, quantization: Mapping[str, Any] | None, **config: Any) -> Path:
    """A checkpoint of these tensors, of E experts of hidden size H and width I unless config says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 1,
        "num_experts": E,
        "num_experts_per_tok": 1,
        "hidden_size": H,
        "moe_intermediate_size": I,
        "hidden_act": "silu",
    } | config
    if quantization:
        document["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(document))
    write_file(folder / "model.safetensors", tensors)
    return folder
