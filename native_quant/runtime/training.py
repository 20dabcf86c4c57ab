"""Differentiable routed experts of a layer: LoRA on frozen base weights (numerics.md, section 5c)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.experts import KTExperts

CPU = torch.device("cpu")


class Lora(NamedTuple):
    """LoRA of E experts of sizes H and I, rank r: its tensors, all BF16 or all float32.

    There are six, or four if experts have no gate.
    """

    gate_a: torch.Tensor | None  # [E, r, H]
    gate_b: torch.Tensor | None  # [E, I, r]
    up_a: torch.Tensor  # [E, r, H]
    up_b: torch.Tensor  # [E, I, r]
    down_a: torch.Tensor  # [E, r, I]
    down_b: torch.Tensor  # [E, H, r]

    @classmethod
    def from_tensors(cls, tensors: Iterable[torch.Tensor]) -> Lora:
        """Return LoRA of six tensors, or of the four of experts without a gate, in the order of the fields."""
        given: list[Any] = [*tensors]
        absent: list[Any] = [None] * (len(cls._fields) - len(given))
        return cls(*absent, *given)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors in the order of the fields, without those of an absent gate."""
        return [tensor for tensor in self if tensor is not None]

    @property
    def rank(self) -> int:
        return self.up_a.shape[1]


class SavedForward(NamedTuple):
    """Intermediate results that backward needs of a forward, BF16, a row for each (token, expert): ktq_activations."""

    gate: torch.Tensor  # [T * k, I]; [T * k, 0] without a gate
    up: torch.Tensor  # [T * k, I]
    act: torch.Tensor  # [T * k, I]
    down: torch.Tensor  # [slices, T * k, H]
    rank_rows: torch.Tensor  # [2 + slices, T * k, 2 * columns]; empty without LoRA


class Gradients(NamedTuple):
    """Gradients of hidden states (BF16 [T, H]), of routing weights (float32 [T, k]) and of LoRA, if there is any."""

    hidden: torch.Tensor
    weights: torch.Tensor
    lora: Lora | None


