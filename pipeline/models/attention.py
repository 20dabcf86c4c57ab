"""Attention of one new token on the CPU: the heads that share keys become rows of one product."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

NAME = "sdpa"  # transformers' default attention


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

    torch's CPU kernel takes 16 times as long for a head with one row as for 8 heads as rows of one head with the same
    keys (BF16, 300 keys). Which keys a row sees does not depend on its head, so that the results are the same.
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
    AttentionInterface.register(NAME, attend)
