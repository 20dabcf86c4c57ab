"""Looks a number up in config.json, wherever a family keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Where multimodal models keep the language model's configuration.
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


def scopes(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration objects that may describe the experts, the innermost first."""
    for key in NESTED:
        if isinstance(inner := config.get(key), dict):
            yield from scopes(inner)
    yield config


def find(config: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, Any] | None:
    """The first of these keys that has a value, and the value; a dot in a key goes into a nested object."""
    for scope in scopes(config):
        for key in keys:
            value: Any = scope
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                return key, value
    return None


def number(config: dict[str, Any], keys: tuple[str, ...], layer: int = 0) -> tuple[str, int] | None:
    """The first of these keys that is a whole number; of a list per layer, the layer's own."""
    found = find(config, keys)
    if found is None:
        return None
    key, value = found
    if isinstance(value, list):
        value = value[layer] if layer < len(value) else None
        key = f"{key}[{layer}]"
    return (key, value) if type(value) is int else None


def families(config: dict[str, Any]) -> list[str]:
    """What the model calls itself: model_type and architectures, the outermost first."""
    names: list[str] = []
    for scope in reversed(list(scopes(config))):
        kinds = scope.get("architectures")
        said = [scope.get("model_type"), *(kinds if isinstance(kinds, list) else [])]
        names += [name for name in said if isinstance(name, str)]
    return names


def scale_blocks(config: dict[str, Any]) -> list[tuple[int, int]]:
    """The sizes (rows, columns) of FP8 scale blocks that quantization_config names."""
    sizes: list[Any] = []
    for scope in scopes(config):
        for key in ("quantization_config", "compression_config"):
            if isinstance(quant := scope.get(key), dict):
                sizes.append(quant.get("weight_block_size"))
                groups = quant.get("config_groups")
                for group in groups.values() if isinstance(groups, dict) else ():
                    weights = group.get("weights") if isinstance(group, dict) else None
                    sizes.append(weights.get("block_structure") if isinstance(weights, dict) else None)
    good = [
        (s[0], s[1]) for s in sizes if isinstance(s, list) and len(s) == 2 and all(type(n) is int and n > 0 for n in s)
    ]
    return list(dict.fromkeys(good))
