"""Which experts are hot: torch computes them, on a GPU if there is one, and the CPU runtime the cold ones."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ktconvert.layouts.checkpoints.containers.safetensors import read_matrix
from ktconvert.layouts.errors import InputError, KtconvertError, UsageError
from ktconvert.layouts.files.publish import MARK
from ktconvert.layouts.files.shards import plan_shard
from ktconvert.layouts.tensors import TensorInfo
from ktconvert.native_quant.arrays import F64, I64, Array, Bool
from ktconvert.native_quant.runtime.install import generate_gpu_experts_masks

Mask = Bool
REMEDY = "choose fewer hot experts"
KEY = "gpu_experts_mask"
FORM = f"a safetensors file with a tensor {KEY!r}, bool [decoder layers, experts], is needed"


def check(mask: object, count: int | None) -> None:
    """Raises UsageError for a mask and a count together, and for a count below 0."""
    if mask is not None and count is not None:
        raise UsageError("a mask of experts and a number of experts both say which experts are hot; give one of them")
    if count is not None and count < 0:
        raise UsageError(f"{count} experts cannot be hot; give a number from 0 to the experts of a layer")


def read(path: Path) -> Mask:
    """The mask in a file. Raises InputError where the file is damaged, or holds no such tensor."""
    values = read_matrix(path, KEY, "BOOL", FORM)
    if (values > 1).any():
        raise InputError(f"{path}: {KEY!r} holds bytes that are neither 0 nor 1; {FORM}")
    return values.astype(np.bool_)


def data_of(mask: Mask) -> bytes:
    """The file that `read` reads a mask [layers, experts] from."""
    plan = plan_shard([TensorInfo(KEY, "BOOL", mask.shape, mask.nbytes)], {"generator": MARK})
    return plan.header + mask.tobytes()


def per_layer(
    mask: str | list[list[bool]] | None, count: int | None, experts: Mapping[int, int], layers: int
) -> dict[int, Mask]:
    """Layer -> bool [E], whether its experts are hot, for each layer that has experts.

    mask     a file, or the mask itself, [layers, E]: row n is layer n of the model, as in SGLang; rows of layers
             without experts are ignored
    count    instead: this many of each layer, the first ones
    experts  layer -> E; layers: decoder layers of the model, with and without experts
    Raises InputError where the mask does not fit the model, UsageError where there are fewer experts than `count`.
    """
    check(mask, count)
    if mask is None:
        for layer, total in experts.items():
            if (count or 0) > total:
                raise UsageError(f"{count} experts cannot be hot: layer {layer} has {total}; give at most {total}")
        return {layer: np.arange(total) < (count or 0) for layer, total in experts.items()}
    where = mask if isinstance(mask, str) else KEY
    table: Array = read(Path(mask).expanduser()) if isinstance(mask, str) else np.array(mask)
    shape = list(table.shape)
    if table.dtype != np.bool_ or table.ndim != 2:
        raise InputError(f"{where}: is {table.dtype} of shape {shape}; bool [decoder layers, experts] is needed")
    for layer, total in experts.items():
        if table.shape != (layers, total):
            has = f"{layers} decoder layers, and layer {layer} has {total} experts"
            needed = f"a mask of shape {[layers, total]} is needed"
            raise InputError(f"{where}: has shape {shape}, but the model has {has}; {needed}")
    return {layer: table[layer].copy() for layer in experts}


# --- chosen by how often experts were routed to ----------------------------------------------------


def of_each_layer(counts: I64, number: int) -> Mask:
    """bool [layers, experts]: of each layer with experts so many, those with the most tokens; of equals the first."""
    if number > counts.shape[1]:
        raise UsageError(f"--num-gpu-experts {number}: a layer has {counts.shape[1]} experts; give at most so many.")
    mask = np.zeros(counts.shape, np.bool_)
    np.put_along_axis(mask, np.argsort(-counts, axis=1, kind="stable")[:, :number], True, axis=1)
    return mask & counts.any(axis=1, keepdims=True)


def of_all_layers(counts: I64, number: int) -> Mask:
    """bool [layers, experts]: this many experts, those with the most tokens in any layer; of equals the ones that
    kt-kernel takes, but none of a layer without experts. Raises UsageError where there are fewer, KtconvertError where
    torch is not installed.
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


def coverage(counts: I64, mask: Mask) -> F64:
    """The part of each layer's routed tokens that go to hot experts, float64 [layers]; NaN for layers without."""
    total = counts.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray((counts * mask).sum(axis=1) / total)
