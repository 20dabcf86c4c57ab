"""The plan of `ktconvert merge-adapter`: a whole BF16 checkpoint with an adapter folded into its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from ktconvert.layouts.checkpoints.adapter import (
    CONFIG,
    DOWN,
    GATE_UP,
    WEIGHTS,
    Delta,
    read_adapter,
    require_adapter,
)
from ktconvert.layouts.checkpoints.archs import PREFIXES
from ktconvert.layouts.checkpoints.kt_adapter import FUSED, OF_EXPERT, ExpertNames, name_experts
from ktconvert.layouts.checkpoints.non_expert_tensors import OutputTensor, TensorDeltas
from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.files import publish
from ktconvert.pipeline.engine.plan import Plan, identify_by_stat
from ktconvert.pipeline.options.conversion_options import MergeAdapterOptions
from ktconvert.pipeline.plans import checkpoint
from ktconvert.pipeline.plans.dequantize import plan_dequantize

Shapes = Mapping[str, tuple[int, ...]]  # shapes of the checkpoint's tensors, by name

# An expert's projections in the stacked tensors of newer checkpoints, [E, 2 I, H] and [E, H, I]: the tensor, and which
# half of the expert's rows
STACKED = {"gate_proj": (GATE_UP, 0), "up_proj": (GATE_UP, 1), "down_proj": (DOWN, 0)}
OTHER = "use an adapter of this model"


def plan_merge_adapter(options: MergeAdapterOptions) -> Plan:
    """Build the plan from headers and the adapter. Raises InputError or UnsupportedError if they do not fit."""
    folder = options.adapter
    require_adapter(folder)
    # The files are small, so they are identified by their content.
    files = {
        folder / name: msgspec.structs.replace(
            identify_by_stat(folder / name, f"adapter/{name}"), sha256=publish.sha256_file(folder / name)
        )
        for name in (CONFIG, WEIGHTS, FUSED)
        if (folder / name).is_file()
    }
    identity = "".join(str(file.sha256) for file in files.values())
    names: Mapping[int, ExpertNames] = {}
    if folder / FUSED in files:
        names = name_experts(recognize(checkpoint.open_source(options), to_read=True))
    return plan_dequantize(options, partial(_add_adapter, folder, names, identity), files)


def _add_adapter(
    folder: Path, names: Mapping[int, ExpertNames], identity: str, tensors: Sequence[OutputTensor]
) -> tuple[Sequence[OutputTensor], str]:
    """Return the tensors with the adapter's updates, and a note.

    names  names of the checkpoint's experts, for an adapter of kt-kernel

    Raises InputError or UnsupportedError if the checkpoint lacks such weights.
    """
    shapes = {tensor.key: tensor.entry.shape for tensor in tensors}
    blocks: dict[str, dict[int, Delta]] = {}
    experts: dict[str, set[int]] = {}
    for module, delta in read_adapter(folder, names).items():
        name, row = _find_weight(module, delta, shapes, folder)
        if row in blocks.setdefault(name, {}):
            raise InputError(f"changes {name} twice, with {module} and a second module", OTHER, path=folder)
        blocks[name][row] = delta
        if match := OF_EXPERT.fullmatch(module):
            experts.setdefault(f"{match['experts']}.*.{match['name']}", set()).add(int(match["expert"]))
    _require_all_experts(experts, shapes, folder)
    changed = []
    for tensor in tensors:
        if tensor.key in blocks:
            if tensor.entry.dtype != "BF16" or (isinstance(tensor.stored, Weight) and len(tensor.entry.shape) > 2):
                raise UnsupportedError(
                    f"{tensor.key} is {tensor.entry.dtype} {list(tensor.entry.shape)}, but adapters change only BF16 "
                    "matrices; give the output of `ktconvert dequantize`",
                    path=folder,
                )
            tensor = replace(
                tensor, deltas=TensorDeltas(tensor.entry.shape[-1], tuple(sorted(blocks[tensor.key].items())), identity)
            )
        changed.append(tensor)
    return changed, f"the adapter {folder.name} is merged into {len(blocks)} tensors, each rounded to BF16 once"


def _find_weight(module: str, delta: Delta, shapes: Shapes, folder: Path) -> tuple[str, int]:
    """Return the tensor that holds a module's weight, and the weight's first row in it."""
    name = _find_name(f"{module}.weight", shapes, folder)
    if name is not None and shapes[name] == delta.shape:
        return name, 0
    match = OF_EXPERT.fullmatch(module)
    if name is None and match is not None and match["name"] in STACKED:
        stacked, half = STACKED[match["name"]]
        gate_up, down = (_find_name(f"{match['experts']}.{part}", shapes, folder) for part in (GATE_UP, DOWN))
        name = gate_up if stacked == GATE_UP else down
        expert = int(match["expert"])
        rows = delta.shape[0]
        if gate_up is not None and down is not None and name is not None:
            count, hidden, width = (*shapes[down], 0, 0, 0)[:3]
            expected = (width, hidden) if stacked == GATE_UP else (hidden, width)
            # Both shapes are compared, because other families store the tensors transposed.
            is_untransposed = shapes[gate_up] == (count, 2 * width, hidden) and shapes[down] == (count, hidden, width)
            if is_untransposed and delta.shape == expected and expert < count:
                return name, (expert * (2 if stacked == GATE_UP else 1) + half) * rows
    difference = "lacks it" if name is None else f"has {name} {list(shapes[name])}"
    problem = f"the adapter changes {module}, {list(delta.shape)}, but the checkpoint {difference}"
    raise InputError(problem, OTHER, path=folder)


def _find_name(name: str, shapes: Shapes, folder: Path) -> str | None:
    """Return the checkpoint's name of a tensor of transformers' model: the same, or with a different known prefix."""
    if name in shapes:
        return name
    name_prefix = next((prefix for prefix in PREFIXES if name.startswith(f"{prefix}layers.")), None)
    if name_prefix is None:
        names = [name.removeprefix("model.")]
    else:
        names = [prefix + name.removeprefix(name_prefix) for prefix in PREFIXES]
    matches = [candidate for candidate in names if candidate in shapes]
    if len(matches) > 1:
        problem = f"changes {name}, which may be the checkpoint's {matches[0]} or {matches[1]}"
        raise InputError(problem, "train it with the transformers model of this checkpoint", path=folder)
    return matches[0] if matches else None


def _require_all_experts(experts: Mapping[str, set[int]], shapes: Shapes, folder: Path) -> None:
    """Raise InputError if an adapter changes only some of a layer's experts: it belongs to a different model."""
    for projection, numbers in experts.items():
        parent, name = projection.split(".*.")
        stacked = _find_name(f"{parent}.{STACKED[name][0]}", shapes, folder) if name in STACKED else None
        count = len(numbers)
        if stacked is not None:
            count = shapes[stacked][0]
        elif _find_name(f"{parent}.{count}.{name}.weight", shapes, folder) is not None:
            count += 1
        if count != len(numbers):
            problem = f"changes {projection} of {len(numbers)} experts, but the checkpoint has more"
            raise InputError(problem, OTHER, path=folder)
