"""The bundled model stored as models are released: in FP8 with a scale per block, or with its experts in 4 bits."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.quantizers import packed
from rig import reference
from rig.encodings import gptq_config, scheme
from rig.safetensors import Tensor, Tensors, edit_file

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def model(example: Path, folder: Path, method: str) -> Path:
    """Write a copy. "BF16": unchanged; "FP8": linears that blocks of 128 x 128 divide; others: only routed experts."""
    shutil.copytree(example, folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if method != "BF16":
        edit_file(folder / "model.safetensors", lambda tensors: _store(tensors, method))
    if method in CONFIGS:
        configure(folder, quantization_config=CONFIGS[method])
    return folder


def _store(tensors: Tensors, method: str) -> None:
    """Store linears by a method."""
    for name, tensor in list(tensors.items()):
        in_blocks = name.endswith("_proj.weight") and not any(size % 128 for size in tensor.shape)
        if ".experts." in name or (method == "FP8" and in_blocks):
            del tensors[name]
            for suffix, (dtype, bits) in STORED[method](tensor.bits).items():
                tensors[name.removesuffix("weight") + suffix] = Tensor(dtype, bits.shape, bits.tobytes())


def configure(folder: Path, **more: Any) -> None:
    """Change entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


Stored = dict[str, tuple[str, Any]]  # (dtype, bits) by the suffix that replaces "weight" in a name


def _fp8(bits: Any) -> Stored:
    codes, scales = reference.quantize_fp8(bits)
    return {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scales)}


def _mxfp4(bits: Any) -> Stored:
    codes, exponents = reference.quantize_mxfp4(bits)
    return {"weight": ("U8", codes[:, ::2] | codes[:, 1::2] << 4), "scale": ("F8_E8M0", exponents)}


def _rawint4(bits: Any) -> Stored:
    codes, scales = reference.quantize_groups(4, 32, bits)
    shape = np.array(codes.shape, np.int64)
    words = packed.pack_words(4, codes)
    return {"weight_packed": ("I32", words), "weight_scale": ("BF16", scales), "weight_shape": ("I64", shape)}


def _gptq(bits: Any) -> Stored:
    codes, scales = reference.quantize_groups(4, 128, bits)
    exact = (scales.astype(np.uint32) << 16).view(np.float32)
    return {"qweight": ("I32", packed.pack_words(4, codes).T), "scales": ("F32", exact.T)}


def _fp16(bits: Any) -> Stored:
    values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float16)
    return {"weight": ("F16", values.view(np.uint16))}


STORED = {"FP16": _fp16, "FP8": _fp8, "MXFP4": _mxfp4, "RAWINT4": _rawint4, "GPTQ_INT4": _gptq}
CONFIGS = {"FP8": FP8, "RAWINT4": scheme(4, 32), "GPTQ_INT4": gptq_config(4, 128, sym=True)}
