"""The choice of hot experts, by how often experts were routed to."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.errors import KtconvertError, UsageError
from ktconvert.layouts.statistics.imatrix import I64
from ktconvert.native_quant.runtime.hot_mask import Mask
from ktconvert.native_quant.runtime.install import generate_gpu_experts_masks


def of_each_layer(counts: I64, number: int) -> Mask:
    """bool [layers, experts]: this many experts of each layer, those with the most tokens; of equals the first.

    counts  int64 [layers, experts]; a layer where all are zero has no experts, and gets none
    Raises UsageError where a layer has fewer experts.
    """
    if number > counts.shape[1]:
        raise UsageError(f"--num-gpu-experts {number}: a layer has {counts.shape[1]} experts; give at most so many.")
    mask = np.zeros(counts.shape, np.bool_)
    np.put_along_axis(mask, np.argsort(-counts, axis=1, kind="stable")[:, :number], True, axis=1)
    return mask & counts.any(axis=1, keepdims=True)


def of_all_layers(counts: I64, number: int) -> Mask:
    """bool [layers, experts]: this many experts, those with the most tokens in any layer; of equals the ones that
    kt-kernel's generate_gpu_experts_masks takes (kt_kernel/experts_base.py), which asks torch.topk. Only where that
    would take experts of a layer without experts, others are taken instead. Raises UsageError where there are fewer
    experts, KtconvertError where torch is not installed.
    """
    there = counts.any(axis=1, keepdims=True)
    most = int(there.sum()) * counts.shape[1]
    if number > most:
        raise UsageError(f"--total {number}: the layers have {most} experts in all; give at most so many.")
    if find_spec("torch") is None:
        raise KtconvertError("--total needs torch, not installed here: pip install 'ktconvert[torch]'")
    import torch

    for known in (counts, np.where(there, counts, -1)):
        mask: Mask = generate_gpu_experts_masks(torch.from_numpy(np.ascontiguousarray(known)), number).numpy()
        if (mask <= there).all():
            break
    return mask


def coverage(counts: I64, mask: Mask) -> npt.NDArray[np.float64]:
    """The part of each layer's routed tokens that go to hot experts, float64 [layers]; NaN for layers without."""
    total = counts.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray((counts * mask).sum(axis=1) / total)
