"""A layer's routed experts as one operator of torch, `ktconvert::routed_experts`: torch.compile, torch.export and
torch.jit.trace record the call and look no further, and autograd learns that no gradient comes back through it.

In a recorded program the experts are a name, such as "layer 0 of /models/OUT": a program that was saved finds them
where a model with the experts of that directory is loaded. The name is a tensor, the codes of its characters, so that
layers that are compiled one by one share their code.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch

NUMBER = " #"
PADDED = 256  # bytes of a name, or a multiple
NO_GRADIENT = (
    "experts of ktconvert are for inference, no gradient goes through them ({name}): to train, load the original model "
    "without KTConvertConfig, so that transformers computes its experts; to compute without gradients, call the model "
    "under torch.no_grad() or torch.inference_mode()"
)


class Computing(Protocol):
    """Hidden states [T, H], int64 ids [T, k] and float32 weights [T, k], both on the CPU, to a new tensor like the
    first.
    """

    def compute(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts."""


_named: weakref.WeakValueDictionary[str, Computing] = weakref.WeakValueDictionary()


def register(experts: Computing, name: str) -> torch.Tensor:
    """The name by which the operator calls these experts as long as they live: this one, with a number if it is taken.

    Experts of the same name compute the same.
    """
    names = itertools.chain([name], (f"{name}{NUMBER}{number}" for number in itertools.count(2)))
    free = next(each for each in names if each not in _named)
    _named[free] = experts
    codes = free.encode()
    return torch.frombuffer(bytearray(codes.ljust(-(-len(codes) // PADDED) * PADDED, b"\0")), dtype=torch.uint8)


def _text(name: torch.Tensor) -> str:
    return name.numpy().tobytes().rstrip(b"\0").decode()


def _find(name: str) -> Computing | None:
    """The experts with this name; where they are gone, or were loaded in another process, others that differ in their
    number.
    """
    alike = (experts for other, experts in _named.items() if other.split(NUMBER)[0] == name.split(NUMBER)[0])
    return _named.get(name) or next(alike, None)


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
    schema="(Tensor hidden, Tensor ids, Tensor weights, Tensor name) -> Tensor",
)
def routed_experts(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, name: torch.Tensor) -> torch.Tensor:
    """Computing.compute of the experts with this name. Raises RuntimeError where none are loaded."""
    experts = _find(_text(name))
    if experts is None:
        raise RuntimeError(
            f"no experts are loaded as {_text(name)!r} in this process; load their model first, and keep it"
        )
    return experts.compute(hidden, ids, weights)


@routed_experts.register_fake
def _like(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, name: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op(
    "ktconvert::no_gradient", mutates_args=(), schema="(Tensor gradient, SymInt k, Tensor name) -> (Tensor, Tensor)"
)
def no_gradient(gradient: torch.Tensor, k: int, name: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the gradients of hidden and weights would be computed; an operator, so that a backward pass can be compiled
    for a model whose forward pass alone is called. Raises RuntimeError.
    """
    raise RuntimeError(NO_GRADIENT.format(name=_text(name)))


@no_gradient.register_fake
def _likes(gradient: torch.Tensor, k: int, name: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient.new_empty(gradient.shape), gradient.new_empty((gradient.shape[0], k), dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ids, _, name = inputs
    ctx.k = ids.shape[1]
    ctx.save_for_backward(name)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    hidden, weights = no_gradient(gradient, ctx.k, *ctx.saved_tensors)
    return hidden, None, weights, None


routed_experts.register_autograd(_backward, setup_context=_remember)
