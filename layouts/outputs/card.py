"""config.json and README.md of an output: what these weights are, for the loader and for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

QUANT_METHOD = "kt_amx"
# transformers skips a quantization that it does not know, with a warning, and makes up the experts. It refuses to load a file of this
# name, whatever the model, and prints the name.
NO_FILE = "none; these are experts for the CPU: import KTConvertConfig from ktconvert.native_quant before loading them"


def config_json(original: Mapping[str, Any], facts: Mapping[str, Any], tool_version: str) -> bytes:
    """The source's config with a quantization_config for these experts; the source's own stays beside it.

    transformers loads it only where something registered QUANT_METHOD and takes NO_FILE out.
    """
    config = dict(original)
    before = config.pop("quantization_config", None)
    if before is not None:
        config["original_quantization_config"] = before
    config["transformers_weights"] = NO_FILE
    config["quantization_config"] = {
        "quant_method": QUANT_METHOD,
        "method": facts["method"],
        "layout_version": facts["layout_version"],
        "bits": facts["bits"],
        "strategy": "channel",
        "symmetric": True,
        "num_numa_nodes": facts["numa"],
        "targets": ["routed experts"],
        "quantizer": f"ktconvert:{tool_version}",
    }
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def error_lines(stats: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section on how far the sampled experts lie from their source; nothing where none was measured."""
    rows = []
    for projection in ("gate", "up", "down"):
        measured = [s[projection] for s in stats if projection in s]
        if measured:
            relative = [m["relative_error"] for m in measured]
            cosine = min(m["cosine"] for m in measured)
            rows.append(
                f"| {projection}_proj | {sum(relative) / len(relative):.4f} | {max(relative):.4f} | {cosine:.5f} |"
            )
    if not rows:
        return []
    return [
        "",
        "## Error",
        "",
        "Measured on one expert of each shard against the source in BF16 (`ktconvert verify --against SOURCE --full` measures all).",
        "",
        "| projection | mean relative error | worst | lowest cosine |",
        "|---|---|---|---|",
        *rows,
    ]


def model_card(
    *,
    base_model: str | None,
    facts: Mapping[str, Any],
    notes: Sequence[str],
    stats: Sequence[Mapping[str, Any]],
    loose: bool,
    non_experts: bool,
    tool_version: str,
) -> bytes:
    """README.md: front matter that the hub reads, what the folder is, how to launch it, how exact it is."""
    front = [
        "---",
        *([f"base_model: {base_model}"] if base_model else []),
        "library_name: kt-kernel",
        "tags:",
        "- ktconvert",
        "- kt-kernel",
    ]
    front += ["- mixture-of-experts", f"- {facts['method'].lower()}", "---"]
    name = base_model or "this model"
    layers = facts["layers"]
    what = (
        "everything else under kt-kernel's names"
        if non_experts
        else "nothing else: attention, router and shared experts stay in the original checkpoint"
    )
    method, numa = facts["method"], facts["numa"]
    lines = [
        *front,
        "",
        f"# {method} expert weights of {name}",
        "",
        f"Routed experts of {len(layers)} layers ({ranges(layers)}), quantized to {method} in {numa} NUMA part{'s' if numa != 1 else ''},",
        f"in the format that kt-kernel 0.7 loads{' (loose .kt folders)' if loose else ''}. The folder holds {what}.",
        "",
        "| | |",
        "|---|---|",
        f"| method | {method} ({facts['bits']} bits, one scale per output row and part) |",
        f"| NUMA parts | {numa}: load with `--kt-threadpool-count {numa}` and no other |",
        f"| experts per layer | {facts['experts']} |",
        f"| hidden size, expert width | {facts['hidden']}, {facts['intermediate']} |",
        f"| activation | {facts['activation']} |",
        f"| source dtypes | {', '.join(facts['dtypes'])} |",
        f"| made by | ktconvert {tool_version} |",
        "",
        "## Use",
        "",
        "```bash",
        "python -m sglang.launch_server \\",
        f"  --model {base_model or '/path/to/the/original/checkpoint'} \\",
        "  --kt-weight-path /path/to/this/folder \\",
        f"  --kt-method {method} \\",
        f"  --kt-threadpool-count {numa} \\",
        "  --kt-cpuinfer PHYSICAL_CORES \\",
        "  --kt-num-gpu-experts EXPERTS_PER_LAYER_ON_THE_GPU",
        "```",
        "",
        "`ktconvert doctor` prints the two machine values.",
        *error_lines(stats),
    ]
    if notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return ("\n".join(lines) + "\n").encode()


def ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
