"""Folders of statistics as `ktconvert calibrate` writes them, with invented numbers, and expected search results."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.encodings.encoding import tensor_suffixes
from ktconvert.layouts.outputs import FORMATS
from ktconvert.layouts.outputs.measuring import measure_output
from ktconvert.layouts.outputs.opening import open_output
from ktconvert.layouts.outputs.slices import SliceId
from ktconvert.layouts.statistics.folder import encode_document
from ktconvert.quantizers import Grid
from rig import group_search, scale_search
from rig.safetensors import read_folder


def describe(
    folder: Path, shapes: Mapping[int, tuple[int, int, int]], sensitivity: Sequence[float] = (), **changed: Any
) -> Path:
    """Write statistics.json for the files in a folder.

    shapes: (experts, hidden, width) of each layer. sensitivity: of each layer.
    """
    files = [
        {"name": path.name, "size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
        if path.name != "statistics.json"
    ]
    experts, hidden, width = next(iter(shapes.values()))
    model = {"architecture": "made up", "name": None, "source": "", "decoder_layers": len(shapes), "layers": [*shapes]}
    model |= {"experts": experts, "hidden": hidden, "intermediate": width} | changed
    description = {"model": model, "data": {"dataset": "made up", "samples": 1, "tokens": 409}, "settings": {}}
    description["sensitivity"] = list(sensitivity)
    (folder / "statistics.json").write_bytes(encode_document(description, files, "0"))
    return folder


def search_reference(grid: Grid, bf16: Any, importance: Any = None) -> tuple[Any, Any]:
    """Return codes and scales [n, groups] of least squared error, by the definitions."""
    if not grid.has_row_scales:
        return group_search.search(grid, bf16, importance)
    codes, scales = scale_search.search(grid.bits, bf16, importance)
    return codes, scales[:, None]


def check_search(
    source: Path,
    output: Path,
    linears: Iterable[tuple[int, int, str]],
    importance_of: Callable[[int, int, str], Any] = lambda *linear: None,
    search: Callable[[Any, Grid, Any], tuple[Any, Any]] = lambda bf16, grid, importance: search_reference(
        grid, bf16, importance
    ),
) -> int:
    """Assert that each NUMA slice of these linears holds the result of a search with only its columns' importance.

    linears: (layer, expert, projection). Return the number of slices whose scales differ from a search without
    importance.
    """
    opened, weights, different = open_output(output), read_folder(source), 0
    fmt = FORMATS[measure_output(opened).method]
    encoding, slices = fmt.encoding, 2 if fmt.arrangement.sliced else 1
    for layer, expert, projection in linears:
        linear = weights[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"].bits
        importance, is_down = importance_of(layer, expert, projection), projection == "down"
        for numa, values in enumerate(np.split(linear, slices, axis=1 if is_down else 0)):
            values, columns = np.ascontiguousarray(values), slice(numa * values.shape[1], (numa + 1) * values.shape[1])
            own_importance = (
                importance[(columns,) * importance.ndim] if is_down and importance is not None else importance
            )
            codes, scales = search(values, encoding.grid, own_importance)
            slice_id = SliceId(layer, expert, projection, False, numa)
            stored = [opened.read(opened.tensors[slice_id, suffix]) for suffix in tensor_suffixes(encoding)]
            expected = [np.empty_like(data) for data in stored]
            encoding.pack(codes, scales, expected)
            for ours, theirs in zip(stored, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
            different += not np.array_equal(scales, search(values, encoding.grid, None)[1])
    return different
