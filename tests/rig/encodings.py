"""Tiny checkpoints in every quantized encoding of safetensors, made from its formula, with the value of every weight.

Nothing here uses the code under test: words are built code by code.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rig.safetensors import write_file

PROJECTIONS = ("gate", "up", "down")
E, H, I = 2, 256, 384  # noqa: E741
SHAPES = {"gate": (I, H), "up": (I, H), "down": (H, I)}
W132 = {"gate": "w1", "up": "w3", "down": "w2"}
Bits = Any
Stored = dict[str, tuple[str, Any]]  # (dtype, bits) by a tensor's name, or by its suffix
# Draws a weight [n, k]; returns its tensors, and its values as BF16 bits.
Make = Callable[[np.random.Generator, int, int], tuple[Stored, Bits]]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = [(8 + b % 8) * 2.0 ** ((b >> 3) - 10) if b & 0x78 else b % 8 * 2.0**-9 for b in range(127)] + [np.nan]
E4M3 = np.concatenate([SIZES, np.negative(SIZES)])


@dataclass(frozen=True)
class Encoding:
    """An encoding of a checkpoint.

    name             name in the product's records
    claim            value of --input-type
    v4, stacked      use the tensor names of DeepSeek-V4, of gpt-oss
    """

    name: str
    claim: str
    make: Make
    config: Mapping[str, Any] | None = None
    v4: bool = False
    stacked: bool = False

    @property
    def is_4_bit(self) -> bool:
        """Return whether weights have 4 bits, for which AMXINT4 prints a warning."""
        return self.name.endswith("4")

    def base(self, expert: int, projection: str) -> str:
        """Return the prefix of the names of a weight's tensors."""
        if self.v4:
            return f"layers.0.ffn.experts.{expert}.{W132[projection]}"
        return f"model.layers.0.mlp.experts.{expert}.{projection}_proj"


