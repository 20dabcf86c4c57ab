"""Routed experts inside a transformers model: finding them, and the module without parameters that replaces each."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ktconvert.layouts.checkpoints.archs import PREFIXES
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.runtime import hf_operator
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.hot_experts import HotExperts
from ktconvert.native_quant.runtime.swiglu import PLAIN, Swiglu

LAYER = re.compile(r"(?P<prefix>.*?)layers\.(?P<layer>\d+)\.(?:.+\.)?experts")
CPU = torch.device("cpu")
ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


class RoutedExperts(torch.nn.Module):
    """One layer's routed experts, computed on the CPU by the runtime; a torch module without parameters.

    layer       its number in the model and in the directory of the weights
    experts     the loaded weights
    zero_ids    ids from E on are identity experts, which return their input (LongCat-Flash); otherwise they add nothing
    hot         experts that torch computes; `experts` skips them
    """

    def __init__(self, layer: int, experts: Experts, zero_ids: bool = False, hot: HotExperts | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.experts = experts
        self.num_experts = experts.num_experts
        self.zero_ids = zero_ids
        self.hot = hot
        self._register()

    def _register(self) -> None:
        experts, hot = self.experts, 0 if self.hot is None else len(self.hot)
        name = f"layer {self.layer} of {experts.source or f'experts in memory {id(experts.packed):x}'}"
        settings = ", exact" * experts.exact + f", {hot} hot" * bool(hot)
        self._handle = hf_operator.register(self, name + settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register()  # a copy of a model shares the weights and has a handle of its own

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, [..., H] as hidden_states; ids and weights [T, k].

        No gradient goes through it: backward() raises RuntimeError, unless no input requires one. torch.compile and its
        like see it as the operator of hf_operator.py.
        """
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids = top_k_index.to(CPU, torch.int64).contiguous()
        weights = top_k_weights.to(CPU, torch.float32).contiguous()
        if hf_operator.is_direct(hidden, weights):
            out = self.compute(hidden, ids, weights)
        else:
            out = hf_operator.routed_experts(hidden, ids, weights, self._handle)
        return out.reshape(hidden_states.shape)

    def compute(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same for hidden [T, H], ids int64 and weights float32 on the CPU."""
        hidden, weights = (x.detach() if x.requires_grad else x for x in (hidden, weights))
        rows = hidden.to(CPU, torch.bfloat16).contiguous()
        # The hot ones first: a GPU computes them while the CPU computes the others.
        hot = None if self.hot is None else self.hot.forward(hidden, ids, weights)
        out = torch.empty_like(rows)
        if len(rows):
            skip = None if self.hot is None else self.hot.mask
            self.experts.forward(_bits(rows), ids.numpy(), weights.numpy(), skip=skip, out=_bits(out))
        if self.zero_ids:
            identity = weights.where(ids >= self.num_experts, 0).sum(-1, keepdim=True)
            out = (out.float() + identity * rows.float()).to(torch.bfloat16)
        if hot is not None:
            out = (hot + out.to(hot.device).float()).to(torch.bfloat16)
        return out.to(hidden.device, hidden.dtype)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        x = self.experts
        hot = "" if self.hot is None else f", hot={len(self.hot)} on {self.hot.device}"
        sizes = f"experts={x.num_experts}, hidden={x.hidden}, intermediate={x.intermediate}"
        return f"layer={self.layer}, {x.method}, {sizes}{hot}"


def _bits(tensor: torch.Tensor) -> Any:
    """The same memory as uint16, since NumPy has no BF16."""
    return tensor.view(torch.uint16).numpy()


@dataclass(frozen=True)
class ExpertModule:
    """A routed-experts module that is to be replaced: its name in the model, its layer, and the sizes E, H and I.

    zero_ids  as in RoutedExperts
    """

    name: str
    layer: int
    num_experts: int
    hidden: int
    intermediate: int
    zero_ids: bool


def find_experts(
    model: torch.nn.Module, swiglu_of: Callable[[int], Swiglu] = lambda layer: PLAIN
) -> list[ExpertModule]:
    """Every routed-experts module of a transformers model: called `experts`, with 3-D gate_up_proj and down_proj.

    Where a model has several stacks of layers (a talker beside the thinker), the one named in the table of
    architectures is used. swiglu_of: what a layer's weights are to compute. Raises UnsupportedError for a model without
    such modules, and for experts that compute another function than the weights.
    """
    modules: dict[str, list[tuple[int, str, torch.nn.Module]]] = {}
    for name, module in model.named_modules():
        match = LAYER.fullmatch(name)
        if match is not None and all(_is_3d(module, part) for part in ("gate_up_proj", "down_proj")):
            modules.setdefault(match["prefix"], []).append((int(match["layer"]), name, module))
    prefixes = list(modules) if len(modules) == 1 else [prefix for prefix in modules if prefix in PREFIXES]
    what = type(model).__name__
    if len(prefixes) != 1:
        if modules:
            raise UnsupportedError(
                f"{what}: has experts under several names ({', '.join(map(repr, modules))}); "
                "load it without cpu_weights"
            )
        import transformers

        raise UnsupportedError(
            f"{what}: transformers {transformers.__version__} builds no routed experts in it that could be replaced"
            " (a module 'experts' with 3-D gate_up_proj and down_proj in every MoE layer); load it without cpu_weights,"
            " or without trust_remote_code if the model brings classes of its own"
        )
    layers = Counter(layer for layer, _, _ in modules[prefixes[0]])
    if repeated := [layer for layer, count in layers.items() if count > 1]:
        raise UnsupportedError(f"{what}: has two kinds of experts in layer {repeated[0]}; load it without cpu_weights")
    for layer, name, module in modules[prefixes[0]]:
        swiglu = swiglu_of(layer)
        ours = "silu(gate) * up" + (f" with {swiglu}" if any(swiglu) else "")
        for differs, why in REFUSALS:
            if differs(module, swiglu):
                raise UnsupportedError(
                    f"{what}: {name} ({type(module).__name__}) {why}, and these experts compute {ours} with"
                    " the routing weights on the output; load it without cpu_weights"
                )
    return [
        ExpertModule(name, layer, *_sizes(module), zero_ids=hasattr(module, "identity_expert"))
        for layer, name, module in modules[prefixes[0]]
    ]


def _is_3d(module: torch.nn.Module, name: str) -> bool:
    parameter = module._parameters.get(name)
    return parameter is not None and parameter.ndim == 3


def _sizes(module: torch.nn.Module) -> tuple[int, int, int]:
    """(E, H, I); down_proj is [E, H, I], or [E, I, H] where the module says that it is transposed."""
    experts, rows, columns = (int(n) for n in module._parameters["down_proj"].shape)  # type: ignore[union-attr]
    return (experts, columns, rows) if getattr(module, "is_transposed", False) else (experts, rows, columns)


def _other_gate(module: Any, swiglu: Swiglu) -> bool:
    """Whether it computes something else than Experts with these settings; tried on samples, large ones among them
    (clamping). Which side of silu is clamped above, and a clamp of gate below beside an alpha, make no difference that
    counts: at most 1e-3 of the limits that models have.
    """
    spread = torch.linspace(-7, 7, 128, device="cpu", dtype=torch.float32)
    gate_up = spread.sinh().reshape(4, 32)  # to 548; most are small
    gate, up = gate_up.chunk(2, dim=-1)
    try:
        result = module._apply_gate(gate_up) if hasattr(module, "_apply_gate") else module.act_fn(gate) * up
    except (AttributeError, RuntimeError, TypeError):
        return True
    with np.errstate(over="ignore"):
        defined = torch.from_numpy(swiglu.compute(gate.numpy(), up.numpy()))
    atol = 1e-3 if swiglu.alpha else 1e-5
    return result.shape != up.shape or not torch.allclose(result, defined, rtol=1e-3, atol=atol)


# Modules that our experts cannot replace, and the reason given in the message.
REFUSALS: tuple[tuple[Callable[[torch.nn.Module, Swiglu], bool], str], ...] = (
    (lambda module, swiglu: any("bias" in name for name in module._parameters), "has biases"),
    (
        lambda module, swiglu: list(inspect.signature(type(module).forward).parameters)[1:] != ARGUMENTS,
        f"is not called with {', '.join(ARGUMENTS)}",
    ),
    (_other_gate, "has another activation"),
)
