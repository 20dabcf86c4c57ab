"""LoRA of routed experts as kt-kernel's training saves it: six stacked tensors for each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.layouts.tensors import PROJECTIONS, TensorInfo, format_ranges

FUSED = "fused_expert_lora.safetensors"
FACTOR = re.compile(r"layers\.(?P<layer>\d{1,6})\.experts\.(?P<factor>(?:gate|up|down)_lora_[ab])")
REMEDY = "save the adapter again with kt-kernel"
FACTORS = tuple(f"{projection}_lora_{side}" for projection in PROJECTIONS for side in "ab")

Matrices = tuple[TensorInfo, TensorInfo]  # A [r, in] and B [out, r] of one expert's projection


def read_fused(folder: Path, rank: int) -> dict[tuple[int, int, str], Matrices]:
    """Return the matrices of (layer, expert, projection); {} if the folder has no FUSED file.

    Raises InputError for a missing layer or tensor, and for shapes without this rank.
    """
    file = folder / FUSED
    if not file.is_file():
        return {}
    layers: dict[int, dict[str, TensorInfo]] = {}
    for info in read_header(file).entries:
        if (match := FACTOR.fullmatch(info.name)) is None:
            raise InputError.from_tensor(info.name, "is not LoRA of kt-kernel's experts", REMEDY, file)
        layers.setdefault(int(match["layer"]), {})[match["factor"]] = info
    if not layers:
        raise InputError("has no matrices", REMEDY, path=file)
    if absent := sorted(set(range(min(layers), max(layers))) - layers.keys()):
        raise InputError(f"has layers {format_ranges(layers)}, but lacks layer {absent[0]}", REMEDY, path=file)
    matrices: dict[tuple[int, int, str], Matrices] = {}
    for layer, tensors in layers.items():
        if missing := [name for name in FACTORS if name not in tensors]:
            raise InputError(f"lacks tensor 'layers.{layer}.experts.{missing[0]}'", REMEDY, path=file)
        _check_shapes(tensors, rank, file)
        for projection in PROJECTIONS:
            a, b = (tensors[f"{projection}_lora_{side}"] for side in "ab")
            for expert in range(a.shape[0]):
                matrices[layer, expert, projection] = _cut_expert(a, expert), _cut_expert(b, expert)
    return matrices


def _check_shapes(tensors: Mapping[str, TensorInfo], rank: int, file: Path) -> None:
    first = tensors["gate_lora_a"]
    e, r, h = first.shape if len(first.shape) == 3 else (0, 0, 0)
    i = tensors["down_lora_a"].shape[-1] if tensors["down_lora_a"].shape else 0
    shapes = (e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r)
    for name, shape in zip(FACTORS, shapes, strict=True):
        info = tensors[name]
        if info.shape != shape or r != rank or not e or info.dtype not in ("BF16", "F16", "F32"):
            problem = f"is {info.dtype} {list(info.shape)}, which does not fit the other tensors or rank {rank}"
            raise InputError.from_tensor(info.name, problem, REMEDY, file)


def _cut_expert(info: TensorInfo, expert: int) -> TensorInfo:
    """Return one expert's matrix of a stacked tensor."""
    nbytes = info.nbytes // info.shape[0]
    return TensorInfo(info.name, info.dtype, info.shape[1:], nbytes, info.file, info.start + expert * nbytes)
