"""`ktconvert experts`: a mask of hot experts, from routing counts."""

from __future__ import annotations

import json
from typing import Any

import click

from ktconvert.layouts.errors import UsageError
from ktconvert.layouts.files import publish
from ktconvert.pipeline.cli import preconditions
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.queries import ExpertsOptions


@command("experts", ExpertsOptions)
def experts(options: ExpertsOptions) -> None:
    """Choose the hot experts, those with the most tokens in DIR/counts.safetensors, and report their share of tokens.

    DIR is a folder written by `ktconvert calibrate`, or by GPTQ with --save-statistics. `run` and `serve` take the
    output as --gpu-experts-mask.

    Examples:
      ktconvert experts /models/Qwen3-30B-A3B-statistics --output mask.safetensors --num-gpu-experts 32
      ktconvert experts /models/Qwen3-30B-A3B-statistics --output mask.safetensors --total 1536 --plot mask.svg
      ktconvert run MODEL --cpu-weights CPU_WEIGHTS --gpu-experts-mask mask.safetensors --chat
    """
    from ktconvert.layouts.statistics.folder import read_folder_counts
    from ktconvert.native_quant.runtime import hot_experts
    from ktconvert.pipeline.report.plots import plot_experts
    from ktconvert.pipeline.report.text import format_table

    per_layer = options.num_gpu_experts
    total = options.total
    if (per_layer is None) == (total is None):
        raise UsageError("give either --num-gpu-experts (per layer) or --total (all layers together).")
    preconditions.check_file("--output", options.output)
    preconditions.check_plot(options.plot)
    output = options.output.expanduser().absolute()
    counts = read_folder_counts(options.dir.expanduser())
    chosen = hot_experts.most_used_in_total if per_layer is None else hot_experts.most_used_per_layer
    mask = chosen(counts, (total or 0) if per_layer is None else per_layer)
    publish.write_marked_file(output, hot_experts.mask_file(mask))
    covered = hot_experts.hot_fraction(counts, mask)
    document = {
        "event": "chosen",
        "statistics": str(options.dir),
        "output": str(output),
        "experts": counts.shape[1],
        "tokens": int(counts.sum()),
        "coverage": float((counts * mask).sum() / counts.sum()),
        "layers": [
            {"layer": n, "coverage": float(covered[n]), "hot": [int(e) for e in mask[n].nonzero()[0]]}
            for n in range(len(counts))
            if counts[n].any()
        ],
    }
    if options.plot is not None:
        plot_experts(options.plot, document)
    click.echo(json.dumps(document) if options.as_json else "\n".join(format_table(coverage_rows(document))))


def coverage_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the hot experts of each layer and their share of tokens, below a header."""
    rows: list[tuple[str, ...]] = [("layer", "hot", "coverage", "experts")]
    for row in document["layers"]:
        first = ", ".join(map(str, row["hot"][:12])) + (", ..." if len(row["hot"]) > 12 else "")
        rows.append((str(row["layer"]), str(len(row["hot"])), f"{row['coverage']:.1%}", first))
    hot = sum(len(row["hot"]) for row in document["layers"])
    return [*rows, ("all", str(hot), f"{document['coverage']:.1%}", f"of {document['experts']} in each layer")]
