"""Every quantized encoding in safetensors: tiny checkpoints stored by its formula, with the value of every weight. Nothing
here uses the code under test: words are put together code by code.
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
Stored = dict[str, tuple[str, Any]]  # (dtype, bits) by a tensor's name, or by what a weight's name ends with
Make = Callable[[np.random.Generator, int, int], tuple[Stored, Bits]]  # a weight [n, k], and its values as BF16 bits

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = [(8 + b % 8) * 2.0 ** ((b >> 3) - 10) if b & 0x78 else b % 8 * 2.0**-9 for b in range(127)] + [np.nan]
E4M3 = np.concatenate([SIZES, np.negative(SIZES)])


@dataclass(frozen=True)
class Encoding:
    """name: in facts. claim: in --input-type. v4, stacked: the names of DeepSeek-V4, of gpt-oss."""

    name: str
    claim: str
    make: Make
    config: Mapping[str, Any] | None = None
    v4: bool = False
    stacked: bool = False

    @property
    def few(self) -> bool:
        """4 bits, of which AMXINT4 is warned."""
        return self.name.endswith("4")

    def base(self, expert: int, projection: str) -> str:
        """What the names of a weight's tensors begin with."""
        if self.v4:
            return f"layers.0.ffn.experts.{expert}.{W132[projection]}"
        return f"model.layers.0.mlp.experts.{expert}.{projection}_proj"


