"""Experts of a checkpoint, one matrix at a time: packed ones (`ktconvert gpu`, llmcompressor) as codes and scales, others in BF16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.experts import MoeModel, recognise
from ktconvert.layouts.checkpoints.source import TensorInfo, TensorSource, open_checkpoint
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs.compressed import SUFFIXES, W4A16, W8A16, Compressed
from ktconvert.native_quant import kernels
from ktconvert.quantizers.reference import bf16_to_f32

CODES, SHAPE, SCALE = SUFFIXES
DTYPES = {CODES: "I32", SHAPE: "I64", SCALE: "BF16"}
LARGEST = 2.0**120  # a scale above it makes a weight that BF16 cannot hold
METHOD, FORMAT = "compressed-tensors", "pack-quantized"
FORMS = {form.grid.bits: form for form in (W4A16, W8A16)}
ONLY = f"only {FORMAT} experts with symmetric 4-bit or 8-bit codes can be read (`ktconvert gpu` makes them)"


class HotWeights:
    """The routed experts of a checkpoint: a directory, or a model of the hub. Reads headers only, until an expert is asked for.

    Raises InputError where it is damaged or lacks an expert, UnsupportedError where its experts are packed in another way.
    """

    def __init__(self, where: str | Path) -> None:
        self._source = open_checkpoint(where)
        self.root = self._source.root
        self._form = _form(self._source)
        self.model: MoeModel = recognise(self._source if self._form is None else _unpacked(self._source, self._form))

    def require(self, layer: int, shape: tuple[int, int, int]) -> None:
        """Raises UnsupportedError where a layer is not there, or has other sizes E, H, I than the model that is being loaded."""
        have = self.model.shape(layer) if layer in self.model.layers else None
        if have is None:
            raise UnsupportedError(
                f"{self.root}: holds no experts of layer {layer}, which the model has; give its own checkpoint"
            )
        if have != shape:
            raise UnsupportedError(
                f"{self.root}: layer {layer} has {have[0]} experts of hidden size {have[1]} and width {have[2]}, the model "
                f"{shape[0]} of {shape[1]} and {shape[2]}; give a checkpoint of this model"
            )

    def linear(
        self, layer: int, expert: int, projection: str
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint16] | None]:
        """A linear [n, k]: int8 codes [n, k] with BF16 scales [n, groups], or the BF16 bits themselves [n, k] without scales.

        The arrays are the caller's. Raises InputError for scales that are no finite numbers.
        """
        if self._form is None:
            linear = self.model.linear(layer, expert, projection)
            bits = kernels.decode(linear)
            for info in self.model.expert_tensors(layer, expert):
                self._source.release(info)
            return bits, None
        weight = self.model.weight(layer, expert, projection)
        codes, shape, scale = (self._source.tensors[f"{weight.name}_{what}"] for what in ("packed", "shape", "scale"))
        said = self._source.view(shape).tolist()
        if said != list(weight.shape):
            raise _damaged(self._source, shape, f"says {said}, its codes are for {list(weight.shape)}")
        scales = self._source.view(scale).copy()
        largest = float(np.max(np.abs(bf16_to_f32(scales))))
        if not largest < LARGEST:  # NaN is not below it either
            raise _damaged(self._source, scale, f"holds {largest}")
        made = self._form.codes(self._source.view(codes))
        self._source.release(codes)
        return made, scales


def _form(source: TensorSource) -> Compressed | None:
    """How a checkpoint's linears are packed, by its config; None if they are not. Raises UnsupportedError for another packing."""
    said = next((s["quantization_config"] for s in cfg.scopes(source.config) if "quantization_config" in s), None)
    if not isinstance(said, dict) or said.get("quant_method") != METHOD:
        return None  # what is quantized in another way is refused with the tensor's name
    groups = said.get("config_groups")
    found = {_bits(group) for group in groups.values()} if isinstance(groups, dict) else set()
    if said.get("format") != FORMAT or len(found) != 1 or not found <= FORMS.keys():
        raise UnsupportedError(f"{source.root / 'config.json'}: is quantized by {METHOD} in another way; {ONLY}")
    return FORMS[found.pop()]


def _bits(group: Any) -> int:
    """Bits of the codes of a config group; 0 where they are no symmetric integers."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("type") != "int" or weights.get("symmetric") is not True:
        return 0
    bits = weights.get("num_bits")
    return bits if type(bits) is int else 0


def _unpacked(source: TensorSource, form: Compressed) -> TensorSource:
    """The checkpoint as it would look with each packed linear as one BF16 weight: for finding and measuring experts, not for reading."""
    shown = dict(source.tensors)
    packed = {name.rpartition(".")[0] for name in shown if name.endswith((f".{CODES}", f".{SHAPE}"))}
    for base in sorted(packed):
        codes, _, _ = _three(source, base, form)
        for suffix in SUFFIXES:
            del shown[f"{base}.{suffix}"]
        shape = (codes.shape[0], codes.shape[1] * 32 // form.grid.bits)
        shown[f"{base}.weight"] = replace(codes, name=f"{base}.weight", dtype="BF16", shape=shape)
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    return TensorSource(source.root, config, source.shards, shown)


def _three(source: TensorSource, base: str, form: Compressed) -> tuple[TensorInfo, ...]:
    """Codes, shape, scales of a packed linear. Raises InputError where one is missing or does not fit, UnsupportedError for other types."""
    found = [info for suffix in SUFFIXES if (info := source.tensors.get(f"{base}.{suffix}")) is not None]
    if len(found) < len(SUFFIXES):
        missing = next(suffix for suffix in SUFFIXES if f"{base}.{suffix}" not in source.tensors)
        raise _damaged(source, found[0], f"lacks '{base}.{missing}' beside it")
    for info, suffix in zip(found, SUFFIXES, strict=True):
        if info.dtype != DTYPES[suffix] or len(info.shape) != (1 if suffix == SHAPE else 2):
            at = source.shards[info.shard].path
            raise UnsupportedError(f"{at}: tensor {info.name!r} is {info.dtype} of shape {list(info.shape)}; {ONLY}")
    (n, words), (rows, groups) = found[0].shape, found[2].shape
    if rows != n or not groups or (words * 32 // form.grid.bits) % groups:
        raise _damaged(source, found[2], f"of shape {[rows, groups]} does not fit codes of shape {[n, words]}")
    return tuple(found)


def _damaged(source: TensorSource, info: TensorInfo, why: str) -> InputError:
    at = source.shards[info.shard].path
    return InputError(f"{at}: tensor {info.name!r} {why}; make this checkpoint again")
