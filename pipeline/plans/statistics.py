"""What statistics.json says of model, data and settings; all of it is known before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.moe_model import MoeModel
from ktconvert.pipeline.engine.plan import Request
from ktconvert.pipeline.options.quantization import QuantizationOptions
from ktconvert.pipeline.options.rewriting import CalibrateOptions
from ktconvert.pipeline.plans.checkpoint import base_model, shape_facts, source_identity
from ktconvert.pipeline.walk.calibration_data import Calibration

SIZES = ("layers", "experts", "hidden", "intermediate")
# Paths, and what stands in `data`, changes nothing here, or is recorded with the plan only.
MOMENTS = (
    "- `second-moments-NNN.safetensors`: of layer NNN, the sums of x xT of what gate and up read, over all tokens, and "
    "of what down of each expert reads, over its tokens; `ktconvert cpu --scale mse --statistics` reads them."
)
ELSEWHERE = ("dataset", "arch_row", "max_shard_size", "with_statistics")


def describe(model: MoeModel, request: Request[QuantizationOptions] | Request[CalibrateOptions]) -> dict[str, Any]:
    """Entries of layouts.statistics.folder.STATISTICS, but for files and what the data really held."""
    number = cfg.number(dict(model.source.config), model.arch.layers)
    facts = shape_facts(model, model.layers)
    settings = {key: value for key, value in request.options.settings.items() if key not in ELSEWHERE}
    return {
        "command": request.command,
        "model": {
            "architecture": model.arch.name,
            "name": base_model(model.source),
            "source": source_identity(model.source),
            "decoder_layers": number[1] if number else model.layers[-1] + 1,
            **{key: facts[key] for key in SIZES},
        },
        "data": Calibration.of(request.options.samples).facts(),
        "settings": dict(sorted(settings.items())),
    }


def card(about: Mapping[str, Any], stats: list[Mapping[str, Any]], version: str) -> bytes:
    """README.md of a folder of statistics."""
    model, data = about["model"], about["data"]
    name = model["name"] or model["architecture"]
    counted: Mapping[str, Any] = next((s for s in stats if "calibration_tokens" in s), {})
    lines = [
        "---",
        *([f"base_model: {model['name']}"] if model["name"] else []),
        "tags:",
        "- ktconvert",
        "- imatrix",
        "---",
        "",
        f"# Statistics of the experts of {name}",
        "",
        f"{counted.get('samples', data['samples'])} samples of {data['dataset']}, at most {data['max_length']} tokens "
        f"each (seed {data['seed']}), {counted.get('calibration_tokens', 'unknown')} tokens in all, went through the "
        "model.",
        "",
        "- `imatrix.gguf`: for each column of what an expert's linears read, the sum of its squares over the tokens "
        "that were routed to the expert, and their number; llama.cpp's format. Routed experts only.",
        "- `counts.safetensors`: `counts`, int64 [decoder layers, experts], how often each expert was chosen.",
        *([MOMENTS] if about["settings"].get("second_moments") else []),
        "- `statistics.json`: of which model and data, and the hashes of these files.",
        "",
        "| layer | tokens routed to an expert: least | median | most | experts without any |",
        "|---|---|---|---|---|",
    ]
    for s in stats:
        if t := s.get("routed_tokens"):
            lines.append(f"| {s['layer']} | {t['least']} | {t['median']} | {t['most']} | {t['none']} |")
    return ("\n".join([*lines, "", f"Made by ktconvert {version}."]) + "\n").encode()
