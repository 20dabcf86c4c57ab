"""GPTQ as a consumer of the walk: experts are rounded with compensation, and the next layer reads what these give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.encodings.encoding import Encoding, scale_numbers
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.layouts.outputs.parts import ExpertGrid, Item, Parts, cut_parts, empty_parts, join_parts
from ktconvert.pipeline.calibration import bf16
from ktconvert.pipeline.calibration.consumers import Evidence, ExpertGroup, ExpertWeights
from ktconvert.quantizers import descent, gptq, predictions
from ktconvert.quantizers.reference import F32, e8m0_exponents

if TYPE_CHECKING:
    import torch

Scales = npt.NDArray[Any]  # as Encoding.scales gives them
Write = Callable[[int, str, Parts], None]
# (expert, projection, importance of its columns [k], None if nothing is known of its inputs) -> the linear, each code
# rounded to nearest. Raises InputError for a value that is not finite.
Nearest = Callable[[int, str, F32 | None], Parts]


@dataclass
class Compensate:
    """Quantizes one layer's experts, beginning with the scales of rounding to nearest.

    dampening  fraction of mean(diag(H)) that is added to the diagonal
    rounding   "library": codes are derived again from BF16 values by a division in BF16, as compressed-tensors does,
               which moves one 8-bit code in 400 by one; "float32": the codes that GPTQ chose
    sees       which tokens an expert is calibrated on, as Evidence says
    floor      a linear that fewer tokens than these reached is rounded to nearest
    nearest    rounds a linear to nearest
    write      takes the linears, in file order
    parts      NUMA parts of a linear
    steps      "plain": GPTQ alone; "descent": errors are weighted by routing weights, and scales and codes improved
               after GPTQ; "full": errors are also weighed by what they do to predictions
    too_few    experts with linears that were rounded to nearest since too few tokens were routed to them
    fell_back  linears that were rounded to nearest since their Hessian could not be factorized
    shared     what all experts of the layer share
    """

    encoding: Encoding
    dampening: float
    rounding: str
    sees: str
    floor: int
    nearest: Nearest
    write: Write
    parts: int = 1
    steps: str = "plain"
    too_few: list[int] = field(default_factory=list)
    fell_back: list[Item] = field(default_factory=list)
    shared: Shared = field(default_factory=lambda: Shared())
    replaces = True

    @property
    def evidence(self) -> Evidence:
        return Evidence(gptq.Hessian.empty, self.sees, self.steps != "plain", self.steps == "full")

    def take(self, group: ExpertGroup) -> Mapping[int, ExpertWeights]:
        """Quantize and write experts; returns their dequantized weights. VerificationError for what is not finite."""
        if group.left is not None:
            return self._take_over(group, group.left)
        rounded = {}
        for expert in group.weights:
            made = self._quantize(group, expert)
            for projection in PROJECTIONS:
                self.write(expert, projection, made[projection][0])
            rounded[expert] = ExpertWeights(**{projection: values for projection, (_, values) in made.items()})
        return rounded

    def left(self, linears: Sequence[tuple[int, str, Parts]]) -> dict[str, Any]:
        """What a worker leaves of a group beside evidence and weights; linears: as they were written."""
        import torch

        tensors = [
            (expert, projection, [[torch.from_numpy(x) for x in each] for _, each in stored])
            for expert, projection, stored in linears
        ]
        return {"linears": tensors, "too_few": self.too_few, "fell_back": self.fell_back}

    def _take_over(self, group: ExpertGroup, left: Mapping[str, Any]) -> Mapping[int, ExpertWeights]:
        for expert, projection, stored in left["linears"]:
            width, hidden = group.weights[expert].gate.shape
            parts = ExpertGrid(group.layer, hidden, width, self.parts).parts(expert, projection)
            tensors = [[tensor.cpu().numpy() for tensor in each] for each in stored]
            self.write(expert, projection, [*zip(parts, tensors, strict=True)])
        self.too_few += left["too_few"]
        self.fell_back += left["fell_back"]
        return group.weights

    def _quantize(self, group: ExpertGroup, expert: int) -> dict[str, tuple[Parts, torch.Tensor]]:
        """Each linear of an expert, and the BF16 values that its codes stand for."""
        few = group.tokens[expert] < self.floor
        made: dict[str, tuple[Parts, torch.Tensor]] = {}
        # Gate and up read the same: they are quantized as one tall matrix.
        for projections, own_tokens in ((("gate", "up"), not self.evidence.shared), (("down",), self.evidence.routed)):
            if few and own_tokens:
                made |= {projection: self._round(group, expert, projection) for projection in projections}
            else:
                made |= self._compensate(group, expert, projections)
        if few and self.evidence.routed:
            self.too_few.append(expert)
        return made

    def _round(self, group: ExpertGroup, expert: int, projection: str) -> tuple[Parts, torch.Tensor]:
        import torch

        linear = self._nearest(group, expert, projection)
        decoded = [self.encoding.decode(tensors, part.n, part.k, slice(None)) for part, tensors in linear]
        weight = getattr(group.weights[expert], projection)
        return linear, torch.from_numpy(join_parts(projection, decoded)).to(weight)

    def _nearest(self, group: ExpertGroup, expert: int, projection: str) -> Parts:
        """A linear rounded to nearest, by the mean square of each input column up to a common factor, if any."""
        import torch

        diagonal: F32 = torch.diagonal(_hessian(group, expert, projection).sum).float().cpu().numpy().copy()
        return self.nearest(expert, projection, diagonal if diagonal.any() else None)

    def _scales(self, group: ExpertGroup, expert: int, projection: str) -> Scales:
        """The scales of rounding a linear to nearest, [n, groups]."""
        assert self.encoding.scales is not None
        linear = self._nearest(group, expert, projection)
        return join_parts(projection, [self.encoding.scales(last, part.n, part.k) for part, (*_, last) in linear])

    def _compensate(
        self, group: ExpertGroup, expert: int, projections: Sequence[str]
    ) -> dict[str, tuple[Parts, torch.Tensor]]:
        import torch

        items = [(expert, projection) for projection in projections]
        weight = torch.cat([getattr(group.weights[expert], projection) for projection in projections])
        scales = np.concatenate([self._scales(group, *item) for item in items])
        scale = steps(self.encoding, scales).to(weight.device)
        try:
            with torch.inference_mode():
                shared = projections[0] == "gate" and self.evidence.shared
                metric = self._metric(_hessian(group, *items[0]), shared=shared)
                rows = self._rows(group, expert, projections)
                if rows is None:
                    chosen, values = self._choose(weight, scale, metric)
                else:
                    chosen = predictions.in_turn(
                        weight, rows, lambda some, numbers: self._choose(some, scale[numbers], metric)[0]
                    )
                    values = chosen.values
                codes, rounded = chosen.codes, values.to(weight.dtype)
                if self.steps != "plain":
                    scales = stored_scales(self.encoding, chosen.scale)
        except gptq.NotFinite as error:
            where = f"layer {group.layer}, {' and '.join(projections)} of expert {expert}"
            raise VerificationError(
                f"{where}: {error}; the model gives NaN or infinity on this data set. Try another --dataset, or what "
                "needs none: --quant-method RTN (gpu), --scale mse (cpu)."
            ) from error
        if metric.factor.fell_back:
            self.fell_back += items
        width, hidden = group.weights[expert].gate.shape
        expert_grid, n = ExpertGrid(group.layer, hidden, width, self.parts), len(items)
        linears = zip(items, codes.chunk(n), np.split(scales, n), rounded.chunk(n), strict=True)
        return {
            item[1]: (packed(self.encoding, item, own, own_scales, expert_grid), values)
            for item, own, own_scales, values in linears
        }

    def _choose(
        self, weight: torch.Tensor, scale: torch.Tensor, metric: _Metric
    ) -> tuple[descent.Chosen, torch.Tensor]:
        """The codes and scales of rows of a linear, beginning with these scales, and the values that they stand for."""
        grid, exact = self.encoding.grid, self.rounding == "float32"
        if metric.errors is not None:
            chosen = descent.choose(weight, metric.errors, scale.float(), grid)
            return chosen, chosen.values
        values = gptq.compensate(weight, metric.factor, scale, grid.code_range)
        values, own = (values, scale.float()) if exact else (values.bfloat16(), scale)
        return descent.Chosen(gptq.codes(values, own, grid.code_range), scale.float()), values

    def _rows(self, group: ExpertGroup, expert: int, projections: Sequence[str]) -> predictions.Rows | None:
        """The root of what the model's predictions feel of these linears' outputs; None where nobody asked."""
        if group.outputs is None:
            return None
        if projections != ("down",):
            down = group.weights[expert].down
            return predictions.factorize(predictions.of_middle(group.outputs, down, group.slopes[expert]))
        self.shared.outputs = self.shared.outputs or predictions.factorize(group.outputs)
        return self.shared.outputs

    def _metric(self, hessian: gptq.Hessian, *, shared: bool) -> _Metric:
        """What follows from a Hessian; one that all experts of a layer share is factorized once."""
        if shared and self.shared.metric is not None:
            return self.shared.metric
        factor = gptq.factorize(hessian, self.dampening)
        descends = self.steps != "plain" and not factor.fell_back
        metric = _Metric(factor, descent.metric_of(hessian, factor, self.dampening) if descends else None)
        if shared:
            self.shared.metric = metric
        return metric


class _Metric(NamedTuple):
    """The factor of a Hessian, and what errors cost; None where codes stay as GPTQ gives them."""

    factor: gptq.Factor
    errors: descent.Metric | None


@dataclass
class Shared:
    """What all experts of a layer share: what follows from the Hessian of gate and up, and the root of what
    predictions feel of the layer's outputs.
    """

    metric: _Metric | None = None
    outputs: predictions.Rows | None = None


def steps(encoding: Encoding, scales: Scales) -> torch.Tensor:
    """What the codes are multiples of, of scales [n, groups]: BF16 where scales are BF16, else float32."""
    import torch

    if scales.dtype == np.uint16:
        return bf16.to_tensor(scales) * encoding.grid.step
    return torch.from_numpy(scale_numbers(scales)) * encoding.grid.step


def stored_scales(encoding: Encoding, steps: torch.Tensor) -> Scales:
    """The inverse of `steps` for float32 numbers that can be stored: scales as Encoding.scales gives them."""
    scales = steps / encoding.grid.step
    if encoding.grid.scales == "BF16":
        return bf16.to_bits(scales.bfloat16())
    numbers = np.ascontiguousarray(scales.cpu().numpy())
    return e8m0_exponents(numbers) if encoding.grid.scales == "U8" else numbers


def packed(encoding: Encoding, item: Item, codes: torch.Tensor, scales: Scales, grid: ExpertGrid) -> Parts:
    """The parts of a linear with these codes, int8 [n, k], and scales [n, groups]."""
    expert, projection = item
    cut = (cut_parts(projection, whole, grid.numa) for whole in (codes.cpu().numpy(), scales))
    stored = empty_parts(encoding, grid.parts(expert, projection))
    assert encoding.pack is not None
    for (_, tensors), own, own_scales in zip(stored, *cut, strict=True):
        encoding.pack(np.ascontiguousarray(own), np.ascontiguousarray(own_scales), tensors)
    return stored


def _hessian(group: ExpertGroup, expert: int, projection: str) -> gptq.Hessian:
    hessian: gptq.Hessian = (group.down if projection == "down" else group.gate_up)[expert]
    return hessian
