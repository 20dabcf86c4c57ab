"""Loose folders of .kt files, one per matrix, whose names contain the exact size; no header (bytes.md, "Loose")."""

from __future__ import annotations

import re
from pathlib import Path

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs.slices import NumaSlice
from ktconvert.layouts.tensors import TensorInfo

FILE = re.compile(
    r"(?P<prefix>(?:MOE_)?INT[48]|BF16)_(?P<projection>gate|up|down)(?P<backward>_bwd)?_(?P<expert>0|[1-9][0-9]*)"
    r"_(?P<nbytes>0|[1-9][0-9]*)Byte_(?P<what>quant|scale)_\.kt"
)
SUFFIXES = {"weight": "quant", "scale": "scale"}  # suffix of a tensor -> its word in file names
LAYER = re.compile(r"_layer_(0|[1-9][0-9]*)")
NUMA = re.compile(r"_numa_(0|[1-9][0-9]*)")


def layer_folder(layer: int) -> str:
    return f"_layer_{layer}"


def numa_folder(node: int) -> str:
    return f"_numa_{node}"


def file_path(prefix: str, numa_slice: NumaSlice, nbytes: int, what: str) -> str:
    """Return the path in its layer's folder of a matrix's file of `nbytes` bytes; `what` is "quant" or "scale"."""
    matrix = numa_slice.projection + ("_bwd" if numa_slice.backward else "")
    return f"{numa_folder(numa_slice.node)}/{prefix}_{matrix}_{numa_slice.expert}_{nbytes}Byte_{what}_.kt"


def describe_tensor(what: str, nbytes: int) -> TensorInfo:
    """Return the tensor of a merged output that a loose file becomes; `what` as in its name."""
    if what == "scale":
        return TensorInfo("scale", "F32", (nbytes // 4,), nbytes)
    return TensorInfo("weight", "I8", (nbytes,), nbytes)


def find_layers(root: Path) -> dict[int, Path]:
    found = ((LAYER.fullmatch(child.name), child) for child in root.iterdir() if child.is_dir())
    return dict(sorted((int(match[1]), child) for match, child in found if match))


def require_plain_numbers(root: Path) -> None:
    """Raise InputError for a folder such as _layer_01 or _numa_x, which kt-kernel never opens."""
    for folder in sorted((*root.glob("_layer_*"), *root.glob("_layer_*/_numa_*"))):
        if folder.is_dir() and not (LAYER.fullmatch(folder.name) or NUMA.fullmatch(folder.name)):
            what = "kt-kernel does not read this name (it has zeros before a number)"
            raise InputError(f"{folder}: {what}; rename the folder, or convert again.")
