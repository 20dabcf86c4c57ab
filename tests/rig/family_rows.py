"""Expectations of tests/test_families.py for each mixture-of-experts family of transformers, and its tiny config."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from rig.families import COMMON, EXPERTS, GLM, HIDDEN, LINEAR, MLA, VOCABULARY, WIDTH

Settings = dict[str, Any]


def _set_all(value: Any, *names: str) -> Settings:
    """Return settings that give each name the same value."""
    return dict.fromkeys(names, value)


# Settings for all families; names that a config does not have are left out.
TINY: Settings = {
    **{name: value for name, value in LINEAR.items() if name != "layer_types"},
    **COMMON,
    **GLM,
    **MLA,
    **_set_all(EXPERTS, "num_experts", "num_local_experts", "moe_num_experts"),
    **_set_all(2, "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_layers"),
    **_set_all(WIDTH, "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    **_set_all(WIDTH, "shared_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"),
    **_set_all(32, "head_dim", "qk_rope_head_dim", "linear_head_dim"),
    **_set_all(4, "num_key_value_heads", "linear_num_heads"),
    "unpadded_vocab_size": VOCABULARY,
    "num_expert_group": 1,
    "max_position_embeddings": 256,
}
# The same for the vision and audio parts of a model.
VISION: Settings = {
    **_set_all(1, "depth", "num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"),
    **_set_all(32, "hidden_size", "embed_dim", "intermediate_size", "mlp_dim", "d_model", "encoder_ffn_dim"),
    **_set_all(32, "projection_dim", "image_size", "width", "hidden_dim", "output_channels"),
    **_set_all(32, "adapter_in_dim", "adapter_input_size"),
    **_set_all(2, "num_heads", "num_attention_heads", "num_key_value_heads", "encoder_attention_heads"),
    **_set_all(HIDDEN, "out_hidden_size", "output_dim", "vision_output_dim", "text_hidden_size", "adapter_out_dim"),
    **_set_all(16, "head_dim", "num_position_embeddings", "num_mel_bins"),
    "patch_size": 4,
    "deepstack_visual_indexes": [0],
}
SECOND = {"mlp_layer_types": ["dense", "sparse"]}  # only the second layer has experts
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
INDEXED = {**HYBRID, **_set_all(2, "indexer_n_heads", "indexer_compress_ratio"), "indexer_kv_heads": 1}
INDEXED |= {"indexer_head_dim": 32, "indexer_budget": 64}
MAMBA = {**HYBRID, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8}
GEMMA = {"enable_moe_block": True, "hidden_size_per_layer_input": 0}


def _rope(*sections: int) -> Settings:
    """Return the settings of a rotary embedding in sections."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


ENCODER = "it has an encoder"
NO_MODULE = "builds no routed experts that could be replaced"


@dataclass(frozen=True)
class Row:
    """A family.

    settings, vision   entries of its config, besides TINY and VISION
    since              first tested version of transformers that can compute the family
    build_error        transformers' error if it cannot build a model; "" if it can
    refusal            the command's message if it refuses the family; "" if it converts it
    load_error         error of from_pretrained; "" if the output loads and gives the original's logits
    loads_since        first tested version in which the output loads
    no_text            why transformers generates no text with the tiny model; "" if it does
    """

    settings: Settings = field(default_factory=dict)
    vision: Settings = field(default_factory=dict)
    since: str = "5.17"
    build_error: str = ""
    refusal: str = ""
    load_error: str = ""
    loads_since: str = ""
    no_text: str = ""

    def holds_for(self, installed: str) -> "Row | None":
        """Return the row for an installed version of transformers; None if it lacks the family."""
        if _parse(installed) < _parse(self.since):
            return None
        loads = bool(self.loads_since) and _parse(installed) >= _parse(self.loads_since)
        return replace(self, load_error="") if loads else self


