"""GPTQ of one layer's routed experts: what they read is recorded, they are quantized some at a time, and what they then give is passed on.

Memory is the layer without its experts, a group of experts with their Hessians, and one sequence; what all sequences bring into the
experts, and what comes out, lies in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ktconvert.layouts.checkpoints.experts import MoeModel
from ktconvert.layouts.errors import VerificationError
from ktconvert.layouts.files.rows import RowFile
from ktconvert.layouts.outputs import PROJECTIONS
from ktconvert.layouts.outputs.compressed import Compressed
from ktconvert.layouts.outputs.linear_names import linear_name
from ktconvert.native_quant import kernels
from ktconvert.pipeline.walk.layered import LayeredModel
from ktconvert.quantizers import gptq, groups

if TYPE_CHECKING:
    import torch

Packed = npt.NDArray[np.int32]
Scales = npt.NDArray[np.uint16]
Rounding = tuple["torch.Tensor", Packed]  # what codes stand for, BF16 [n, k], and weight_packed
# (expert, projection) -> weight_packed and weight_scale, rounded to nearest; raises InputError for a value that is not finite
Rounded = Callable[[int, str], tuple[Packed, Scales]]


@dataclass(frozen=True)
class Work:
    """One layer: what is quantized, how, and on which sequences.

    lengths    tokens of each sequence; its rows follow each other in the files
    dampening  fraction of mean(diag(H)) added to the diagonal
    rounding   "library": codes are found again by a division in BF16, as compressed-tensors does; "float32": those that GPTQ chose
    routed     whether an expert is calibrated on the tokens routed to it only, instead of on all
    floor      with routed: an expert with fewer tokens is rounded to nearest
    group      experts that are in memory at a time
    """

    model: MoeModel
    form: Compressed
    layer: int
    lengths: Sequence[int]
    dampening: float
    rounding: str
    routed: bool
    floor: int
    group: int

    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each sequence's rows."""
        start = 0
        for length in self.lengths:
            yield start, start + length
            start += length


@dataclass
class Told:
    """What is worth telling of a layer.

    tokens     tokens routed to each expert, over all sequences
    rounded    experts that were rounded to nearest since too few tokens were routed to them
    fell_back  linears whose Hessian could not be factorized, and that were rounded to nearest
    """

    tokens: npt.NDArray[np.int64]
    rounded: list[int] = field(default_factory=list)
    fell_back: list[str] = field(default_factory=list)


@dataclass
class Inputs:
    """What the layer's experts read: rows in a file, and per sequence the ids and weights [T, k] of the router."""

    rows: RowFile
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    hessian: gptq.Hessian | None


