"""The outputs that a checkpoint can be converted to: legal methods, their sizes, and the commands to run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.layouts.checkpoints.other_tensors import other_tensors
from ktconvert.layouts.checkpoints.output_tensors import decoded_others
from ktconvert.layouts.checkpoints.source import TensorSource
from ktconvert.layouts.encodings import Weight
from ktconvert.layouts.errors import InputError, UnsupportedError
from ktconvert.layouts.outputs import Format, formats_of
from ktconvert.layouts.outputs.format import expert_bytes, illegal_reason, legal_counts
from ktconvert.layouts.outputs.parts import ExpertGrid
from ktconvert.native_quant import machine
from ktconvert.pipeline.plans.checkpoint import require_whole

EXPLAINED = (1, 2, 4, 8)  # NUMA parts whose refusal is explained; few machines have others
DEFAULT_PARTS = 2  # of `ktconvert cpu`


def methods(model: MoeModel) -> list[dict[str, Any]]:
    """For each method: the legal NUMA counts, why others are not, and the size of the output by count."""
    shapes = [model.shape(layer)[1:] for layer in model.layers]
    reasons = {fmt: {t: illegal_reason(fmt, shapes, t) for t in EXPLAINED} for fmt in formats_of("cpu").values()}
    return [
        {
            "quant_method": fmt.option,
            "method": fmt.name,
            "legal": list(counts := legal_counts(fmt, shapes)),
            "illegal": {str(t): reason for t, reason in why.items() if reason is not None},
            "bytes": {str(t): output_bytes(model, fmt, t) for t in counts},
        }
        for fmt, why in reasons.items()
    ]


def gpu_types(model: MoeModel) -> list[dict[str, Any]]:
    """For each --quant-type of `ktconvert gpu`: the reason if it is refused, else None, and the bytes of the output."""
    shapes = [model.shape(layer)[1:] for layer in model.layers]
    types: list[dict[str, Any]] = []
    for fmt in formats_of("gpu").values():
        try:
            require_whole(model.source, "`ktconvert gpu`")
            reason = illegal_reason(fmt, shapes, 1)
            rest = decoded_others(other_tensors(model.source, model.expert_tensor_names(), model.quantization))
        except (InputError, UnsupportedError) as error:
            reason, rest = str(error), ()
        nbytes = 0 if reason else output_bytes(model, fmt, 1) + sum(tensor.entry.nbytes for tensor in rest)
        types.append({"quant_type": fmt.option, "refused": reason, "bytes": nbytes})
    return types


def gpu_commands(types: list[dict[str, Any]], where: str) -> list[str]:
    name = Path(where).expanduser().resolve().name
    return [
        shlex.join(["ktconvert", "gpu", "-i", where, "-o", f"{name}-{t}", "--quant-method", "RTN", "--quant-type", t])
        for t in (row["quant_type"] for row in types if row["refused"] is None)
    ]


def dequantized(source: TensorSource, where: str) -> dict[str, Any]:
    """The bytes that `ktconvert dequantize` would write, and its command; {} where it would not decode anything."""
    try:
        require_whole(source, "`ktconvert dequantize`")
        tensors = decoded_others(other_tensors(source, (), source.quantization))
    except (InputError, UnsupportedError):
        return {}
    if not any(isinstance(tensor.stored, Weight) for tensor in tensors):
        return {}
    name = Path(where).expanduser().resolve().name
    return {
        "dequantized_bytes": sum(tensor.entry.nbytes for tensor in tensors),
        "dequantize": [shlex.join(["ktconvert", "dequantize", where, f"{name}-dequantized"])],
    }


def output_bytes(model: MoeModel, fmt: Format, parts: int) -> int:
    total, parts = 0, parts if fmt.arrangement.parted else 1
    for layer in model.layers:
        experts, hidden, intermediate = model.shape(layer)
        total += experts * expert_bytes(fmt.encoding, ExpertGrid(layer, hidden, intermediate, parts))
    return total


def commands(model: MoeModel, where: str) -> list[str]:
    pools = machine.pool_count()
    shapes = [model.shape(layer)[1:] for layer in model.layers]
    lines = []
    for option, fmt in formats_of("cpu").items():
        if not (counts := legal_counts(fmt, shapes)):
            continue
        parts = next((t for t in (pools, DEFAULT_PARTS) if t in counts), counts[-1])
        name = Path(where).expanduser().resolve().name.rpartition(":")[2]
        output = f"{name.removesuffix(model.source.container.suffix)}-{fmt.name}"
        words = ["ktconvert", "cpu", "-i", where, "-o", output, "--quant-method", option]
        lines.append(shlex.join([*words, "--threadpool-count", str(parts)]))
    return lines
