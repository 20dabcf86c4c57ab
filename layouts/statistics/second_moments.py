"""Second moments of what a layer's experts read: a safetensors file for each layer, beside an importance matrix.

Tensors: `gate_up`, float32 [H (H + 1) / 2], the sum of x xT over all tokens, which all experts of the layer share;
`down`, float32 [experts, I (I + 1) / 2], of the tokens that are routed to an expert, each times the square of its
routing weight; `counts`, int64 [experts], the tokens of each; `inputs` and `middle`, as in the importance matrix. A
symmetric matrix is its upper triangle, row after row.
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

from ktconvert.layouts.checkpoints.containers.container import read_unchanged
from ktconvert.layouts.checkpoints.containers.safetensors import read_header
from ktconvert.layouts.errors import InputError
from ktconvert.layouts.files.publish import sha256_file
from ktconvert.layouts.statistics.imatrix import Shapes
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F32, I64

DAMPING = 0.1  # of the mean of the diagonal, added to it: what calibration did not see counts, too
PER_COLUMN = 130  # numbers of each column that the search keeps beside it
KEPT = 2  # layers whose matrix of gate and up stays in memory: as many as units run at once
ROUNDING = np.float32(1.001)  # how far beyond its bound a sum in float32 may lie
MAKE = "make them again with `ktconvert calibrate --second-moments`"


def file_of(layer: int) -> str:
    return f"second-moments-{layer:03d}.safetensors"


def triangle(k: int) -> int:
    return k * (k + 1) // 2


def entries(shape: tuple[int, int, int]) -> list[TensorInfo]:
    """The tensors of a layer of shape (E, H, I), in file order."""
    experts, hidden, width = shape

    def entry(name: str, *sizes: int, dtype: str = "F32") -> TensorInfo:
        return TensorInfo(name, dtype, sizes, (8 if dtype == "I64" else 4) * math.prod(sizes))

    return [
        entry("gate_up", triangle(hidden)),
        entry("down", experts, triangle(width)),
        entry("counts", experts, dtype="I64"),
        entry("inputs", experts, hidden),
        entry("middle", experts, width),
    ]


def packed(matrix: F32) -> F32:
    """The upper triangle of a symmetric matrix [k, k], row after row."""
    return np.concatenate([row[first:] for first, row in enumerate(matrix)])


def unpacked(values: F32, k: int) -> F32:
    matrix, at = np.empty((k, k), np.float32), 0
    for first in range(k):
        matrix[first, first:] = matrix[first:, first] = values[at : at + k - first]
        at += k - first
    return matrix


@dataclass(frozen=True)
class LayerFile:
    """A layer's file, whose header was checked. starts: where the values of a tensor begin."""

    path: Path
    size: int
    mtime_ns: int
    sha256: str
    shape: tuple[int, int, int]
    starts: Mapping[str, int]

    @cached_property
    def counts(self) -> I64:
        """int64 [experts], the tokens of each. Raises InputError if the file changed."""
        return np.frombuffer(self.read(self.starts["counts"], 8 * self.shape[0]), "<i8").astype(np.int64)

    def matrix(self, name: str, number: int, k: int) -> F32:
        """Matrix `number` of a tensor, float32 [k, k], checked and damped. Raises InputError."""
        values = np.frombuffer(self.read(self.starts[name] + 4 * triangle(k) * number, 4 * triangle(k)), "<f4")
        matrix = unpacked(values, k)
        what = f"{self.path}: {name}" + (f" of expert {number}" if name == "down" else "")
        if not np.isfinite(values).all():
            raise InputError(f"{what} holds a value that is not finite; {MAKE}")
        diagonal = np.diagonal(matrix)
        if (diagonal < 0).any():
            column = int(np.argmax(diagonal < 0))
            raise InputError(f"{what} has {diagonal[column]} as the sum of squares of column {column}; {MAKE}")
        roots = np.sqrt(diagonal)
        for row, root in enumerate(roots):
            if (np.abs(matrix[row]) > ROUNDING * root * roots).any():
                raise InputError(f"{what} is no sum of x xT: row {row} is larger than its diagonal allows; {MAKE}")
        matrix[np.diag_indices(k)] += np.float32(DAMPING * math.fsum(diagonal.tolist()) / k)
        return matrix

    def read(self, start: int, count: int) -> bytes:
        """Bytes of the file. Raises InputError if it changed."""
        return read_unchanged(self.path, ".safetensors", start, count, self.size, self.mtime_ns)


@dataclass(frozen=True)
class SecondMoments:
    """Second moments in files that must not change, for many threads; path, sha256: of their document."""

    path: Path
    sha256: str
    layers: Mapping[int, LayerFile]
    fact: ClassVar[str] = "second_moments"  # under which the sha256 is recorded
    _kept: dict[int, F32] = field(default_factory=dict, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def importance(self, layer: int, expert: int, projection: str) -> F32 | None:
        """The sum of x xT of what a linear reads, float32 [k, k]; None without tokens. Raises InputError."""
        file = self.layers[layer]
        with self._lock:
            if layer not in self._kept:
                if sha256_file(file.path) != file.sha256:
                    raise InputError(f"{file.path}: is not the file that {self.path.name} beside it describes; {MAKE}")
                while len(self._kept) >= KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[layer] = file.matrix("gate_up", 0, file.shape[1])
            shared = self._kept[layer]
        if projection == "down":
            return file.matrix("down", expert, file.shape[2]) if file.counts[expert] else None
        return shared if file.counts.any() else None

    def memory(self, threads: int) -> int:
        """Bytes that so many threads take to read and use them: what all share, and one matrix each as it is read."""
        shapes = [file.shape for file in self.layers.values()]
        hidden, width = (max(shape[n] for shape in shapes) for n in (1, 2))
        return 4 * (KEPT + 2) * hidden**2 + threads * 4 * (3 * width**2 + PER_COLUMN * max(hidden, width))

    def unreached(self, layer: int) -> tuple[int, ...]:
        return tuple(int(n) for n in np.flatnonzero(self.layers[layer].counts == 0))


def open_second_moments(document: Path, files: Mapping[str, str], model: str, shapes: Shapes) -> SecondMoments:
    """The second moments of these layers, every header checked; values are looked at when they are read. document: the
    path of statistics.json; files: the sha256 of each, as it says. InputError: missing, damaged or of another layer.
    """
    found = {}
    for layer, shape in shapes.items():
        path = document.with_name(file_of(layer))
        if path.name not in files:
            raise InputError(f"{document.parent}: holds no second moments of layer {layer}, which {model} has; {MAKE}")
        header = read_header(path)
        own = header.metadata.get("layer")
        if own != str(layer):
            raise InputError(f"{path}: holds the second moments of layer {own}, not of layer {layer}; {MAKE}")
        have = {entry.name: entry for entry in header.entries}
        for want in entries(shape):
            entry = have.get(want.name)
            if entry is None or (entry.dtype, entry.shape) != (want.dtype, want.shape):
                has = "is missing" if entry is None else f"is {entry.dtype} of shape {list(entry.shape)}"
                needs = f"layer {layer} of {model} needs {want.dtype} of shape {list(want.shape)}"
                raise InputError(f"{path}: {want.name} {has}, and {needs}; give the statistics of this model")
        starts = {name: entry.start for name, entry in have.items()}
        found[layer] = LayerFile(path, header.size, header.mtime_ns, files[path.name], shape, starts)
        if (found[layer].counts < 0).any():
            raise InputError(f"{path}: counts holds a number below 0; {MAKE}")
    return SecondMoments(document, sha256_file(document), found)