@dataclass
class Linears:
    """One expert's weights in BF16, and its Hessians."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    entering: gptq.Hessian | None
    inner: gptq.Hessian | None


def record(work: Work, lm: LayeredModel, entering: RowFile, path: Path) -> Inputs:
    """Run a loaded layer as far as its experts, for all sequences; what they would read goes to a new file at `path`."""
    rows = RowFile(path, entering.count, entering.width, new=True)
    hessian = None if work.routed else gptq.Hessian.empty(entering.width, lm.device)
    found = Inputs(rows, [], [], hessian)
    for start, stop in work.spans():
        x, ids, weights = lm.routed_inputs(work.layer, from_bits(entering.read(start, stop), lm.device))
        if hessian is not None:
            hessian.add(x)
        rows.write(start, bits(x))
        found.ids.append(ids.int().cpu())
        found.weights.append(weights.cpu())
    return found


def token_counts(work: Work, inputs: Inputs) -> npt.NDArray[np.int64]:
    """Tokens routed to each expert."""
    experts = work.model.shape(work.layer)[0]
    counts = np.zeros(experts, np.int64)
    for ids in inputs.ids:
        counts += np.bincount(ids.numpy().reshape(-1), minlength=experts)[:experts]
    return counts


def quantize_experts(
    work: Work, lm: LayeredModel, inputs: Inputs, rounded: Rounded, told: Told, outputs: RowFile | None
) -> Iterator[tuple[int, str, Packed, Scales]]:
    """All linears of the layer in file order: (expert, projection, weight_packed, weight_scale).

    outputs  where the sum that the quantized experts give each token is put; None where nobody asks.
    Raises VerificationError, naming the layer, where a Hessian or a loss is not finite.
    """
    experts = work.model.shape(work.layer)[0]
    for start in range(0, experts, work.group):
        group = range(start, min(start + work.group, experts))
        linears = {e: _load(work, lm, e, told) for e in group}
        _calibrate(work, lm, inputs, linears)
        for e, made in _quantized(work, inputs, linears, rounded, told):
            linears[e] = made.linears
            for projection in PROJECTIONS:
                yield e, projection, *made.stored[projection]
        if outputs is not None:
            _compute(work, lm, inputs, linears, outputs)


def pass_on(work: Work, lm: LayeredModel, entering: RowFile, outputs: RowFile, leaving: RowFile) -> None:
    """Run a loaded layer for all sequences, its experts giving what lies in `outputs`."""
    for start, stop in work.spans():
        given = from_bits(outputs.read(start, stop), lm.device)

        def give(x: torch.Tensor, *_: Any, given: torch.Tensor = given) -> torch.Tensor:
            return given.reshape(x.shape)

        leaving.write(start, bits(lm.run(work.layer, from_bits(entering.read(start, stop), lm.device), give)))


# --- one group of experts -------------------------------------------------------------------------


@dataclass
class _Made:
    linears: Linears
    stored: dict[str, tuple[Packed, Scales]]


def _load(work: Work, lm: LayeredModel, expert: int, told: Told) -> Linears:
    """An expert's weights, and empty Hessians unless too few tokens come to it."""
    gate, up, down = (_weight(work.model, work.layer, expert, p).to(lm.device) for p in PROJECTIONS)
    if work.routed and told.tokens[expert] < work.floor:
        told.rounded.append(expert)
        return Linears(gate, up, down, None, None)
    _, hidden, width = work.model.shape(work.layer)
    own = gptq.Hessian.empty(hidden, lm.device) if work.routed else None
    return Linears(gate, up, down, own, gptq.Hessian.empty(width, lm.device))


def _calibrate(work: Work, lm: LayeredModel, inputs: Inputs, linears: dict[int, Linears]) -> None:
    """Let the experts of a group see the sequences."""
    import torch

    inner = lm.expert(work.layer).inner
    with torch.inference_mode():
        for (start, stop), ids in zip(work.spans(), inputs.ids, strict=True):
            x = from_bits(inputs.rows.read(start, stop), lm.device)
            for e, own in linears.items():
                if own.inner is None:
                    continue
                seen = x
                if own.entering is not None:
                    tokens, _ = torch.where(ids == e)
                    seen = x[tokens.to(lm.device)]
                    own.entering.add(seen)
                own.inner.add(inner(_linear(seen, own.gate), _linear(seen, own.up)))


def _quantized(
    work: Work, inputs: Inputs, linears: dict[int, Linears], rounded: Rounded, told: Told
) -> Iterator[tuple[int, _Made]]:
    """Each expert with its weights rounded; gate and up of all that share a Hessian as one tall matrix."""
    import torch

    alone = work.routed
    for batch in [[e] for e in linears] if alone else [list(linears)]:
        nearest = {(e, p): rounded(e, p) for e in batch for p in PROJECTIONS}
        entering = linears[batch[0]].entering if alone else inputs.hessian
        tall: list[Rounding] = []
        if entering is not None:
            parts = [(e, p) for e in batch for p in ("gate", "up")]
            weight = torch.cat([getattr(linears[e], p) for e, p in parts])
            made = _quantize(work, weight, [nearest[part][1] for part in parts], entering, batch, "gate and up", told)
            tall = list(zip(made[0].chunk(len(parts)), np.split(made[1], len(parts)), strict=True))
        for n, e in enumerate(batch):
            own = linears[e]
            stored = {p: nearest[e, p] for p in PROJECTIONS}
            if entering is not None and own.inner is not None:
                three = (
                    *tall[2 * n : 2 * n + 2],
                    _quantize(work, own.down, [stored["down"][1]], own.inner, [e], "down", told),
                )
                stored = {p: (packed, stored[p][1]) for p, (_, packed) in zip(PROJECTIONS, three, strict=True)}
                own = Linears(three[0][0], three[1][0], three[2][0], None, None)
            else:
                device = own.gate.device
                gate, up, down = (_values(work, *stored[p]).to(device) for p in PROJECTIONS)
                own = Linears(gate, up, down, None, None)
            yield e, _Made(own, stored)


