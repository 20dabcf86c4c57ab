"""Claims of config.json about a model's experts, compared with the tensors: layers, counts and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ktconvert.layouts.checkpoints import archs
from ktconvert.layouts.checkpoints.archs import Arch
from ktconvert.layouts.checkpoints.expert_function import HIDDEN_ACT, HIDDEN_ACTS
from ktconvert.layouts.sources import config as cfg
from ktconvert.layouts.sources.containers.gguf import KEYS, PREFIX

Config = dict[str, Any]
Shape = tuple[int, int, int]  # experts, hidden size, expert width; 0 is unknown
UNKNOWN = Arch("", (), width=())  # the row of a family without one


def _is_below(value: Any, layer: int) -> bool:
    return type(value) is int and layer < value


def _is_off_step(value: Any, layer: int) -> bool:
    return type(value) is int and value > 1 and (layer + 1) % value != 0


def _is_not_listed(value: Any, layer: int) -> bool:
    numbers = value.split(",") if isinstance(value, str) else value
    return isinstance(numbers, list) and str(layer) not in [str(n).strip() for n in numbers]


def _is_dense_by_frequency(value: Any, layer: int) -> bool:
    if isinstance(value, list):
        return layer < len(value) and not value[layer]
    return type(value) is int and value > 1 and layer % value != 0


# Config key -> whether its value says that a layer is dense, as transformers and the models' own code read it.
DENSE: Mapping[str, Callable[[Any, int], bool]] = {
    "first_k_dense_replace": _is_below,
    "num_dense_layers": _is_below,
    "moe_layer_num_skipped": _is_below,
    "moe_layer_start_index": _is_below,
    "moe_layer_end_index": lambda value, layer: type(value) is int and 0 <= value < layer,
    "moe_layer_interval": _is_off_step,
    "decoder_sparse_step": _is_off_step,
    "interleave_moe_layer_step": _is_off_step,
    "mlp_only_layers": lambda value, layer: isinstance(value, list) and layer in value,
    "moe_layers": _is_not_listed,
    "moe_layers_enum": _is_not_listed,
    "moe_layer_freq": _is_dense_by_frequency,
    "mlp_layer_types": lambda value, layer: isinstance(value, list) and value[layer : layer + 1] == ["dense"],
}


def find_family(config: Config) -> Arch | None:
    """Return the row of the table of architectures that the config names."""
    return next((arch for name in cfg.list_families(config) for arch in archs.ARCHS if name in arch.matches), None)


def find_layer_count(config: Config, family: Arch | None = None) -> tuple[str, int] | None:
    """Return the config key of the number of layers, and its value; layers beyond it are MTP layers.

    Of several stacks, these are the keys and the sum. family: row of the table; None: the row that the config names
    """
    row = family or find_family(config) or UNKNOWN
    counts = [cfg.find_number(config, stack.layers) for stack in row.stacks]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    return " + ".join(key for key, _ in known), sum(number for _, number in known)


def locate_layer(config: Config, family: Arch, layer: int) -> tuple[Arch, int]:
    """Return the row of the stack that has a layer of an output, and the layer's number in this stack."""
    *stacks, last = family.stacks
    for stack in stacks:
        count = cfg.find_number(config, stack.layers)
        if count is None or layer < count[1]:
            return stack, layer
        layer -= count[1]
    return last, layer


def list_moe_layers(config: Config) -> list[int] | None:
    """Return the layers with experts according to the config; None if it does not say."""
    limit = find_layer_count(config)
    if (
        limit is None
        or (find_family(config) or UNKNOWN).more
        or all(cfg.find_value(config, (key,)) is None for key in DENSE)
    ):
        return None
    return [layer for layer in range(min(limit[1], archs.MOST_LAYERS)) if _find_dense_key(config, layer) is None]


# Numbers in the header of a weight file, by config.json's name -> keys of config.json that may have the same number.
EQUIVALENT_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": archs.HIDDEN[2:],
    "routed_expert_hidden_size": archs.HIDDEN[:2],
    "num_experts": archs.NUM_EXPERTS,
    "moe_intermediate_size": (*archs.MOE_WIDTH, "intermediate_size", "moe_ffn_hidden_size"),
    "intermediate_size": ("intermediate_size", "intermediate_size_mlp", "ffn_hidden_size", "moe_ffn_hidden_size"),
    "first_k_dense_replace": tuple(key for key, is_dense in DENSE.items() if is_dense is _is_below),
}


