"""Golden files: those of tests/golden and, where KTCONVERT_GOLDEN names folders (separated by colons), theirs too."""

import os
from pathlib import Path

from rig.safetensors import metadata_of

FOLDER = Path(__file__).parents[1] / "golden"


def files(pattern: str) -> dict[str, Path]:
    """Files by their names without the suffix; one of KTCONVERT_GOLDEN wins over one of the same name here."""
    folders = [FOLDER, *map(Path, filter(None, os.environ.get("KTCONVERT_GOLDEN", "").split(os.pathsep)))]
    return {path.stem: path for folder in folders for path in sorted(folder.glob(pattern))}


def libraries() -> dict[str, Path]:
    """A layer as a library stores it, with hashes of the library's own values."""
    return {name: path for name, path in files("*.safetensors").items() if "expected_sha256" in metadata_of(path)}