def _quantize(
    work: Work,
    weight: torch.Tensor,
    scales: list[Scales],
    hessian: gptq.Hessian,
    experts: list[int],
    what: str,
    told: Told,
) -> Rounding:
    import torch

    scale = torch.cat([from_bits(s, weight.device) for s in scales])
    grid = work.form.grid
    code_range = grid.low, grid.high
    try:
        with torch.inference_mode():
            factor = gptq.factorize(hessian, work.dampening)
            values = gptq.compensate(weight, factor, scale, code_range).values
            rounded = values.to(weight.dtype)
            exact = work.rounding == "float32"
            codes = gptq.codes(values if exact else rounded, scale.float() if exact else scale, code_range)
    except gptq.NotFinite as error:
        which = f"expert {experts[0]}" if len(experts) == 1 else f"experts {experts[0]} to {experts[-1]}"
        raise VerificationError(
            f"layer {work.layer}, {what} of {which}: {error}; the model gives NaN or infinity on this data set. Try another "
            "--dataset, or --quant-method RTN, which needs none."
        ) from error
    if factor.fell_back:
        parts = ("gate", "up") if what != "down" else ("down",)
        told.fell_back += [linear_name(work.model, work.layer, e, p) for e in experts for p in parts]
    return rounded, groups.pack_words(grid.bits, codes.cpu().numpy())


def _compute(work: Work, lm: LayeredModel, inputs: Inputs, linears: dict[int, Linears], outputs: RowFile) -> None:
    """Add what a group of quantized experts gives the tokens that are routed to them, in BF16, expert after expert."""
    import torch

    inner = lm.expert(work.layer).inner
    first = 0 in linears
    with torch.inference_mode():
        for (start, stop), ids, weights in zip(work.spans(), inputs.ids, inputs.weights, strict=True):
            x = from_bits(inputs.rows.read(start, stop), lm.device)
            total = torch.zeros_like(x) if first else from_bits(outputs.read(start, stop), lm.device)
            for e, own in linears.items():
                tokens, place = torch.where(ids == e)
                if not len(tokens):
                    continue
                share = weights[tokens, place, None].to(lm.device)
                tokens = tokens.to(lm.device)
                # One row alone takes another way through the library of matrix products, to other bits than among others.
                seen = x[tokens] if len(tokens) > 1 else x[tokens.repeat(2)]
                out = _linear(inner(_linear(seen, own.gate), _linear(seen, own.up)), own.down)[: len(tokens)]
                total.index_add_(0, tokens, (out * share).to(total.dtype))
            outputs.write(start, bits(total))


def _weight(model: MoeModel, layer: int, expert: int, projection: str) -> torch.Tensor:
    """A linear of the checkpoint in BF16, [n, k]."""
    return from_bits(kernels.decode(model.linear(layer, expert, projection)), "cpu")


def _values(work: Work, packed: Packed, scale: Scales) -> torch.Tensor:
    import torch

    return torch.from_numpy(groups.dequantize_groups(work.form.grid.bits, packed, scale)).to(torch.bfloat16)


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.linear(x, weight)


def from_bits(bits: npt.NDArray[np.uint16], device: Any) -> torch.Tensor:
    """BF16 bits as a tensor."""
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16).to(device)


def bits(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    """A BF16 tensor's bits."""
    import torch

    return tensor.contiguous().cpu().view(torch.uint16).numpy()
