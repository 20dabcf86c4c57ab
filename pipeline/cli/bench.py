"""`ktconvert bench`: speed of a layer's experts on this machine, compared with its memory bandwidth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.sources.config import find_experts_per_token
from ktconvert.layouts.tensors import format_ranges
from ktconvert.pipeline.cli import preconditions
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.option_groups import AUTO
from ktconvert.pipeline.options.queries import BenchOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import format_table, plural, size


@command("bench", BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure how fast this machine computes one layer of an output or a checkpoint, and its memory bandwidth.

    Every run routes random tokens to different random experts, so that weights come from memory, as in normal use, and
    not from a cache.

    Examples:
      ktconvert bench OUT
      ktconvert bench OUT --layer 20 --tokens 1,8,512 --threads 16
      ktconvert bench OUT --json --plot bench.svg
      ktconvert bench MODEL    the original experts
    """
    from ktconvert.pipeline.report.plots import plot_bench

    preconditions.check_plot(options.plot)
    preconditions.check_kernels("the command again")
    threads = preconditions.limit_optional_threads(options.threads, Reporter().announce)
    document = measure_layer(options.output, options.layer, options.tokens, threads, options.activations)
    if options.as_json:
        click.echo(json.dumps(document))
    else:
        click.echo("\n".join([*format_table(overview_rows(document)), "", *format_table(format_timings(document)), ""]))
        for note in document["notes"]:
            click.echo(f"note: {note}")
    if options.plot is not None:
        plot_bench(options.plot, document)


def measure_layer(
    path: Path, layer: int | None, tokens: tuple[int, ...], threads: int | None, activations: Any = AUTO
) -> dict[str, Any]:
    """Measure a layer; return a JSON object with sizes in bytes and times in seconds."""
    from ktconvert.native_quant import kernels
    from ktconvert.native_quant.runtime import benchmark
    from ktconvert.native_quant.runtime.experts import KTExperts, open_experts
    from ktconvert.native_quant.runtime.pool import get_shared_pool
    from ktconvert.pipeline.verify.inputs import require_finished

    require_finished(path)
    source = open_experts(path)
    if source.damage:
        raise InputError(f"{path}: {source.damage[0]}; see `ktconvert verify {path}`.")
    source.require_computable()
    config = source.config
    layers = source.layers
    layer = layers[0] if layer is None else layer
    pool = get_shared_pool(threads)
    with KTExperts.load(path, layer, pool=pool, activations=activations) as experts:
        topk, topk_source = find_experts_per_token(config, experts.layer, experts.num_experts)
        by_streams = benchmark.read_bandwidth(pool.threads)
        memory = max(by_streams.values())
        benchmark.warm_up(experts, topk)
        timings = [benchmark.time_forward(experts, count, topk) for count in tokens]
        cache = benchmark.last_level_cache()
        notes = []
        if experts.nbytes < benchmark.CACHES * cache:
            comparison = "fits in" if experts.nbytes <= cache else "is not much larger than"
            notes.append(
                f"the layer ({size(experts.nbytes)}) {comparison} the last-level cache ({size(cache)}): "
                "cached weights are faster than a whole model's would be; measure a model with larger layers."
            )
        return {
            "event": "benchmarked",
            "output": str(path),
            "layer": experts.layer,
            "layers": layers,
            "method": experts.method,
            "activations": " and ".join(experts._list_activations()),
            "weights": experts._packed.description,
            "numa": experts.parts,
            "experts": experts.num_experts,
            "experts_per_token": topk,
            "experts_per_token_from": topk_source,
            "hidden": experts.hidden,
            "intermediate": experts.intermediate,
            "layer_bytes": experts.nbytes,
            "expert_bytes": experts.nbytes // experts.num_experts,
            "isa": kernels.isa(),
            "threads": pool.threads,
            "cache_bytes": cache,
            "memory_bytes_per_second": round(memory),
            "memory_by_streams": {str(streams): round(rate) for streams, rate in by_streams.items()},
            "timings": [
                {
                    "tokens": t.tokens,
                    "runs": t.runs,
                    "seconds_median": t.median,
                    "seconds_best": t.best,
                    "tokens_per_second": t.tokens_per_second,
                    "experts_touched": t.touched,
                    "bytes": round(t.nbytes),
                    "bytes_per_second": round(t.bytes_per_second),
                    "share_of_memory": t.bytes_per_second / memory,
                    "seconds_all_layers": t.median * len(layers),
                }
                for t in timings
            ],
            "notes": notes,
        }


def overview_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that describe the layer and this machine."""
    threads = plural(document["threads"], "thread")
    rates = document["memory_by_streams"]
    rate = f"{document['memory_bytes_per_second'] / 1e9:.1f} GB/s read by {threads}"
    expert = f"{size(document['expert_bytes'])}: {document['hidden']} x {document['intermediate']}"
    return [
        ("output", document["output"]),
        ("layer", f"{document['layer']}, of {len(document['layers'])} ({format_ranges(document['layers'])})"),
        ("method", f"{document['method']} ({document['weights']}), NUMA slices: {document['numa']}"),
        ("experts", f"{document['experts']}, each {expert}"),
        ("per token", f"{document['experts_per_token']} ({document['experts_per_token_from']})"),
        ("computing", f"{document['isa']}, {document['activations']} activations, {threads}"),
        ("memory", f"{rate}, {plural(int(max(rates, key=rates.__getitem__)), 'stream')} each"),
    ]


def format_timings(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the timings, one row per number of tokens, below a header."""
    columns = {
        "tokens": "{tokens}",
        "ms/layer": "{median:.3g}",
        "best": "{best:.3g}",
        "tokens/s": "{tokens_per_second:.0f}",
        "experts": "{experts_touched:.1f}",
        "GB/s": "{rate:.2f}",
        "of memory": "{share:.0f} %",
        f"{plural(len(document['layers']), 'layer')}, experts only": "{whole:.3g} ms, {all_per_second:.3g} tokens/s",
    }
    rows = [tuple(columns)]
    for row in document["timings"]:
        median, best, all_layers = (1e3 * row[f"seconds_{name}"] for name in ("median", "best", "all_layers"))
        rate = row["bytes_per_second"] / 1e9
        share = 100 * row["share_of_memory"]
        cells = {**row, "median": median, "best": best, "whole": all_layers, "rate": rate, "share": share}
        cells["all_per_second"] = row["tokens"] / row["seconds_all_layers"]
        rows.append(tuple(text.format(**cells) for text in columns.values()))
    return rows
