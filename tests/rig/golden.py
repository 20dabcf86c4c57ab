"""Golden files of tests/golden, and of the folders in KTCONVERT_GOLDEN (separated by colons)."""

import os
from pathlib import Path

from rig.safetensors import metadata_of

FOLDER = Path(__file__).parents[1] / "golden"


def files(pattern: str) -> dict[str, Path]:
    """Return the files by name without suffix; a file of KTCONVERT_GOLDEN overrides one of the same name."""
    folders = [FOLDER, *map(Path, filter(None, os.environ.get("KTCONVERT_GOLDEN", "").split(os.pathsep)))]
    return {path.stem: path for folder in folders for path in sorted(folder.glob(pattern))}


def libraries() -> dict[str, Path]:
    """Return the files with a layer as a library stores it, and hashes of the values that the library decodes."""
    return {name: path for name, path in files("*.safetensors").items() if "expected_sha256" in metadata_of(path)}
