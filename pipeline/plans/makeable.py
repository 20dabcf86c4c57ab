"""What can be made of a checkpoint: by method, which outputs are legal and how large they are, and the lines that make them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.beside import beside
from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs import LAYOUTS, Layout, numa
from ktconvert.layouts.outputs.compressed import COMPRESSED, check_shapes
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.native_quant import machine
from ktconvert.pipeline.stages.carry_over import carried

COUNTS = (1, 2, 4, 8)  # NUMA parts that machines have
DEFAULT_PARTS = 2  # of `ktconvert cpu`


def methods(model: MoeModel) -> list[dict[str, Any]]:
    """For each method: the legal NUMA counts, why others are not, and the size of the output by count."""
    return [
        {
            "quant_method": name,
            "method": layout.name,
            "legal": legal_counts(model, layout),
            "illegal": {str(t): reason for t in COUNTS if (reason := illegal_reason(model, layout, t)) is not None},
            "bytes": {str(t): output_bytes(model, layout, t) for t in legal_counts(model, layout)},
        }
        for name, layout in LAYOUTS.items()
    ]


def gpu_types(model: MoeModel) -> list[dict[str, Any]]:
    """For each --quant-type of `ktconvert gpu`: why it cannot be made, or None, and the size of the whole output."""
    made = []
    for name, form in COMPRESSED.items():
        try:
            check_shapes(model, form)
            rest = carried(beside(model.source, model.expert_tensor_names(), model.quantization))
        except (InputError, UnsupportedError) as error:
            made.append({"quant_type": name, "refused": str(error), "bytes": 0})
            continue
        shapes = [model.shape(layer) for layer in model.layers]
        nbytes = sum(experts * form.expert_bytes(hidden, width) for experts, hidden, width in shapes)
        nbytes += sum(tensor.entry.nbytes for tensor in rest)
        made.append({"quant_type": name, "refused": None, "bytes": nbytes})
    return made


def gpu_commands(types: list[dict[str, Any]], where: str) -> list[str]:
    """The ready line for each type that can be made."""
    name = Path(where).expanduser().resolve().name
    return [
        shlex.join(["ktconvert", "gpu", "-i", where, "-o", f"{name}-{t}", "--quant-method", "RTN", "--quant-type", t])
        for t in (made["quant_type"] for made in types if made["refused"] is None)
    ]


def illegal_reason(model: MoeModel, layout: Layout, parts: int) -> str | None:
    """Why this model cannot be held in so many parts, by the first layer that cannot; None if it can."""
    shapes = dict.fromkeys(model.shape(layer)[1:] for layer in model.layers)
    reasons = (numa.illegal_reason(layout, hidden, intermediate, parts) for hidden, intermediate in shapes)
    return next((reason for reason in reasons if reason is not None), None)


def legal_counts(model: MoeModel, layout: Layout) -> list[int]:
    """The NUMA counts, of those that machines have, that this layout can hold this model in."""
    return [t for t in COUNTS if illegal_reason(model, layout, t) is None]


def output_bytes(model: MoeModel, layout: Layout, parts: int) -> int:
    """Bytes of the weights and scales of the whole output."""
    total = 0
    for layer in model.layers:
        experts, hidden, intermediate = model.shape(layer)
        total += experts * ExpertGrid(layer, hidden, intermediate, parts).expert_bytes(layout)
    return total


def commands(model: MoeModel, where: str) -> list[str]:
    """The ready line for each method: for this machine's NUMA nodes where that is legal, else for what is."""
    nodes = len(machine.numa_nodes())
    lines = []
    for name, layout in LAYOUTS.items():
        legal = legal_counts(model, layout)
        if not legal:
            continue
        parts = next((t for t in (nodes, DEFAULT_PARTS) if t in legal), legal[-1])
        output = f"{Path(where).expanduser().resolve().name}-{layout.name}"
        words = ["ktconvert", "cpu", "-i", where, "-o", output, "--quant-method", name]
        lines.append(shlex.join([*words, "--threadpool-count", str(parts)]))
    return lines
