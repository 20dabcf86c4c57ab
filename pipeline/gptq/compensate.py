"""GPTQ as a consumer of the walk: experts are rounded with compensation, and the next layer reads what these give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import Bytes, Encoding, scale_numbers
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.layouts.outputs.parts import ExpertGrid, Part, cut_parts, join_parts
from ktconvert.pipeline.walk import bf16
from ktconvert.pipeline.walk.consumers import Evidence, ExpertGroup, ExpertWeights
from ktconvert.quantizers import gptq
from ktconvert.quantizers.reference import F32

if TYPE_CHECKING:
    import torch

Item = tuple[int, str]  # (expert, projection)
Stored = list[tuple[Part, list[Bytes]]]  # the parts of a linear, each with its tensors in the encoding's order
Scales = npt.NDArray[Any]  # as Encoding.scales gives them
Write = Callable[[int, str, Stored], None]


class Nearest(Protocol):
    """Rounds a linear by itself, each code to the nearest. Raises InputError for a value that is not finite."""

    def __call__(self, expert: int, projection: str, importance: F32 | None) -> Stored:
        """The linear. importance: of its columns, [k]; None if nothing is known of its inputs."""


@dataclass
class Compensate:
    """Quantizes one layer's experts to an encoding with scales and codes, with the scales of rounding to nearest.

    parts      NUMA parts of a linear
    dampening  fraction of mean(diag(H)) that is added to the diagonal
    rounding   "library": codes are derived again from BF16 values by a division in BF16, as compressed-tensors does,
               which moves one
               8-bit code in 400 by one; "float32": the codes that GPTQ chose
    sees       which tokens an expert is calibrated on, as Evidence says
    floor      unless every expert sees all tokens: an expert with fewer is rounded to nearest
    nearest    rounds a linear to nearest
    write      takes the linears, in file order
    too_few    experts that were rounded to nearest since too few tokens were routed to them
    fell_back  linears whose Hessian could not be factorized, and that were rounded to nearest
    """

    encoding: Encoding
    dampening: float
    rounding: str
    sees: str
    floor: int
    nearest: Nearest
    write: Write
    parts: int = 1
    too_few: list[int] = field(default_factory=list)
    fell_back: list[Item] = field(default_factory=list)
    replaces = True
    _shared: gptq.Factor | None = None  # of the Hessian that gate and up of all experts share

    @property
    def evidence(self) -> Evidence:
        """The Hessians of all linears."""
        return Evidence(gptq.Hessian.empty, self.sees)

    def take(self, group: ExpertGroup) -> Mapping[int, ExpertWeights]:
        """Quantize and write the experts of a group; returns their dequantized weights.

        Raises VerificationError, naming the layer, where a Hessian or a loss is not finite.
        """
        few = [e for e in group.weights if self.sees != "all" and group.tokens[e] < self.floor]
        enough = [e for e in group.weights if e not in few]
        stored: dict[Item, Stored] = {}
        rounded: dict[int, ExpertWeights] = {}
        for batch in [enough] if self.evidence.shared else [[e] for e in enough]:
            if batch:
                rounded |= self._compensate_experts(group, batch, stored)
        for expert in few:
            rounded[expert] = self._round(group, expert, stored)
        self.too_few += few
        for expert in group.weights:
            for projection in PROJECTIONS:
                self.write(expert, projection, stored.pop((expert, projection)))
        return rounded

    def _round(self, group: ExpertGroup, expert: int, stored: dict[Item, Stored]) -> ExpertWeights:
        """Round an expert to nearest."""
        import torch

        values = []
        for projection in PROJECTIONS:
            linear = self._nearest(group, expert, projection)
            decoded = [self.encoding.decode(tensors, part.n, part.k, slice(None)) for part, tensors in linear]
            weight = getattr(group.weights[expert], projection)
            values.append(torch.from_numpy(join_parts(projection, decoded)).to(weight))
            stored[expert, projection] = linear
        return ExpertWeights(*values)

    def _nearest(self, group: ExpertGroup, expert: int, projection: str) -> Stored:
        """A linear rounded to nearest, by the mean square of each input column up to a common factor, if any."""
        import torch

        diagonal: F32 = torch.diagonal(_hessian(group, expert, projection).sum).float().cpu().numpy().copy()
        return self.nearest(expert, projection, diagonal if diagonal.any() else None)

    def _compensate_experts(
        self, group: ExpertGroup, batch: Sequence[int], stored: dict[Item, Stored]
    ) -> dict[int, ExpertWeights]:
        """Experts whose gate and up share a Hessian: these as one tall matrix, down expert by expert."""
        import torch

        items = [(e, p) for e in batch for p in ("gate", "up")]
        scales = [self._scales(group, *item) for item in items]
        tall = torch.cat([getattr(group.weights[e], p) for e, p in items])
        both, codes = self._compensate(group, items, tall, np.concatenate(scales), _hessian(group, *items[0]))
        for item, chosen, scale in zip(items, codes.chunk(len(items)), scales, strict=True):
            stored[item] = packed(self.encoding, item, chosen, scale, self._grid(group))
        values = both.chunk(len(items))
        rounded = {}
        for n, e in enumerate(batch):
            scale = self._scales(group, e, "down")
            down, of_down = self._compensate(
                group, [(e, "down")], group.weights[e].down, scale, _hessian(group, e, "down")
            )
            stored[e, "down"] = packed(self.encoding, (e, "down"), of_down, scale, self._grid(group))
            rounded[e] = ExpertWeights(values[2 * n], values[2 * n + 1], down)
        return rounded

    def _grid(self, group: ExpertGroup) -> ExpertGrid:
        width, hidden = next(iter(group.weights.values())).gate.shape
        return ExpertGrid(group.layer, hidden, width, self.parts)

    def _scales(self, group: ExpertGroup, expert: int, projection: str) -> Scales:
        """The scales of rounding a linear to nearest, [n, groups]."""
        assert self.encoding.scales is not None
        linear = self._nearest(group, expert, projection)
        own = [self.encoding.scales(tensors[-1], part.n, part.k) for part, tensors in linear]
        return join_parts(projection, own)

    def _compensate(
        self,
        group: ExpertGroup,
        items: Sequence[Item],
        weight: torch.Tensor,
        scales: Scales,
        hessian: gptq.Hessian,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize stacked linears with the same inputs, BF16 [n, k]: rounded values in BF16, codes, int8 [n, k]."""
        import torch

        code_range = self.encoding.grid.code_range
        scale = steps(self.encoding, scales).to(weight.device)
        try:
            with torch.inference_mode():
                factor = self._factor(hessian, shared=items[0][1] == "gate" and self.evidence.shared)
                values = gptq.compensate(weight, factor, scale, code_range).values
                rounded = values.to(weight.dtype)
                exact = self.rounding == "float32"
                codes = gptq.codes(values if exact else rounded, scale.float() if exact else scale, code_range)
        except gptq.NotFinite as error:
            raise VerificationError(
                f"layer {group.layer}, {_names(items)}: {error}; the model gives NaN or infinity on this data set. Try "
                "another --dataset, or what needs none: --quant-method RTN (gpu), --scale mse (cpu)."
            ) from error
        if factor.fell_back:
            self.fell_back += items
        return rounded, codes

    def _factor(self, hessian: gptq.Hessian, *, shared: bool) -> gptq.Factor:
        """The factor of a Hessian; a Hessian that all experts of a layer share is factorized once."""
        if not shared:
            return gptq.factorize(hessian, self.dampening)
        if self._shared is None:
            self._shared = gptq.factorize(hessian, self.dampening)
        return self._shared


