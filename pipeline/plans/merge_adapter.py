"""The plan of `ktconvert merge-adapter`: a whole checkpoint in BF16, with an adapter folded into its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ktconvert.layouts.checkpoints.adapter import CONFIG, WEIGHTS, Delta, by_tail, read_adapter, tail
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.files import publish
from ktconvert.pipeline.engine.plan import Plan, Request
from ktconvert.pipeline.options.quantization import MergeAdapterOptions
from ktconvert.pipeline.plans.dequantize import plan_dequantize
from ktconvert.pipeline.stages.copy_tensors import Added, OtherTensor

OF_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)")
# The place of an expert's projection in the stacked tensors of newer checkpoints: [E, 2 I, H], and [E, H, I].
STACKED = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}


def plan_merge_adapter(request: Request[MergeAdapterOptions]) -> Plan:
    """Of headers and the adapter's hash. Raises InputError or UnsupportedError for one of another checkpoint."""
    folder = request.options.adapter
    plan = plan_dequantize(request, partial(_with_adapter, folder))
    return replace(plan, reads=(*plan.reads, folder / CONFIG, folder / WEIGHTS))


def _with_adapter(folder: Path, tensors: Sequence[OtherTensor]) -> tuple[Sequence[OtherTensor], str]:
    """The tensors with what is added to them, and a sentence. Raises where the checkpoint has no such weights."""
    blocks: dict[str, list[tuple[int, Delta]]] = {}
    shapes = {tail(tensor.key): tensor.entry.shape for tensor in tensors}
    for module, delta in by_tail(read_adapter(folder)).items():
        name, row = f"{module}.weight", 0
        if name not in shapes and (match := OF_EXPERT.fullmatch(module)) and match["name"] in STACKED:
            stacked, half = STACKED[match["name"]]
            name = f"{match['experts']}.{stacked}"
            row = (int(match["expert"]) * (2 if stacked == "gate_up_proj" else 1) + half) * delta.shape[0]
        shape = shapes.get(name)
        rows = 0 if shape is None or len(shape) < 2 else math.prod(shape[:-1])
        if (
            shape is None
            or shape[-1] != delta.shape[1]
            or row + delta.shape[0] > rows
            or (len(shape) == 2 and rows != delta.shape[0])
        ):
            has = "lacks it" if shape is None else f"has {list(shape)}"
            size = ", ".join(map(str, delta.shape))
            raise InputError(f"the adapter changes {module}, [{size}], and the checkpoint {has}", path=folder)
        blocks.setdefault(name, []).append((row, delta))
    made, identity = [], publish.sha256_file(folder / WEIGHTS)
    for tensor in tensors:
        mine = blocks.get(tail(tensor.key))
        if mine is not None:
            if tensor.entry.dtype != "BF16" or (isinstance(tensor.stored, Weight) and len(tensor.entry.shape) > 2):
                raise UnsupportedError(
                    f"{tensor.key} is {tensor.entry.dtype} {list(tensor.entry.shape)}, and an adapter is added to BF16 "
                    "matrices: give what `ktconvert dequantize` writes",
                    path=folder,
                )
            tensor = replace(tensor, added=Added(tensor.entry.shape[-1], tuple(mine), identity))
        made.append(tensor)
    return made, f"the adapter {folder.name} is added to {len(blocks)} tensors, each rounded to BF16 once"
