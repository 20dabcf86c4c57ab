"""Routed experts in a transformers model: the search for them, and the module without parameters that replaces each."""

from __future__ import annotations

import inspect
import itertools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from ktconvert.layouts.checkpoints.archs import PREFIXES
from ktconvert.layouts.checkpoints.expert_function import PLAIN, ExpertFunction
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.native_quant.arrays import F32
from ktconvert.native_quant.runtime import adapters, training
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.hot_experts import HotExperts
from ktconvert.native_quant.runtime.training import CPU, TrainingPass

LAYER = re.compile(r"(?P<stack>(?P<prefix>.*?)(?:layers|blocks?))\.(?P<layer>\d+)\.(?:.+\.)?experts")
# ERNIE-4.5-VL: experts for images, which torch computes unless the output has them, and beside them those for text.
# Checkpoints number both together, those for text first.
IMAGES, TEXT = ".vision_moe.", ".text_moe."
NORM = "post_expert_norm"  # name of the module that normalizes each expert's output
ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
# Names of these arguments in transformers' modules, which are given by position.
SIGNATURES = (ARGUMENTS, ["hidden_states", "router_indices", "routing_weights"])
WITHOUT_WEIGHTS = "load it without converted experts"
GATED, UNGATED = ("gate_up_proj", "down_proj"), ("up_proj", "down_proj")  # 3-D parameters


