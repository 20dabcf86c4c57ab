"""Tiny models as they are published: attention, shared experts and dense layers are quantized like the experts."""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rig import families, stored
from rig.encodings import E2M1, E4M3, grid, spread
from rig.safetensors import Tensor, Tensors, edit_file

Bits = Any
Encode = Callable[[Bits], stored.Stored]  # BF16 bits [n, k] -> tensors by the suffix that replaces "weight"

TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "qwen3-moe-small"
TOKENS = 2048  # of its vocabulary


def _nearest(table: Any, values: Any) -> Any:
    """Return the codes of the nearest numbers of a table."""
    finite = np.flatnonzero(np.isfinite(table))
    order = finite[np.argsort(table[finite], kind="stable")]
    numbers = table[order]
    return order[np.searchsorted((numbers[1:] + numbers[:-1]) / 2, values)].astype(np.uint8)


def _floats(bits: Bits) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _largest(x: Any, block: tuple[int, int]) -> Any:
    """Return the largest magnitude in each block of x [n, k]."""
    rows, columns = grid(block, *x.shape)
    padded = np.zeros((rows * block[0], columns * block[1]))
    padded[: x.shape[0], : x.shape[1]] = np.abs(x)
    return padded.reshape(rows, block[0], columns, block[1]).max(axis=(1, 3))


def fp8(block: tuple[int, int] | None, scale: str, dtype: str = "F32") -> Encode:
    """Return an encoder of E4M3. block: None for a scale per row; dtype: of the scales, F32, BF16 or F8_E8M0."""

    def encode(bits: Bits) -> stored.Stored:
        x = _floats(bits)
        own = block or (1, x.shape[1])
        scales = (np.maximum(_largest(x, own), 1e-9) / 448).astype(np.float32)
        saved: Any = scales
        if dtype == "F8_E8M0":
            saved = (np.ceil(np.log2(scales)) + 127).astype(np.uint8)
            scales = 2.0 ** (saved.astype(np.float64) - 127)
        elif dtype == "BF16":
            saved = (scales.view(np.uint32) + 0xFFFF >> 16).astype(np.uint16)
            scales = _floats(saved)
        codes = _nearest(E4M3, np.clip(x / spread(scales, own, *x.shape), -448, 448))
        return {"weight": ("F8_E4M3", codes), scale: (dtype, saved)}

    return encode


def nvfp4(bits: Bits) -> stored.Stored:
    """Encode as modelopt does, with the scale of the inputs."""
    x = _floats(bits)
    largest = np.maximum(_largest(x, (1, 16)), 1e-9)
    whole = np.float32(largest.max() / (6 * 448))
    steps = _nearest(E4M3, largest / 6 / whole)
    codes = _nearest(E2M1, x / np.maximum(np.repeat(E4M3[steps] * whole, 16, axis=1), 1e-12))
    return {
        "weight": ("U8", codes[:, ::2] | codes[:, 1::2] << 4),
        "weight_scale": ("F8_E4M3", steps),
        "weight_scale_2": ("F32", np.full((), whole)),
        "input_scale": ("F32", np.ones((), np.float32)),
    }


def mxfp4(bits: Bits) -> stored.Stored:
    """Encode as DeepSeek-V4 does."""
    tensors = stored.STORED["MXFP4"](bits)
    return {"weight": ("I8", tensors["weight"][1]), "scale": tensors["scale"]}


@dataclass(frozen=True)
class Form:
    """A published form.

    family, settings   of the tiny model
    linears            pattern of names without ".weight" -> encoder; the first match counts
    quantization       quantization_config of config.json
    method             of the runtime, for the experts as they are stored
    change             changes the tensors before they are encoded
    extra              tensors that are added: (dtype, values)
    """

    family: str
    linears: Mapping[str, Encode]
    quantization: dict[str, Any]
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Tensors], Any] = lambda tensors: None
    extra: Mapping[str, tuple[str, Any]] = field(default_factory=dict)


def _add_mtp_layer(tensors: Tensors) -> None:
    """Add a layer beyond the model's: the last one, as MTP layers repeat it."""
    last = f"layers.{families.LAYERS - 1}."
    for name in [name for name in tensors if last in name]:
        tensors[name.replace(last, f"layers.{families.LAYERS}.")] = tensors[name]


