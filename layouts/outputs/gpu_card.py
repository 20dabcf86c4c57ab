"""The model card of a whole model with pack-quantized experts, and what config.json says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ktconvert.layouts.outputs import cpu_card, ignore
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.format import Card, Description, Format
from ktconvert.layouts.outputs.linear_names import RAWINT4_NAMES, TEMPLATES
from ktconvert.layouts.outputs.output import Output
from ktconvert.quantizers import Grid

# What `version` in quantization_config says: the compressed-tensors release whose contract this is.
CONTRACT = "0.19.0"


def quantization_config(grid: Grid, ignored: Sequence[str]) -> dict[str, Any]:
    """compressed-tensors' own document; `actorder` null, since loaders misread "static"."""
    weights = {"num_bits": grid.bits, "type": "int", "symmetric": True, "group_size": grid.group, "strategy": "group"}
    weights |= {"block_structure": None, "dynamic": False, "actorder": None, "scale_dtype": None, "zp_dtype": None}
    weights |= {"observer": None, "observer_kwargs": {}}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    scheme |= {"format": "pack-quantized"}
    return {
        "config_groups": {"group_0": scheme},
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": None,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(ignored),
        "version": CONTRACT,
    }


def config_entries(fmt: Format, facts: Mapping[str, Any], ignored: Sequence[str], tool_version: str) -> dict[str, Any]:
    """compressed-tensors' own document."""
    return {"quantization_config": quantization_config(fmt.encoding.grid, ignored)}


def check_config(output: Output, fmt: Format, numa: int) -> Iterator[str]:
    """quantization_config is as the format requires, and its ignore list separates experts from all other modules."""
    return ignore.check_config(output, lambda ignored: quantization_config(fmt.encoding.grid, ignored))


def is_rawint4(facts: Mapping[str, Any]) -> bool:
    """Whether experts with these facts are what kt-kernel's RAWINT4 computes, whatever their names are."""
    return (facts.get("bits"), facts.get("group_size")) == (4, 32)


def why_not_for_cpu(facts: Mapping[str, Any]) -> str | None:
    """Why kt-kernel's RAWINT4 cannot compute the experts of an output with these facts on the CPU; None if it can."""
    if not is_rawint4(facts):
        return "it reads 4 bits in groups of 32 columns"
    names = facts[TEMPLATES]
    if names in RAWINT4_NAMES:
        return None
    return f"it looks for {RAWINT4_NAMES[0]['gate']}, and they are {names['gate']} here"


def launch(facts: Mapping[str, Any], folder: str = "/path/to/this/folder") -> tuple[str, ...]:
    """How SGLang is started with the output as the model: with its own experts on the CPU, too, or with others."""
    if why_not_for_cpu(facts) is None:
        return cpu_card.launch(folder, "RAWINT4", "NUMA_NODES", folder)
    return (
        "```bash",
        "python -m sglang.launch_server \\",
        f"  --model {folder} \\",
        "  --kt-weight-path /path/to/the/cpu/experts \\",
        "  --kt-method AMXINT4 \\",
        "  --kt-num-gpu-experts EXPERTS_PER_LAYER_ON_THE_GPU",
        "```",
    )


def card(facts: Mapping[str, Any], base_model: str | None, loose: bool, non_experts: str, numbers: str) -> Card:
    """The lines of the model card."""
    method, layers = facts["method"], facts["layers"]
    return Card(
        head=(),
        tags=("kt-kernel", "compressed-tensors", "mixture-of-experts"),
        title=f"{base_model or 'Model'} with experts in {method}",
        about=(
            f"The whole model. The routed experts of {len(layers)} layers ({ranges(layers)}) are {method}; "
            "all other tensors are",
            "those of the original, under the same names. The format is compressed-tensors' pack-quantized, "
            "which transformers,",
            "vLLM and SGLang load.",
        ),
        rows=(
            ("experts", f"{facts['bits']} bits, {numbers.format(**facts)}"),
            ("method", f"{facts['quant_method']}, rounding {facts['rounding']}"),
            ("quantized linears", f"{facts['packed_linears']}"),
            *cpu_card.equalized(facts),
            ("experts per layer", f"{facts['experts']}"),
            ("hidden size, expert width", f"{facts['hidden']}, {facts['intermediate']}"),
            ("activation", f"{facts['activation']}"),
            ("source dtypes of the experts", ", ".join(facts["dtypes"])),
        ),
        use=(
            "As the model and, by kt-kernel's RAWINT4, as the experts on the CPU, from the same files:"
            if why_not_for_cpu(facts) is None
            else "As the GPU half beside CPU experts that `ktconvert cpu` made:",
            "",
            *launch(facts),
            "",
            'Or alone: `AutoModelForCausalLM.from_pretrained("/path/to/this/folder")`, '
            "with compressed-tensors installed.",
        ),
    )


DESCRIPTION = Description("symmetric, one BF16 scale per {group_size} columns", card, config_entries, check_config)
