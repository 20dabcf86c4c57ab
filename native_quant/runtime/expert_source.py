"""The source of a model's routed experts: the interface that converted directories and checkpoints share."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.arrays import F32
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.weights import LayerWeights

FileStatus = tuple[str, int, int, int]


@dataclass(frozen=True)
class Requirements:
    """Requirements of a caller for a layer's experts; the fields are arguments of Experts.load. None: any value.

    function  what the experts compute, for files that do not record it; otherwise limit and alpha must agree
    """

    method: str | None = None
    num_experts: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    slices: int | None = None
    memory: str = "auto"
    function: ExpertFunction | None = None
    transposed: bool | None = False

    def check(
        self, path: Path, layer: int, evidence: str, shape: tuple[int, int, int], method: str | None = None
    ) -> None:
        """Raise UnsupportedError if the files have a different method or different sizes.

        evidence  source of shape and method, for the message
        shape     E, H, I of the files
        """
        names = ("method", "num_experts", "hidden_size", "moe_intermediate_size")
        required = (method and self.method, self.num_experts, self.hidden, self.intermediate)
        for name, value, actual in zip(names, required, (method, *shape), strict=True):
            if value is not None and value != actual:
                contents = f"layer {layer} has {name} {actual} according to its {evidence}, not {value}"
                raise UnsupportedError(f"{path}: {contents}; use this model's directory, or {name}={actual}.")

    def choose_function(self, path: Path, layer: int, recorded: ExpertFunction | None) -> ExpertFunction:
        """Return the recorded function, or the required one if none is recorded; neither: a plain SwiGLU.

        Raises UnsupportedError if their limit or alpha differ.
        """
        required = self.function
        if required is None or recorded is None:
            return required or recorded or PLAIN
        if (required.limit, required.alpha) != (recorded.limit, recorded.alpha):
            problem = f"the experts of layer {layer} compute {recorded}, not {required}"
            raise UnsupportedError(f"{path}: {problem}; leave out swiglu_limit and swiglu_alpha.")
        return recorded


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
    def function(self, layer: int) -> ExpertFunction | None:
        """Return what a layer's experts compute, as the files or config.json describe it; None if neither does.

        Raises InputError and UnsupportedError for records that cannot be read.
        """

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
    def linears(self, packed: LayerWeights, expert: int) -> Iterator[tuple[F32, ...]]:
        """Yield the linears of an expert in float32, for each NUMA slice or as a whole."""


def directory_state(path: Path) -> frozenset[FileStatus]:
    """Return a value that changes when files in a directory change. path: the directory, or a file in it.

    The value has name, size, modification time (ns) and inode of weights, JSON files and folders.
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
