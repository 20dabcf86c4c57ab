"""The cache that each decoder layer keeps of a sequence: keys and values, latents, windows, or a state of fixed size.

Two tables of config keys describe it: KINDS says which layers have full attention, a window or a state, and
CACHES says how many bytes a token takes in each. No model is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktconvert.layouts.sources import config as cfg

FULL, WINDOW, CHUNK, STATE, NONE = "full", "window", "chunk", "state", "none"
ELEMENT = 2  # bytes of an element of the cache: BF16
STATE_ELEMENT = 4  # bytes of an element of a state: float32
USUAL_COMPRESSION = 4  # tokens that share an entry of a compressed cache, if the config does not say

Find = Callable[..., Any]  # (keys, ...) -> the value of the first key in a config; None if there is none


@dataclass(frozen=True)
class LayerCache:
    """The cache of one sequence in one layer.

    token     bytes for each token
    most      largest number of tokens that are kept; None: all
    fixed     bytes for each sequence, whatever its length
    heads     number of GPUs over which tensor parallelism can divide it
    """

    token: float = 0.0
    most: int | None = None
    fixed: int = 0
    heads: int = 1

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes for a sequence of this number of tokens."""
        return self.fixed + math.ceil(self.token * (tokens if self.most is None else min(tokens, self.most)))


# Words of `layer_types` and of similar lists -> kind of the layer.
WORDS: Mapping[object, str] = {
    **dict.fromkeys(("full_attention", "attention", "global_attention", "global", "hybrid", "*", "full"), FULL),
    **dict.fromkeys(("deepseek_sparse_attention", "qwen_sparse_attention"), FULL),
    **dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), FULL),
    **dict.fromkeys(("sliding_attention", "sliding_window", "local", "swa", "sliding"), WINDOW),
    **dict.fromkeys(("chunked_attention",), CHUNK),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent", "M", "gated_deltanet"), STATE),
    **dict.fromkeys(("conv", "mlp", "moe", "E", "-"), NONE),
}


@dataclass(frozen=True)
class KindRule:
    """A way in which configs say which layers have which attention.

    keys   names of the entry; a dot enters a nested object
    kind   (value of the entry, layer, find) -> kind of the layer; None if the value does not decide
    """

    keys: tuple[str, ...]
    kind: Callable[[Any, int, Find], str | None]


def _decide_by_list(names: Mapping[object, str]) -> Callable[[Any, int, Find], str | None]:
    """Return a rule for a list, or a text, with an entry for each layer."""

    def kind(value: Any, layer: int, find: Find) -> str | None:
        if not isinstance(value, list | str) or layer >= len(value):
            return None
        entry = value[layer]
        return names.get(entry) if isinstance(entry, str | int) else None

    return kind


def _decide_by_interval(other: str) -> Callable[[Any, int, Find], str | None]:
    """Return a rule for a number n: the last of n layers has full attention, the others have `other`."""
    return lambda value, layer, find: (
        None if type(value) is not int or value < 1 else FULL if (layer + 1) % value == 0 else other
    )


def _decide_by_numbers(value: Any, layer: int, find: Find) -> str | None:
    return None if not isinstance(value, list) else FULL if layer + 1 in value else STATE


def _decide_by_period(value: Any, layer: int, find: Find) -> str | None:
    if type(value) is not int or value < 1:
        return None
    return FULL if layer % value == (find(("attn_layer_offset",)) or 0) else STATE


def _decide_by_window(value: Any, layer: int, find: Find) -> str | None:
    used = find(("use_sliding_window",)) is not False
    return WINDOW if used and type(value) is int and value > 0 else None


# The first rule that decides counts; a layer that none decides has full attention.
KINDS: tuple[KindRule, ...] = (
    KindRule(("layer_types",), _decide_by_list(WORDS)),
    KindRule(("hybrid_layer_pattern",), _decide_by_list({0: FULL, 1: WINDOW})),
    KindRule(("attn_type_list",), _decide_by_list({1: FULL, 0: STATE})),
    KindRule(("hybrid_override_pattern", "layers_block_type"), _decide_by_list(WORDS)),
    KindRule(("linear_attn_config.full_attn_layers",), _decide_by_numbers),
    KindRule(("full_attention_interval", "layer_group_size"), _decide_by_interval(STATE)),
    KindRule(("sliding_window_pattern", "_sliding_window_pattern"), _decide_by_interval(WINDOW)),
    KindRule(("no_rope_layers",), _decide_by_list({0: FULL, 1: CHUNK})),
    KindRule(("attn_layer_period",), _decide_by_period),
    KindRule(("sliding_window",), _decide_by_window),
)

