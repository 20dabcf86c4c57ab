"""Comparison of converted experts with those of the model's checkpoint, which they replace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ktconvert.layouts.checkpoints.recognition import recognize
from ktconvert.layouts.errors import InputError, KTConvertError
from ktconvert.layouts.sources.source import open_checkpoint
from ktconvert.native_quant.matrix import decode
from ktconvert.native_quant.runtime.experts import KTExperts, open_experts
from ktconvert.native_quant.runtime.hot_experts import Mask
from ktconvert.quantizers.reference import bf16_to_f32

# Minimum cosine between a weight and its converted form. For weights of different experts, it is close to 0.
MIN_COSINE = 0.8
COMPARED_ROWS = 16  # step between compared rows: all rows, in float32, would need more memory than a short prompt


def require_same_experts(
    model: Path, cpu_weights: Path, loaded: Mapping[int, KTExperts], skipped: Mapping[int, Mask]
) -> None:
    """Raise InputError if converted experts are not those of the model's checkpoint, or not in its order.

    Compares some experts of the first and the last layer that have converted experts. Adapters and quantizers move
    weights far less than MIN_COSINE allows.

    model        directory of the checkpoint
    cpu_weights  directory or file of the converted experts
    loaded       layer -> its converted experts
    skipped      layer -> which experts are not loaded, for layers with such experts
    """
    if cpu_weights.resolve() == model.resolve():
        return
    try:
        checkpoint = recognize(open_checkpoint(model), to_read=True)
    except KTConvertError:  # without readable experts there is nothing to compare
        return
    layers = [layer for layer in loaded if layer in checkpoint.moe_layers]
    converted_experts = open_experts(cpu_weights)
    for layer in dict.fromkeys((*layers[:1], *layers[-1:])):
        experts = loaded[layer]
        count = experts.num_experts
        for expert in sorted({0, 1 % count, count // 2, count - 1}):
            if layer in skipped and skipped[layer][expert]:
                continue
            try:
                first = checkpoint.linear(layer, expert, checkpoint.projections[0])
                checkpoint_first = bf16_to_f32(decode(first)[::COMPARED_ROWS])
            except KTConvertError:
                continue
            slices = [first for first, *_ in converted_experts.linears(experts._packed, expert)]
            converted_first = np.concatenate(slices)[::COMPARED_ROWS].copy()
            del slices
            norms = float(np.linalg.norm(converted_first) * np.linalg.norm(checkpoint_first))
            if norms > 0 and float(np.vdot(converted_first, checkpoint_first)) / norms < MIN_COSINE:
                problem = f"expert {expert} of layer {layer} differs from that of {model}"
                raise InputError(problem, "give experts that were converted from this model", path=cpu_weights)
