"""The companions of a checkpoint: the files that belong to its weights, such as tokenizer and chat template."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ktconvert.layouts.errors import InputError

WEIGHT_SUFFIXES = frozenset(
    f".{s}"
    for s in (
        *("safetensors", "bin", "pt", "pth", "ckpt", "gguf", "ggml", "onnx", "onnx_data", "kt"),
        *("h5", "msgpack", "npz", "npy", "pkl", "tflite", "ot"),
    )
)
LOOSE_LAYER = re.compile(r"_layer_\d+")  # a folder of kt-kernel's loose weights
INDEX_NAME = re.compile(r"\.index(\.[^.]+)?\.json\Z")


def companion_files(root: Path, *, nested: bool = True) -> list[str]:
    """Every file of a directory that is neither weights nor an index of them, as sorted paths relative to it; no dot
    files.

    Links to folders are not entered. Without `nested` only files directly beside a config.json.
    Raises InputError for a folder that cannot be listed.
    """
    if not nested and not (root / "config.json").is_file():
        return []
    companions: list[str] = []
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = sorted(d for d in folders if _is_entered(d)) if nested else []
        base = Path(folder)
        companions += [(base / f).relative_to(root).as_posix() for f in files if _is_companion(base / f)]
    return sorted(companions)


def require_copyable(root: Path, name: str) -> None:
    """Raise InputError where a companion cannot be read, or is a link out of its checkpoint.

    A link is followed to a file of the same checkpoint, and to a blob of the Hugging Face cache, where downloaded files
    are links."""
    path = root / name
    try:
        real = path.resolve(strict=True)
        with path.open("rb") as file:
            file.read(1)
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{path}: cannot be read ({reason}), and would be copied beside the weights; "
            "change its permissions, download it again, or move it out of the checkpoint."
        ) from None
    if not real.is_relative_to(root.resolve()) and not _is_hub_blob(real):
        raise InputError(
            f"{path}: is a link to {real}, outside the checkpoint, and is not followed; "
            "put a copy of the file in its place, or remove the link."
        )


def _is_hub_blob(path: Path) -> bool:
    """Whether it is a file in models--ORG--NAME/blobs of a Hugging Face cache."""
    model = path.parent.parent
    return path.parent.name == "blobs" and model.name.startswith("models--") and (model / "snapshots").is_dir()


def _is_entered(folder: str) -> bool:
    return not (folder.startswith(".") or _is_weights(folder) or LOOSE_LAYER.fullmatch(folder))


def _is_companion(path: Path) -> bool:
    name = path.name
    return not (name.startswith(".") or _is_weights(name) or INDEX_NAME.search(name)) and path.is_file()


def _is_weights(name: str) -> bool:
    return Path(name).suffix.lower() in WEIGHT_SUFFIXES


def _refuse(error: OSError) -> None:
    raise InputError(f"{error.filename}: cannot be listed ({error.strerror}); check its permissions") from None