def rounded(x: Any) -> Bits:
    """BF16 bits of float32 values, to the nearest even."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def spread(scales: Any, block: tuple[int, int], n: int, k: int) -> Any:
    return np.repeat(np.repeat(scales, min(n, block[0]), axis=0), min(k, block[1]), axis=1)[:n, :k]


def grid(block: tuple[int, int], n: int, k: int) -> tuple[int, int]:
    return -(-n // block[0]), -(-k // block[1])


def e8m0(rng: np.random.Generator, *shape: int) -> tuple[Bits, Any]:
    exponents = rng.integers(100, 130, shape).astype(np.uint8)
    exponents[-1, 0] = 0
    return exponents, 2.0 ** (exponents.astype(np.float64) - 127)


def fp4(rng: np.random.Generator, n: int, k: int) -> tuple[Bits, Any]:
    """Codes in bytes, the even column in the lower half, and their values."""
    codes = rng.integers(0, 16, (n, k))
    codes[0] = 8  # -0
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), E2M1[codes]


def mxfp4(dtype: str, values: str, scale: str, scale_dtype: str) -> Make:
    def make(rng: np.random.Generator, n: int, k: int) -> tuple[Stored, Bits]:
        codes, x = fp4(rng, n, k)
        exponents, scales = e8m0(rng, n, k // 32)
        return {values: (dtype, codes), scale: (scale_dtype, exponents)}, rounded(x * spread(scales, (1, 32), n, k))

    return make


def fp8(block: tuple[int, int], scale: str, scale_dtype: str = "F32") -> Make:
    def make(rng: np.random.Generator, n: int, k: int) -> tuple[Stored, Bits]:
        codes = (rng.integers(0, 127, (n, k)) | rng.integers(0, 2, (n, k)) << 7).astype(np.uint8)
        shape = grid(block, n, k)
        drawn = rng.uniform(1e-4, 1e-2, shape).astype(np.float32)
        bits, scales = (drawn, drawn) if scale_dtype == "F32" else e8m0(rng, *shape)
        exact = E4M3[codes].astype(np.float32) * spread(scales, block, n, k).astype(np.float32)
        return {".weight": ("F8_E4M3", codes), scale: (scale_dtype, bits)}, rounded(exact)

    return make


def nvfp4(values: str, whole: str, divides: bool) -> Make:
    def make(rng: np.random.Generator, n: int, k: int) -> tuple[Stored, Bits]:
        codes, x = fp4(rng, n, k)
        steps = rng.integers(1, 127, (n, k // 16)).astype(np.uint8)
        one = np.float32(8095.6 if divides else 1.235e-4) + np.float32(rng.random())
        s = E4M3[steps].astype(np.float32)
        exact = x.astype(np.float32) * np.repeat(s / one if divides else s * one, 16, axis=1)
        stored = {values: ("U8", codes), ".weight_scale": ("F8_E4M3", steps)}
        return {**stored, whole: ("F32", np.full((1,) if divides else (), one, np.float32))}, rounded(exact)

    return make


@dataclass(frozen=True)
class Codes:
    """Unsigned codes [n, k], zero points [n, groups] in the same range, float32 scales, and the group of each column."""

    bits: int
    codes: Any
    zeros: Any
    scales: Any
    group_of: Any


def integers(
    bits: int, group: int | None, store: Callable[[Codes], Stored], zeros: bool = True, order: bool = False
) -> Make:
    """Codes of the whole range, zero points too (some are 0), scales that float16 and BF16 hold."""

    def make(rng: np.random.Generator, n: int, k: int) -> tuple[Stored, Bits]:
        top, groups = 1 << bits, k // (group or k)
        points = rng.integers(0, top, (n, groups)) if zeros else np.full((n, groups), top // 2)
        points[3] = 0 if zeros else top // 2
        scales = rng.integers(64, 128, (n, groups)).astype(np.float32) / 2**14
        neighbours = np.arange(k) // (group or k)
        codes = rng.integers(0, top, (n, k))
        own = Codes(bits, codes, points, scales, rng.permutation(neighbours) if order else neighbours)
        exact = (codes - points[:, own.group_of]).astype(np.float32) * scales[:, own.group_of]
        return store(own), rounded(exact)

    return make


def words(bits: int, codes: Any) -> Any:
    """[n, k] -> uint32 [n, k * bits / 32], low bits first; k is filled up to whole words."""
    each = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each))).astype(np.uint64).reshape(len(codes), -1, each)
    return (codes << (np.arange(each, dtype=np.uint64) * np.uint64(bits))).sum(axis=2).astype(np.uint32)


def down(array: Any) -> Any:
    """Along columns, as int32."""
    return np.ascontiguousarray(array.T).view(np.int32)


SCALES = {"F16": lambda s: s.astype(np.float16), "BF16": rounded, "F32": lambda s: s}


def compressed(
    dtype: str = "F16", unit: str = "I32", shape: str = "I64", zeros: bool = False, order: bool = False
) -> Any:
    def store(own: Codes) -> Stored:
        packed = words(own.bits, own.codes)
        out: Stored = {
            ".weight_packed": (unit, packed.view(np.int32 if unit == "I32" else np.uint8)),
            ".weight_scale": (dtype, SCALES[dtype](own.scales)),
            ".weight_shape": (shape, np.array(own.codes.shape, np.int64 if shape == "I64" else np.int32)),
        }
        if zeros:
            out[".weight_zero_point"] = ("I32", down(words(own.bits, own.zeros.T)))
        if order:
            out[".weight_g_idx"] = ("I32", own.group_of.astype(np.int32))
        return out

    return store


def gptq(zeros: str = "", order: bool = True) -> Any:
    """zeros: the checkpoint_format of qzeros; "": none. order: with g_idx, of whatever order."""

    def store(own: Codes) -> Stored:
        out: Stored = {
            ".qweight": ("I32", down(words(own.bits, own.codes))),
            ".scales": ("F16", np.ascontiguousarray(own.scales.T).astype(np.float16)),
        }
        if zeros:
            one = {("gptq", 4): 0x11111111, ("gptq", 8): 0x01010101}.get((zeros, own.bits), 0)
            out[".qzeros"] = ("I32", (words(own.bits, own.zeros.T) - np.uint32(one)).view(np.int32))
        if order:
            out[".g_idx"] = ("I32", own.group_of.astype(np.int32))
        return out

    return store


def awq(own: Codes) -> Stored:
    def rows(values: Any) -> Any:
        shuffled = values.reshape(len(values), -1, 8)[:, :, (0, 2, 4, 6, 1, 3, 5, 7)]
        return words(4, shuffled.reshape(len(values), -1)).view(np.int32)

    scales = np.ascontiguousarray(own.scales.T).astype(np.float16)
    return {".qweight": ("I32", rows(own.codes.T)), ".qzeros": ("I32", rows(own.zeros.T)), ".scales": ("F16", scales)}


def int8(own: Codes) -> Stored:
    codes, zeros = ((values - 128).astype(np.int8) for values in (own.codes, own.zeros))
    return {".weight": ("I8", codes), ".weight_scale": ("F32", own.scales), ".weight_zero_point": ("I8", zeros)}


def scheme(
    bits: int, group: int | None, symmetric: bool = True, kind: str = "pack-quantized", **others: Any
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group, **others}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}


def gptq_config(bits: int, group: int, **others: Any) -> dict[str, Any]:
    usual = {"bits": bits, "group_size": group, "sym": False, "desc_act": False, "checkpoint_format": "gptq"}
    return {"quant_method": "gptq", **usual, **others}


def fp8_config(block: tuple[int, int]) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": list(block)}


def awq_config(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def _ct(bits: int, group: int | None, store: Any, zeros: bool = False, order: bool = False, **config: Any) -> Encoding:
    of_config = scheme(bits, group, not zeros, **config)
    return Encoding(f"INT{bits}", f"int{bits}", integers(bits, group, store, zeros, order), of_config)


def _gptq(bits: int, group: int | None, zeros: str, g_idx: bool = True, order: bool = False, **config: Any) -> Encoding:
    of_config = gptq_config(bits, group or -1, **config)
    made = integers(bits, group, gptq(zeros, g_idx), bool(zeros), order)
    return Encoding(f"GPTQ_INT{bits}", "gptq", made, of_config)


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
    """The tensors of E random experts of layer 0, and the BF16 values of each linear."""
    rng = np.random.default_rng(seed)
    made = {(e, p): encoding.make(rng, *shape) for e in range(E) for p, shape in SHAPES.items()}
    values = {key: bits for key, (_, bits) in made.items()}
    tensors: Stored = {}
    if not encoding.stacked:
        for key, (stored, _) in made.items():
            tensors |= {f"{encoding.base(*key)}{suffix}": tensor for suffix, tensor in stored.items()}
        return tensors, values
    for part, projections in (("gate_up", ("gate", "up")), ("down", ("down",))):
        for suffix, (dtype, _) in made[0, "gate"][0].items():
            bits = np.stack([np.concatenate([made[e, p][0][suffix][1] for p in projections]) for e in range(E)])
            if suffix == "_blocks":
                bits = bits.reshape(*bits.shape[:2], -1, 16)
            tensors[f"model.layers.0.mlp.experts.{part}_proj{suffix}"] = (dtype, bits)
    return tensors, values


def checkpoint(folder: Path, tensors: Any, quantization: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """A checkpoint of these tensors, of E experts of hidden size H and width I unless config says otherwise."""
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
    """A checkpoint in an encoding, and its values; change: its tensors and its quantization_config, before."""
    encoding = ENCODINGS[name]
    tensors, values = tensors_of(encoding)
    quantization = json.loads(json.dumps(encoding.config or {}))
    tensors["model.layers.0.mlp.gate.weight"] = ("BF16", np.zeros((E, H), np.uint16))
    if change is not None:
        change(tensors, quantization)
    family = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]} if encoding.v4 else {}
    return checkpoint(folder, tensors, quantization, **{**family, **config}), values


def write_plain(folder: Path, values: Mapping[tuple[int, str], Bits]) -> Path:
    plain = ENCODINGS["awq"]
    return checkpoint(folder, {f"{plain.base(*key)}.weight": ("BF16", bits) for key, bits in values.items()})
