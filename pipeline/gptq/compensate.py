"""GPTQ as a consumer of the walk: experts are rounded with error compensation, and the rounded ones compute what the
next layer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.outputs import PROJECTIONS, Form
from ktconvert.layouts.outputs.output import Bytes
from ktconvert.pipeline.walk import bf16
from ktconvert.pipeline.walk.consumers import Evidence, ExpertGroup, ExpertWeights
from ktconvert.quantizers import gptq

if TYPE_CHECKING:
    import torch

Item = tuple[int, str]  # (expert, projection)
Stored = list[Bytes]  # the tensors of a linear, in the form's order
Nearest = Callable[[int, str], Stored]  # rounds a linear to nearest; raises InputError for a value that is not finite
Write = Callable[[int, str, Stored], None]


@dataclass
class Compensate:
    """Quantizes one layer's experts to a form, with the scales of rounding to nearest.

    dampening  fraction of mean(diag(H)) that is added to the diagonal
    rounding   "library": codes are derived again from BF16 values by a division in BF16, as compressed-tensors does,
               which moves one
               8-bit code in 400 by one; "float32": the codes that GPTQ chose
    routed     whether an expert is calibrated on the tokens routed to it only, instead of on all
    floor      with routed: an expert with fewer tokens is rounded to nearest
    nearest    rounds a linear to nearest
    write      takes the linears, in file order
    too_few    experts that were rounded to nearest since too few tokens were routed to them
    fell_back  linears whose Hessian could not be factorized, and that were rounded to nearest
    """

    form: Form
    dampening: float
    rounding: str
    routed: bool
    floor: int
    nearest: Nearest
    write: Write
    too_few: list[int] = field(default_factory=list)
    fell_back: list[Item] = field(default_factory=list)
    replaces = True
    _shared: gptq.Factor | None = None  # of the Hessian that gate and up of all experts share

    @property
    def evidence(self) -> Evidence:
        """The Hessians of all linears."""
        return Evidence(gptq.Hessian.empty, "routed" if self.routed else "all")

    def take(self, group: ExpertGroup) -> Mapping[int, ExpertWeights]:
        """Quantize and write the experts of a group; returns their dequantized weights.

        Raises VerificationError, naming the layer, where a Hessian or a loss is not finite.
        """
        batches = [[e] for e in group.weights] if self.routed else [list(group.weights)]
        rounded: dict[int, ExpertWeights] = {}
        for batch in batches:
            if self.routed and group.tokens[batch[0]] < self.floor:
                rounded[batch[0]] = self._round(group, batch[0])
            else:
                rounded |= self._compensate_experts(group, batch)
        return rounded

    def _round(self, group: ExpertGroup, expert: int) -> ExpertWeights:
        """Round an expert to nearest."""
        import torch

        self.too_few.append(expert)
        values = []
        for projection in PROJECTIONS:
            weight = getattr(group.weights[expert], projection)
            stored = self.nearest(expert, projection)
            self.write(expert, projection, stored)
            values.append(torch.from_numpy(self.form.unpack(stored, *weight.shape)).to(weight))
        return ExpertWeights(*values)

    def _compensate_experts(self, group: ExpertGroup, batch: Sequence[int]) -> dict[int, ExpertWeights]:
        """Experts whose gate and up share a Hessian: these as one tall matrix, down expert by expert."""
        import torch

        scales = {(e, p): self._scale(e, p, getattr(group.weights[e], p)) for e in batch for p in PROJECTIONS}
        parts = [(e, p) for e in batch for p in ("gate", "up")]
        tall = torch.cat([getattr(group.weights[e], p) for e, p in parts])
        scale = torch.cat([scales[part] for part in parts])
        both, codes = self._compensate(group, parts, tall, scale, group.gate_up[batch[0]])
        values, chosen = both.chunk(len(parts)), codes.chunk(len(parts))
        rounded = {}
        for n, e in enumerate(batch):
            down, of_down = self._compensate(
                group, [(e, "down")], group.weights[e].down, scales[e, "down"], group.down[e]
            )
            for p, codes in zip(PROJECTIONS, (*chosen[2 * n : 2 * n + 2], of_down), strict=True):
                self.write(e, p, packed(self.form, codes, scales[e, p]))
            rounded[e] = ExpertWeights(values[2 * n], values[2 * n + 1], down)
        return rounded

    def _scale(self, expert: int, projection: str, weight: torch.Tensor) -> torch.Tensor:
        """The scales of rounding a linear to nearest, [n, groups]."""
        import torch

        scales = self.form.scales(self.nearest(expert, projection), *weight.shape)
        return (
            bf16.to_tensor(scales, weight.device)
            if scales.dtype == np.uint16
            else torch.from_numpy(scales).to(weight.device)
        )

    def _compensate(
        self,
        group: ExpertGroup,
        parts: Sequence[Item],
        weight: torch.Tensor,
        scale: torch.Tensor,
        hessian: gptq.Hessian,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize linears with the same inputs, stacked, BF16 [n, k]; returns the rounded values in BF16 and the
        codes, int8 [n, k].
        """
        import torch

        code_range = self.form.grid.low, self.form.grid.high
        scale = scale * self.form.grid.step
        try:
            with torch.inference_mode():
                factor = self._factor(hessian, shared=parts[0][1] == "gate" and not self.routed)
                values = gptq.compensate(weight, factor, scale, code_range).values
                rounded = values.to(weight.dtype)
                exact = self.rounding == "float32"
                codes = gptq.codes(values if exact else rounded, scale.float() if exact else scale, code_range)
        except gptq.NotFinite as error:
            raise VerificationError(
                f"layer {group.layer}, {_names(parts)}: {error}; the model gives NaN or infinity on this data set. Try "
                "another --dataset, or --quant-method RTN, which needs none."
            ) from error
        if factor.fell_back:
            self.fell_back += parts
        return rounded, codes

    def _factor(self, hessian: gptq.Hessian, *, shared: bool) -> gptq.Factor:
        """The factor of a Hessian; a Hessian that all experts of a layer share is factorized once."""
        if not shared:
            return gptq.factorize(hessian, self.dampening)
        if self._shared is None:
            self._shared = gptq.factorize(hessian, self.dampening)
        return self._shared


def packed(form: Form, codes: torch.Tensor, scale: torch.Tensor) -> Stored:
    """The tensors of a linear with these codes, int8 [n, k], and scales, BF16 or float32 [n, groups]."""
    import torch

    stored = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(*codes.shape)]
    scales = bf16.to_bits(scale) if scale.dtype == torch.bfloat16 else scale.cpu().numpy()
    form.pack(codes.cpu().numpy(), scales, stored)
    return stored


def _names(parts: Sequence[Item]) -> str:
    """The linears that are quantized together, for messages."""
    first, last = parts[0][0], parts[-1][0]
    which = f"expert {first}" if first == last else f"experts {first} to {last}"
    return f"{' and '.join(dict.fromkeys(p for _, p in parts))} of {which}"
