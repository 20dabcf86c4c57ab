"""config.json and README.md of an output for the GPU: what its loaders read, and what people should know."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ktconvert.layouts.outputs.card import error_lines, ranges
from ktconvert.layouts.outputs.compressed import Compressed

# Where a checkpoint says how it is quantized: keys of config.json, and files beside it that loaders look for.
CONFIG_KEYS = ("quantization_config", "compression_config")
CONFIG_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")


def config_json(original: Mapping[str, Any], form: Compressed, ignore: Sequence[str]) -> bytes:
    """The source's config with the quantization_config of these experts; none that the source had survives, at any depth."""
    config = _plain(original)
    config["quantization_config"] = form.quantization_config(ignore)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _plain(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in CONFIG_KEYS
    }


def calibration_lines(facts: Mapping[str, Any], stats: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section on what GPTQ calibrated with, and how many tokens came to the experts; nothing for rounding to nearest."""
    told = facts.get("calibration")
    if told is None:
        return []
    seen = "every expert saw every token" if told["calibrate"] == "all" else "each expert saw the tokens routed to it"
    made = next((s for s in stats if "calibration_tokens" in s), None)
    amount = f"{made['samples']} samples, {made['calibration_tokens']} tokens" if made else f"{told['samples']} samples"
    lines = [
        "",
        "## Calibration",
        "",
        f"{amount} of {told['dataset']}, at most {told['max_length']} tokens each (seed {told['seed']}, dampening {told['dampening']});"
        f" {seen}.",
    ]
    routed = [s for s in stats if "routed_tokens" in s]
    if routed:
        lines += [
            "",
            "| layer | tokens routed to an expert: least | median | most | experts without any | rounded to nearest |",
            "|---|---|---|---|---|---|",
        ]
        for s in routed:
            t = s["routed_tokens"]
            rounded = len(s["rounded_experts"]) + len(s["rounded_linears"])
            lines.append(
                f"| {s['layer']} | {t['least']} | {t['median']} | {t['most']} | {t['none']} | {rounded or '-'} |"
            )
    return lines


def model_card(
    *,
    base_model: str | None,
    facts: Mapping[str, Any],
    notes: Iterable[str],
    stats: Sequence[Mapping[str, Any]],
    tool_version: str,
) -> bytes:
    """README.md: front matter that the hub reads, what the folder is, how to load it, how exact it is."""
    method, layers = facts["method"], facts["layers"]
    lines = [
        "---",
        *([f"base_model: {base_model}"] if base_model else []),
        "tags:",
        "- ktconvert",
        "- kt-kernel",
        "- compressed-tensors",
        "- mixture-of-experts",
        f"- {method.lower()}",
        "---",
        "",
        f"# {base_model or 'Model'} with experts in {method}",
        "",
        f"The whole model. The routed experts of {len(layers)} layers ({ranges(layers)}) are {method}; all other tensors are",
        "those of the original, under the same names. The format is compressed-tensors' pack-quantized, which transformers,",
        "vLLM and SGLang load.",
        "",
        "| | |",
        "|---|---|",
        f"| experts | {facts['bits']} bits, symmetric, one BF16 scale per {facts['group_size']} columns |",
        f"| method | {facts['quant_method']}, rounding {facts['rounding']} |",
        f"| quantized linears | {facts['packed_linears']} |",
        f"| experts per layer | {facts['experts']} |",
        f"| hidden size, expert width | {facts['hidden']}, {facts['intermediate']} |",
        f"| activation | {facts['activation']} |",
        f"| source dtypes of the experts | {', '.join(facts['dtypes'])} |",
        f"| made by | ktconvert {tool_version} |",
        "",
        "## Use",
        "",
        "As the GPU half beside CPU experts that `ktconvert cpu` made:",
        "",
        "```bash",
        "python -m sglang.launch_server \\",
        "  --model /path/to/this/folder \\",
        "  --kt-weight-path /path/to/the/cpu/experts \\",
        "  --kt-method AMXINT4 \\",
        "  --kt-num-gpu-experts EXPERTS_PER_LAYER_ON_THE_GPU",
        "```",
        "",
        'Or alone: `AutoModelForCausalLM.from_pretrained("/path/to/this/folder")`, with compressed-tensors installed.',
        *error_lines(stats),
        *calibration_lines(facts, stats),
    ]
    notes = list(notes)
    if notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return ("\n".join(lines) + "\n").encode()
