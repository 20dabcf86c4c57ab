"""manifest.json: an output's files, its source and its settings; enough to verify it without its source."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files import documents, publish
from ktconvert.layouts.files.documents import COUNT, NUMBER

NAME = "manifest.json"
FORMAT = 1
LONGEST_NAME = 255  # bytes, on Linux
LAYERS = [range(1 << 31)]
# No model has more experts or NUMA parts; objects for more of them would fill the memory.
EXPERTS, PARTS = range(1, 1 << 16), range(1, 1 << 10)
SIZES = (COUNT, [COUNT], str)
# The entries that we read, and the types that they must have (documents.mismatch).
MANIFEST = {
    "command": str,
    "settings": {"arch_file?": (str, None), "no_merge_safetensor?": bool},
    "model": {
        "architecture?": str,
        "activation?": str,
        "dtypes?": [str],
        "method?": str,
        "imatrix?": str,
        "without_counts?": [str],
        "calibration?": {
            "dataset": str,
            "samples": NUMBER,
            "max_length": NUMBER,
            "seed": NUMBER,
            "dampening": (float, int),
            "calibrate": str,
        },
        "machine?": {"device": str, "threads": NUMBER},
        "too_few_tokens?": [str],
        "backward?": bool,
        "layers?": LAYERS,
        "kept_layers?": LAYERS,
        "numa?": PARTS,
        "quant_method?": str,
        "scale?": str,
        "resplit_from?": [PARTS],
        "experts?": (EXPERTS, [EXPERTS], str),
        "hidden?": SIZES,
        "intermediate?": SIZES,
    },
    "source": [{"name": str, "size": NUMBER, "header_sha256?": str, "blob?": str, "sha256?": str}],
    "files": [{"name": str, "size": NUMBER, "sha256": str}],
    "sha256": str,
}


def encode(
    *,
    tool_version: str,
    command: str,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    source: list[dict[str, Any]],
    files: list[dict[str, Any]],
) -> bytes:
    """The manifest. files: {"name", "size", "sha256", "tensors"?}. No times, no paths: same work, same bytes."""
    document = {
        "format": {"name": "ktconvert-manifest", "version": FORMAT},
        "tool": {"name": "ktconvert", "version": tool_version},
        "command": command,
        "settings": dict(settings),
        "model": dict(facts),
        "source": source,
        "files": sorted(files, key=lambda f: str(f["name"])),
    }
    return (json.dumps({**document, "sha256": digest(document)}, indent=2) + "\n").encode()


def digest(document: Mapping[str, Any]) -> str:
    """The sha256, in hex, of what a manifest says: of its JSON without white space and `sha256`, with sorted names."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    return publish.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def is_intact(document: Mapping[str, Any]) -> bool:
    """Whether a manifest says what it said when it was written."""
    return bool(document["sha256"] == digest(document))


def read(folder: Path) -> dict[str, Any] | None:
    """An output's manifest, None where there is none. Raises VerificationError for one that is damaged or too new."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        document = documents.parse(path.read_bytes())
        if documents.mismatch(document, {"format": {"name": "ktconvert-manifest"}}):
            if documents.mismatch(document, {"format": {"name": str}}):
                raise ValueError("it has no format")
            return None
        wrong = documents.mismatch(document, {"format": {"version": NUMBER}, "tool": {"version": str}})
        if wrong is None and document["format"]["version"] > FORMAT:
            raise VerificationError(
                f"{path}: written by a newer ktconvert ({document['tool']['version']}); update this one."
            )
        wrong = wrong or documents.mismatch(document, MANIFEST)
        if wrong is not None:
            raise ValueError(wrong)
        for file in document["files"]:
            if file["name"].startswith("/") or ".." in Path(file["name"]).parts:
                raise ValueError(f"{file['name']} lies outside the output")
            if any(len(part) > LONGEST_NAME for part in os.fsencode(file["name"]).split(b"/")):
                raise ValueError("a file's name is too long")
    except ValueError as error:
        raise VerificationError(
            f"{path}: not a manifest that can be understood ({error}); convert again with --overwrite --delete-others."
        ) from error
    return dict(document)
