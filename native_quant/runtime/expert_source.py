"""The source of a model's routed experts: the interface that converted directories and checkpoints share."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.arrays import F32
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.swiglu import PLAIN, Swiglu
from ktconvert.native_quant.runtime.weights import LayerWeights

FileStatus = tuple[str, int, int, int]


@dataclass(frozen=True)
class Requirements:
    """Requirements of a caller for a layer's experts, as in Experts.load. None: whatever the files have.

    transposed  whether gradients use the transposes that `cpu --save-backward-weights` wrote
    """

    method: str | None = None
    num_experts: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    parts: int | None = None
    memory: str = "auto"
    swiglu: Swiglu = PLAIN
    transposed: bool | None = False

    def check(
        self, path: Path, layer: int, evidence: str, shape: tuple[int, int, int], method: str | None = None
    ) -> None:
        """Raise UnsupportedError if method or sizes (E, H, I) of the files differ. evidence: how these are known."""
        names = ("method", "num_experts", "hidden_size", "moe_intermediate_size")
        required = (method and self.method, self.num_experts, self.hidden, self.intermediate)
        for name, value, actual in zip(names, required, (method, *shape), strict=True):
            if value is not None and value != actual:
                has = f"layer {layer} has {name} {actual} according to its {evidence}, not {value}"
                raise UnsupportedError(f"{path}: {has}; use this model's directory, or {name}={actual}.")


class ExpertSource(ABC):
    """Routed experts in a directory or file, whose headers have been read.

    path  the directory or the GGUF file
    """

    path: Path

    @property
    @abstractmethod
    def layers(self) -> list[int]:
        """The layers with experts, in ascending order."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The model's config.json."""

    @property
    @abstractmethod
    def damage(self) -> list[str]:
        """Descriptions of damaged and missing files."""

    @abstractmethod
    def shape(self, layer: int) -> tuple[int, int, int]:
        """Return a layer's number of experts, hidden size and intermediate size."""

    @abstractmethod
    def swiglu(self, layer: int) -> Swiglu:
        """Return the activation of a layer by config.json, as far as its method supports it."""

    @abstractmethod
    def require_computable(self) -> None:
        """Raise UnsupportedError unless this runtime can compute all layers. Reads no weights."""

    @abstractmethod
    def require_readable(self, layer: int) -> None:
        """Raise InputError if a missing layer may be in a damaged or missing file."""

    @abstractmethod
    def load(self, layer: int, pool: Pool, required: Requirements) -> LayerWeights:
        """Load a layer into the memory of the pool's nodes.

        Raises UnsupportedError if it does not meet the requirements, InputError if it is damaged.
        """

    @abstractmethod
    def linears(self, packed: LayerWeights, expert: int) -> Iterator[tuple[F32, F32, F32]]:
        """Yield gate, up and down of an expert in float32, for each NUMA slice or as a whole."""


def directory_state(path: Path) -> frozenset[FileStatus]:
    """Return a value that changes when files of a directory, or of that of a file, change.

    It has name, bytes, modification time (ns) and inode of weights, JSON files and folders.
    """
    folder = path if path.is_dir() else path.parent
    entries = (_file_status(entry) for entry in folder.iterdir() if not entry.name.startswith("."))
    return frozenset(filter(None, entries))


def _file_status(path: Path) -> FileStatus | None:
    try:
        status = path.stat()
    except OSError:  # a broken link
        return path.name, 0, 0, 0
    if path.suffix not in (".safetensors", ".gguf", ".json") and not stat.S_ISDIR(status.st_mode):
        return None
    return path.name, status.st_size, status.st_mtime_ns, status.st_ino
