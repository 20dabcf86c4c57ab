"""The source of a model's routed experts: the interface that converted directories and checkpoints share."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.layouts.errors import ArgumentError, InputError, UnsupportedError
from ktconvert.native_quant.arrays import F32, I64, U8, Bool
from ktconvert.native_quant.runtime.arguments import MARKS, describe, require_array
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.weights import LayerWeights

FileStatus = tuple[str, int, int, int]
FileState = tuple[int, int, int] | None  # size, modification time (ns) and inode; None: there is no file
Skip = Bool | U8 | None  # [E]: experts that add nothing to a forward
# kt-kernel's arguments for the constants of an activation. 0: not given.
CONSTANTS = ("swiglu_limit", "swiglu_alpha", "situ_beta", "situ_linear_beta")
CONSTANT_NAMES = f"{', '.join(CONSTANTS[:-1])} and {CONSTANTS[-1]}"


@dataclass(frozen=True)
class Requirements:
    """Requirements of a caller for a layer's experts; the fields are arguments of KTExperts.load. None: any value.

    function  what the experts compute, for files that do not record it; otherwise each constant must agree or be 0
    skip      experts that are loaded only when a forward needs them
    order     the file's expert for each expert
    """

    method: str | None = None
    num_experts: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    slices: int | None = None
    memory: str = "auto"
    function: ExpertFunction | None = None
    transposed: bool | None = False
    skip: Skip = None
    order: I64 | None = None

    def check(
        self, path: Path, layer: int, evidence: str, shape: tuple[int, int, int], method: str | None = None
    ) -> None:
        """Raise UnsupportedError if the files have a different method, InputError if they have different sizes.

        evidence  source of shape and method, for the message
        shape     E, H, I of the files
        """
        if method and self.method not in (None, method):
            problem = f"layer {layer} has method {method} according to its {evidence}, not {self.method}"
            raise UnsupportedError(f"{path}: {problem}; give method {method}, or other weights.")
        names = ("num_experts", "hidden_size", "moe_intermediate_size")
        sizes = zip(names, (self.num_experts, self.hidden, self.intermediate), shape, strict=True)
        differences = [f"{name} {actual}, not {value}" for name, value, actual in sizes if value not in (None, actual)]
        if differences:
            problem = f"layer {layer} has {' and '.join(differences)} (from its {evidence})"
            raise InputError(f"{path}: {problem}; these weights belong to a different model: give this model's.")

    def find_missing(self, experts: int) -> set[int]:
        """Return the file's experts that need not be loaded now: each expert that computes with them is skipped.

        Raises ArgumentError for a skip or an order of another length.
        """
        order = resolve_order(self.order, experts)
        if self.skip is None:
            return set()
        require_array("skip", self.skip, MARKS, (experts,))
        needed = {expert for expert, skipped in zip(order, self.skip.tolist(), strict=True) if not skipped}
        return set(range(experts)) - needed

    def choose_function(self, path: Path, layer: int, recorded: ExpertFunction | None) -> ExpertFunction:
        """Return the recorded function, or the required one if none is recorded; neither: a plain SwiGLU.

        Raises UnsupportedError if a constant of the required function, or its activation, differs from the record.
        """
        required = self.function
        if required is None or recorded is None:
            return required or recorded or PLAIN
        pairs = [(getattr(required, name), getattr(recorded, name)) for name in ("limit", "alpha", "beta")]
        is_different = required.activation not in ("silu", recorded.activation)  # a limit alone fits several
        if is_different or any(value and value != actual for value, actual in pairs):
            problem = f"the experts of layer {layer} compute {recorded}, not {required}"
            raise UnsupportedError(f"{path}: {problem}; use this model's directory, or leave out {CONSTANT_NAMES}.")
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


def resolve_order(order: I64 | None, experts: int) -> list[int]:
    """Return the file's expert for each expert; None: the file's order.

    Raises ArgumentError unless the order names each expert once.
    """
    if order is None:
        return list(range(experts))
    rule = f"order (physical_to_logical_map_cpu) must name each of {experts} experts once"
    if not isinstance(order, np.ndarray) or order.dtype != np.int64 or order.shape != (experts,):
        raise ArgumentError(f"{rule}, in a NumPy array of int64 [{experts}], not {describe(order)}")
    numbers: list[int] = order.tolist()
    if sorted(numbers) != list(range(experts)):
        wrong = next(number for number in numbers if not 0 <= number < experts or numbers.count(number) > 1)
        problem = f"{wrong} {numbers.count(wrong)} times" if 0 <= wrong < experts else str(wrong)
        raise ArgumentError(f"{rule}, but names {problem}")
    return numbers


class LoadedFiles:
    """The files of a layer with missing experts, to notice before a later read that one of them has changed."""

    def __init__(self, layer: int, paths: Iterable[Path]) -> None:
        self._layer = layer
        self._states: Mapping[Path, FileState] = {path: _file_state(path) for path in paths}

    def require_unchanged(self) -> None:
        """Raise InputError if a file has changed since."""
        for path, state in self._states.items():
            if _file_state(path) != state:
                problem = f"changed after experts of layer {self._layer} were loaded, and the others are needed now"
                raise InputError(f"{path}: {problem}; load the model again.")


def _file_state(path: Path) -> FileState:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


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