def _parse(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


PLAIN = Row()

# By model_type.
PLAIN_FAMILIES = """afmoe axk1 axk2 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo
    glm4_moe glm4_moe_lite glm_moe_dsa granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 inkling_text laguna
    mellum minimax minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe qwen3_vl_moe solar_open"""
OTHERS: dict[str, Row] = {
    "aria": Row(load_error=NO_MODULE, loads_since="5.23"),
    "aria_text": Row(load_error=NO_MODULE, loads_since="5.23"),
    "bailing_hybrid": Row({**HYBRID, **SECOND}, since="5.23"),
    "beam": Row(SECOND, since="5.23"),
    "dbrx": Row(
        {
            "d_model": HIDDEN,
            "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": WIDTH, "moe_num_experts": EXPERTS, "moe_top_k": 2},
        }
    ),
    "deepseek_ocr2": Row(SECOND),
    "deepseek_v4": PLAIN,
    "diffusion_gemma": Row(since="5.23", no_text="it fills blocks in several steps"),
    "doge": Row({"is_moe": True}, since="5.23", refusal="its experts are single rows of an embedding"),
    "dots3_note": Row(vision={"per_layer_config": {}}, since="5.23"),
    "dots3_note_text": Row(since="5.23"),
    "ernie4_5_vl_moe": Row(
        {"moe_intermediate_size": [WIDTH, 64], **_rope(6, 6, 4)},
    ),
    "flint": Row({"mlp_only_layers": [0]}, since="5.23"),
    "gemma4": Row(GEMMA),
    "gemma4_text": Row(GEMMA),
    "glm4v_moe": Row(_rope(2, 3, 3)),
    "glm5_next": Row({"qk_rope_head_dim": 0, "head_dim": 0, **HYBRID, **SECOND}),
    "gpt_oss": PLAIN,
    "granitemoehybrid": Row(MAMBA),
    "hy_v4": PLAIN,
    "hy_v4_vl": Row(_rope(6, 6, 4), since="5.24"),
    "inkling2": Row(since="5.23"),
    "inkling2_loop": Row(since="5.24"),
    "inkling2_loop_text": Row(since="5.24"),
    "inkling2_text": Row(since="5.23"),
    "inkling_mm_model": Row(vision={"num_hidden_layers": 4}),
    "jamba": Row(JAMBA),
    "jetmoe": PLAIN,
    "kimi_linear": Row({**HYBRID, **SECOND}),
    "kolibri1": Row(since="5.23"),
    "lara_mini": Row(since="5.24"),
    "lfm2_moe": Row({"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "llama4": PLAIN,
    "llama4_text": PLAIN,
    "longcat_flash": Row({"zero_expert_num": 0}),
    "mimo_v2_flash": Row({"num_key_value_heads": 2}),
    "minimax_m3_vl": PLAIN,
    "minimax_m3_vl_text": PLAIN,
    "mistral4": Row({"head_dim": 64}),
    "mistral_large4": Row(since="5.23"),
    "muse_spark": Row(vision={"num_hidden_layers": 4}, since="5.23"),
    "nemotron_h": PLAIN,
    "nllb-moe": Row(
        {
            **_set_all(HIDDEN, "d_model", "encoder_ffn_dim", "decoder_ffn_dim"),
            **_set_all(2, "encoder_layers", "decoder_layers", "decoder_sparse_step"),
            **_set_all(4, "encoder_attention_heads", "decoder_attention_heads"),
            "encoder_sparse_step": 1,
        },
        no_text=ENCODER,
    ),
    "qwen3_5_moe": Row(HYBRID),
    "qwen3_5_moe_text": Row(HYBRID),
    "qwen3_next": Row(HYBRID),
    "qwen3_omni_moe_thinker": Row(no_text="it reads vision_start_token_id, which its own config lacks"),
    "qwen4_exp": Row(INDEXED),
    "qwen4_exp_text": Row(INDEXED),
    "step3p7": Row({"sliding_window": 16, "swiglu_limits": [0.0, 7.0], **SECOND}),
    "switch_transformers": Row(
        {
            **_set_all(HIDDEN, "d_model", "d_ff"),
            **_set_all(2, "num_layers", "num_decoder_layers"),
            **_set_all(1, "num_sparse_encoder_layers", "num_sparse_decoder_layers"),
            "num_heads": 4,
            "d_kv": 32,
        },
        no_text=ENCODER,
    ),
    "unlimited_ocr": Row(since="5.23"),
    "zaya": Row({"num_experts_per_tok": 1}),
}
ROWS = dict(sorted((dict.fromkeys(PLAIN_FAMILIES.split(), PLAIN) | OTHERS).items()))
