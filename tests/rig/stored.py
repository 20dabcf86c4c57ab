"""The bundled model stored as models are released: in FP8 with a scale per block, or with its experts in 4 bits."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.quantizers import fp8, groups, mxfp4
from rig.encodings import gptq_config, scheme
from rig.safetensors import Tensor, Tensors, edit_file

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def model(example: Path, folder: Path, method: str) -> Path:
    """A copy. "BF16": as it is; "FP8": every linear that blocks of 128 x 128 divide; others: routed experts alone."""
    shutil.copytree(example, folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if method != "BF16":
        edit_file(folder / "model.safetensors", STORED[method])
    if method in CONFIGS:
        configure(folder, quantization_config=CONFIGS[method])
    return folder


def configure(folder: Path, **more: Any) -> None:
    """Change config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def _fp8(tensors: Tensors) -> None:
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight") and not any(size % 128 for size in tensor.shape):
            codes, scales = fp8.quantize(tensor.bits)
            tensors[name] = Tensor("F8_E4M3", codes.shape, codes.tobytes())
            tensors[f"{name}_scale_inv"] = Tensor("F32", scales.shape, scales.tobytes())


def _mxfp4(tensors: Tensors) -> None:
    for name, tensor in list(tensors.items()):
        if ".experts." in name:
            codes, exponents = mxfp4.quantize(tensor.bits)
            packed = codes[:, ::2] | codes[:, 1::2] << 4
            tensors[name] = Tensor("U8", packed.shape, packed.tobytes())
            tensors[f"{name.removesuffix('.weight')}.scale"] = Tensor("F8_E8M0", exponents.shape, exponents.tobytes())


def _rawint4(tensors: Tensors) -> None:
    for name, tensor in list(tensors.items()):
        if ".experts." in name:
            codes, scales = groups.quantize_groups(4, 32, tensor.bits)
            words = groups.pack_words(4, codes)
            stem = tensors.pop(name) and name.removesuffix("weight")
            tensors[f"{stem}weight_packed"] = Tensor("I32", words.shape, words.tobytes())
            tensors[f"{stem}weight_scale"] = Tensor("BF16", scales.shape, scales.tobytes())
            tensors[f"{stem}weight_shape"] = Tensor("I64", (2,), np.array(codes.shape, np.int64).tobytes())


def _gptq(tensors: Tensors) -> None:
    for name, tensor in list(tensors.items()):
        if ".experts." in name:
            codes, scales = groups.quantize_groups(4, 128, tensor.bits)
            words = np.ascontiguousarray(groups.pack_words(4, codes).T)
            exact = np.ascontiguousarray((scales.astype(np.uint32) << 16).view(np.float32).T)
            stem = tensors.pop(name) and name.removesuffix("weight")
            tensors[f"{stem}qweight"] = Tensor("I32", words.shape, words.tobytes())
            tensors[f"{stem}scales"] = Tensor("F32", exact.shape, exact.tobytes())


STORED = {"FP8": _fp8, "MXFP4": _mxfp4, "RAWINT4": _rawint4, "GPTQ_INT4": _gptq}
CONFIGS = {"FP8": FP8, "RAWINT4": scheme(4, 32), "GPTQ_INT4": gptq_config(4, 128, sym=True)}
