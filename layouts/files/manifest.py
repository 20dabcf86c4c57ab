"""manifest.json: what an output is made of, from what, and how; enough to verify it without its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import VerificationError

NAME = "manifest.json"
FORMAT = 1


def encode(
    *,
    tool_version: str,
    command: str,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    source: list[dict[str, Any]],
    files: list[dict[str, Any]],
) -> bytes:
    """The manifest. files: {"name", "size", "sha256", "tensors"?}. No time stamps, no paths: same input and options, same bytes."""
    document = {
        "format": {"name": "ktconvert-manifest", "version": FORMAT},
        "tool": {"name": "ktconvert", "version": tool_version},
        "command": command,
        "settings": dict(settings),
        "model": dict(facts),
        "source": source,
        "files": sorted(files, key=lambda f: str(f["name"])),
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def read(folder: Path) -> dict[str, Any] | None:
    """An output's manifest, or None where there is none. Raises VerificationError where it cannot be understood."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_bytes())
        if document["format"]["name"] != "ktconvert-manifest":
            return None
        if document["format"]["version"] > FORMAT:
            raise VerificationError(
                f"{path}: written by a newer ktconvert ({document['tool']['version']}); update this one."
            )
        for file in document["files"]:
            if (
                not isinstance(file["name"], str)
                or not isinstance(file["size"], int)
                or not isinstance(file["sha256"], str)
            ):
                raise ValueError("a file's entry is incomplete")
            if file["name"].startswith("/") or ".." in Path(file["name"]).parts:
                raise ValueError(f"{file['name']} lies outside the output")
        dict(document["settings"]), dict(document["model"]), list(document["source"])
    except (ValueError, KeyError, TypeError) as error:
        raise VerificationError(
            f"{path}: not a manifest that can be understood ({error}); convert again with --overwrite."
        ) from error
    return dict(document)
