"""A few tokens in a transformers model on the CPU: linears and attention that read the memory at its speed."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.pool import Pool, check_error

MOST_TOKENS: int = lib.KTQ_ROW_TOKENS
ATTENTION = "sdpa"  # transformers' name of its default attention


class FewTokensLinear(torch.nn.Linear):
    """A linear that multiplies few tokens with the runtime's kernels if no gradients are needed; else as its base.

    pool: threads that compute
    """

    pool: Any  # torch's modules declare other attributes as tensors or modules

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input [..., columns] times the transposed weight, plus the bias: numerics.md, section 5e."""
        if not self._is_for_kernel(input):
            return super().forward(input)
        x = input.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=torch.bfloat16)
        sizes = (x.numel() // self.in_features, self.out_features, self.in_features)
        matrices = (_address(self.weight), ffi.NULL if self.bias is None else _address(self.bias))
        check_error(lib.ktq_multiply_rows(self.pool.pointer, *sizes, *matrices, _address(x), _address(out)))
        return out

    def _is_for_kernel(self, x: torch.Tensor) -> bool:
        return (
            0 < x.numel() <= MOST_TOKENS * self.in_features
            and type(x) is torch.Tensor
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and torch._C._get_tracing_state() is None
            and all(_is_bf16_in_memory(tensor) for tensor in (x, self.weight, self.bias) if tensor is not None)
            and self.weight.is_contiguous()
        )


def _is_bf16_in_memory(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.is_cpu


def _address(tensor: torch.Tensor) -> Any:
    return ffi.cast("uint16_t *", tensor.data_ptr())


def accelerate_linears(model: torch.nn.Module, pool: Pool) -> None:
    """Let every linear of the model multiply few tokens with the runtime's kernels, with the threads of a pool."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.in_features % lib.KTQ_ROW_MULTIPLE == 0:
            linear: Any = module
            linear.__class__, linear.pool = FewTokensLinear, pool


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    scaling: float | None = None,
    **named: Any,
) -> tuple[Any, None]:
    """Return the attention of query [batch, heads, tokens, size] as transformers' function does, and no weights.

    For one token, heads that share keys become rows of one head: which keys a row sees does not depend on its head.
    torch's CPU kernel takes a sixteenth of the time for 8 rows of one head (BF16, 300 keys).
    """
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    is_shared = attention_mask is None or attention_mask.shape[1:3] == (1, 1)
    if query.shape[2] > 1 or groups == 1 or not is_shared or not query.is_cpu or named.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **named)
    rows = query.reshape(len(query), heads, groups, -1)
    dropout = named.get("dropout", 0.0)
    out = scaled_dot_product_attention(rows, key, value, attention_mask, dropout_p=dropout, scale=scaling)
    return out.reshape(len(query), 1, heads * groups, -1), None


def share_keys_of_heads() -> None:
    """Let transformers compute its default attention by attend(), in this process."""
    AttentionInterface.register(ATTENTION, attend)