def compute_with_lora(
    experts: KTExperts,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    lora: Lora | None = None,
    scaling: float = 1.0,
    *,
    dropout: float = 0.0,
    training: bool = True,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, BF16 [T, H], differentiable in hidden, weights and lora.

    hidden [T, H] in any floating-point dtype, ids int64 [T, k], weights [T, k]. scaling: alpha / rank. dropout:
    probability for each element of LoRA's inputs, only if `training`.
    Raises UnsupportedError for experts without gradients, ValueError for inconsistent tensors.
    """
    step = TrainingPass.create(experts, hidden, ids, weights, lora, scaling, dropout if training else 0.0)
    out: torch.Tensor = _LoraFunction.apply(step, hidden, weights, *(lora.tensors if lora else ()))  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class TrainingPass:
    """One forward and its backward.

    hidden BF16 [T, H], ids int64 [T, k], weights float32 [T, k] and lora are contiguous on the CPU.
    skip  bool [E], experts that add nothing
    """

    experts: KTExperts
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    lora: Lora | None
    scaling: float
    dropout: float
    seed: int
    skip: torch.Tensor | None = None

    @classmethod
    def create(
        cls,
        experts: KTExperts,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        lora: Lora | None,
        scaling: float,
        dropout: float = 0.0,
        skip: torch.Tensor | None = None,
    ) -> TrainingPass:
        """Check the arguments, copy them if needed, and draw the seed of dropout from torch's CPU generator."""
        require_trainable(experts)
        if hidden.ndim != 2 or hidden.shape[1] != experts.hidden:
            raise ValueError(f"hidden must be [tokens, {experts.hidden}], not {tuple(hidden.shape)}")
        if ids.ndim != 2 or len(ids) != len(hidden) or weights.shape != ids.shape:
            shapes = f"{tuple(ids.shape)} and {tuple(weights.shape)}"
            raise ValueError(f"ids and weights must be [{len(hidden)}, experts per token], not {shapes}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be from 0 to less than 1, not {dropout}")
        if lora is not None:
            lora = Lora.from_tensors(tensor.detach().to(CPU).contiguous() for tensor in lora.tensors)
            check_lora(experts, lora)
        seed = int(torch.randint(2**63 - 1, (), device=CPU)) if dropout else 0
        inputs = (
            hidden.detach().to(CPU, torch.bfloat16).contiguous(),
            ids.to(CPU, torch.int64).contiguous(),
            weights.detach().to(CPU, torch.float32).contiguous(),
        )
        return cls(experts, *inputs, lora, scaling, dropout, seed, skip)

    def forward(self, reuse: SavedForward | None = None) -> tuple[torch.Tensor, SavedForward]:
        """Return the output, BF16 [T, H], and what backward needs, in the memory of `reuse` if the shapes match."""
        shapes = self._shapes()
        if reuse is not None and [tuple(tensor.shape) for tensor in reuse] == shapes:
            saved = reuse
        else:
            saved = SavedForward(*(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes))
        out = torch.empty_like(self.hidden)
        self.experts._train_call(self._c_call(out), self._c_lora(), _c_saved(saved))
        return out, saved

    def backward(
        self, saved: SavedForward, gradient: torch.Tensor, scale: float = 1.0, buffers: Lora | None = None
    ) -> Gradients:
        """Return the gradients for the gradient of the output [T, H].

        Those of LoRA are multiplied by `scale` and written to `buffers`, if given.
        """
        gradient = gradient.to(CPU, torch.bfloat16).contiguous()
        lora = buffers
        if lora is None and self.lora is not None:
            lora = Lora.from_tensors(map(torch.empty_like, self.lora.tensors))
        if lora is not None:
            idle = torch.ones(self.experts.num_experts, dtype=torch.bool)
            idle[self.ids[(self.ids >= 0) & (self.ids < len(idle))]] = False
            if self.skip is not None:
                idle |= self.skip
            for tensor in lora.tensors:
                tensor.data[idle] = 0
        gradients = Gradients(torch.empty_like(self.hidden), torch.empty_like(self.weights), lora)
        fields = {"out": _address(gradient), "hidden": _address(gradients.hidden), "scale": scale}
        fields["weights"] = ffi.cast("float *", gradients.weights.data_ptr())
        pointer = ffi.new("ktq_gradients *", {**fields, **_c_factors(lora)})
        self.experts._train_call(self._c_call(gradients.hidden), self._c_lora(), _c_saved(saved), pointer)
        return gradients

    def _shapes(self) -> list[tuple[int, ...]]:
        rows = self.ids.numel()
        x = self.experts
        rank_columns = 0 if self.lora is None else 2 * lib.ktq_rank_columns(self.lora.rank)
        gate = (rows, x.intermediate if x._function.gated else 0)
        rank_rows = (2 + x.parts, rows, rank_columns)
        return [gate, *[(rows, x.intermediate)] * 2, (x.parts, rows, x.hidden), rank_rows]

    def _c_call(self, out: torch.Tensor) -> Any:
        skip = 0 if self.skip is None else self.skip.data_ptr()
        addresses = self.hidden.data_ptr(), self.ids.data_ptr(), self.weights.data_ptr(), skip, out.data_ptr()
        tokens, topk = self.ids.shape
        return self.experts._make_call(tokens, topk, *addresses)

    def _c_lora(self) -> Any:
        if self.lora is None:
            return ffi.NULL
        numbers = {"rank": self.lora.rank, "scaling": self.scaling, "dropout": self.dropout, "seed": self.seed}
        is_float32 = self.lora.up_a.dtype == torch.float32
        return ffi.new("ktq_lora *", {**numbers, "float32": is_float32, **_c_factors(self.lora)})


class _LoraFunction(torch.autograd.Function):
    """A TrainingPass as a function of torch; all arguments but the first have gradients."""

    @staticmethod
    def forward(
        ctx: Any, step: TrainingPass, hidden: torch.Tensor, weights: torch.Tensor, *lora: torch.Tensor
    ) -> torch.Tensor:
        out, saved = step.forward()
        # Even the seed is saved as a tensor: activation checkpointing computes the forward again, with a new seed.
        seed = torch.tensor(step.seed)
        ctx.save_for_backward(step.hidden, step.ids, step.weights, seed, *lora, *saved)
        ctx.step = (step.experts, step.scaling, step.dropout, step.skip)
        ctx.factors = len(lora)
        ctx.kinds = (hidden.dtype, hidden.device), (weights.dtype, weights.device)
        return out.to(hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, ids, weights, seed, *tensors = ctx.saved_tensors
        factors, saved = tensors[: ctx.factors], SavedForward(*tensors[ctx.factors :])
        lora = Lora.from_tensors(factor.detach().to(CPU).contiguous() for factor in factors) if factors else None
        experts, scaling, dropout, skip = ctx.step
        step = TrainingPass(experts, hidden, ids, weights, lora, scaling, dropout, int(seed), skip)
        result = step.backward(saved, gradient)
        (dtype, device), (weights_dtype, weights_device) = ctx.kinds
        gradients = result.lora.tensors if result.lora else ()
        on_devices = (gradient.to(factor.device) for gradient, factor in zip(gradients, factors, strict=True))
        return None, result.hidden.to(device, dtype), result.weights.to(weights_device, weights_dtype), *on_devices


def check_lora(experts: KTExperts, lora: Lora) -> None:
    """Raise ValueError if the tensors of LoRA do not match the experts."""
    if (len(lora.tensors) == len(lora)) != experts._function.gated:
        has, have = ("lacks", "have one") if experts._function.gated else ("has", "have none")
        raise ValueError(f"LoRA of layer {experts.layer} {has} matrices of a gate, but its experts {have}")
    e, h, i = experts.num_experts, experts.hidden, experts.intermediate
    rank = lora.rank if lora.up_a.ndim == 3 else 0
    limit = min(h, i, lib.KTQ_MAX_RANK)
    shapes = (e, rank, h), (e, i, rank), (e, rank, h), (e, i, rank), (e, rank, i), (e, h, rank)
    for name, tensor, shape in zip(Lora._fields, lora, shapes, strict=True):
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or not 1 <= rank <= limit:
            raise ValueError(
                f"LoRA of layer {experts.layer}: {name} must be {list(shape)} with a rank of 1 to {limit}, not "
                f"{list(tensor.shape)}; use an adapter of this model, or a different rank"
            )
        if tensor.dtype not in (torch.bfloat16, torch.float32) or tensor.dtype != lora.up_a.dtype:
            problem = f"{name} is {tensor.dtype}; all must be BF16, or all float32"
            raise ValueError(f"LoRA of layer {experts.layer}: {problem}")


def require_trainable(experts: KTExperts) -> None:
    """Raise UnsupportedError for experts whose computation has no gradient in this runtime."""
    if not experts._trainable:
        raise UnsupportedError(
            f"layer {experts.layer}: gradients are unsupported for experts in {experts._packed.description}, or with "
            "routing weights on their input; convert the model with `ktconvert cpu`, or call it under torch.no_grad()"
        )


def _address(tensor: torch.Tensor) -> Any:
    return ffi.cast("uint16_t *", tensor.data_ptr())


def _c_factors(lora: Lora | None) -> dict[str, Any]:
    if lora is None:
        return {}
    pointers = [ffi.cast("void *", 0 if tensor is None else tensor.data_ptr()) for tensor in lora]
    return {"a": pointers[::2], "b": pointers[1::2]}


def _c_saved(saved: SavedForward) -> Any:
    return ffi.new("ktq_activations *", {name: _address(tensor) for name, tensor in saved._asdict().items()})
