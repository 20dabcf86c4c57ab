"""Tiny models as they are published: attention, shared experts and dense layers are quantized like the experts."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rig import decided, families, family_models, stored
from rig.encodings import E2M1, E4M3, grid, spread
from rig.family_rows import ROWS
from rig.safetensors import Tensor, Tensors, edit_file

Bits = Any
Encode = Callable[[Bits], stored.Stored]  # BF16 bits [n, k] -> tensors by the suffix that replaces "weight"

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
    """Return an encoder of E4M3. block: None for a scale per row; dtype: of scales: F32, BF16, F8_E8M0, or U8 for it."""

    def encode(bits: Bits) -> stored.Stored:
        x = _floats(bits)
        own = block or (1, x.shape[1])
        scales = (np.maximum(_largest(x, own), 1e-9) / 448).astype(np.float32)
        saved: Any = scales
        if dtype in ("F8_E8M0", "U8"):
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
    linears            pattern of names without ".weight" -> encoder of each matrix; the first match counts
    quantization       quantization_config of config.json
    method             of the runtime, for the experts as they are stored; "" if it computes them only when converted
    change             changes the tensors before they are encoded
    restore            gives decoded tensors the names that transformers loads
    extra              tensors that are added: (dtype, values)
    """

    family: str
    linears: Mapping[str, Encode]
    quantization: dict[str, Any]
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Tensors], Any] = lambda tensors: None
    restore: Callable[[Tensors], Any] = lambda tensors: None
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


STACK = re.compile(r"(.*experts)\.(gate_up|down)_proj")


def _split(transposed: bool) -> Callable[[Tensors], None]:
    """Return a function that stores stacks of experts as one tensor per projection of an expert.

    transposed: the stacks are [E, H, 2I] and [E, I, H].
    """

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if match := STACK.fullmatch(name):
                for expert, bits in enumerate(tensors.pop(name).bits):
                    rows = bits.T if transposed else bits
                    parts = np.split(rows, 2) if match[2] == "gate_up" else [rows]
                    for projection, part in zip(match[2].split("_"), parts, strict=True):
                        data = np.ascontiguousarray(part).tobytes()
                        tensors[f"{match[1]}.{expert}.{projection}_proj.weight"] = Tensor("BF16", part.shape, data)

    return change


def _join(transposed: bool) -> Callable[[Tensors], None]:
    """Return the inverse of _split."""

    def change(tensors: Tensors) -> None:
        for first in [name for name in tensors if name.endswith("experts.0.down_proj.weight")]:
            base = first.removesuffix(".0.down_proj.weight")
            for stack in ("gate_up", "down"):
                names = [
                    [f"{base}.{expert}.{projection}_proj.weight" for projection in stack.split("_")]
                    for expert in range(families.EXPERTS)
                ]
                bits = np.stack([np.concatenate([tensors.pop(name).bits for name in expert]) for expert in names])
                bits = bits.swapaxes(1, 2) if transposed else bits
                data = np.ascontiguousarray(bits).tobytes()
                tensors[f"{base}.{stack}_proj"] = Tensor("BF16", bits.shape, data)

    return change


def _store_stacks(encode: Encode, names: Mapping[str, str], transposed: bool = False) -> Callable[[Tensors], None]:
    """Return a function that encodes stacks of experts whose names do not end in ".weight".

    names: suffix of an encoder's tensor -> suffix of the stored tensor; transposed: encode each expert's transpose.
    """

    def change(tensors: Tensors) -> None:
        for name in [
            name for name in tensors if re.search(r"experts\.(gate_up_proj|down_proj|w13_weight|w2_weight)$", name)
        ]:
            bits = tensors.pop(name).bits
            for suffix, (dtype, values) in _encode(encode, bits.swapaxes(1, 2) if transposed else bits).items():
                tensors[name + names[suffix]] = Tensor(dtype, values.shape, np.ascontiguousarray(values).tobytes())

    return change


def _gpt_oss(bits: Bits) -> stored.Stored:
    """Encode as gpt-oss, with blocks of 32 columns."""
    tensors = stored.STORED["MXFP4"](bits)
    codes = tensors["weight"][1]
    return {"weight": ("U8", codes.reshape(len(codes), -1, 16)), "scale": ("U8", tensors["scale"][1])}


