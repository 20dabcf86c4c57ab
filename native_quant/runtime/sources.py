"""Where experts come from: what `ktconvert cpu` or kt-kernel's converter wrote (weights.py), or a checkpoint as it was
released (from_checkpoint.py). Whatever computes asks kind_of() which of the two a directory is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.runtime import from_checkpoint, weights
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.requirements import Requirements
from ktconvert.native_quant.runtime.swiglu import Swiglu

F32 = npt.NDArray[np.float32]


class Kind(Protocol):
    """The functions of weights.py and from_checkpoint.py. Each raises InputError for damaged files, UnsupportedError
    for a directory without experts that this runtime computes.
    """

    def layers_of(self, path: Path) -> list[int]:
        """The layers with experts."""

    def require_computable(self, path: Path) -> None:
        """Raises UnsupportedError unless every layer's experts can be computed as they are; no weight is read."""

    def config_of(self, path: Path) -> dict[str, Any]:
        """config.json; {} where there is none."""

    def require_readable(self, path: Path, layer: int) -> None:
        """Raises InputError where a missing layer may be in a file that is damaged or missing."""

    def shape_of(self, path: Path, layer: int) -> tuple[int, int, int]:
        """E, H and I of a layer that has experts."""

    def damage_of(self, path: Path) -> list[str]:
        """The files that are damaged or missing, one text each."""

    def swiglu_of(self, path: Path, layer: int) -> Swiglu:
        """What a layer's experts compute by config.json, as far as their method can."""

    def load(self, path: Path, layer: int, pool: Pool, required: Requirements) -> weights.LayerWeights:
        """A layer's experts, all its tensors checked, in memory where C can read them."""

    def linears(self, path: Path, packed: weights.LayerWeights, expert: int) -> Iterator[tuple[F32, F32, F32]]:
        """Gate, up and down of each NUMA part of an expert (a checkpoint's: of all parts together), decoded."""


def kind_of(path: Path) -> Kind:
    """The module that reads a directory."""
    return from_checkpoint if from_checkpoint.is_checkpoint(path) else weights
