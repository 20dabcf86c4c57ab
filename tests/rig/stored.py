"""The bundled model stored as models are released: in FP8 with a scale per block, or with its experts in MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ktconvert.quantizers import fp8, mxfp4
from rig.safetensors import Tensor, Tensors, edit_file

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def model(example: Path, folder: Path, method: str) -> Path:
    """A copy. "BF16": as it is; "FP8": every linear that blocks of 128 x 128 divide; "MXFP4": routed experts alone."""
    shutil.copytree(example, folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if method != "BF16":
        edit_file(folder / "model.safetensors", {"FP8": _fp8, "MXFP4": _mxfp4}[method])
    if method == "FP8":
        configure(folder, quantization_config=FP8)
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