def find_contradiction(config: Config, header_config: Config, arch: Arch) -> str | None:
    """Explain why a config.json belongs to a different model than the weight files' headers; return None if it may not.

    header_config  the configuration in the headers of the weight files
    """
    own = find_family(header_config)
    if own is not None and (other := find_other_family(config, own.name)) is not None:
        header = f"general.architecture = {header_config['model_type'].removeprefix(PREFIX)}, {own.name}"
        return f"config.json belongs to {other}, but the header of the weights has {header}"
    limit, blocks = cfg.find_number(config, arch.layers), cfg.find_number(header_config, archs.NUM_LAYERS)
    mtp = cfg.find_number(config, archs.MTP_LAYERS)
    if limit and blocks and blocks[1] not in (limit[1], limit[1] + (mtp[1] if mtp else 0)):
        header = f"the header of the weights has {blocks[1]} layers"
        return f"config.json has {limit[0]} = {limit[1]}, but {header}"
    for name, keys in EQUIVALENT_KEYS.items():
        number = header_config.get(name)
        values = {
            key: found[1]
            for key in keys
            if (found := cfg.find_value(config, (key,))) is not None and type(found[1]) is int
        }
        if type(number) is int and values and number not in values.values():
            key = next(iter(values))
            header = f"the header of the weights has {KEYS[name]} = {number}"
            return f"config.json has {key} = {values[key]}, but {header}"
    acts = [cfg.find_value(each, HIDDEN_ACT) for each in (config, header_config)]
    if acts[0] and acts[1]:
        one, two = ({*HIDDEN_ACTS.get(str(act[1]).lower(), (act[1],))} for act in acts if act)
        if not one & two:
            return f"config.json has {acts[0][0]} = {acts[0][1]}, but the header of the weights has {acts[1][1]}"
    return None


def find_other_family(config: Config, name: str) -> str | None:
    """Return the family that the config names if it is certainly not `name`, else None.

    llama.cpp uses one name for several families.
    """
    own, other = next((row for row in archs.ARCHS if row.name == name), None), find_family(config)
    if own is None or other is None or own is other:
        return None
    names, others = ({m.removeprefix(PREFIX) for m in row.matches if m.startswith(PREFIX)} for row in (own, other))
    return other.name if (others or other.shares) and not names & {*other.shares} else None


def find_layer_problems(config: Config, layers: Iterable[int]) -> Iterator[str]:
    """Yield a sentence for each of these layers that has no experts according to the config."""
    limit = find_layer_count(config)
    for layer in layers:
        if limit is not None and layer >= limit[1]:
            yield f"config.json has {limit[0]} = {limit[1]}, but layer {layer} has experts"
        elif (key := _find_dense_key(config, layer)) is not None:
            yield f"layer {layer} is dense according to {key} in config.json, but has experts"


def find_size_problems(config: Config, shapes: Mapping[int, Shape]) -> Iterator[str]:
    """Yield a sentence for each number of experts, hidden size and expert width that contradicts the config."""
    for layer, shape in shapes.items():
        claims = find_sizes(config, layer)
        for label, size in zip(claims, shape, strict=True):
            claim = claims[label]
            if claim is not None and size and claim[1] != size:
                yield f"config.json has {claim[0]} = {claim[1]}, but layer {layer} has {label} {size}"


def find_sizes(config: Config, layer: int) -> dict[str, tuple[str, int] | None]:
    """Map the name of each size to its config key and value; None if the config does not record it."""
    row, number = locate_layer(config, find_family(config) or UNKNOWN, layer)
    return {
        "experts": cfg.find_number(config, row.experts, number),
        "hidden size": cfg.find_number(config, row.hidden, number),
        "expert width": cfg.find_number(config, row.width, number),
    }


def _find_dense_key(config: Config, layer: int) -> str | None:
    """Return the key by which a layer is dense; None if there is none, or if the keys are those of several stacks."""
    if (find_family(config) or UNKNOWN).more:
        return None
    for key, is_dense in DENSE.items():
        recorded = cfg.find_value(config, (key,))
        if recorded is not None and is_dense(recorded[1], layer):
            return key
    return None
