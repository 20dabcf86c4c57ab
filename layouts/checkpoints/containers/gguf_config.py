"""What a GGUF's metadata say about the model's experts, under the names that a config.json has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Before general.architecture, whose names are llama.cpp's, in model_type and in the table of architectures.
PREFIX = "gguf:"
# Key of config.json -> key of the metadata, after "{architecture}.".
KEYS = {
    "hidden_size": "embedding_length",
    "routed_expert_hidden_size": "moe_latent_size",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "intermediate_size": "feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "swiglu_limits": "swiglu_clamp_exp",
    "hidden_act": "hidden_activation",
}
LAYERS, MTP_LAYERS = "block_count", "nextn_predict_layers"  # the last blocks are the MTP part


def config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration made of the metadata; {} for a file without an architecture, such as a later part of a split."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        return {}
    config: dict[str, Any] = {"model_type": f"{PREFIX}{architecture}"}
    for name, key in KEYS.items():
        if (value := metadata.get(f"{architecture}.{key}")) is not None:
            config[name] = value
    layers, mtp = (metadata.get(f"{architecture}.{key}") for key in (LAYERS, MTP_LAYERS))
    if type(layers) is int:
        config["num_hidden_layers"] = layers - (mtp if type(mtp) is int else 0)
    return config
