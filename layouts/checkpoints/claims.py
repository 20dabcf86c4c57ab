"""What config.json says about a model's experts, compared with those present: layers, counts and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.archs import ARCHS, HIDDEN, NUM_EXPERTS, NUM_LAYERS, Arch

Config = dict[str, Any]
Shape = tuple[int, int, int]  # experts, hidden size, expert width; 0 is unknown


def _below(value: Any, layer: int) -> bool:
    return type(value) is int and layer < value


def _off_step(value: Any, layer: int) -> bool:
    return type(value) is int and value > 1 and (layer + 1) % value != 0


def _not_among(value: Any, layer: int) -> bool:
    numbers = value.split(",") if isinstance(value, str) else value
    return isinstance(numbers, list) and str(layer) not in [str(n).strip() for n in numbers]


def _frequency(value: Any, layer: int) -> bool:
    if isinstance(value, list):
        return layer < len(value) and not value[layer]
    return type(value) is int and value > 1 and layer % value != 0


# Config key -> whether its value says that a layer is dense, as transformers and the models' own code read it.
DENSE: Mapping[str, Callable[[Any, int], bool]] = {
    "first_k_dense_replace": _below,
    "num_dense_layers": _below,
    "moe_layer_num_skipped": _below,
    "moe_layer_start_index": _below,
    "moe_layer_end_index": lambda value, layer: type(value) is int and 0 <= value < layer,
    "moe_layer_interval": _off_step,
    "decoder_sparse_step": _off_step,
    "interleave_moe_layer_step": _off_step,
    "mlp_only_layers": lambda value, layer: isinstance(value, list) and layer in value,
    "moe_layers": _not_among,
    "moe_layers_enum": _not_among,
    "moe_layer_freq": _frequency,
    "mlp_layer_types": lambda value, layer: isinstance(value, list) and value[layer : layer + 1] == ["dense"],
}


def family(config: Config) -> Arch | None:
    """The row of the table of architectures that the config names."""
    return next((arch for name in cfg.families(config) for arch in ARCHS if name in arch.matches), None)


def num_layers(config: Config) -> tuple[str, int] | None:
    """The config key of the number of layers, and its value; layers beyond are of MTP."""
    row = family(config)
    return cfg.number(config, row.layers if row else NUM_LAYERS)


def moe_layers(config: Config) -> list[int] | None:
    """The layers with experts according to the config; None if it does not say how many layers there are, or which have
    experts.
    """
    limit = num_layers(config)
    if limit is None or all(cfg.find(config, (key,)) is None for key in DENSE):
        return None
    return [layer for layer in range(min(limit[1], 10_000)) if _dense_by(config, layer) is None]


def layer_problems(config: Config, layers: Iterable[int]) -> Iterator[str]:
    """A sentence for each of these layers for which the config has no experts."""
    limit = num_layers(config)
    for layer in layers:
        if limit is not None and layer >= limit[1]:
            yield f"config.json says {limit[0]} = {limit[1]}, and layer {layer} has experts here"
        elif (key := _dense_by(config, layer)) is not None:
            yield f"config.json says by {key} that layer {layer} is dense, and it has experts here"


def size_problems(config: Config, shapes: Mapping[int, Shape]) -> Iterator[str]:
    """A sentence for each number of experts, hidden size and expert width of a layer that the config contradicts."""
    for layer, shape in shapes.items():
        claims = sizes(config, layer)
        for what, size in zip(claims, shape, strict=True):
            claim = claims[what]
            if claim is not None and size and claim[1] != size:
                yield f"config.json says {claim[0]} = {claim[1]}, layer {layer} has {what} {size}"


def sizes(config: Config, layer: int) -> dict[str, tuple[str, int] | None]:
    """Name of a size -> the config key and its value, None if the config does not record it."""
    row = family(config)
    return {
        "experts": cfg.number(config, row.experts if row else NUM_EXPERTS, layer),
        "hidden size": cfg.number(config, row.hidden if row else HIDDEN, layer),
        "expert width": cfg.number(config, row.width, layer) if row else None,
    }


def _dense_by(config: Config, layer: int) -> str | None:
    """The config key that says that this layer is dense."""
    for key, is_dense in DENSE.items():
        recorded = cfg.find(config, (key,))
        if recorded is not None and is_dense(recorded[1], layer):
            return key
    return None
