"""Hot experts, which torch computes: read one linear at a time, packed integers as codes and scales, others as BF16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, silu

from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.source import open_checkpoint
from ktconvert.layouts.errors import InputError, ResourceError, UnsupportedError
from ktconvert.native_quant import kernels, machine
from ktconvert.native_quant.arrays import F32, Array
from ktconvert.native_quant.matrix import INT4, INT8
from ktconvert.native_quant.own_cpus import use_own_cpus
from ktconvert.native_quant.runtime.hot_mask import REMEDY, Mask
from ktconvert.quantizers.packed import signed_codes

LARGEST = 2.0**120  # a scale above it could give a weight that BF16 cannot hold


class HotWeights:
    """The routed experts of a checkpoint: a directory, or a model of the hub. Only headers are read at first."""

    def __init__(self, where: str | Path) -> None:
        self._source = open_checkpoint(where)
        self._source.require_one_reading()
        self.root = self._source.root
        self.model: MoeModel = recognise(self._source)

    def require(self, layer: int, shape: tuple[int, int, int]) -> None:
        """Raises UnsupportedError where a layer is missing, or has other sizes E, H, I than the loaded model."""
        e, h, i = self.model.shape(layer) if layer in self.model.layers else (0, 0, 0)
        what = f"layer {layer} has {e} experts of hidden size {h} and width {i}, the model {{}} of {{}} and {{}}"
        if not e:
            what = f"holds no experts of layer {layer}, which the model has"
        if (e, h, i) != shape:
            raise UnsupportedError(f"{self.root}: {what.format(*shape)}; give a checkpoint of this model")

    def linear(self, layer: int, expert: int, projection: str) -> tuple[Array, F32 | None]:
        """int8 codes [n, k] with float32 scales [n, groups], or BF16 bits [n, k] without. Raises InputError."""
        linear = self.model.linear(layer, expert, projection)
        is_packed = linear.kind in (INT4, INT8) and linear.zeros is None and linear.group_of is None
        values: Array = signed_codes(linear) if is_packed else kernels.decode(linear)
        for info in self.model.expert_tensors(layer, expert):
            self._source.release(info)
        if not is_packed:
            return values, None
        assert linear.scales is not None
        largest = float(np.max(np.abs(linear.scales)))
        if largest > LARGEST:
            scale = self.model.weight(layer, expert, projection).tensors["scale"]
            what = f"tensor {scale.name!r} holds {largest}, more than BF16 weights can have"
            raise InputError(f"{self._source.path(scale)}: {what}; make this checkpoint again")
        return values, linear.scales


class HotExperts:
    """Some of a layer's E experts, those of mask, bool [E]: expert -> BF16 (gate and up [2I, H], down [H, I])."""

    def __init__(
        self, mask: Mask, weights: Mapping[int, tuple[torch.Tensor, torch.Tensor]], device: torch.device
    ) -> None:
        self.mask, self.device = mask, device
        self.weights = dict(sorted(weights.items()))

    def __len__(self) -> int:
        return len(self.weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> HotExperts:
        return self  # no one writes to them

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's hot experts, in the order of their numbers: float32 [T, H] on `device`.
        hidden [T, H] anywhere; ids int64 and weights float32 [T, k] on the CPU, so that the CPU never waits for a GPU.
        """
        hidden = hidden.to(self.device, torch.bfloat16)
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=self.device)
        order = ids.reshape(-1).argsort(stable=True)  # pairs (token, expert), by expert
        starts = torch.searchsorted(ids.reshape(-1)[order], torch.arange(len(self.mask) + 1, device="cpu")).tolist()
        tokens = (order // ids.shape[1]).to(self.device)
        scale = weights.reshape(-1)[order].to(self.device)
        for expert, (gate_up, down) in self.weights.items():
            pairs = slice(starts[expert], starts[expert + 1])
            if pairs.start == pairs.stop:
                continue
            gate, up = linear(hidden[tokens[pairs]], gate_up).float().chunk(2, dim=-1)
            output = linear((silu(gate) * up).to(torch.bfloat16), down)
            out.index_add_(0, tokens[pairs], output.float() * scale[pairs, None])
        return out


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def require_space(masks: Iterable[Mask], hidden: int, width: int, where: torch.device) -> None:
    """Raises ResourceError where the hot experts of all layers do not fit into free memory."""
    count = sum(int(mask.sum()) for mask in masks)
    need = count * 3 * hidden * width * 2
    free = torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else machine.memory_available()
    if need > free:
        what = f"take {need / 2**30:.1f} GiB in BF16, and {where} has {free / 2**30:.1f} GiB left"
        raise ResourceError(f"{count} hot experts {what}; {REMEDY}")


def load(source: HotWeights, layer: int, mask: Mask, where: torch.device) -> HotExperts:
    """The hot experts of one layer, read and unpacked by several threads. No other expert is read."""

    def matrix(expert: int, projection: str) -> torch.Tensor:
        """code * scale, rounded to BF16: what compressed-tensors unpacks."""
        values, scale = source.linear(layer, expert, projection)
        if scale is None:
            return torch.from_numpy(values).view(torch.bfloat16).to(where)
        codes = torch.from_numpy(values).to(where).to(torch.float32)
        scales = torch.from_numpy(scale).to(where)
        return (codes.view(*scales.shape, -1) * scales[:, :, None]).view(codes.shape).to(torch.bfloat16)

    def one(expert: int) -> tuple[int, tuple[torch.Tensor, torch.Tensor]]:
        gate_up = torch.cat([matrix(expert, "gate"), matrix(expert, "up")])
        return expert, (gate_up, matrix(expert, "down"))

    with ThreadPoolExecutor(machine.physical_cores(), initializer=use_own_cpus) as executor:
        return HotExperts(mask, dict(executor.map(one, mask.nonzero()[0].tolist())), where)
