"""Tiny GGUF files: written by gguf-py, or byte by byte if they shall be wrong; random blocks of all types of ggml."""

import itertools
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from rig import floats
from rig.safetensors import read_file

U8 = npt.NDArray[np.uint8]
Types = Sequence[Sequence[str]]  # for each layer, the types of gate, up and down

E, H, I = 2, 512, 256  # noqa: E741
# Offsets of the float16 scales in a block, by type; `blocks` handles types that store scales differently.
SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
TYPES = (*SCALES, "IQ1_M", "MXFP4", "NVFP4")  # all types of blocks that gguf-py dequantizes


def blocks(kind: str, rows: int, columns: int, seed: int = 0) -> U8:
    """Draw blocks [rows, bytes of a row], with scales of the size that weights have."""
    rng = np.random.default_rng(seed)
    per_block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    out = rng.integers(0, 256, (rows, columns // per_block, nbytes)).astype(np.uint8)
    for at in SCALES.get(kind, ()):
        values = rng.uniform(-2e-3, 2e-3, out.shape[:2]).astype(np.float16)
        out[..., at : at + 2] = values[..., None].view(np.uint8)
    if kind == "IQ1_M":  # the upper four bits of four words are one float16: its exponent
        out[..., 55] = out[..., 55] & 0x0F | 0x10
    if kind in ("F32", "F16", "BF16"):
        x = (rng.standard_normal((rows, columns)) * 0.02).astype(np.float32)
        return gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    if kind == "MXFP4":
        out[..., 0] = rng.integers(110, 122, out.shape[:2])
    return out.reshape(rows, -1)


def write(
    path: Path, tensors: Mapping[str, tuple[str, npt.NDArray[Any]]], metadata: Mapping[str, Any], arch: str = "qwen3moe"
) -> Path:
    """Write a file with gguf-py.

    tensors: blocks as bytes [..., bytes of a row], or plain numbers; metadata: numbers, texts and lists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    add = {list: writer.add_array, str: writer.add_string, float: writer.add_float32}
    for key, value in metadata.items():
        add.get(type(value), writer.add_uint32)(key, value)
    for name, (kind, values) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_metadata(layers: int, arch: str = "qwen3moe", **more: Any) -> dict[str, Any]:
    """Return the metadata of a model with E experts of this size."""
    keys = {"block_count": layers, "embedding_length": H, "expert_count": E, "expert_used_count": 1}
    keys |= {"expert_feed_forward_length": I, "feed_forward_length": 1024} | more
    return {f"{arch}.{key}": value for key, value in keys.items()}


def model(
    types: Types, seed: int = 0, *, experts: int = E, hidden: int = H, width: int = I
) -> dict[str, tuple[str, U8]]:
    """Return the tensors of a model: experts of these types, a router, and an embedding that is not read."""
    tensors: dict[str, tuple[str, Any]] = {"token_embd.weight": ("F32", np.ones((8, hidden), np.float32))}
    for layer, layer_types in enumerate(types):
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = ("F32", np.ones((experts, hidden), np.float32))
        for number, (projection, kind) in enumerate(zip(("gate", "up", "down"), layer_types, strict=True)):
            n, k = (hidden, width) if projection == "down" else (width, hidden)
            stored = blocks(kind, experts * n, k, seed + 3 * layer + number)
            tensors[f"blk.{layer}.ffn_{projection}_exps.weight"] = (kind, stored.reshape(experts, n, -1))
    return tensors


def quantize_example(example: Path) -> tuple[dict[str, tuple[str, U8]], dict[str, Any]]:
    """Return the tensors and the metadata of the bundled model's experts: Q8_0, and Q4_0 for down of the last layer."""
    stored, tensors = read_file(example / "model.safetensors"), {}
    for layer, projection in itertools.product(range(2), ("gate", "up", "down")):
        kind = "Q4_0" if (layer, projection) == (1, "down") else "Q8_0"
        names = [f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight" for expert in range(8)]
        stacked = np.stack([floats.from_bits(stored[name].bits) for name in names]).astype(np.float32)
        blocks = gguf.quants.quantize(stacked, gguf.GGMLQuantizationType[kind])
        tensors[f"blk.{layer}.ffn_{projection}_exps.weight"] = (kind, blocks)
    sizes = {"embedding_length": 256, "expert_count": 8, "expert_used_count": 2}
    return tensors, model_metadata(2, **sizes, feed_forward_length=512, expert_feed_forward_length=256)


def split(tensors: Mapping[str, Any], metadata: Mapping[str, Any], count: int) -> list[list[Any]]:
    """Return name, metadata and tensors of each of several files, as gguf-split distributes a model."""
    files: list[list[Any]] = []
    for number in range(count):
        about = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        shared = {} if number else dict(metadata)
        name = f"m-{number + 1:05d}-of-{count:05d}.gguf"
        files.append([name, shared | about, dict([*tensors.items()][number::count])])
    return files


NUMBERS = {"B": 0, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10}


def text(value: str | bytes) -> bytes:
    """Encode a text with its length."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, value: Any, code: str = "I") -> bytes:
    """Encode a key-value pair: a text, a list of texts, or a number by its code of the struct module."""
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return text(key) + struct.pack(f"<I{code}", NUMBERS[code], value)


def info(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """Encode a tensor's entry; shape: rows before columns."""
    dims = tuple(reversed(shape))
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file(
    pairs: Sequence[bytes], infos: Sequence[bytes], data: bytes = b"", *, magic: bytes = b"GGUF", version: int = 3,
    counts: tuple[int, int] | None = None, alignment: int = 32,
) -> bytes:  # fmt: skip
    """Encode a file; counts: false counts of tensors and pairs."""
    head = magic + struct.pack("<IQQ", version, *(counts or (len(infos), len(pairs)))) + b"".join((*pairs, *infos))
    return head + bytes(-len(head) % alignment) + data
