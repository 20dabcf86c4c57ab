"""config.json of outputs: the source's, without entries that no longer hold, and with the entries of the format."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ktconvert.layouts.files.facts import OutputFacts
from ktconvert.layouts.outputs.format import Card, Description, Format
from ktconvert.layouts.outputs.output import Output
from ktconvert.layouts.sources.config import QUANT_METHOD

# Places in which checkpoints declare their quantization: keys of config.json, and other files that loaders look for.
CONFIG_KEYS = ("quantization_config", "compression_config")
CONFIG_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")
# Entries that loaders obey and that do not hold for experts in a different format. DeepSeek-V4's expert_dtype is "fp4".
STORED_KEYS = (*CONFIG_KEYS, "expert_dtype")

# transformers ignores an unknown quantization with a warning and initializes the experts at random. It refuses to load
# a weight file of this name, for any model, and prints the name.
NO_FILE = "none; these are experts for the CPU: import KTConvertConfig from ktconvert before loading them"


def config_json(original: Mapping[str, Any], entries: Mapping[str, Any], *, is_whole_model: bool) -> bytes:
    """Return the source's config.json with the entries of these experts' format, quantization_config among them.

    is_whole_model  whether loaders of checkpoints open the output. Then the source's quantization entries are removed
                    at any depth; else quantization_config stays under a different name
    """
    config = remove_quantization(original, STORED_KEYS) if is_whole_model else dict(original)
    original_quantization = config.pop("quantization_config", None)
    if original_quantization is not None:
        config["original_quantization_config"] = original_quantization
    return encode_json({**config, **entries})


def remove_quantization(config: Mapping[str, Any], keys: Collection[str] = CONFIG_KEYS) -> dict[str, Any]:
    """Return a copy of a config without these keys at any depth; by default the keys that describe quantization."""
    return {
        key: remove_quantization(value, keys) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in keys
    }


def encode_json(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def describe_cpu(card: Card) -> Description:
    """Return the description of a format for the CPU."""
    return Description(card, _cpu_entries, _check_cpu)


def _cpu_entries(fmt: Format, facts: OutputFacts, ignore: Sequence[str], tool_version: str) -> dict[str, Any]:
    return cpu_entries(
        facts,
        tool_version,
        has_row_scales=all(layer_format.encoding.grid.has_row_scales for layer_format in fmt.layer_formats),
    )


def cpu_entries(facts: OutputFacts, tool_version: str, *, has_row_scales: bool) -> dict[str, Any]:
    """Return the entries of config.json, made only from facts; transformers loads them if QUANT_METHOD is registered.

    has_row_scales  whether each row of a weight has one scale
    """
    quantization = {
        "quant_method": QUANT_METHOD,
        "method": facts["method"],
        **({"methods": facts["methods"]} if "methods" in facts else {}),
        "layout_version": facts["layout_version"],
        "bits": facts["bits"],
        **({"strategy": "channel", "symmetric": True} if has_row_scales else {}),
        "num_numa_nodes": facts["numa"],
        "targets": ["routed experts"],
        "quantizer": f"ktconvert:{tool_version}",
    }
    return {"transformers_weights": NO_FILE, "quantization_config": quantization}


def _check_cpu(output: Output, fmt: Format, numa: int) -> Iterator[str]:
    """Check that config.json names the method and number of NUMA slices of the tensors."""
    quantization = output.config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD:
        for name, value in (("method", fmt.name), ("num_numa_nodes", numa)):
            if quantization.get(name) != value:
                yield f"config.json has {name} {quantization.get(name)}, the tensors have {value}"
