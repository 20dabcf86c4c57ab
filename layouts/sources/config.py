"""Values of config.json under the keys of the model families, and its description of quantization."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.tensors import TensorInfo

# Keys of config.json for the number of experts per token.
TOPK = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k"),
    *("top_k_experts", "experts_per_token", "moe_k", "ffn_config.moe_top_k"),
)
USUAL_TOPK, ASSUMED = 8, "assumed; not in config.json"
CONTEXT_LENGTH = "max_position_embeddings"  # key of the size of a model's context
# Keys of dimensions and of numbers of layers. Values up to WIDE and DEEP cost no time; larger ones are compared with
# the stored tensors. Packed words hold up to 8 values, and gate and up may be one tensor.
SIZE = re.compile(r"(^|_)(size|dim|heads|layers|experts|rank|depth)$")
LAYERS = re.compile(r"(^|_)(layers|depth)$")
NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.)")  # in tensor names
WIDE, DEEP, PACKED = 1 << 20, 1000, 16
# Keys under which multimodal models have the configuration of the language model.
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


def iterate_scopes(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the configuration objects that may describe the experts, innermost first."""
    for key in NESTED:
        if isinstance(inner := config.get(key), dict):
            yield from iterate_scopes(inner)
    yield config


def find_value(config: dict[str, Any], keys: tuple[str, ...]) -> tuple[str, Any] | None:
    """Return the first of these keys that has a value, and the value; a dot in a key enters an object or a list."""
    for scope in iterate_scopes(config):
        for key in keys:
            value: Any = scope
            for part in key.split("."):
                if isinstance(value, list):
                    value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
                else:
                    value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                return key, value
    return None


def find_number(config: dict[str, Any], keys: tuple[str, ...], layer: int = 0) -> tuple[str, int] | None:
    """Return the first of these keys that is a whole number, with its value; a list has one number per layer."""
    entry = find_value(config, keys)
    if entry is None:
        return None
    key, value = entry
    if isinstance(value, list):
        value = value[layer] if layer < len(value) else None
        key = f"{key}[{layer}]"
    return (key, value) if type(value) is int else None


def find_valid_number(config: dict[str, Any], keys: tuple[str, ...], layer: int = 0) -> tuple[str, int] | None:
    """Return the result of find_number. Raises InputError for a value that is no number."""
    number, entry = find_number(config, keys, layer), find_value(config, keys)
    if number is None and entry is not None and (not isinstance(entry[1], list) or not _has_whole_numbers(entry[1])):
        problem = f"config.json says {entry[0]} = {json.dumps(entry[1])}, which is not a whole number"
        raise InputError(problem, "correct it, or download config.json again")
    return number


def _has_whole_numbers(values: list[Any]) -> bool:
    """Return whether a list has nothing but whole numbers, and None for layers without one."""
    return all(value is None or type(value) is int for value in values)


def find_experts_per_token(config: dict[str, Any], layer: int, experts: int) -> tuple[int, str]:
    """Return the number of experts per token, at most `experts`, and its origin. Raises InputError for a text."""
    recorded = find_valid_number(config, TOPK, layer)
    if recorded is not None and 0 < recorded[1] <= experts:
        return recorded[1], f"config.json: {recorded[0]}"
    return min(USUAL_TOPK, experts), ASSUMED


def explain_experts_per_token(config: dict[str, Any], experts: int) -> str | None:
    """Explain what is wrong with the recorded number for a model that computes with it; None if nothing is.

    A missing number and 1 to `experts` are correct. A list has one number per layer, 0 for a layer without experts.
    """
    entry = find_value(config, TOPK)
    if entry is None or experts < 1:
        return None
    key, value = entry
    most = max(value, default=0) if isinstance(value, list) and all(type(n) is int for n in value) else value
    if type(most) is not int or 0 < most <= experts:
        return None
    return f"{key} is {most}, but a layer has {experts} experts; set the number with which the model was trained"


