"""Experts of a checkpoint, one linear at a time.

Packed integers (`ktconvert gpu`, llmcompressor) are read as codes and scales, other encodings as BF16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import INT4, INT8
from ktconvert.quantizers.packed import signed_codes

LARGEST = 2.0**120  # a scale above it could give a weight that BF16 cannot hold


class HotWeights:
    """The routed experts of a checkpoint: a directory, or a model of the hub.

    Only headers are read before the first expert is. Raises InputError where it is damaged or lacks an expert,
    UnsupportedError where its experts cannot be read.
    """

    def __init__(self, where: str | Path) -> None:
        self._source = open_checkpoint(where)
        self.root = self._source.root
        self.model: MoeModel = recognise(self._source)

    def require(self, layer: int, shape: tuple[int, int, int]) -> None:
        """Raises UnsupportedError where a layer is missing, or has other sizes E, H, I than the loaded model."""
        sizes = self.model.shape(layer) if layer in self.model.layers else None
        if sizes is None:
            raise UnsupportedError(
                f"{self.root}: holds no experts of layer {layer}, which the model has; give a checkpoint of this model"
            )
        if sizes != shape:
            raise UnsupportedError(
                f"{self.root}: layer {layer} has {sizes[0]} experts of hidden size {sizes[1]} and width {sizes[2]}, "
                f"the model {shape[0]} of {shape[1]} and {shape[2]}; give a checkpoint of this model"
            )

    def linear(
        self, layer: int, expert: int, projection: str
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32] | None]:
        """A linear: int8 codes [n, k] with float32 scales [n, groups], or BF16 bits [n, k] without scales.

        The caller owns the arrays. Raises InputError for scales that are not finite.
        """
        linear = self.model.linear(layer, expert, projection)
        is_packed = linear.kind in (INT4, INT8) and linear.zeros is None and linear.group_of is None
        values: npt.NDArray[Any] = signed_codes(linear) if is_packed else kernels.decode(linear)
        for info in self.model.expert_tensors(layer, expert):
            self._source.release(info)
        if not is_packed:
            return values, None
        assert linear.scales is not None
        largest = float(np.max(np.abs(linear.scales)))
        if largest > LARGEST:
            scale = self.model.weight(layer, expert, projection).tensors["scale"]
            raise InputError(
                f"{self._source.path(scale)}: tensor {scale.name!r} holds {largest}, "
                "more than BF16 weights can have; make this checkpoint again"
            )
        return values, linear.scales
