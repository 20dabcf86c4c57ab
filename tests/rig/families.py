"""Tiny models of many families with random weights, saved with transformers."""

from pathlib import Path
from typing import Any

HIDDEN = WIDTH = 128
EXPERTS, LAYERS, VOCABULARY = 8, 2, 320

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    # About 1 / sqrt(hidden_size), so that the experts contribute much to the output.
    "initializer_range": 0.09,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDTHS = {"intermediate_size": 256, "moe_intermediate_size": WIDTH}
LINEAR = {
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"],
}
GLM = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MLA = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "v_head_dim": 32, "qk_nope_head_dim": 32}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": HIDDEN}
V4 = {"num_hidden_layers": 3, "num_key_value_heads": 1, "n_routed_experts": EXPERTS, "head_dim": 64, "q_lora_rank": 64}
V4 |= {"moe_intermediate_size": WIDTH, "o_groups": 2, "o_lora_rank": 32, "index_n_heads": 2, "index_head_dim": 32}
V4 |= {"index_topk": 8, "sliding_window": 16, "partial_rotary_factor": 0.25, "swiglu_limit": 0.05}
V4 |= {"hc_mult": 2, "hc_sinkhorn_iters": 2}
V4 |= {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"]}
V4 |= {"mlp_layer_types": ["hash_moe", "moe", "moe"]}

# model_type -> its config, beyond COMMON
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**WIDTHS, "num_experts": EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    "qwen3_next": {**WIDTHS, **LINEAR, "num_experts": EXPERTS},
    "qwen3_5_moe_text": {**LINEAR, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS},
    "deepseek_v3": {**WIDTHS, **GLM, **MLA, "num_key_value_heads": 4},
    "deepseek_v4": V4,
    "mixtral": {"intermediate_size": WIDTH, "num_local_experts": EXPERTS},
    "glm4_moe": {**WIDTHS, **GLM, "head_dim": 32},
    "minimax_m2": {"intermediate_size": WIDTH, "num_local_experts": EXPERTS, "head_dim": 32, "rotary_dim": 16},
}

# Models whose attention reads only the keys that an indexer chooses. With few heads, many of its scores are 0, and equal.
SPARSE = {**WIDTHS, **GLM, **MLA, "num_key_value_heads": 4, "index_n_heads": 32, "index_head_dim": 32, "index_topk": 8}
SPARSE_FAMILIES = dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), SPARSE)


def make_config(family: str, **overrides: Any) -> Any:
    """Return the family's config, with a vision part if published models of the family have one."""
    import transformers

    plain = FAMILIES | SPARSE_FAMILIES
    settings = {**COMMON, **plain.get(family, FAMILIES["qwen3_5_moe_text"]), **overrides}
    if family in plain:
        return transformers.AutoConfig.for_model(family, **settings)
    return transformers.AutoConfig.for_model(family, text_config=settings, vision_config=VISION)


def make(family: str, fused: bool, folder: Path, **overrides: Any) -> Path:
    """Save a model of this family, its experts as 3-D tensors or one by one. overrides: changes of its config."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind = "AutoModelForCausalLM" if family in FAMILIES else "AutoModelForImageTextToText"
    model = getattr(transformers, kind).from_config(make_config(family, **overrides), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("experts.down_proj"):
            parameter.data.mul_(2)  # silu(gate) * up is small: make the experts' share of the output larger
    model.save_pretrained(folder, save_original_format=not fused)
    return folder
