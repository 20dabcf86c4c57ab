"""Checkpoints without quantization, as `ktconvert dequantize` writes them: config.json, card and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.outputs.card import STORED_KEYS, Card, encode_json, remove_quantization

COMMAND = "dequantize"
COMMANDS = (COMMAND, "merge-adapter")
METHOD, VERSION = "BF16", 1
ARRANGEMENT = "unquantized"
DTYPE_KEYS = ("dtype", "torch_dtype")


def config_json(original: Mapping[str, Any]) -> bytes:
    """Return the source's config.json without quantization at any depth; its dtypes become bfloat16."""
    config = remove_quantization(original, STORED_KEYS)
    for scope in cfg.scopes(config):
        scope.update({key: "bfloat16" for key in DTYPE_KEYS if key in scope})
    if not any(key in config for key in DTYPE_KEYS):
        config["torch_dtype"] = "bfloat16"  # the older of the two names, which all versions of transformers read
    return encode_json(config)


def card(facts: Mapping[str, Any], base_model: str | None) -> Card:
    decoded = ", ".join(f"{count} in {title}" for title, count in facts["decoded"].items()) or "none"
    return Card(
        head=(),
        tags=(),
        title=f"{base_model or 'Model'} in BF16",
        about=(
            "The whole model, dequantized: each quantized weight is BF16, rounded once to nearest even from its value",
            "in float32, under the name and in the shape of a BF16 release. All else is as in the original.",
        ),
        rows=(("quantized weights of the source, now BF16", decoded), ("tensors", f"{facts['tensors']}")),
        use=('`AutoModelForCausalLM.from_pretrained("/path/to/this/folder")`, or as the input of `ktconvert`.',),
    )
