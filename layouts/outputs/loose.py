"""Loose folders of .kt files, one per matrix: names that carry the exact size, no header (bytes.md, "Loose")."""

from __future__ import annotations

import re
from pathlib import Path

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.outputs.parts import Part
from ktconvert.layouts.tensors import TensorInfo

FILE = re.compile(
    r"(?P<prefix>(?:MOE_)?INT[48]|BF16)_(?P<projection>gate|up|down)(?P<backward>_bwd)?_(?P<expert>0|[1-9][0-9]*)"
    r"_(?P<nbytes>0|[1-9][0-9]*)Byte_(?P<what>quant|scale)_\.kt"
)
SUFFIXES = {"weight": "quant", "scale": "scale"}  # a tensor's suffix -> its word in the names of files
LAYER = re.compile(r"_layer_(0|[1-9][0-9]*)")
NUMA = re.compile(r"_numa_(0|[1-9][0-9]*)")


def layer_folder(layer: int) -> str:
    """The folder of one layer."""
    return f"_layer_{layer}"


def numa_folder(node: int) -> str:
    """The folder of one NUMA node inside a layer's folder."""
    return f"_numa_{node}"


def path_in_layer(prefix: str, part: Part, nbytes: int, what: str) -> str:
    """The path of one matrix's file of `nbytes` bytes inside its layer's folder; `what` is "quant" or "scale"."""
    backward = "_bwd" if part.backward else ""
    return f"{numa_folder(part.numa)}/{prefix}_{part.projection}{backward}_{part.expert}_{nbytes}Byte_{what}_.kt"


def tensor(what: str, nbytes: int) -> TensorInfo:
    """What a loose file becomes in a merged output; `what` as in its name."""
    if what == "scale":
        return TensorInfo("scale", "F32", (nbytes // 4,), nbytes)
    return TensorInfo("weight", "I8", (nbytes,), nbytes)


def layers_in(root: Path) -> dict[int, Path]:
    """The layer folders below a loose output, by layer number."""
    folders = {}
    for child in sorted(root.iterdir()):
        match = LAYER.fullmatch(child.name)
        if match and child.is_dir():
            folders[int(match[1])] = child
    return dict(sorted(folders.items()))


def require_plain_numbers(root: Path) -> None:
    """Raise InputError for a folder such as _layer_01 or _numa_x, which kt-kernel never opens."""
    for folder in sorted((*root.glob("_layer_*"), *root.glob("_layer_*/_numa_*"))):
        if folder.is_dir() and not (LAYER.fullmatch(folder.name) or NUMA.fullmatch(folder.name)):
            raise InputError(
                f"{folder}: not a name that kt-kernel reads (no zeros before a number); "
                "rename the folder, or move it away."
            )


def files_in(layer_dir: Path) -> list[tuple[int, re.Match[str], Path]]:
    """(NUMA node, parsed name, path) of every .kt file of one layer, ours or kt-kernel's.

    Raises InputError for a file whose size is not the one in its name, or whose name is not kt-kernel's.
    """
    files = []
    for node_dir in sorted(layer_dir.iterdir()):
        node = NUMA.fullmatch(node_dir.name)
        if not node or not node_dir.is_dir():
            if node_dir.suffix == ".kt":
                raise InputError(f"{node_dir}: kt-kernel reads .kt files in _numa_N folders only; move the file away.")
            continue
        for path in sorted(node_dir.iterdir()):
            match = FILE.fullmatch(path.name)
            if match is None:
                if path.suffix == ".kt":
                    raise InputError(
                        f"{path}: not a name that kt-kernel writes; move the file away or convert this layer again."
                    )
                continue
            size = path.stat().st_size
            if size != int(match["nbytes"]):
                raise InputError(
                    f"{path}: holds {size} bytes where its name says {match['nbytes']}; convert layer {layer_dir.name} "
                    "again."
                )
            files.append((int(node[1]), match, path))
    return files