# Config keys of numbers; "swa_" and "global_" keys precede the general ones in layers of that kind.
HEADS = ("num_attention_heads", "n_heads")
KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_attention_groups", *HEADS)
HEAD_DIM = ("head_dim", "v_head_dim", "attention_head_dim")
VALUE_DIM = ("v_head_dim", *HEAD_DIM)
WINDOW_SIZE = ("sliding_window", "sliding_window_size", "attention_window_size")
CHUNK_SIZE = ("attention_chunk_size",)
HIDDEN = ("hidden_size", "dim", "d_model")
SPARSE_LATENTS = ("kv_lora_rank", "index_head_dim")  # of layers whose latents have an index
PREFERRED = {WINDOW: "swa_", FULL: "global_"}


@dataclass(frozen=True)
class CacheRule:
    """A way in which layers of some kinds keep a sequence.

    needs  config keys that must all have a number; a dot enters a nested object
    make   find -> the layer's cache
    """

    kinds: tuple[str, ...]
    needs: tuple[str, ...]
    make: Callable[[Find], LayerCache]


def _make_latent_cache(find: Find) -> LayerCache:
    """Return the cache of multi-head latent attention, and of the index of sparse attention if there is one."""
    index = find(("index_head_dim",), 0)
    latent = find(("kv_lora_rank",), 0) + find(("qk_rope_head_dim",), 0)
    return LayerCache(latent * ELEMENT + index + index / 32)  # the index: FP8, a float32 for 128 numbers


def _make_expanded_cache(find: Find) -> LayerCache:
    """Return the cache of sparse attention over latents in transformers: keys and values of all heads, and the index.

    SGLang keeps latents (MLATokenToKVPool), and the index in FP8. transformers caches what kv_b_proj computes from them
    (DeepseekV32Attention and GlmMoeDsaAttention), and the index in BF16 (DynamicIndexedLayer).
    """
    heads = find(HEADS, 1)
    head = find(("qk_nope_head_dim",), 0) + find(("qk_rope_head_dim",), 0) + find(VALUE_DIM, 0)
    return LayerCache((heads * head + find(("index_head_dim",), 0)) * ELEMENT)


def _make_compressed_cache(find: Find) -> LayerCache:
    """Return the cache of attention over compressed tokens: one head, whose keys are its values."""
    ratio = find(("compress_ratios",), 0) or USUAL_COMPRESSION
    return LayerCache((find(("head_dim",), 0) * ELEMENT + find(("index_head_dim",), 0)) / ratio)


def _make_key_value_cache(find: Find) -> LayerCache:
    heads = find(KV_HEADS, 1)
    key = find(("head_dim",), 0) or find(HIDDEN, 0) // max(1, find(HEADS, 1))
    value = find(VALUE_DIM, 0) or key
    return LayerCache(heads * (key + value) * ELEMENT, heads=heads)


def _make_delta_state(find: Find) -> LayerCache:
    keys, values = find(("linear_num_key_heads",), 0), find(("linear_num_value_heads",), 0)
    key, value = find(("linear_key_head_dim",), 0), find(("linear_value_head_dim",), 0)
    convolution = (2 * keys * key + values * value) * find(("linear_conv_kernel_dim",), 4)
    return LayerCache(fixed=values * key * value * STATE_ELEMENT + convolution * ELEMENT, heads=values)


def _make_kimi_state(find: Find) -> LayerCache:
    heads, size = find(("linear_attn_config.num_heads",), 0), find(("linear_attn_config.head_dim",), 0)
    convolution = 3 * heads * size * find(("linear_attn_config.short_conv_kernel_size",), 4)
    return LayerCache(fixed=heads * size * size * STATE_ELEMENT + convolution * ELEMENT, heads=max(1, heads))


def _make_square_state(find: Find) -> LayerCache:
    heads, size = find(("linear_num_heads",), 0), find(("linear_head_dim",), 0)
    convolution = 3 * heads * size * find(("linear_conv_kernel_dim",), 4)
    return LayerCache(fixed=heads * size * size * STATE_ELEMENT + convolution * ELEMENT, heads=max(1, heads))


def _make_mamba_state(find: Find) -> LayerCache:
    heads, size = find(("mamba_num_heads",), 0), find(("mamba_head_dim",), 0)
    return LayerCache(fixed=heads * size * find(("ssm_state_size", "mamba_d_state"), 128) * STATE_ELEMENT, heads=heads)


def _make_plain_state(find: Find) -> LayerCache:
    heads = find(HEADS, 1)
    size = find(("head_dim",), 0) or find(HIDDEN, 0) // max(1, heads)
    return LayerCache(fixed=heads * size * size * STATE_ELEMENT, heads=heads)