def _keep_biases(tensors: Tensors) -> None:
    """Store the routers' biases in float32, with values that BF16 cannot hold."""
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            values = np.linspace(1, 1 + 1e-4, *tensor.shape, dtype=np.float32)
            tensors[name] = Tensor("F32", tensor.shape, values.tobytes())


def _prepare_deepseek(tensors: Tensors) -> None:
    _keep_biases(tensors)
    _add_mtp_layer(tensors)


V4_FLOATS = re.compile(r"hc_|attn_sink$|\.ape$|gate\.bias$")  # published in float32


def _rename_deepseek_v4(tensors: Tensors) -> None:
    """Give the tensors their published names and dtypes, and add the block mtp.0."""
    for name in list(tensors):
        tensor = tensors.pop(name)
        published = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
        if V4_FLOATS.search(published) and tensor.dtype == "BF16":
            data = _floats(tensor.bits).astype(np.float32).tobytes()
            tensor = Tensor("F32", tensor.shape, data)
        if published.endswith("tid2eid"):  # experts by token
            ids = (np.arange(tensor.shape[0])[:, None] + np.arange(tensor.shape[1]) * 3) % families.EXPERTS
            tensor = tensor._replace(data=ids.astype(np.int64).tobytes())
        tensors[published] = tensor
        if published.startswith("layers.2."):
            tensors[published.replace("layers.2.", "mtp.0.")] = tensor
    tensors["mtp.0.e_proj.weight"] = tensors["layers.2.attn.wq_a.weight"]


CT_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "ignore": ["*gate"]}
KV_SCALES = {
    f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale": ("F32", np.full((), 0.125, np.float32))
    for layer in range(families.LAYERS)
    for name in "kv"
}
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PROJECTIONS = r"(self_attn|mlp).*_(proj|proj_with_mqa|a_proj|b_proj)$"
V4_BLOCKS = fp8((128, 128), "scale", "F8_E8M0")

FORMS = {
    "modelopt NVFP4": Form("qwen3_moe", {rf"{PROJECTIONS}|^lm_head$": nvfp4}, MODELOPT, "NVFP4", extra=KV_SCALES),
    "ct FP8": Form("glm4_moe", {PROJECTIONS: fp8(None, "weight_scale", "BF16")}, CT_FP8, "FP8_PERCHANNEL"),
    "FP8 in blocks": Form(
        "deepseek_v3",
        {PROJECTIONS: fp8((128, 128), "weight_scale_inv")},
        FP8_BLOCKS,
        "FP8",
        change=_prepare_deepseek,
    ),
    "FP8, tied": Form(
        "qwen3_moe",
        {PROJECTIONS: fp8((128, 128), "weight_scale_inv")},
        FP8_BLOCKS,
        "FP8",
        {"tie_word_embeddings": True},
    ),
    "DeepSeek-V4": Form(
        "deepseek_v4",
        {
            r"ffn\.experts\.": mxfp4,
            r"attn\.w(q_a|q_b|kv|o_a|o_b)$|indexer\.wq_b$|shared_experts|e_proj$": V4_BLOCKS,
        },
        {**FP8_BLOCKS, "scale_fmt": "ue8m0"},
        "MXFP4",
        change=_rename_deepseek_v4,
    ),
}


def write(name: str, folder: Path) -> Path:
    """Write a tiny model with random weights in a published form, with a tokenizer."""
    form = FORMS[name]
    families.make(form.family, False, folder, vocab_size=TOKENS, **form.settings)
    edit_file(folder / "model.safetensors", lambda tensors: _store(tensors, form))
    stored.configure(folder, quantization_config=form.quantization)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, folder)
    return folder


def _store(tensors: Tensors, form: Form) -> None:
    form.change(tensors)
    for name, tensor in list(tensors.items()):
        stem = name.removesuffix(".weight")
        encode = next((one for pattern, one in form.linears.items() if stem != name and re.search(pattern, stem)), None)
        if encode is not None:
            del tensors[name]
            for suffix, (dtype, values) in encode(tensor.bits).items():
                tensors[f"{stem}.{suffix}"] = Tensor(dtype, values.shape, np.ascontiguousarray(values).tobytes())
    for name, (dtype, values) in form.extra.items():
        tensors[name] = Tensor(dtype, values.shape, values.tobytes())