def _encode(encode: Encode, bits: Bits) -> stored.Stored:
    """Encode a matrix, or each matrix of a stack."""
    if bits.ndim == 2:
        return encode(bits)
    matrices = [encode(matrix) for matrix in bits]
    return {
        suffix: (dtype, np.stack([matrix[suffix][1] for matrix in matrices]))
        for suffix, (dtype, _) in matrices[0].items()
    }


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


EXPERT = r"experts\.\d+\.(gate|up|down|w1|w2|w3)(_proj)?$"
MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
FP8_EXPERTS = {EXPERT: fp8((128, 128), "weight_scale_inv")}
MXFP8_SCALES = {"weight": "", "weight_scale": "_scale"}
MXFP4_SCALES = {"weight": "_blocks", "scale": "_scales"}
# Forms with quantized experts only, of families that transformers builds but for `families.FAMILIES`.
MORE_FORMS = {
    "gpt-oss MXFP4": Form(
        "gpt_oss", {}, {"quant_method": "mxfp4"}, "MXFP4", change=_store_stacks(_gpt_oss, MXFP4_SCALES, transposed=True)
    ),
    "Step-3.7 FP8": Form(
        "step3p7", {r"moe\.(gate|up|down)_proj$": fp8((128, 128), "weight_scale_inv")}, FP8_BLOCKS, "FP8"
    ),
    "MiniMax-M2 FP8": Form("minimax_m2", FP8_EXPERTS, FP8_BLOCKS, "FP8"),
    "MiniMax-M3 MXFP8": Form("minimax_m3_vl", {EXPERT: fp8((1, 32), "weight_scale_inv", "U8")}, MXFP8, "MXFP8"),
    "Nemotron-H NVFP4": Form("nemotron_h", {EXPERT: nvfp4}, MODELOPT, "NVFP4"),
    "Llama-4 ct FP8": Form(
        "llama4",
        {EXPERT: fp8(None, "weight_scale", "BF16")},
        CT_FP8,
        "FP8_PERCHANNEL",
        change=_split(transposed=True),
        restore=_join(transposed=True),
    ),
    "Gemma-4 NVFP4": Form(
        "gemma4", {EXPERT: nvfp4}, MODELOPT, "NVFP4", change=_split(transposed=False), restore=_join(transposed=False)
    ),
    "GLM-5.3-Flash FP8": Form("glm5_next", FP8_EXPERTS, FP8_BLOCKS, "FP8"),
    "Inkling 2 MXFP8": Form(
        "inkling2", {}, MXFP8, "", change=_store_stacks(fp8((1, 32), "weight_scale", "U8"), MXFP8_SCALES)
    ),
}


def write(name: str, folder: Path) -> Path:
    """Write a tiny model with random weights in a published form, with a tokenizer."""
    form = {**FORMS, **MORE_FORMS}[name]
    if form.family in families.FAMILIES:
        families.make(form.family, False, folder, vocab_size=TOKENS, **form.settings)
    else:
        row = ROWS[form.family]
        family_models.save_model(
            family_models.auto_class(form.family), family_models.config_of(form.family, row), folder
        )
    edit_file(folder / "model.safetensors", lambda tensors: _store(tensors, form))
    stored.configure(folder, quantization_config=form.quantization)
    decided.add_tokenizer(folder)
    return folder


def _store(tensors: Tensors, form: Form) -> None:
    form.change(tensors)
    for name, tensor in list(tensors.items()):
        stem = name.removesuffix(".weight")
        encode = next((one for pattern, one in form.linears.items() if stem != name and re.search(pattern, stem)), None)
        if encode is not None:
            del tensors[name]
            for suffix, (dtype, values) in _encode(encode, tensor.bits).items():
                tensors[f"{stem}.{suffix}"] = Tensor(dtype, values.shape, np.ascontiguousarray(values).tobytes())
    for name, (dtype, values) in form.extra.items():
        tensors[name] = Tensor(dtype, values.shape, values.tobytes())