ATTENTION = (FULL, WINDOW, CHUNK)
CACHES: tuple[CacheRule, ...] = (
    CacheRule(ATTENTION, ("kv_lora_rank",), _make_latent_cache),
    CacheRule(ATTENTION, ("compress_ratios",), _make_compressed_cache),
    CacheRule(ATTENTION, ("compress_rates",), _make_compressed_cache),
    CacheRule(ATTENTION, ("num_attention_heads",), _make_key_value_cache),
    CacheRule(ATTENTION, ("n_heads",), _make_key_value_cache),
    CacheRule((STATE,), ("linear_num_value_heads",), _make_delta_state),
    CacheRule((STATE,), ("linear_num_heads",), _make_square_state),
    CacheRule((STATE,), ("linear_attn_config.num_heads",), _make_kimi_state),
    CacheRule((STATE,), ("mamba_num_heads",), _make_mamba_state),
    CacheRule((STATE,), ("num_attention_heads",), _make_plain_state),
)


# In addition, if transformers computes attention
EXPANDED_CACHES = (CacheRule(ATTENTION, SPARSE_LATENTS, _make_expanded_cache),)


def find_caches(config: dict[str, Any], layers: int, *, in_transformers: bool = False) -> tuple[LayerCache, ...] | None:
    """Return the cache of each of a model's decoder layers; None if the config describes no attention.

    in_transformers  as transformers keeps it, and not SGLang
    """
    rules = (*EXPANDED_CACHES, *CACHES) if in_transformers else CACHES
    caches = tuple(cache for layer in range(layers) if (cache := _find_cache(config, layer, rules)) is not None)
    return caches if len(caches) == layers else None


@dataclass(frozen=True)
class AttentionBytes:
    """Bytes of a token's vectors in one layer's attention, for all heads.

    query     queries, and as many for the keys of all heads
    result    results, and as many for the values of all heads
    expanded  keys and values that each use computes from latents; 0 if the cache contains them
    repeated  keys and values of one head, once for each head that shares them; 0 if none does
    """

    query: int = 0
    result: int = 0
    expanded: int = 0
    repeated: int = 0


NO_ATTENTION = AttentionBytes()


def find_attention_bytes(config: dict[str, Any]) -> AttentionBytes:
    """Return the bytes of a token's vectors in one layer's attention; all 0 if the config describes none."""

    def find(keys: Sequence[str]) -> int:
        entry = cfg.find_number(config, tuple(keys))
        return entry[1] if entry else 0

    heads = find(HEADS)
    usual = find(HEAD_DIM) or find(HIDDEN) // max(1, heads)
    without_position = find(("qk_nope_head_dim",))
    key = without_position + find(("qk_rope_head_dim",)) if without_position else usual
    value = find(VALUE_DIM) or usual
    projected = without_position + value  # of the linear that expands a latent; keys with positions are a copy
    has_latents = bool(find(("kv_lora_rank",)))
    is_cached = all(find((name,)) for name in SPARSE_LATENTS)
    expanded = ELEMENT * heads * (projected + key) if has_latents and not is_cached else 0
    sharing = 1 if has_latents else heads // max(1, find(KV_HEADS))
    repeated = ELEMENT * sharing * (key + value) if sharing > 1 else 0
    return AttentionBytes(ELEMENT * heads * key, ELEMENT * heads * value, expanded, repeated)


def _find_cache(config: dict[str, Any], layer: int, rules: Sequence[CacheRule]) -> LayerCache | None:
    def find(keys: Sequence[str], default: Any = None) -> Any:
        entry = cfg.find_value(config, tuple(keys))
        value = None if entry is None else entry[1]
        if default is None:
            return value
        if isinstance(value, list) and layer < len(value):
            value = value[layer]
        return value if type(value) is int and value >= 0 else default

    kind = next(_decide_kinds(find, layer), FULL)
    if kind == NONE:
        return LayerCache()
    for rule in rules:
        if kind in rule.kinds and all(find((key,)) is not None for key in rule.needs):
            return _limit(rule.make(_prefer(find, PREFERRED.get(kind, ""))), kind, find)
    return None


def _decide_kinds(find: Find, layer: int) -> Iterator[str]:
    for rule in KINDS:
        value = find(rule.keys)
        if value is not None and (kind := rule.kind(value, layer, find)) is not None:
            yield kind


def _prefer(find: Find, prefix: str) -> Find:
    """Return `find` for a layer whose kind has keys of its own, such as swa_head_dim or num_global_key_value_heads."""
    if not prefix:
        return find

    def find_own(keys: Sequence[str], default: Any = None) -> Any:
        own = [name for key in keys for name in (f"{prefix}{key}", key.replace("num_", f"num_{prefix}", 1))]
        own = [name for name in own if name not in keys]
        value = find(own, default) if find(own) is not None else None
        return find(keys, default) if value is None else value

    return find_own


def _limit(cache: LayerCache, kind: str, find: Find) -> LayerCache:
    """Return the cache with the largest number of tokens that a layer of this kind keeps."""
    keys = {WINDOW: WINDOW_SIZE, CHUNK: CHUNK_SIZE}.get(kind, ())
    most = find(keys, 0) if keys else 0
    return LayerCache(cache.token, most or None, cache.fixed, cache.heads)
