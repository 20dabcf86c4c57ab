"""Loose folders of .kt files, one per matrix, whose names contain the exact size; no header (bytes.md, "Loose")."""

from __future__ import annotations

import re
from pathlib import Path

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs.slices import NumaSlice
from ktconvert.layouts.tensors import TensorInfo

FILE = re.compile(
    r"(?P<prefix>(?:MOE_)?INT[48]|BF16)_(?P<projection>gate|up|down)(?P<backward>_bwd)?_(?P<expert>0|[1-9][0-9]*)"
    r"_(?P<nbytes>0|[1-9][0-9]*)Byte_(?P<word>quant|scale|bias)_\.kt"
)
FILE_WORDS = {"weight": "quant", "scale": "scale", "bias": "bias"}  # suffix of a tensor -> its word in file names
LAYER = re.compile(r"_layer_(0|[1-9][0-9]*)")
NUMA = re.compile(r"_numa_(0|[1-9][0-9]*)")


def layer_folder(layer: int) -> str:
    return f"_layer_{layer}"


def numa_folder(node: int) -> str:
    return f"_numa_{node}"


def file_path(prefix: str, numa_slice: NumaSlice, nbytes: int, word: str) -> str:
    """Return the path of a file of a matrix, relative to its layer's folder.

    prefix  prefix of the format ("INT4")
    nbytes  size of the file
    word    one of FILE_WORDS
    """
    matrix = numa_slice.projection + ("_bwd" if numa_slice.backward else "")
    return f"{numa_folder(numa_slice.node)}/{prefix}_{matrix}_{numa_slice.expert}_{nbytes}Byte_{word}_.kt"


def describe_tensor(word: str, nbytes: int) -> TensorInfo:
    """Return the tensor that a loose file becomes in a merged output.

    word  one of FILE_WORDS, as in the file's name
    """
    if word != "quant":
        return TensorInfo(word, "F32", (nbytes // 4,), nbytes)
    return TensorInfo("weight", "I8", (nbytes,), nbytes)


def find_layers(root: Path) -> dict[int, Path]:
    matches = ((LAYER.fullmatch(folder.name), folder) for folder in root.iterdir() if folder.is_dir())
    return dict(sorted((int(match[1]), folder) for match, folder in matches if match))


def require_plain_numbers(root: Path) -> None:
    """Raise InputError for a folder such as _layer_01 or _numa_x, which kt-kernel never opens."""
    for folder in sorted((*root.glob("_layer_*"), *root.glob("_layer_*/_numa_*"))):
        if folder.is_dir() and not (LAYER.fullmatch(folder.name) or NUMA.fullmatch(folder.name)):
            problem = "kt-kernel does not read this name (it has zeros before a number)"
            raise InputError(f"{folder}: {problem}; rename the folder, or convert again.")
