"""Folders of statistics as `ktconvert calibrate` leaves them, of made-up numbers; and what a search with them must give."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.encodings.encoding import suffixes
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.measuring import measure
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.slices import SliceId
from ktconvert.layouts.statistics.folder import encode_document
from ktconvert.quantizers import Grid
from rig import group_search, scale_search
from rig.safetensors import read_folder


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
    (folder / "statistics.json").write_bytes(encode_document(about, files, "0"))
    return folder


def searched(grid: Grid, bf16: Any, importance: Any = None) -> tuple[Any, Any]:
    """Codes and scales [n, groups] of least squared error, by the definitions."""
    if not grid.per_row:
        return group_search.search(grid, bf16, importance)
    codes, scales = scale_search.search(grid.bits, bf16, importance)
    return codes, scales[:, None]


def check_searched(
    source: Path,
    output: Path,
    linears: Iterable[tuple[int, int, str]],
    importance_of: Callable[[int, int, str], Any] = lambda *linear: None,
    search: Callable[[Any, Grid, Any], tuple[Any, Any]] = lambda bf16, grid, importance: searched(
        grid, bf16, importance
    ),
) -> int:
    """Each part of these linears (layer, expert, projection) holds what is searched with its own columns' importance
    alone; of how many parts the scales are others than without.
    """
    opened, weights, differ = open_output(output), read_folder(source), 0
    fmt = FORMATS[measure(opened).method]
    form, parts = fmt.encoding, 2 if fmt.arrangement.sliced else 1
    for layer, expert, projection in linears:
        whole = weights[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"].bits
        importance, down = importance_of(layer, expert, projection), projection == "down"
        for numa, part in enumerate(np.split(whole, parts, axis=1 if down else 0)):
            part, columns = np.ascontiguousarray(part), slice(numa * part.shape[1], (numa + 1) * part.shape[1])
            own = importance[(columns,) * importance.ndim] if down and importance is not None else importance
            codes, scales = search(part, form.grid, own)
            place = SliceId(layer, expert, projection, False, numa)
            stored = [opened.read(opened.tensors[place, suffix]) for suffix in suffixes(form)]
            expected = [np.empty_like(data) for data in stored]
            form.pack(codes, scales, expected)
            for ours, theirs in zip(stored, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
            differ += not np.array_equal(scales, search(part, form.grid, None)[1])
    return differ
