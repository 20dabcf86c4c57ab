"""LoRA of routed experts as kt-kernel's training saves it: six stacked tensors for each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.sources.containers.safetensors import read_header
from ktconvert.layouts.tensors import PROJECTIONS, TensorInfo

FUSED = "fused_expert_lora.safetensors"
FACTOR = re.compile(r"layers\.(?P<layer>\d{1,6})\.experts\.(?P<factor>(?:gate|up|down)_lora_[ab])")
REMEDY = "save the adapter again with kt-kernel"
FACTORS = tuple(f"{projection}_lora_{side}" for projection in PROJECTIONS for side in "ab")

OF_EXPERT = re.compile(r"(?P<experts>.*\bexperts)\.(?P<expert>\d+)\.(?P<name>\w+)")  # a module of one expert
OF_LAYER = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?:\w+\.)?experts")  # the module of a layer's experts

Matrices = tuple[TensorInfo, TensorInfo]  # A [r, in] and B [out, r] of one expert's projection


class ExpertNames(NamedTuple):
    """Names of a layer's experts in a model: their common module, and the gate, up and down projection of each.

    sizes  (E, H, I); None if unknown
    """

    experts: str
    projections: tuple[str, ...]
    sizes: tuple[int, int, int] | None = None


def name_experts(model: MoeModel) -> dict[int, ExpertNames]:
    """Return the names of each layer's experts in a checkpoint; projections of stacked ones are named gate_proj etc.

    Raises UnsupportedError for a checkpoint whose tensors name no experts, or whose experts have no gate.
    """
    names = {}
    for layer in model.layers:
        stored = [model.weight_name(layer, 0, projection).removesuffix(".weight") for projection in model.projections]
        matches = [match for match in map(OF_EXPERT.fullmatch, stored) if match]
        if matches:
            experts, projections = matches[0]["experts"], tuple(match["name"] for match in matches)
        else:
            experts, projections = stored[0].rpartition(".")[0], tuple(f"{name}_proj" for name in PROJECTIONS)
        if not model.is_gated or OF_LAYER.fullmatch(experts) is None:
            problem = f"{stored[0]!r} belongs to experts of a form that kt-kernel cannot train"
            raise UnsupportedError(problem, "use an adapter of this model", path=model.source.root)
        names[layer] = ExpertNames(experts, projections, model.shape(layer))
    return names


def read_fused(folder: Path, rank: int, names: Mapping[int, ExpertNames]) -> dict[str, Matrices]:
    """Return the matrices of each expert's projections, by the names in a model; {} if the folder has no FUSED file.

    names  those of each layer with experts

    Raises InputError for layers or sizes that are not the model's, missing tensors, and shapes without this rank.
    """
    file = folder / FUSED
    if not file.is_file():
        return {}
    layers: dict[int, dict[str, TensorInfo]] = {}
    for info in read_header(file).entries:
        if (match := FACTOR.fullmatch(info.name)) is None:
            raise InputError.from_tensor(info.name, "is not LoRA of kt-kernel's experts", REMEDY, file)
        layers.setdefault(int(match["layer"]), {})[match["factor"]] = info
    for layer in sorted(layers.keys() ^ names.keys()):
        problem = f"has layer {layer}, where the model has no experts" if layer in layers else f"lacks layer {layer}"
        raise InputError(problem, "use an adapter of this model", path=file)
    matrices: dict[str, Matrices] = {}
    for layer, tensors in layers.items():
        if missing := [name for name in FACTORS if name not in tensors]:
            raise InputError(f"lacks tensor 'layers.{layer}.experts.{missing[0]}'", REMEDY, path=file)
        _check_shapes(tensors, rank, names[layer].sizes, file)
        for projection, name in zip(PROJECTIONS, names[layer].projections, strict=True):
            a, b = (tensors[f"{projection}_lora_{side}"] for side in "ab")
            for expert in range(a.shape[0]):
                matrices[f"{names[layer].experts}.{expert}.{name}"] = _cut_expert(a, expert), _cut_expert(b, expert)
    return matrices


def _check_shapes(tensors: Mapping[str, TensorInfo], rank: int, sizes: tuple[int, int, int] | None, file: Path) -> None:
    first = tensors["gate_lora_a"]
    e, r, h = first.shape if len(first.shape) == 3 else (0, 0, 0)
    i = tensors["down_lora_a"].shape[-1] if tensors["down_lora_a"].shape else 0
    shapes = (e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r)
    for name, shape in zip(FACTORS, shapes, strict=True):
        info = tensors[name]
        if info.shape != shape or r != rank or not e or info.dtype not in ("BF16", "F16", "F32"):
            problem = f"is {info.dtype} {list(info.shape)}, which does not fit the other tensors or rank {rank}"
            raise InputError.from_tensor(info.name, problem, REMEDY, file)
    if sizes is not None and sizes != (e, h, i):
        problem = f"is {list(first.shape)}, but the model has experts of sizes [E, H, I] = {list(sizes)}"
        raise InputError.from_tensor(first.name, problem, "use an adapter of this model", file)


def _cut_expert(info: TensorInfo, expert: int) -> TensorInfo:
    """Return one expert's matrix of a stacked tensor."""
    nbytes = info.nbytes // info.shape[0]
    return TensorInfo(info.name, info.dtype, info.shape[1:], nbytes, info.file, info.start + expert * nbytes)
