"""Checkpoints of any dtypes, which `dequantize`, `merge-adapter` and `fetch` write: names, and config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconvert.layouts.checkpoints.adapter import MERGE
from ktconvert.layouts.checkpoints.recognition import FETCH
from ktconvert.layouts.outputs.configs import STORED_KEYS, encode_json, remove_quantization
from ktconvert.layouts.sources import config as cfg

COMMAND = "dequantize"
COMMANDS = (COMMAND, MERGE, FETCH)
METHOD = "BF16"
FETCHED = "as released"
VERSION = 1
ARRANGEMENT = "unquantized"
DTYPE_KEYS = ("dtype", "torch_dtype")


def config_json(original: Mapping[str, Any]) -> bytes:
    """Return the source's config.json without quantization at any depth; its dtypes become bfloat16."""
    config = remove_quantization(original, STORED_KEYS)
    for scope in cfg.iterate_scopes(config):
        scope.update({key: "bfloat16" for key in DTYPE_KEYS if key in scope})
    if not any(key in config for key in DTYPE_KEYS):
        config["torch_dtype"] = "bfloat16"  # the older of the two names, which all versions of transformers read
    return encode_json(config)