def steps(encoding: Encoding, scales: Scales) -> torch.Tensor:
    """What the codes are multiples of, of scales [n, groups]: BF16 where scales are BF16, else float32."""
    import torch

    if scales.dtype == np.uint16:
        return bf16.to_tensor(scales) * encoding.grid.step
    return torch.from_numpy(scale_numbers(scales)) * encoding.grid.step


def packed(encoding: Encoding, item: Item, codes: torch.Tensor, scales: Scales, grid: ExpertGrid) -> Stored:
    """The parts of a linear with these codes, int8 [n, k], and scales [n, groups]."""
    expert, projection = item
    cut = (cut_parts(projection, whole, grid.numa) for whole in (codes.cpu().numpy(), scales))
    stored: Stored = []
    for part, own, own_scales in zip(grid.parts(expert, projection), *cut, strict=True):
        tensors = [np.empty(tensor.nbytes, np.uint8) for tensor in encoding.tensors(part.n, part.k)]
        assert encoding.pack is not None
        encoding.pack(np.ascontiguousarray(own), np.ascontiguousarray(own_scales), tensors)
        stored.append((part, tensors))
    return stored


def _hessian(group: ExpertGroup, expert: int, projection: str) -> gptq.Hessian:
    hessian: gptq.Hessian = (group.down if projection == "down" else group.gate_up)[expert]
    return hessian


def _names(items: Sequence[Item]) -> str:
    """The linears that are quantized together, for messages."""
    first, last = items[0][0], items[-1][0]
    which = f"expert {first}" if first == last else f"experts {first} to {last}"
    return f"{' and '.join(dict.fromkeys(p for _, p in items))} of {which}"
