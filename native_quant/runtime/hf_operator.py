"""A layer's routed experts as one operator of torch, `ktconvert::routed_experts`: torch.compile, torch.export and
torch.jit.trace record the call and look no further, and autograd learns that no gradient comes back through it.

In a recorded program the experts are a handle: a number, which counts those that have one name, and the name, such as
"layer 0 of /models/OUT". A program that was saved finds them where a model with the experts of that directory is
loaded. The handle is a tensor, so that layers that are compiled one by one share their code.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

NUMBER_BYTES = 8  # the handle begins with the number
PADDED = 256  # bytes of a handle, or a multiple
NO_GRADIENT = (
    "experts of ktconvert are for inference, no gradient goes through them ({name}): to train, load the original model "
    "without KTConvertConfig, so that transformers computes its experts; to compute without gradients, call the model "
    "under torch.no_grad() or torch.inference_mode()"
)


_named: weakref.WeakValueDictionary[tuple[str, int], Any] = weakref.WeakValueDictionary()  # RoutedExperts


def register(experts: Any, name: str) -> torch.Tensor:
    """The handle by which the operator calls these RoutedExperts as long as they live.

    Experts of the same name compute the same.
    """
    number = next(number for number in itertools.count() if (name, number) not in _named)
    _named[name, number] = experts
    handle = number.to_bytes(NUMBER_BYTES, "little") + name.encode(errors="surrogateescape")
    return torch.frombuffer(bytearray(handle.ljust(-(-len(handle) // PADDED) * PADDED, b"\0")), dtype=torch.uint8)


def _read(handle: torch.Tensor) -> tuple[str, int]:
    """Name and number. No name ends with a zero byte: it ends with a path or our words."""
    codes = handle.numpy().tobytes()
    name = codes[NUMBER_BYTES:].rstrip(b"\0").decode(errors="surrogateescape")
    return name, int.from_bytes(codes[:NUMBER_BYTES], "little")


def is_direct(hidden: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether the experts can be called without the operator, which would take a tenth of a small layer's time: nobody
    records what happens, and nobody expects a gradient.
    """
    return not (
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
def routed_experts(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor
) -> torch.Tensor:
    """RoutedExperts.compute of those with this handle; where they are gone, or were loaded in another process, of
    others with the same name. Raises RuntimeError where none are loaded.
    """
    name, number = _read(handle)
    experts = _named.get((name, number)) or next((one for (other, _), one in _named.items() if other == name), None)
    if experts is None:
        raise RuntimeError(f"no experts are loaded as {name!r} in this process; load their model first, and keep it")
    out: torch.Tensor = experts.compute(hidden, ids, weights)
    return out


@routed_experts.register_fake
def _like(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op(
    "ktconvert::no_gradient", mutates_args=(), schema="(Tensor gradient, SymInt k, Tensor handle) -> (Tensor, Tensor)"
)
def no_gradient(gradient: torch.Tensor, k: int, handle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the gradients of hidden and weights would be computed; an operator, so that a backward pass can be compiled
    for a model whose forward pass alone is called. Raises RuntimeError.
    """
    raise RuntimeError(NO_GRADIENT.format(name=_read(handle)[0]))


@no_gradient.register_fake
def _likes(gradient: torch.Tensor, k: int, handle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient.new_empty(gradient.shape), gradient.new_empty((gradient.shape[0], k), dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ids, _, handle = inputs
    ctx.k = ids.shape[1]
    ctx.save_for_backward(handle)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    hidden, weights = no_gradient(gradient, ctx.k, *ctx.saved_tensors)
    return hidden, None, weights, None


routed_experts.register_autograd(_backward, setup_context=_remember)
