"""An adapter folded into the weights of a checkpoint: the tensors that it changes, and where."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ktconvert.layouts.checkpoints.adapter import (
    CONFIG,
    GATE_UP,
    MERGE,
    WEIGHTS,
    Delta,
    read_adapter,
    read_settings,
)
from ktconvert.layouts.checkpoints.archs import NUM_LAYERS, PREFIXES, Fused
from ktconvert.layouts.checkpoints.kt_adapter import FUSED, OF_EXPERT, OF_LAYER, name_experts
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.non_expert_tensors import Addition, OutputTensor, TensorDeltas
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources.source import TensorSource

Shapes = Mapping[str, tuple[int, ...]]  # shapes of the checkpoint's tensors, by name

FILES = (CONFIG, WEIGHTS, FUSED)  # of an adapter
RECORDED = "adapter/"  # before their names in the manifest of an output
# An expert's linears in the modules of transformers; the last one is a parameter of all experts
LINEARS = {"gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",), GATE_UP: ("gate", "up")}
OTHER = "use an adapter of this model"
IN_LAYER = re.compile(r"(?P<before>.*\blayers\.)(?P<layer>\d{1,6})(?P<after>\..*)")


def add_adapter(
    folder: Path, identity: str, source: TensorSource, tensors: Sequence[OutputTensor]
) -> tuple[Sequence[OutputTensor], Sequence[str]]:
    """Return the tensors with the adapter's additions, and warnings.

    identity  the adapter's identity in fingerprints of units

    Raises InputError or UnsupportedError if the checkpoint lacks such weights.
    """
    find_experts = functools.cache(lambda: recognize(source, to_read=True))
    is_fused = (folder / FUSED).is_file()
    deltas_by_module = read_adapter(folder, name_experts(find_experts()) if is_fused else {})
    shapes = {tensor.key: tensor.entry.shape for tensor in tensors}
    changes: dict[str, list[Addition]] = {}
    experts: dict[tuple[int, str], set[int]] = {}
    for module, delta in deltas_by_module.items():
        expert = AdaptedLinear.parse(module)
        if expert is not None:
            experts.setdefault((expert.layer, expert.name), set()).add(expert.number)
        name = _find_name(f"{module}.weight", shapes, folder)
        if name is not None and shapes[name] == delta.shape:
            found = [(name, Addition(range(delta.shape[0]), range(delta.shape[1]), delta))]
        else:
            found = [] if expert is None or name is not None else expert.find_changes(delta, find_experts())
        if not found or not all(changed in shapes for changed, _ in found):
            difference = "lacks it" if name is None else f"has {name} {list(shapes[name])}"
            problem = f"the adapter changes {module}, {list(delta.shape)}, but the checkpoint {difference}"
            raise InputError(problem, OTHER, path=folder)
        for name, addition in found:
            if any(addition[:2] == other[:2] for other in changes.setdefault(name, [])):
                raise InputError(f"changes {name} twice, with {module} and a second module", OTHER, path=folder)
            changes[name].append(addition)
    for (layer, projection), numbers in experts.items():
        if len(numbers) < (count := find_experts().shape(layer)[0]):
            problem = f"changes {projection} of only {len(numbers)} of the {count} experts of layer {layer}"
            raise InputError(problem, OTHER, path=folder)
    changed = []
    for tensor in tensors:
        if tensor.key in changes:
            if tensor.entry.dtype != "BF16":
                raise UnsupportedError(
                    f"{tensor.key} is {tensor.entry.dtype} {list(tensor.entry.shape)}, but adapters change only BF16 "
                    "matrices; give the output of `ktconvert dequantize`",
                    path=folder,
                )
            deltas = TensorDeltas(tensor.entry.shape[-1], tuple(changes[tensor.key]), identity)
            tensor = replace(tensor, deltas=deltas)
        changed.append(tensor)
    return changed, () if is_fused else _make_warnings(folder, deltas_by_module, source)


def _make_warnings(folder: Path, modules: Iterable[str], source: TensorSource) -> tuple[str, ...]:
    """Return a sentence on the first module that the settings name and the checkpoint has, but without matrices.

    Only modules that have matrices in another layer count, and none of layers for multi-token prediction: PEFT does not
    see those.
    """
    settings, number = read_settings(folder, MERGE), cfg.find_number(source.config, NUM_LAYERS)
    if settings["layers_to_transform"] is not None or settings["exclude_modules"]:
        return ()
    stored = _group_by_layer(name.removesuffix(".weight") for name in source.tensors)
    for (before, after), layers in _group_by_layer(modules).items():
        for layer in sorted(stored.get((before, after), set()) - layers):
            module = f"{before}{layer}{after}"
            if (number is None or layer < number[1]) and settings.name_module(module):
                return (
                    f"{folder.name} has no matrices for {module}, though {CONFIG} names it and the checkpoint has it, "
                    f"so that module stays unchanged; if the adapter is of a different model, {OTHER}",
                )
    return ()


def _group_by_layer(names: Iterable[str]) -> dict[tuple[str, str], set[int]]:
    """Return the numbers of layers by what is before and after them in the names of modules."""
    found: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(IN_LAYER.fullmatch, names)):
        found.setdefault((match["before"], match["after"]), set()).add(int(match["layer"]))
    return found


class AdaptedLinear(NamedTuple):
    """A linear of an expert in transformers, or its share of a parameter of all experts; `name` is a key of LINEARS."""

    layer: int
    number: int
    name: str

    @classmethod
    def parse(cls, module: str) -> AdaptedLinear | None:
        """Return the linear that a name means; None for a module that is no expert's, or of a different model."""
        match = OF_EXPERT.fullmatch(module)
        layer = match and OF_LAYER.fullmatch(match["experts"])
        if match is None or layer is None or match["name"] not in LINEARS or _find_prefix(module) is None:
            return None
        return cls(int(layer["layer"]), int(match["expert"]), match["name"])

    def find_changes(self, delta: Delta, model: MoeModel) -> list[tuple[str, Addition]]:
        """Return the tensors that an addition changes, and where; [] if the checkpoint has no such weight."""
        moe, linears = model.moe_layers.get(self.layer), LINEARS[self.name]
        if moe is None or self.number >= moe.num_experts or not set(linears) <= set(model.projections):
            return []
        found = []
        for number, linear in enumerate(linears):
            place = model.place(self.layer, self.number, linear)
            rows, half = delta.rows, len(delta.rows) // 2
            if self.name == GATE_UP:
                # transformers keeps the order of a tensor that has its own name, and changes that of others.
                alternate = isinstance(moe.style, Fused) and moe.style.interleaved and place.tensor.endswith(GATE_UP)
                rows = rows[number::2] if alternate else rows[number * half : (number + 1) * half]
            part = replace(delta, rows=rows, transposed=place.transposed)
            shape = part.shape[::-1] if part.transposed else part.shape
            if shape != (len(place.rows), len(place.columns)):
                return []
            found.append((place.tensor, Addition(place.rows, place.columns, part)))
        return found


def _find_prefix(name: str) -> str | None:
    return next((prefix for prefix in PREFIXES if name.startswith(f"{prefix}layers.")), None)


def _find_name(name: str, shapes: Shapes, folder: Path) -> str | None:
    """Return the checkpoint's name of a tensor of transformers' model: the same, or with a different known prefix."""
    if name in shapes:
        return name
    name_prefix = _find_prefix(name)
    if name_prefix is None:
        names = [name.removeprefix("model.")]
    else:
        names = [prefix + name.removeprefix(name_prefix) for prefix in PREFIXES]
    matches = [candidate for candidate in names if candidate in shapes]
    if len(matches) > 1:
        problem = f"changes {name}, which may be the checkpoint's {matches[0]} or {matches[1]}"
        raise InputError(problem, "train it with the transformers model of this checkpoint", path=folder)
    return matches[0] if matches else None
