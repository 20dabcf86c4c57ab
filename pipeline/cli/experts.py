"""`ktconvert experts`: the hot experts by counts of routed tokens, as a file for `run`, SGLang or sglang-kt."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ktconvert.layouts.errors import InputError, OutputError, UnsupportedError, UsageError
from ktconvert.layouts.files import publish
from ktconvert.layouts.tensors import format_ranges
from ktconvert.native_quant.arrays import I64
from ktconvert.pipeline.cli import preconditions
from ktconvert.pipeline.cli.command import command, require_one
from ktconvert.pipeline.options.queries import ExpertsOptions

if TYPE_CHECKING:
    from ktconvert.layouts.checkpoints.moe_model import MoeModel
    from ktconvert.native_quant.runtime.hot_experts import Mask

# Value of --format -> endings of its file; the servers recognize theirs by them
ENDINGS = {"mask": (".safetensors",), "sglang": (".json",), "sglang-kt": (".pt",)}


@command("experts", ExpertsOptions)
def experts(options: ExpertsOptions) -> None:
    """Choose the hot experts, those that got the most tokens in COUNTS, and report their share of tokens.

    `run` and `serve` take the output as --gpu-experts-mask. With --format sglang or sglang-kt, it is for
    --init-expert-location, and the command that starts the server is printed.

    Examples:
      ktconvert experts DIR -o mask.safetensors --num-gpu-experts 32
      ktconvert experts DIR --format sglang -o hot.json --num-gpu-experts 32
      ktconvert experts DIR -o mask.safetensors --total 1536 --plot mask.svg
      ktconvert serve MODEL --cpu-weights OUT --gpu-experts-mask mask.safetensors
    """
    from ktconvert.native_quant.runtime import expert_placement, hot_experts
    from ktconvert.pipeline.report.plots import plot_experts
    from ktconvert.pipeline.report.progress import Reporter
    from ktconvert.pipeline.report.text import format_table

    require_one({"--num-gpu-experts": options.num_gpu_experts is not None, "--total": options.total is not None})
    if options.format == "sglang" and options.total is not None:
        raise UsageError("--total: SGLang computes the same number of experts in each layer; give --num-gpu-experts.")
    preconditions.check_file("--output", options.output, ENDINGS[options.format], replace=options.format != "sglang")
    preconditions.check_plot(options.plot)
    output = options.output.expanduser().absolute()
    path = options.counts.expanduser()
    counts = expert_placement.read_any_counts(path)
    mask = _choose_experts(options, counts)
    is_mask = options.format == "mask"
    server = (
        _make_serve_command(options, path, counts)
        if is_mask
        else _make_launch_command(options, path, output, counts, mask)
    )
    if options.format == "sglang":
        _write_new_file(output, expert_placement.map_file(counts))
    else:
        data = hot_experts.mask_file(mask) if is_mask else expert_placement.counts_file(counts)
        publish.write_marked_file(output, data)
    covered = hot_experts.hot_fraction(counts, mask)
    document = {
        "event": "chosen",
        "counts": str(options.counts),
        "output": str(output),
        "format": options.format,
        "experts": counts.shape[1],
        "tokens": int(counts.sum()),
        "coverage": float((counts * mask).sum() / counts.sum()),
        "command": None if is_mask else server,
        "layers": [
            {"layer": n, "coverage": float(covered[n]), "hot": [int(e) for e in mask[n].nonzero()[0]]}
            for n in range(len(counts))
            if counts[n].any()
        ],
    }
    if options.as_json:
        click.echo(json.dumps(document))
    else:
        click.echo("\n".join((*format_table(coverage_rows(document)), *(() if is_mask else ("", server)))))
        if is_mask:
            Reporter().say(f"next: {server}")
    if options.plot is not None:
        plot_experts(options.plot, document)


def _choose_experts(options: ExpertsOptions, counts: I64) -> Mask:
    """Return the mask of the experts that the GPU will compute: sglang-kt chooses among all layers together."""
    from ktconvert.native_quant.runtime import hot_experts

    if options.total is not None:
        return hot_experts.most_used_in_total(counts, options.total)
    number = options.num_gpu_experts or 0
    mask = hot_experts.most_used_per_layer(counts, number)
    if options.format != "sglang-kt":
        return mask
    return hot_experts.most_used_in_total(counts, number * int(counts.any(axis=1).sum()))


def _write_new_file(path: Path, data: bytes) -> None:
    """Write a file that cannot have our mark: SGLang refuses other entries. Raises OutputError for a different file."""
    if path.exists():
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return
        raise OutputError(f"{path}: exists with a different content; move it away or choose a different name.")
    partial = path.with_name(f".{path.name}.partial")
    publish.write_file(partial, data)
    publish.publish_path(partial, path)


def _make_serve_command(options: ExpertsOptions, path: Path, counts: I64) -> str:
    """Return the command of ktconvert that serves with the mask.

    Raises InputError if the model or the CPU's experts have other experts than the counts.
    """
    from ktconvert.layouts.outputs.measuring import measure_output
    from ktconvert.layouts.outputs.opening import open_output

    if options.model is not None:
        _require_model(path, counts, options.model)
    if options.cpu_weights is not None:
        shapes = measure_output(open_output(options.cpu_weights.expanduser())).shapes
        _require_same_experts(path, counts, options.cpu_weights, {layer: shape[0] for layer, shape in shapes.items()})
    inputs = options.model or "MODEL", "--cpu-weights", str(_find_cpu_weights(options, path) or "OUT")
    return shlex.join(["ktconvert", "serve", *inputs, "--gpu-experts-mask", str(options.output)])


def _make_launch_command(options: ExpertsOptions, path: Path, output: Path, counts: I64, mask: Mask) -> str:
    """Return the command that starts the server with the placement.

    Raises InputError if the model or the CPU's experts have other experts than the counts, UnsupportedError if the
    CPU's experts are no output or a mix of methods.
    """
    from ktconvert.layouts.outputs import launch
    from ktconvert.layouts.outputs.opening import is_whole_model

    by_counts = options.format == "sglang-kt"
    placement = launch.place_experts(output, _count_experts(options, counts, mask), by_counts=by_counts)
    model = options.model
    if model is None and options.cpu_weights is not None and is_whole_model(path):
        model = str(path.absolute())
    shared_experts = model is None or _require_model(path, counts, model).has_shared_experts
    weights = _find_cpu_weights(options, path)
    if weights is None:
        return launch.join_command(
            launch.make_options(
                model or launch.ORIGINAL,
                launch.CPU_EXPERTS,
                "METHOD",
                placement=placement,
                shared_experts=shared_experts,
            )
        )
    return launch.join_command(_serve_output(path, counts, model, weights.expanduser().absolute(), placement))


def _find_cpu_weights(options: ExpertsOptions, path: Path) -> Path | None:
    """Return the output with the CPU's experts: --cpu-weights, or the one that has the counts; None: unknown."""
    from ktconvert.layouts.outputs.opening import is_output, is_statistics

    return options.cpu_weights or (path if is_output(path) and not is_statistics(path) else None)


