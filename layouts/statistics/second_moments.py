"""Second moments of the inputs of a layer's experts: a safetensors file for each layer, beside an importance matrix.

The file has these tensors; it stores a symmetric matrix as its upper triangle, row after row:

gate_up  float32 [H (H + 1) / 2], the sum of x xT over all tokens, which all experts of the layer share
down     float32 [experts, I (I + 1) / 2], the sum of x xT over the tokens routed to an expert, each times the square of
         its routing weight
counts   int64 [experts], the tokens of each expert
inputs   float32 [experts, H], as in the importance matrix
middle   float32 [experts, I], as in the importance matrix
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files.publish import sha256_file
from ktconvert.layouts.sources.containers.container import read_unchanged
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.layouts.statistics.imatrix import Shapes
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, I64

DAMPING = 0.1  # fraction of the diagonal's mean to add to the diagonal, for inputs that calibration did not see
PER_COLUMN = 130  # numbers per column that the search keeps in addition to the matrix
CACHED = 2  # number of layers whose matrix of gate and up stays in memory, as many as concurrent units
TOLERANCE = np.float32(1.001)  # factor by which a float32 sum may exceed its bound
REMEDY = "write them again with `ktconvert calibrate --second-moments`"


def file_name(layer: int) -> str:
    return f"second-moments-{layer:03d}.safetensors"


def triangle_size(k: int) -> int:
    return k * (k + 1) // 2


def tensor_entries(shape: tuple[int, int, int]) -> list[TensorInfo]:
    """Return the tensors of a layer of shape (E, H, I), in file order."""
    experts, hidden, width = shape

    def entry(name: str, *sizes: int, dtype: str = "F32") -> TensorInfo:
        return TensorInfo(name, dtype, sizes, (8 if dtype == "I64" else 4) * math.prod(sizes))

    return [
        entry("gate_up", triangle_size(hidden)),
        entry("down", experts, triangle_size(width)),
        entry("counts", experts, dtype="I64"),
        entry("inputs", experts, hidden),
        entry("middle", experts, width),
    ]


def pack_triangle(matrix: F32) -> F32:
    """Return the upper triangle of a symmetric matrix [k, k], row after row."""
    return np.concatenate([row[first:] for first, row in enumerate(matrix)])


def unpack_triangle(values: F32, k: int) -> F32:
    """Return the symmetric matrix [k, k]; the inverse of pack_triangle."""
    matrix = np.empty((k, k), np.float32)
    start = 0
    for first in range(k):
        matrix[first, first:] = matrix[first:, first] = values[start : start + k - first]
        start += k - first
    return matrix


@dataclass(frozen=True)
class LayerFile:
    """A layer's file, whose header has been checked.

    shape   (E, H, I)
    starts  name of a tensor -> its offset
    """

    path: Path
    size: int
    mtime_ns: int
    sha256: str
    shape: tuple[int, int, int]
    starts: Mapping[str, int]

    @cached_property
    def counts(self) -> I64:
        """Return the tokens of each expert, int64 [experts]. Raises InputError if the file changed."""
        return np.frombuffer(self.read(self.starts["counts"], 8 * self.shape[0]), "<i8").astype(np.int64)

    def read_matrix(self, name: str, number: int, k: int) -> F32:
        """Read a matrix of a tensor, float32 [k, k], and damp it.

        name    name of the tensor
        number  number of the matrix in it

        Raises InputError for a matrix that is no sum of x xT.
        """
        nbytes = 4 * triangle_size(k)
        values = np.frombuffer(self.read(self.starts[name] + nbytes * number, nbytes), "<f4")
        matrix = unpack_triangle(values, k)
        label = f"{self.path}: {name}" + (f" of expert {number}" if name == "down" else "")
        if not np.isfinite(values).all():
            raise InputError(f"{label} has a value that is not finite; {REMEDY}")
        diagonal = np.diagonal(matrix)
        if (diagonal < 0).any():
            column = int(np.argmax(diagonal < 0))
            raise InputError(f"{label} has {diagonal[column]} as the sum of squares of column {column}; {REMEDY}")
        roots = np.sqrt(diagonal)
        for row, root in enumerate(roots):
            if (np.abs(matrix[row]) > TOLERANCE * root * roots).any():
                raise InputError(f"{label} is not a sum of x xT: row {row} exceeds the bound of its diagonal; {REMEDY}")
        matrix[np.diag_indices(k)] += np.float32(DAMPING * math.fsum(diagonal.tolist()) / k)
        return matrix

    def read(self, start: int, count: int) -> bytes:
        """Read bytes of the file. Raises InputError if it changed."""
        return read_unchanged(self.path, ".safetensors", start, count, self.size, self.mtime_ns)


@dataclass(frozen=True)
class SecondMoments:
    """Second moments in files that must not change, for many threads.

    path    path of statistics.json, which describes the files
    sha256  hash of statistics.json
    layers  layer -> its file
    """

    path: Path
    sha256: str
    layers: Mapping[int, LayerFile]
    manifest_key: ClassVar[str] = "second_moments"  # key of the sha256
    _cached: dict[int, F32] = field(default_factory=dict, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def read_importance(self, layer: int, expert: int, projection: str) -> F32 | None:
        """Return the sum of x xT over a linear's inputs, float32 [k, k]; None without tokens.

        Raises InputError if the file is damaged or changed.
        """
        file = self.layers[layer]
        with self._lock:
            if layer not in self._cached:
                if sha256_file(file.path) != file.sha256:
                    raise InputError(f"{file.path}: differs from the file that {self.path.name} describes; {REMEDY}")
                while len(self._cached) >= CACHED:
                    del self._cached[next(iter(self._cached))]
                self._cached[layer] = file.read_matrix("gate_up", 0, file.shape[1])
            shared = self._cached[layer]
        if projection == "down":
            return file.read_matrix("down", expert, file.shape[2]) if file.counts[expert] else None
        return shared if file.counts.any() else None

    def memory_bytes(self, threads: int) -> int:
        """Return the memory for `threads` readers: the shared matrices, and one matrix for each thread."""
        shapes = [file.shape for file in self.layers.values()]
        hidden = max(shape[1] for shape in shapes)
        width = max(shape[2] for shape in shapes)
        return 4 * (CACHED + 2) * hidden**2 + threads * 4 * (3 * width**2 + PER_COLUMN * max(hidden, width))

    def experts_without_tokens(self, layer: int) -> tuple[int, ...]:
        return tuple(int(expert) for expert in np.flatnonzero(self.layers[layer].counts == 0))


def open_second_moments(document: Path, files: Mapping[str, str], model: str, shapes: Shapes) -> SecondMoments:
    """Open the second moments of these layers and check every header; values are checked when they are read.

    document  path of statistics.json
    files     name of a file -> its recorded sha256

    Raises InputError for files that are missing, damaged or belong to a different layer.
    """
    layers = {}
    for layer, shape in shapes.items():
        path = document.with_name(file_name(layer))
        if path.name not in files:
            raise InputError(f"{document.parent}: has no second moments of layer {layer}, which {model} has; {REMEDY}")
        header = read_header(path)
        recorded_layer = header.metadata.get("layer")
        if recorded_layer != str(layer):
            raise InputError(
                f"{path}: has the second moments of layer {recorded_layer}, not of layer {layer}; {REMEDY}"
            )
        entries = {entry.name: entry for entry in header.entries}
        for expected in tensor_entries(shape):
            entry = entries.get(expected.name)
            if entry is None or (entry.dtype, entry.shape) != (expected.dtype, expected.shape):
                problem = "is missing" if entry is None else f"is {entry.dtype} of shape {list(entry.shape)}"
                needed = f"layer {layer} of {model} needs {expected.dtype} of shape {list(expected.shape)}"
                raise InputError(f"{path}: {expected.name} {problem}, but {needed}; use the statistics of this model")
        starts = {name: entry.start for name, entry in entries.items()}
        layers[layer] = LayerFile(path, header.size, header.mtime_ns, files[path.name], shape, starts)
        if (layers[layer].counts < 0).any():
            raise InputError(f"{path}: counts has negative numbers; {REMEDY}")
    return SecondMoments(document, sha256_file(document), layers)