class RoutedExperts(torch.nn.Module):
    """One layer's routed experts, computed on the CPU by the runtime; a torch module without parameters.

    layer     number in the model and in the directory of the weights
    experts   the loaded weights
    zero_ids  whether ids from E on are identity experts, which return their input (LongCat-Flash); if not, they add
              nothing
    hot       experts that torch computes; `experts` skips them
    norm      the replaced module's norm of each expert's output (Muse Spark)
    """

    def __init__(
        self,
        layer: int,
        experts: KTExperts,
        zero_ids: bool = False,
        hot: HotExperts | None = None,
        norm: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        if norm is not None:
            self.post_expert_norm = norm  # under the name that it has in the checkpoint
        self.layer = layer
        self.experts = experts
        self.num_experts = experts.num_experts
        self.zero_ids, self.hot = zero_ids, hot
        self.projections: tuple[str, ...] = ()  # names of the children that adapters.add_projections added
        self._register()

    def _register(self) -> None:
        experts = self.experts
        hot = 0 if self.hot is None else len(self.hot)
        name = f"layer {self.layer} of {experts.source or f'experts in memory {id(experts._packed):x}'}"
        settings = ", exact" * experts._exact + f", {hot} hot" * bool(hot)
        self._handle = register_handle(self, name + settings)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register()  # a copy of a model shares the weights, but has its own handle

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [..., H] as hidden_states; ids and weights are [T, k].

        Differentiable in hidden_states and top_k_weights: backward computes the forward again, with training.py.
        torch.compile, torch.export and torch.jit.trace record it as the operator below.
        """
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids = top_k_index.to(CPU, torch.int64).contiguous()
        weights = top_k_weights.to(CPU, torch.float32).contiguous()
        adapter = adapters.combine_active(self) if self.projections else None
        if adapter is not None:
            return self._compute_with_adapter(hidden, ids, weights, adapter).reshape(hidden_states.shape)
        if needs_operator(hidden, weights):
            out: torch.Tensor = experts_operator(hidden, ids, weights, self._handle)
        else:
            out = self.compute(hidden, ids, weights)
        return out.reshape(hidden_states.shape)

    def compute(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute the experts for hidden [T, H], and ids int64 and weights float32 on the CPU, without gradients."""
        hidden, weights = (x.detach() if x.requires_grad else x for x in (hidden, weights))
        rows = hidden.to(CPU, torch.bfloat16).contiguous()
        # Start the hot experts first: a GPU computes them while the CPU computes the others.
        hot = None if self.hot is None else self.hot.forward(hidden, ids, weights)
        out = torch.empty_like(rows)
        if len(rows):
            skip = None if self.hot is None else self.hot.mask
            norm = self._read_norm() if self.experts._function.output_norm else None
            self.experts.forward(_bits(rows), ids.numpy(), weights.numpy(), skip=skip, out=_bits(out), norm=norm)
        if self.zero_ids:
            out = (out.float() + self.identity_weight(ids, weights) * rows.float()).to(torch.bfloat16)
        if hot is not None:
            out = (hot + out.to(hot.device).float()).to(torch.bfloat16)
        return out.to(hidden.device, hidden.dtype)

    def _read_norm(self) -> tuple[F32, float]:
        """Return the norm of transformers' MuseSparkTextInputScaledRMSNorm: factors are 1 + weight."""
        norm: Any = self.post_expert_norm
        return (norm.weight.detach().to(CPU, torch.float32) + 1).numpy(), norm.eps

    def _compute_with_adapter(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, adapter: adapters.LayerAdapter
    ) -> torch.Tensor:
        inputs = (hidden, ids, weights, adapter.lora, adapter.scaling)
        dropout = adapter.dropout
        out = training.compute_with_lora(self.experts, *inputs, dropout=dropout, training=self.training)
        out = out.to(hidden.device, hidden.dtype)
        if self.zero_ids:
            out = out + self.identity_weight(ids, weights).to(hidden.device, hidden.dtype) * hidden
        return out

    def identity_weight(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's weights for identity experts (zero_ids): float32 [T, 1]."""
        return weights.where(ids >= self.num_experts, 0).sum(-1, keepdim=True)

    def extra_repr(self) -> str:
        x = self.experts
        hot = "" if self.hot is None else f", hot={len(self.hot)} on {self.hot.device}"
        sizes = f"experts={x.num_experts}, hidden={x.hidden}, intermediate={x.intermediate}"
        return f"layer={self.layer}, {x.method}, {sizes}{hot}"


def _bits(tensor: torch.Tensor) -> Any:
    """Return a NumPy view as uint16, since NumPy has no BF16."""
    return tensor.view(torch.uint16).numpy()


@dataclass(frozen=True)
class ExpertModule:
    """A routed-experts module to replace; zero_ids as in RoutedExperts, gated as in ExpertFunction."""

    name: str
    layer: int
    num_experts: int
    hidden: int
    intermediate: int
    zero_ids: bool
    gated: bool


def find_experts(
    model: torch.nn.Module,
    read_function: Callable[[int], ExpertFunction | None] = lambda layer: None,
    converted: Collection[int] = (),
) -> list[ExpertModule]:
    """Find the routed-experts modules of a transformers model: named `experts`, with the parameters GATED or UNGATED.

    Of several stacks of layers (a thinker and a talker), the one in the table of architectures is searched. Layers of a
    decoder are numbered after those of its encoder, as in outputs, and layers of experts for images after all those for
    text.

    read_function  layer -> what its experts compute; None: a plain SwiGLU
    converted      layers of the output; experts for images are found only in these

    Raises UnsupportedError if there are no such modules, and for experts with a different computation.
    """
    modules: dict[str, list[tuple[int, str, torch.nn.Module]]] = {}
    lengths: dict[str, int] = {}
    images: list[tuple[int, str, torch.nn.Module]] = []
    for name, module in model.named_modules():
        match = LAYER.fullmatch(name)
        matrices = {
            key for key, parameter in module._parameters.items() if parameter is not None and parameter.ndim == 3
        }
        if match is None or matrices not in (set(GATED), set(UNGATED)):
            continue
        if IMAGES in name:
            images.append((int(match["layer"]), name, module))
        else:
            modules.setdefault(match["prefix"], []).append((int(match["layer"]), name, module))
            lengths[match["prefix"]] = len(model.get_submodule(match["stack"]))  # type: ignore[arg-type]
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    is_one = len(modules) == 1 or has_encoder
    prefixes = list(modules) if is_one else [prefix for prefix in modules if prefix in PREFIXES]
    model_class = type(model).__name__
    if len(prefixes) != 1 and not (prefixes and has_encoder):
        if modules:
            names = ", ".join(map(repr, modules))
            raise UnsupportedError(f"{model_class}: has experts under several names ({names})", WITHOUT_WEIGHTS)
        import transformers

        raise UnsupportedError(
            f"{model_class}: transformers {transformers.__version__} builds no routed experts that could be "
            "replaced (a module 'experts' with 3-D gate_up_proj or up_proj, and down_proj, in every MoE layer)",
            f"{WITHOUT_WEIGHTS}, or without trust_remote_code if the model brings classes of its own",
        )
    firsts = itertools.accumulate((lengths[prefix] for prefix in prefixes), initial=0)
    experts = [
        (first + layer, name, module)
        for prefix, first in zip(prefixes, firsts, strict=False)
        for layer, name, module in modules[prefix]
    ]
    first = sum(lengths[prefix] for prefix in prefixes)
    experts += [(first + layer, name, module) for layer, name, module in images if first + layer in converted]
    layers = Counter(layer for layer, _, _ in experts)
    if repeated := [layer for layer, count in layers.items() if count > 1]:
        raise UnsupportedError(f"{model_class}: has two kinds of experts in layer {repeated[0]}", WITHOUT_WEIGHTS)
    for layer, name, module in experts:
        function = read_function(layer) or PLAIN
        for differs, reason in REFUSALS:
            if differs(module, function):
                differing = f"{name} ({type(module).__name__}) {reason}"
                raise UnsupportedError(
                    f"{model_class}: {differing}, but these experts compute {function}", WITHOUT_WEIGHTS
                )
    return [
        ExpertModule(name, layer, *_sizes(module), hasattr(module, "identity_expert"), _has_gate(module))
        for layer, name, module in experts
    ]


def _sizes(module: torch.nn.Module) -> tuple[int, int, int]:
    """Return (E, H, I); down_proj is [E, H, I], or [E, I, H] if the module has is_transposed."""
    experts, rows, columns = (int(n) for n in module._parameters["down_proj"].shape)  # type: ignore[union-attr]
    return (experts, columns, rows) if getattr(module, "is_transposed", False) else (experts, rows, columns)


def _differs_in_activation(module: Any, function: ExpertFunction) -> bool:
    """Return whether a module's activation differs from that of KTExperts with these settings.

    Compares results for samples, some of them large because of limits.
    """
    spread = torch.linspace(-7, 7, 128, device="cpu", dtype=torch.float32)
    gate_up = spread.sinh().reshape(4, 32)  # up to 548, most of them small
    gate, up = gate_up.chunk(2, dim=-1)
    if not getattr(module, "is_concatenated", True):  # gate and up alternate
        gate, up = gate_up[:, ::2], gate_up[:, 1::2]
    try:
        if not function.gated:
            result = module.act_fn(up)
        else:
            result = module._apply_gate(gate_up) if hasattr(module, "_apply_gate") else module.act_fn(gate) * up
    except (AttributeError, RuntimeError, TypeError):
        return True
    inputs = (gate.numpy(), up.numpy()) if function.gated else (up.numpy(),)
    defined = torch.from_numpy(function.compute(*inputs))
    return result.shape != up.shape or not torch.allclose(result, defined, rtol=1e-3, atol=1e-5)


def _has_gate(module: torch.nn.Module) -> bool:
    return GATED[0] in module._parameters


def _has_biases(module: torch.nn.Module) -> bool:
    return any("bias" in name for name in module._parameters)


# Conditions under which our experts cannot replace a module, and the reasons for the message.
REFUSALS: tuple[tuple[Callable[[torch.nn.Module, ExpertFunction], bool], str], ...] = (
    (lambda module, function: function.biases != _has_biases(module), "has biases or lacks them"),
    (lambda module, function: function.gated != _has_gate(module), "differs in its gate"),
    (
        lambda module, function: list(inspect.signature(type(module).forward).parameters)[1:] not in SIGNATURES,
        f"is not called with {', '.join(ARGUMENTS)}",
    ),
    (
        lambda module, function: hasattr(module, NORM) != function.output_norm,
        f"has {NORM} or lacks it",
    ),
    (_differs_in_activation, "has a different activation"),
)


# A layer's routed experts are one operator of torch, `ktconvert::routed_experts`, which torch.compile, torch.export and
# torch.jit.trace record as a call. A recorded program refers to the experts by a handle: a number, and a name such as
# "layer 0 of /models/OUT", by which a saved program finds them. Experts of the same name differ in the number. The
# handle is a tensor, so that layers that are compiled one by one share their code.

NUMBER_BYTES = 8  # the handle begins with the number
PADDED = 256  # the size of a handle is a multiple of it, in bytes
NO_GRADIENT = (
    "hot experts have no gradients ({name}): to train, load the model without hot experts; to compute "
    "without gradients, call it under torch.no_grad() or torch.inference_mode()"
)
_registered: weakref.WeakValueDictionary[tuple[str, int], RoutedExperts] = weakref.WeakValueDictionary()


def register_handle(experts: RoutedExperts, name: str) -> torch.Tensor:
    """Return a handle by which the operator calls these RoutedExperts while they live.

    All experts of one name compute the same.
    """
    number = next(number for number in itertools.count() if (name, number) not in _registered)
    _registered[name, number] = experts
    handle = number.to_bytes(NUMBER_BYTES, "little") + name.encode(errors="surrogateescape")
    return torch.frombuffer(bytearray(handle.ljust(-(-len(handle) // PADDED) * PADDED, b"\0")), dtype=torch.uint8)


def _parse_handle(handle: torch.Tensor) -> tuple[str, int]:
    """Return name and number. A name never ends with a zero byte: it ends with a path or with our own words."""
    codes = handle.numpy().tobytes()
    name = codes[NUMBER_BYTES:].rstrip(b"\0").decode(errors="surrogateescape")
    return name, int.from_bytes(codes[:NUMBER_BYTES], "little")


def _find_by_handle(handle: torch.Tensor) -> RoutedExperts:
    name, number = _parse_handle(handle)
    same_name = (experts for (other_name, _), experts in _registered.items() if other_name == name)
    experts = _registered.get((name, number)) or next(same_name, None)
    if experts is None:
        raise RuntimeError(
            f"no experts are loaded as {name!r} in this process; load their model first, and keep a reference to it"
        )
    return experts


def needs_operator(hidden: torch.Tensor, weights: torch.Tensor) -> bool:
    """Return whether the call is recorded or needs gradients; otherwise the operator would only cost time (a tenth)."""
    return (
        torch.compiler.is_compiling()
        or type(hidden) is not torch.Tensor  # torch's fake tensors, for example
        or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        or (torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad))
    )


@torch.library.custom_op(
    "ktconvert::routed_experts",
    mutates_args=(),
    schema="(Tensor hidden, Tensor ids, Tensor weights, Tensor handle) -> Tensor",
)
def experts_operator(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor
) -> torch.Tensor:
    """Compute the experts with this handle, or others of its name. Raises RuntimeError if none are loaded."""
    return _find_by_handle(handle).compute(hidden, ids, weights)


@experts_operator.register_fake
def _fake_output(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op(
    "ktconvert::routed_experts_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor hidden, Tensor ids, Tensor weights, Tensor handle) -> (Tensor, Tensor)",
)
def backward_operator(
    gradient: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of hidden and weights.

    Raises RuntimeError for hot experts, UnsupportedError for weights without gradients.
    """
    module = _find_by_handle(handle)
    if module.hot is not None:
        raise RuntimeError(NO_GRADIENT.format(name=_parse_handle(handle)[0]))
    step = TrainingPass.create(module.experts, hidden, ids, weights, None, 1.0)
    gradients = step.backward(step.forward()[1], gradient)
    hidden_gradient = gradients.hidden.to(hidden.device, hidden.dtype)
    weights_gradient = gradients.weights
    if module.zero_ids:
        identity = module.identity_weight(ids, weights).to(hidden.device)
        hidden_gradient = (hidden_gradient.float() + identity * gradient.float()).to(hidden.dtype)
        product = (gradient.float() * hidden.float()).sum(-1, keepdim=True).to(CPU)
        weights_gradient = weights_gradient.where(ids < module.num_experts, product)
    return hidden_gradient, weights_gradient


@backward_operator.register_fake
def _fake_gradients(
    gradient: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden.new_empty(hidden.shape), weights.new_empty(weights.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    hidden, weights = backward_operator(gradient, *ctx.saved_tensors)
    return hidden, None, weights, None


experts_operator.register_autograd(_backward, setup_context=_save_inputs)
