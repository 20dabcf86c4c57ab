"""Companions of a checkpoint: the other files of its model, such as tokenizer and chat template."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ktconvert.layouts.errors import PERMISSION, REMEDY, InputError

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".kt"}
WEIGHT_SUFFIXES |= {".h5", ".msgpack", ".npz", ".npy", ".pkl", ".tflite", ".ot"}
LOOSE_LAYER = re.compile(r"_layer_\d+")  # a folder of kt-kernel's loose weights
INDEX_NAME = re.compile(r"\.index(\.[^.]+)?\.json\Z")


def companion_files(root: Path, *, nested: bool = True) -> list[str]:
    """List the files of a directory that are neither weights nor an index of them, as sorted relative paths.

    Dot files and files in linked folders are skipped.

    nested  False: only files directly beside a config.json

    Raises InputError for a folder that cannot be listed.
    """
    if not nested and not (root / "config.json").is_file():
        return []

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be listed ({error.strerror}); check its permissions") from None

    def is_skipped(name: str) -> bool:
        return name.startswith(".") or Path(name).suffix.lower() in WEIGHT_SUFFIXES

    companions: list[str] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(d for d in folders if not is_skipped(d) and not LOOSE_LAYER.fullmatch(d)) if nested else []
        paths = [Path(folder) / name for name in files if not is_skipped(name) and not INDEX_NAME.search(name)]
        companions += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(companions)


def require_copyable(root: Path, name: str) -> None:
    """Raise InputError if a companion cannot be read, or links to a file outside the checkpoint and the hub's cache."""
    path = root / name
    try:
        real = path.resolve(strict=True)
        with path.open("rb") as file:
            file.read(1)
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = PERMISSION if isinstance(error, PermissionError) else REMEDY
        raise InputError(f"{path}: cannot be read ({reason}) and therefore not copied; {remedy}") from None
    model = real.parent.parent
    is_blob = real.parent.name == "blobs" and model.name.startswith("models--") and (model / "snapshots").is_dir()
    if not real.is_relative_to(root.resolve()) and not is_blob:
        raise InputError(
            f"{path}: links to {real}, outside the checkpoint, and is not followed; replace it with a copy of the file."
        )
