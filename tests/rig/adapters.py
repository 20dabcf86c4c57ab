"""Adapters as kt-kernel's training saves them."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ktconvert.layouts.checkpoints.adapter import CONFIG
from ktconvert.layouts.checkpoints.kt_adapter import FACTORS, FUSED
from rig.safetensors import write_file


def write_kt_adapter(folder: Path, sizes: Mapping[int, tuple[int, int, int]], rank: int = 4) -> Path:
    """Write random matrices for the experts of each layer, (E, H, I), and return the folder."""
    rng, tensors = np.random.default_rng(0), {}
    for layer, (e, h, i) in sizes.items():
        shapes = (e, rank, h), (e, i, rank), (e, rank, h), (e, i, rank), (e, rank, i), (e, h, rank)
        for name, shape in zip(FACTORS, shapes, strict=True):
            values = rng.standard_normal(shape).astype(np.float32) / 8
            tensors[f"layers.{layer}.experts.{name}"] = "F32", values
    folder.mkdir()
    write_file(folder / FUSED, tensors)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "target_modules": []}))
    return folder