def round_to_bf16(x: Any) -> Bits:
    """Return BF16 bits of float32 values, rounded to nearest even."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def spread(scales: Any, block: tuple[int, int], n: int, k: int) -> Any:
    """Repeat the scale of each block for all its elements [n, k]."""
    return np.repeat(np.repeat(scales, min(n, block[0]), axis=0), min(k, block[1]), axis=1)[:n, :k]


def grid(block: tuple[int, int], n: int, k: int) -> tuple[int, int]:
    """Return the number of blocks along rows and columns."""
    return -(-n // block[0]), -(-k // block[1])


def e8m0(rng: np.random.Generator, *shape: int) -> tuple[Bits, Any]:
    """Draw E8M0 exponents, and return their values as well."""
    exponents = rng.integers(100, 130, shape).astype(np.uint8)
    exponents[-1, 0] = 0
    return exponents, 2.0 ** (exponents.astype(np.float64) - 127)


def fp4(rng: np.random.Generator, n: int, k: int) -> tuple[Bits, Any]:
    """Draw E2M1 codes; return them in bytes, the even column in the lower half, and their values."""
    codes = rng.integers(0, 16, (n, k))
    codes[0] = 8  # -0
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), E2M1[codes]


def mxfp4(dtype: str, values: str, scale: str, scale_dtype: str) -> Make:
    """Return a function that draws an MXFP4 weight."""

    def make(rng: np.random.Generator, n: int, k: int) -> tuple[Stored, Bits]:
        codes, x = fp4(rng, n, k)
        exponents, scales = e8m0(rng, n, k // 32)
        return {values: (dtype, codes), scale: (scale_dtype, exponents)}, round_to_bf16(
            x * spread(scales, (1, 32), n, k)
        )

    return make


def fp8(block: tuple[int, int], scale: str, scale_dtype: str = "F32") -> Make:
    """Return a function that draws an FP8 weight with a scale per block."""

    def make(rng: np.random.Generator, n: int, k: int) -> tuple[Stored, Bits]:
        codes = (rng.integers(0, 127, (n, k)) | rng.integers(0, 2, (n, k)) << 7).astype(np.uint8)
        shape = grid(block, n, k)
        drawn = rng.uniform(1e-4, 1e-2, shape).astype(np.float32)
        bits, scales = (drawn, drawn) if scale_dtype == "F32" else e8m0(rng, *shape)
        exact = E4M3[codes].astype(np.float32) * spread(scales, block, n, k).astype(np.float32)
        return {".weight": ("F8_E4M3", codes), scale: (scale_dtype, bits)}, round_to_bf16(exact)

    return make


def nvfp4(values: str, global_scale: str, divides: bool) -> Make:
    """Return a function that draws an NVFP4 weight. divides: the global scale divides."""

    def make(rng: np.random.Generator, n: int, k: int) -> tuple[Stored, Bits]:
        codes, x = fp4(rng, n, k)
        steps = rng.integers(1, 127, (n, k // 16)).astype(np.uint8)
        value = np.float32(8095.6 if divides else 1.235e-4) + np.float32(rng.random())
        s = E4M3[steps].astype(np.float32)
        exact = x.astype(np.float32) * np.repeat(s / value if divides else s * value, 16, axis=1)
        stored = {values: ("U8", codes), ".weight_scale": ("F8_E4M3", steps)}
        return {**stored, global_scale: ("F32", np.full((1,) if divides else (), value, np.float32))}, round_to_bf16(
            exact
        )

    return make


@dataclass(frozen=True)
class Integers:
    """Unsigned codes [n, k], zero points [n, groups] of the same range, float32 scales, and the group of each column."""

    bits: int
    codes: Any
    zeros: Any
    scales: Any
    group_of: Any


def integers(
    bits: int, group: int | None, store: Callable[[Integers], Stored], zeros: bool = True, order: bool = False
) -> Make:
    """Return a function that draws codes and zero points of the full range, with scales that float16 and BF16 hold.

    Some zero points are 0.
    """

    def make(rng: np.random.Generator, n: int, k: int) -> tuple[Stored, Bits]:
        count, groups = 1 << bits, k // (group or k)
        points = rng.integers(0, count, (n, groups)) if zeros else np.full((n, groups), count // 2)
        points[3] = 0 if zeros else count // 2
        scales = rng.integers(64, 128, (n, groups)).astype(np.float32) / 2**14
        neighbours = np.arange(k) // (group or k)
        codes = rng.integers(0, count, (n, k))
        linear = Integers(bits, codes, points, scales, rng.permutation(neighbours) if order else neighbours)
        exact = (codes - points[:, linear.group_of]).astype(np.float32) * scales[:, linear.group_of]
        return store(linear), round_to_bf16(exact)

    return make


def pack_words(bits: int, codes: Any) -> Any:
    """Pack codes [n, k] into uint32 [n, k * bits / 32], low bits first; k is padded to whole words."""
    each = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each))).astype(np.uint64).reshape(len(codes), -1, each)
    return (codes << (np.arange(each, dtype=np.uint64) * np.uint64(bits))).sum(axis=2).astype(np.uint32)


def pack_columns(array: Any) -> Any:
    """Transpose words, as int32."""
    return np.ascontiguousarray(array.T).view(np.int32)


SCALES = {"F16": lambda s: s.astype(np.float16), "BF16": round_to_bf16, "F32": lambda s: s}


def compressed(
    dtype: str = "F16", unit: str = "I32", shape: str = "I64", zeros: bool = False, order: bool = False
) -> Any:
    """Return a function that stores codes as compressed-tensors does."""

    def store(linear: Integers) -> Stored:
        packed = pack_words(linear.bits, linear.codes)
        out: Stored = {
            ".weight_packed": (unit, packed.view(np.int32 if unit == "I32" else np.uint8)),
            ".weight_scale": (dtype, SCALES[dtype](linear.scales)),
            ".weight_shape": (shape, np.array(linear.codes.shape, np.int64 if shape == "I64" else np.int32)),
        }
        if zeros:
            out[".weight_zero_point"] = ("I32", pack_columns(pack_words(linear.bits, linear.zeros.T)))
        if order:
            out[".weight_g_idx"] = ("I32", linear.group_of.astype(np.int32))
        return out

    return store


def gptq(zeros: str = "", order: bool = True) -> Any:
    """Return a function that stores codes as GPTQ does.

    zeros: the checkpoint_format of qzeros, or "" for none. order: store g_idx.
    """

    def store(linear: Integers) -> Stored:
        out: Stored = {
            ".qweight": ("I32", pack_columns(pack_words(linear.bits, linear.codes))),
            ".scales": ("F16", np.ascontiguousarray(linear.scales.T).astype(np.float16)),
        }
        if zeros:
            one = {("gptq", 4): 0x11111111, ("gptq", 8): 0x01010101}.get((zeros, linear.bits), 0)
            out[".qzeros"] = ("I32", (pack_words(linear.bits, linear.zeros.T) - np.uint32(one)).view(np.int32))
        if order:
            out[".g_idx"] = ("I32", linear.group_of.astype(np.int32))
        return out

    return store


def awq(linear: Integers) -> Stored:
    """Store codes as AWQ does."""

    def rows(values: Any) -> Any:
        shuffled = values.reshape(len(values), -1, 8)[:, :, (0, 2, 4, 6, 1, 3, 5, 7)]
        return pack_words(4, shuffled.reshape(len(values), -1)).view(np.int32)

    scales = np.ascontiguousarray(linear.scales.T).astype(np.float16)
    return {
        ".qweight": ("I32", rows(linear.codes.T)),
        ".qzeros": ("I32", rows(linear.zeros.T)),
        ".scales": ("F16", scales),
    }


def int8(linear: Integers) -> Stored:
    """Store codes as compressed-tensors does for W8A8."""
    codes, zeros = ((values - 128).astype(np.int8) for values in (linear.codes, linear.zeros))
    return {".weight": ("I8", codes), ".weight_scale": ("F32", linear.scales), ".weight_zero_point": ("I8", zeros)}


def scheme(
    bits: int, group: int | None, symmetric: bool = True, kind: str = "pack-quantized", **others: Any
) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group, **others}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}


def gptq_config(bits: int, group: int, **others: Any) -> dict[str, Any]:
    """Return a quantization_config of GPTQ."""
    usual = {"bits": bits, "group_size": group, "sym": False, "desc_act": False, "checkpoint_format": "gptq"}
    return {"quant_method": "gptq", **usual, **others}


def fp8_config(block: tuple[int, int]) -> dict[str, Any]:
    """Return a quantization_config of FP8 in blocks."""
    return {"quant_method": "fp8", "weight_block_size": list(block)}


def awq_config(group: int) -> dict[str, Any]:
    """Return a quantization_config of AWQ."""
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def _ct(bits: int, group: int | None, store: Any, zeros: bool = False, order: bool = False, **config: Any) -> Encoding:
    quantization = scheme(bits, group, not zeros, **config)
    return Encoding(f"INT{bits}", f"int{bits}", integers(bits, group, store, zeros, order), quantization)


def _gptq(bits: int, group: int | None, zeros: str, g_idx: bool = True, order: bool = False, **config: Any) -> Encoding:
    quantization = gptq_config(bits, group or -1, **config)
    make = integers(bits, group, gptq(zeros, g_idx), bool(zeros), order)
    return Encoding(f"GPTQ_INT{bits}", "gptq", make, quantization)


V2 = {"checkpoint_format": "gptq_v2"}
ENCODINGS: dict[str, Encoding] = {
    "FP8 in blocks": Encoding("F8_E4M3", "fp8", fp8((128, 128), ".weight_scale_inv"), fp8_config((128, 128))),
    "FP8 of 100x72": Encoding("F8_E4M3", "fp8", fp8((100, 72), ".weight_scale_inv"), fp8_config((100, 72))),
    "FP8 in rows": Encoding("F8_E4M3", "fp8", fp8((1, 1 << 20), ".weight_scale")),
    "DeepSeek-V4": Encoding("MXFP4", "fp4", mxfp4("I8", ".weight", ".scale", "F8_E8M0"), v4=True),
    "V4 in unsigned bytes": Encoding("MXFP4", "mxfp4", mxfp4("U8", ".weight", ".scale", "U8"), v4=True),
    "ct MXFP4": Encoding("MXFP4", "mxfp4", mxfp4("U8", ".weight_packed", ".weight_scale", "U8")),
    "blocks": Encoding("MXFP4", "mxfp4", mxfp4("U8", "_blocks", "_scales", "U8"), stacked=True),
    "MXFP8": Encoding("MXFP8", "mxfp8", fp8((1, 32), ".weight_scale_inv", "U8")),
    "E8M0 of 128x128": Encoding("MXFP8", "fp8", fp8((128, 128), ".scale", "F8_E8M0"), fp8_config((128, 128))),
    "E8M0 of 128x128, V4": Encoding("MXFP8", "fp8", fp8((128, 128), ".scale", "F8_E8M0"), v4=True),
    "E8M0 of 32x64": Encoding("MXFP8", "mxfp8", fp8((32, 64), ".weight_scale", "F8_E8M0")),
    "modelopt NVFP4": Encoding("NVFP4", "nvfp4", nvfp4(".weight", ".weight_scale_2", False)),
    "ct NVFP4": Encoding("NVFP4", "nvfp4", nvfp4(".weight_packed", ".weight_global_scale", True)),
    "ct 4": _ct(4, 32, compressed("BF16")),
    "ct 8": _ct(8, 128, compressed("BF16")),
    "ct 8 rows": _ct(8, None, compressed("F32")),
    "ct 4 zeros": _ct(4, 32, compressed(zeros=True), zeros=True),
    "ct 8 zeros": _ct(8, None, compressed("F32", shape="I32", zeros=True), zeros=True),
    "ct 4 bytes": _ct(4, 64, compressed(unit="U8", shape="I32")),
    "ct 4 order": _ct(4, 128, compressed(order=True), order=True, actorder="group"),
    "ct W8A8": Encoding("W8A8", "int8", integers(8, None, int8), scheme(8, None, False, "int-quantized")),
    "gptq 4": _gptq(4, 128, "", g_idx=False, sym=True),
    "gptq 4 v1": _gptq(4, 32, "gptq"),
    "gptq 4 v2": _gptq(4, 128, "gptq_v2", g_idx=False, **V2),
    "gptq 8 v1": _gptq(8, 64, "gptq"),
    "gptq 4 rows": _gptq(4, None, "gptq"),
    "gptq 4 order": _gptq(4, 128, "gptq", order=True, desc_act=True),
    "gptq 4 v2 order": _gptq(4, 64, "gptq_v2", order=True, **V2),
    "gptq 8 order": _gptq(8, 128, "gptq", order=True, desc_act=True),
    "awq": Encoding("AWQ_INT4", "awq", integers(4, 64, awq), awq_config(64)),
    "awq 128": Encoding("AWQ_INT4", "awq", integers(4, 128, awq), awq_config(128)),
}


def tensors_of(encoding: Encoding, seed: int = 0) -> tuple[Stored, dict[tuple[int, str], Bits]]:
    """Return the tensors of E random experts of layer 0, and the BF16 values of each linear."""
    rng = np.random.default_rng(seed)
    weights = {(e, p): encoding.make(rng, *shape) for e in range(E) for p, shape in SHAPES.items()}
    values = {key: bits for key, (_, bits) in weights.items()}
    tensors: Stored = {}
    if not encoding.stacked:
        for key, (stored, _) in weights.items():
            tensors |= {f"{encoding.base(*key)}{suffix}": tensor for suffix, tensor in stored.items()}
        return tensors, values
    for name, projections in (("gate_up", ("gate", "up")), ("down", ("down",))):
        for suffix, (dtype, _) in weights[0, "gate"][0].items():
            bits = np.stack([np.concatenate([weights[e, p][0][suffix][1] for p in projections]) for e in range(E)])
            if suffix == "_blocks":
                bits = bits.reshape(*bits.shape[:2], -1, 16)
            tensors[f"model.layers.0.mlp.experts.{name}_proj{suffix}"] = (dtype, bits)
    return tensors, values


def checkpoint(folder: Path, tensors: Any, quantization: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """Write a checkpoint of these tensors, with E experts, hidden size H and width I unless config says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1}
    document |= {"num_experts": E, "num_experts_per_tok": 1, "hidden_size": H, "moe_intermediate_size": I}
    document |= {"hidden_act": "silu"} | config
    if quantization:
        document["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(document))
    write_file(folder / "model.safetensors", tensors)
    return folder


def write(
    name: str, folder: Path, change: Callable[[Stored, dict[str, Any]], Any] | None = None, **config: Any
) -> tuple[Path, dict[tuple[int, str], Bits]]:
    """Write a checkpoint in an encoding; return its path and values.

    change: edits its tensors and its quantization_config.
    """
    encoding = ENCODINGS[name]
    tensors, values = tensors_of(encoding)
    quantization = json.loads(json.dumps(encoding.config or {}))
    tensors["model.layers.0.mlp.gate.weight"] = ("BF16", np.zeros((E, H), np.uint16))
    if change is not None:
        change(tensors, quantization)
    family = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]} if encoding.v4 else {}
    return checkpoint(folder, tensors, quantization, **{**family, **config}), values


def write_plain(folder: Path, values: Mapping[tuple[int, str], Bits]) -> Path:
    """Write the same values as a BF16 checkpoint."""
    plain = ENCODINGS["awq"]
    return checkpoint(folder, {f"{plain.base(*key)}.weight": ("BF16", bits) for key, bits in values.items()})