def find_large_sizes(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the sizes and layer counts, also in nested objects, that make a model slow to build."""
    large = []
    for key, value in config.items():
        if isinstance(value, dict):
            large += find_large_sizes(value)
        elif isinstance(value, int) and SIZE.search(str(key)) and value > (DEEP if LAYERS.search(str(key)) else WIDE):
            large.append((str(key), value))
    return large


def explain_large_size(large: list[tuple[str, int]], tensors: Mapping[str, TensorInfo]) -> str | None:
    """Explain the first of these sizes that exceeds the tensors; return None if none does."""
    deep = 1 + max((int(find_number) for name in tensors for find_number in NUMBER.findall(name)), default=0)
    wide = PACKED * max((size for info in tensors.values() for size in info.shape), default=0)
    for key, value in large:
        if value > (deep if LAYERS.search(key) else wide):
            return f"{key} is {value}, which is more than the stored tensors have"
    return None


def list_families(config: dict[str, Any]) -> list[str]:
    """Return the names of the model's family, model_type and architectures, outermost first."""
    names: list[str] = []
    for scope in reversed(list(iterate_scopes(config))):
        kinds = scope.get("architectures")
        texts = [scope.get("model_type"), *(kinds if isinstance(kinds, list) else [])]
        names += [name for name in texts if isinstance(name, str)]
    return names


@dataclass(frozen=True)
class Quantization:
    """Quantization of weights according to a config; empty if the config does not mention it.

    method     quant_method, such as "compressed-tensors"; for AutoRound the method whose tensors it stores
    format     for GPTQ and AWQ: layout of words, "gptq_v2" or "gemm"; "" if the config does not say
    blocks     sizes (rows, columns) of blocks that share an FP8 scale
    bits       widths of integer codes
    groups     numbers of columns that share a scale of such codes
    symmetric  False if such codes have zero points, True if they have none; both if the config has both
    ordered    True if g_idx assigns columns to scales, False if neighbours share one
    lookalike  what codes with a byte of scale are, if they are not MXFP4; "" if the config declares nothing else
    """

    method: str = ""
    format: str = ""
    blocks: tuple[tuple[int, int], ...] = ()
    bits: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    symmetric: tuple[bool, ...] = ()
    ordered: tuple[bool, ...] = ()
    lookalike: str = ""


QUANT_METHOD = "kt_amx"  # in our own outputs for the CPU, of all formats
QUANTIZE_CONFIG = "quantize_config.json"  # AutoGPTQ and GPTQModel write it, some versions only this file
# Field of Quantization -> its key in QUANTIZE_CONFIG.
KEYS = {"method": "quant_method", "format": "checkpoint_format"}
KEYS |= {"bits": "bits", "groups": "group_size", "symmetric": "sym", "ordered": "desc_act"}
QUANTIZATIONS = ("quantization_config", "compression_config")  # keys of config.json
AUTO_ROUND = "auto_round"
# AutoRound's packing_format, after "auto_round:" -> method and format of the stored tensors.
PACKINGS = {
    **dict.fromkeys(("auto_gptq", "gptq"), ("gptq", "gptq")),
    **dict.fromkeys(("", "gptqmodel"), ("gptq", "gptq_v2")),
    **dict.fromkeys(("auto_awq", "awq"), ("awq", "gemm")),
    **dict.fromkeys(("exllamav2", "tritonv2", "triton"), ("gptq", "")),  # early versions
}
# AutoRound's data_type, without underscores -> codes and scales whose tensors look like those of MXFP4.
LOOKALIKES = {"mxint": "integers with E8M0 scales (MXINT4)", "nvfp4v2": "FP4 with E5M3 scales (NVFP4_E5M3)"}
WIDEST = 8  # bits of integer codes; layers of more bits are not quantized


def parse_quantization(config: dict[str, Any]) -> Quantization:
    """Read how weights are quantized from a config; unusable values are ignored."""
    method, packing, weights, sizes, lookalike = "", "", [], [], ""
    for scope in iterate_scopes(config):
        for key in QUANTIZATIONS:
            if isinstance(quant := scope.get(key), dict):
                named_method, layout = _parse_method(quant)
                method = method or named_method
                lookalike = lookalike or _find_lookalike(quant)
                groups = quant.get("config_groups")
                group_list = groups.values() if isinstance(groups, dict) else ()
                inner = [group.get("weights") for group in group_list if isinstance(group, dict)]
                schemes = [scheme for scheme in inner if isinstance(scheme, dict)]
                sizes += [quant.get("weight_block_size"), *(scheme.get("block_structure") for scheme in schemes)]
                weights += [{"symmetric": True, **s, "ordered": s.get("actorder") in ("group", True)} for s in schemes]
                if method in ("gptq", "awq"):
                    formats = (
                        layout,
                        *map(quant.get, ("checkpoint_format", "format", "version")),
                        _default_format(quant),
                    )
                    format_name = "marlin" if quant.get("is_marlin_format") else next(filter(None, formats), "")
                    packing = packing or str(format_name).lower()
                    weights += _list_schemes(quant)
    blocks = [
        (s[0], s[1]) for s in sizes if isinstance(s, list) and len(s) == 2 and all(type(n) is int and n > 0 for n in s)
    ]
    integers = [scheme for scheme in weights if scheme.get("type") == "int"]

    def each(key: str, kind: type) -> list[Any]:
        return sorted({value for scheme in integers if type(value := scheme.get(key)) is kind})

    return Quantization(
        method,
        packing,
        tuple(dict.fromkeys(blocks)),
        tuple(n for n in each("num_bits", int) if n > 0),
        tuple(n for n in each("group_size", int) if n > 0),
        tuple(each("symmetric", bool)),
        tuple(each("ordered", bool)),
        lookalike,
    )


def merge_quantization_files(declared: Quantization, other_file: dict[str, Any]) -> Quantization:
    """Merge the config with a quantize_config.json, which has the declared method, or GPTQ, if it names none.

    Raises ValueError if they contradict each other.
    """
    if not other_file.keys() & KEYS.values():
        return declared
    other = parse_quantization({"quantization_config": {"quant_method": declared.method or "gptq", **other_file}})
    for name, key in KEYS.items():
        declared_value, file_value = getattr(declared, name), getattr(other, name)
        if declared_value and file_value and declared_value != file_value:
            file_text, declared_text = (
                value if isinstance(value, str) else " and ".join(map(json.dumps, value))
                for value in (file_value, declared_value)
            )
            raise ValueError(f"has {key} {file_text}, but config.json has {declared_text}")
    return replace(declared, **{name: getattr(declared, name) or getattr(other, name) for name in KEYS})


def _parse_method(quant: dict[str, Any]) -> tuple[str, str]:
    """Return quant_method, and the format of its words if AutoRound names it."""
    method = str(quant.get("quant_method") or "")
    if method.removeprefix("intel/").replace("-", "_") != AUTO_ROUND:
        return method, ""
    backend = str(quant.get("backend") or "").lower()  # in early versions; now it is the runtime
    packing = str(quant.get("packing_format") or (backend if backend.startswith(AUTO_ROUND) else f"{AUTO_ROUND}:gptq"))
    first, kind, *_ = *packing.lower().split(":"), ""
    return PACKINGS.get(kind, (method, "")) if first == AUTO_ROUND else (method, "")


def _default_format(quant: dict[str, Any]) -> str:
    """Return the format of GPTQ's words if the config has none: AutoRound's exporter leaves it out."""
    return PACKINGS["auto_gptq"][1] if quant.get("provider") == "auto-round" else ""


def _layer_overrides(quant: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of individual weights: "dynamic" of GPTQModel, "extra_config" of AutoRound."""
    tables = (table for key in ("dynamic", "extra_config") if isinstance(table := quant.get(key), dict))
    return [other for table in tables for other in table.values() if isinstance(other, dict)]


def _find_lookalike(quant: dict[str, Any]) -> str:
    groups = quant.get("config_groups")
    group_list = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    texts = [
        str(settings.get(key)).replace("_", "").lower()
        for settings in (quant, *_layer_overrides(quant), *group_list)
        for key in ("data_type", "format")
    ]
    return next((title for part, title in LOOKALIKES.items() if any(part in text for text in texts)), "")


def _list_schemes(quant: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a config of GPTQ or AWQ as compressed-tensors' schemes: the default, then the overrides."""
    key_names = {"num_bits": "bits", "group_size": "group_size", "symmetric": "sym", "ordered": "desc_act"}
    schemes = [
        {key: settings.get(quant_key, quant.get(quant_key)) for key, quant_key in key_names.items()}
        for settings in ({}, *_layer_overrides(quant))
    ]
    return [
        {"type": "int"} | scheme
        for scheme in schemes
        if not (type(scheme["num_bits"]) is int and scheme["num_bits"] > WIDEST)
    ]
