"""Experts in a directory: converted ones (converted.py), or those of a checkpoint (from_checkpoint.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ktconvert.native_quant.runtime import converted, from_checkpoint
from ktconvert.native_quant.runtime.pool import Pool
from ktconvert.native_quant.runtime.swiglu import Swiglu
from ktconvert.native_quant.runtime.weights import LayerWeights, Requirements

F32 = npt.NDArray[np.float32]


class ExpertSource(Protocol):
    """A directory, opened: Converted or Checkpoint. InputError: its files are damaged."""

    @property
    def layers(self) -> list[int]:
        """The layers with experts."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json; {} where there is none."""

    @property
    def damage(self) -> Sequence[str]:
        """The files that are damaged or missing, one text each."""

    def shape_of(self, layer: int) -> tuple[int, int, int]:
        """E, H and I of a layer that has experts."""

    def swiglu_of(self, layer: int) -> Swiglu:
        """What a layer's experts compute by config.json, as far as their method can."""

    def require_computable(self) -> None:
        """Raises UnsupportedError unless every layer's experts can be computed as they are; no weight is read."""

    def require_readable(self, layer: int) -> None:
        """Raises InputError where a missing layer may be in a file that is damaged or missing."""

    def load(self, layer: int, pool: Pool, required: Requirements) -> LayerWeights:
        """A layer's experts, all its tensors checked, in memory where C can read them."""

    def linears(self, packed: LayerWeights, expert: int) -> Iterator[tuple[F32, F32, F32]]:
        """Gate, up and down of each NUMA part of an expert (a checkpoint's: of all parts together), decoded."""


def open_experts(path: Path) -> ExpertSource:
    """A directory. Raises InputError for damaged files, UnsupportedError for one without experts."""
    if from_checkpoint.is_checkpoint(path):
        return from_checkpoint.open_stored(path)
    return converted.open_converted(path)
