"""config.json and README.md (the model card) of outputs."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktconvert.layouts.tensors import PROJECTIONS

# Where a checkpoint says how it is quantized: keys of config.json, and files beside it that loaders look for.
CONFIG_KEYS = ("quantization_config", "compression_config")
# What else loaders go by that is no longer so where experts are stored in another way: DeepSeek-V4's "fp4".
STORED_KEYS = (*CONFIG_KEYS, "expert_dtype")
CONFIG_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")


def config_json(original: Mapping[str, Any], entries: Mapping[str, Any], *, whole: bool) -> bytes:
    """Return the source's config.json with the entries of these experts' format, quantization_config among them.

    whole  the source's quantization entries are removed at any depth, and not kept beside ours
    """
    config = remove_quantization(original, STORED_KEYS) if whole else dict(original)
    before = config.pop("quantization_config", None)
    if before is not None:
        config["original_quantization_config"] = before
    return encode_json({**config, **entries})


def remove_quantization(config: Mapping[str, Any], keys: Collection[str] = CONFIG_KEYS) -> dict[str, Any]:
    """Return a copy of a config without these keys at any depth; by default those that describe quantization."""
    return {
        key: remove_quantization(value, keys) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in keys
    }


def encode_json(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Card:
    """A format's lines in the model card.

    head   lines of the front matter above the tags
    tags   tags after "ktconvert"
    about  what the folder contains
    rows   (what, value) of its table
    use    how to load it
    """

    head: tuple[str, ...]
    tags: tuple[str, ...]
    title: str
    about: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    use: tuple[str, ...]


def model_card(
    card: Card,
    base_model: str | None,
    facts: Mapping[str, Any],
    notes: Sequence[str],
    stats: Sequence[Mapping[str, Any]],
    tool_version: str,
) -> bytes:
    """Return README.md: front matter for the hub, contents of the folder, how to load it, errors of its weights."""
    lines = [
        "---",
        *([f"base_model: {base_model}"] if base_model else []),
        *card.head,
        "tags:",
        *(f"- {tag}" for tag in ("ktconvert", *card.tags, facts["method"].lower())),
        *("---", "", f"# {card.title}", ""),
        *card.about,
        *("", "| | |", "|---|---|"),
        *(f"| {what} | {value} |" for what, value in card.rows),
        f"| made by | ktconvert {tool_version} |",
        *("", "## Use", ""),
        *card.use,
        *error_lines(stats),
        *(layer_lines(stats) if facts.keys() & {"scale", "methods"} else []),
        *calibration_lines(facts, stats),
    ]
    if notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return ("\n".join(lines) + "\n").encode()


ERROR = """## Error

Measured on one expert of each shard against the source in BF16 \
(`ktconvert verify --against SOURCE --full` measures all).

| projection | mean relative error | worst | lowest cosine |
|---|---|---|---|"""


def error_lines(stats: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on errors of the sampled experts; nothing if none were measured."""
    rows = []
    for projection in PROJECTIONS:
        if measured := [s[projection] for s in stats if projection in s]:
            relative = [m["relative_error"] for m in measured]
            mean, cosine = sum(relative) / len(relative), min(m["cosine"] for m in measured)
            rows.append(f"| {projection}_proj | {mean:.4f} | {max(relative):.4f} | {cosine:.5f} |")
    return ["", *ERROR.splitlines(), *rows] if rows else []


def layer_lines(stats: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of mean relative errors of the sampled experts by layer."""
    layers: dict[int, list[Mapping[str, Any]]] = {}
    for s in stats:
        if all(key in s for key in ("layer", *PROJECTIONS)):
            layers.setdefault(s["layer"], []).append(s)
    rows = []
    for layer, sampled in sorted(layers.items()):
        errors = [[s[projection]["relative_error"] for s in sampled] for projection in PROJECTIONS]
        rows.append(f"| {layer} | {' | '.join(f'{sum(each) / len(each):.4f}' for each in errors)} |")
    return ["", "| layer | gate_proj | up_proj | down_proj |", "|---|---|---|---|", *rows] if rows else []


SEEN = {  # what --calibrate means
    "all": "every expert saw every token",
    "routed": "each expert saw the tokens routed to it",
    "mixed": "gate and up saw every token, down those routed to its expert",
}
FEW = (
    "These experts saw too few tokens; what was not compensated has the codes of `--scale imatrix`, or of `mse` where "
    "they saw none"
)


def calibration_lines(facts: Mapping[str, Any], stats: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on GPTQ's calibration and the experts' tokens; nothing for rounding to nearest."""
    calibration = facts.get("calibration")
    if calibration is None:
        return []
    seen = SEEN.get(calibration["calibrate"], calibration["calibrate"])
    counted = next((s for s in stats if "calibration_tokens" in s), None)
    amount = f"{(counted or calibration)['samples']} samples"
    amount += f", {counted['calibration_tokens']} tokens" if counted else ""
    lines = [
        *("", "## Calibration", ""),
        f"{amount} of {calibration['dataset']}, at most {calibration['max_length']} tokens each "
        f"(seed {calibration['seed']}, dampening {calibration['dampening']}); {seen}.",
    ]
    if machine := facts.get("machine"):
        lines.append(f"It was computed on this machine: {', '.join(f'{k} {v}' for k, v in sorted(machine.items()))}.")
    if few := facts.get("too_few_tokens"):
        lines.append(f"{FEW}: {'; '.join(few)}.")
    routed = [s for s in stats if "routed_tokens" in s]
    if routed:
        last = "not compensated" if "scale" in facts else "rounded to nearest"
        head = f"| layer | tokens routed to an expert: least | median | most | experts without any | {last} |"
        lines += ["", head, "|---|---|---|---|---|---|"]
        for s in routed:
            tokens = " | ".join(f"{s['routed_tokens'][key]}" for key in ("least", "median", "most", "none"))
            rounded = len(s["rounded_experts"]) + len(s["rounded_linears"])
            lines.append(f"| {s['layer']} | {tokens} | {rounded or '-'} |")
    return lines


def format_ranges(numbers: Sequence[int]) -> str:
    """Return 1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
