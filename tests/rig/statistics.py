"""Folders of statistics as `ktconvert calibrate` leaves them, of made-up numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktconvert.layouts.statistics.folder import encode


def describe(folder: Path, shapes: Mapping[int, tuple[int, int, int]], **changed: Any) -> Path:
    """Write statistics.json of what lies in a folder; shapes: of each layer (experts, hidden, width)."""
    files = [
        {"name": path.name, "size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
        if path.name != "statistics.json"
    ]
    experts, hidden, width = next(iter(shapes.values()))
    model = {"architecture": "made up", "name": None, "source": "", "decoder_layers": len(shapes), "layers": [*shapes]}
    model |= {"experts": experts, "hidden": hidden, "intermediate": width} | changed
    about = {"model": model, "data": {"dataset": "made up", "samples": 1, "tokens": 409}, "settings": {}}
    (folder / "statistics.json").write_bytes(encode(about, files, "0"))
    return folder