def _count_experts(options: ExpertsOptions, counts: I64, mask: Mask) -> str:
    """Return SGLang's option for the number of experts on the GPU."""
    if options.total is None:
        return f"--kt-num-gpu-experts {options.num_gpu_experts}"
    experts_in_total = int(counts.any(axis=1).sum()) * counts.shape[1]
    # sglang-kt rounds ratio * experts down.
    return f"--kt-gpu-experts-ratio {min(1.0, (int(mask.sum()) + 0.5) / experts_in_total):.9g}"


def _serve_output(
    path: Path, counts: I64, model: str | None, weights: Path, placement: Sequence[str]
) -> tuple[str, ...]:
    """Return SGLang's options for an output of `cpu` or `gpu` that has these experts."""
    from ktconvert.layouts.outputs import launch
    from ktconvert.layouts.outputs.measuring import measure_output
    from ktconvert.layouts.outputs.opening import open_output

    opened = open_output(weights)
    measured = measure_output(opened)
    fmt = measured.fmt
    if fmt is None or fmt.by_layer or not fmt.forward:
        raise UnsupportedError(f"{weights}: SGLang has no --kt-method for {measured.method}; use a different output.")
    _require_same_experts(path, counts, weights, {layer: shape[0] for layer, shape in measured.shapes.items()})
    facts = opened.facts
    facts["method"], facts["numa"] = fmt.name, measured.numa
    if not fmt.arrangement.is_whole_model:
        rest = model or launch.ORIGINAL
        return launch.serve_cpu_experts(facts, str(weights), rest, sliced=fmt.arrangement.sliced, placement=placement)
    if model is not None:
        raise UsageError(f"--model: {weights} is a whole model itself; leave out the option.")
    return launch.serve_whole_model(facts, str(weights), placement=placement)


def _require_model(path: Path, counts: I64, model: str) -> MoeModel:
    """Return a checkpoint. Raises InputError if it has other layers or numbers of experts than the counts."""
    from ktconvert.layouts.checkpoints.recognition import recognize
    from ktconvert.layouts.sources.source import open_checkpoint

    checkpoint = recognize(open_checkpoint(model))
    experts_by_layer = {layer: checkpoint.shape(layer)[0] for layer in checkpoint.layers}
    _require_same_experts(path, counts, model, experts_by_layer, checkpoint.decoder_layers)
    return checkpoint


def _require_same_experts(
    path: Path, counts: I64, model: str | Path, experts: Mapping[int, int], decoder_layers: int | None = None
) -> None:
    """Raise InputError if a model has other experts than the counts.

    experts         its layers with experts -> their number
    decoder_layers  number of all its decoder layers; None if unknown
    """
    layers, most = counts.shape
    fits = most == max(experts.values()) and layers == (decoder_layers or max(layers, max(experts) + 1))
    used = [layer for layer in range(layers) if counts[layer].any()]
    known = decoder_layers is None or {*used} <= experts.keys()
    if not (fits and known):
        sizes = " or ".join(map(str, sorted({*experts.values()})))
        depth = "" if decoder_layers is None else f" of {decoder_layers} layers"
        raise InputError(
            f"{path}: counts of {most} experts in layers {format_ranges(used)} of {layers}, but {model} has {sizes} "
            f"experts in layers {format_ranges(sorted(experts))}{depth}; use the counts of this model"
        )


def coverage_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the hot experts of each layer and their share of tokens, below a header."""
    rows: list[tuple[str, ...]] = [("layer", "hot", "coverage", "experts")]
    for row in document["layers"]:
        first = ", ".join(map(str, row["hot"][:12])) + (", ..." if len(row["hot"]) > 12 else "")
        rows.append((str(row["layer"]), str(len(row["hot"])), f"{row['coverage']:.1%}", first))
    hot = sum(len(row["hot"]) for row in document["layers"])
    return [*rows, ("all", str(hot), f"{document['coverage']:.1%}", f"of {document['experts']} in each layer")]
