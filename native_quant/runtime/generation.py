"""Generation with a transformers model on the CPU: attention, a cache that grows in place, and threads."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import cache_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.few_tokens import MOST_TOKENS, address_of, is_bf16_in_memory
from ktconvert.native_quant.runtime.pool import Pool, check_error

ATTENTION = "sdpa"  # transformers' name of its default attention
# Tokens that a cache's memory has beyond those in use: as many at least, and one for each SPARE_SHARE tokens. So each
# token is copied only a few times while the cache grows.
LEAST_SPARE, SPARE_SHARE = 256, 8
HEADS_AT_ONCE = 4  # heads of the attention of several tokens that torch computes together, if it copies their values


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    *,
    pool: Pool,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of query [batch, heads, tokens, size] as transformers' function does, and no weights.

    The runtime's kernel computes one token that sees all keys: numerics.md, section 5f. Other attention is torch's; in
    BF16, for a piece of the heads at a time. pool: threads that compute
    """
    tensors = query, key, value
    is_plain = not named.get("dropout") and named.get("position_bias") is None
    has_gradients = any(tensor.requires_grad for tensor in tensors)
    is_ours = is_plain and query.dim() == 4 and not has_gradients and not torch.compiler.is_compiling()
    if not is_ours or not all(map(is_bf16_in_memory, tensors)):
        return sdpa_attention_forward(module, *tensors, attention_mask, scaling=scaling, **named)
    if attention_mask is not None or query.shape[0] * query.shape[2] > 1 or not all(map(_is_readable, tensors)):
        return _attend_by_heads(module, *tensors, attention_mask, scaling=scaling, **named)
    heads, keys, size, value_size = *key.shape[1:], value.shape[-1]
    queries = query.shape[1] // heads
    out = torch.empty((1, 1, query.shape[1], value_size), dtype=torch.bfloat16)
    sizes = (heads, queries, keys, size, value_size, key.stride(1), value.stride(1))
    scale = size**-0.5 if scaling is None else scaling
    addresses = [address_of(tensor) for tensor in (query.contiguous(), key, value, out)]
    check_error(lib.ktq_attend(pool.pointer, ffi.new("ktq_attention *", (*sizes, scale, *addresses))))
    return out, None


def _attend_by_heads(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **named: Any
) -> tuple[torch.Tensor, None]:
    """Return the attention of all heads as transformers' function does, and no weights.

    transformers copies keys and values for each of the heads that share them, and torch computes all scores in float32
    if values have a different size than keys. Both would need memory for all keys of a layer, times all heads.
    """
    queries, value_size = query.shape[1] // key.shape[1], value.shape[-1]
    padding = max(0, key.shape[-1] - value_size)
    step = 1 if queries > 1 else HEADS_AT_ONCE if padding else key.shape[1]
    if mask is not None and mask.dtype == torch.bool:  # torch would convert it for each piece
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    settings: Any = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # without num_key_value_groups

    def attend_from(first: int) -> torch.Tensor:
        """Return the attention of `step` heads; what it needs is released before that of the next ones."""
        heads = slice(queries * first, queries * (first + step))
        states = key[:, first : first + step], pad(value[:, first : first + step], (0, padding))
        if queries > 1:
            states = states[0].expand(-1, queries, -1, -1), states[1].expand(-1, queries, -1, -1)
        own_mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
        out, _ = sdpa_attention_forward(settings, query[:, heads], *states, own_mask, **named)
        return out[..., :value_size]

    return torch.cat([attend_from(first) for first in range(0, key.shape[1], step)], 2), None


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return whether the kernel can read the numbers of a tensor [1, heads, tokens, size] where they are."""
    size = tensor.shape[-1]
    return (
        size % lib.KTQ_ROW_MULTIPLE == 0
        and tensor.numel() > 0
        and tensor.stride(-1) == 1
        and (tensor.shape[-2] == 1 or tensor.stride(-2) == size)
    )


class GrowingLayer(cache_utils.DynamicLayer):  # type: ignore[no-untyped-call]  # of its base's __init_subclass__
    """A layer's cache that writes new tokens behind the others, where transformers' own copies all of them."""

    _buffers: tuple[torch.Tensor, torch.Tensor] | None = None  # keys and values are the first tokens of these

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states [batch, heads, tokens, size], and return those of all tokens."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states, *args, **named)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        if self._buffers is None or not self._fits(self._buffers, after):
            old = self.keys, self.values
            self._buffers = self._make_buffer(key_states, after), self._make_buffer(value_states, after)
            for buffer, states in zip(self._buffers, old, strict=True):
                if before and states is not None:
                    buffer[..., :before, :] = states
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., before:after, :] = states
        keys, values = (buffer[..., :after, :] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values

    def _fits(self, buffers: tuple[torch.Tensor, torch.Tensor], tokens: int) -> bool:
        """Return whether the tokens fit, and the cache was not replaced by that of other sequences."""
        return all(
            states is not None
            and buffer.shape[-2] >= tokens
            and buffer.shape[:2] == states.shape[:2]
            and buffer.data_ptr() == states.data_ptr()
            for buffer, states in zip(buffers, (self.keys, self.values), strict=True)
        )

    @staticmethod
    def _make_buffer(states: torch.Tensor, tokens: int) -> torch.Tensor:
        batch, heads, _, size = states.shape
        return states.new_empty((batch, heads, tokens + max(LEAST_SPARE, tokens // SPARE_SHARE), size))


def accelerate_generation(model: torch.nn.Module, pool: Pool) -> None:
    """Let transformers use attend() and GrowingLayer in this process, and one thread for a few tokens of this model.

    The threads of torch take longer to wake up than its operations on a few tokens, beside linears and experts, take.
    """
    AttentionInterface.register(ATTENTION, partial(attend, pool=pool))
    layer_types = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    growing = {name: GrowingLayer for name, kind in layer_types.items() if kind is cache_utils.DynamicLayer}
    layer_types.update(growing)
    threads = torch.get_num_threads()

    def choose_threads(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        ids, embeddings = (named.get(name) for name in ("input_ids", "inputs_embeds"))
        tokens = ids.numel() if ids is not None else 0 if embeddings is None else embeddings[..., 0].numel()
        torch.set_num_threads(1 if 0 < tokens <= MOST_TOKENS else threads)

    model.register_forward_pre_hook(choose_threads, with_kwargs=True)
    model.register_forward_hook(lambda *_: torch.set_num_threads(threads), always_call=True)
