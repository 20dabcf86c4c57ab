"""`ktconvert fit`: the forms of a model that fit a machine, and the commands for the best of them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ktconvert.layouts.errors import MissingPackageError, ResourceError, UsageError
from ktconvert.layouts.outputs import launch
from ktconvert.layouts.sources.config import ASSUMED
from ktconvert.native_quant import machine
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.queries import FitOptions, Target, UpOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import duration, format_table, size

if TYPE_CHECKING:
    from ktconvert.pipeline.fit.estimate import Choice, Machine, ModelShape, Use
    from ktconvert.pipeline.fit.machines import Gpu
    from ktconvert.pipeline.fit.reading import NamedShape
    from ktconvert.pipeline.fit.steps import Step

GPU_CHOICE = re.compile(r"(?:(\d{1,2})\s*x\s*)?(\S.*)", re.IGNORECASE)


@command("fit", FitOptions)
def fit(options: FitOptions) -> None:
    """Predict which forms of a model fit a machine, and print the commands for the best of them.

    MODEL is a directory, a .safetensors or .gguf file, or a hub id (org/name, org/name:FILE.gguf). No weights are read
    or downloaded. Sizes of outputs are exact; other figures are predictions. The machine is this one, unless options
    describe a different one. The exit code is 4 if nothing fits.

    Examples:
      ktconvert fit MODEL
      ktconvert fit deepseek-ai/DeepSeek-V3.1 --ram 512GB --gpu 2x4090
      ktconvert fit MODEL --ram 64GB --vram 24GB --context 16384 --explain
    """
    prediction = predict(options)
    document, problem = prediction.document, prediction.problem
    if options.as_json:
        click.echo(json.dumps(document))
        if problem:  # the object contains the reasons: an error event would repeat one
            click.echo(f"ktconvert: {problem}", err=True)
            sys.exit(ResourceError.exit_code)
        return
    click.echo("\n".join(format_document(document, explain=options.explain)))
    if problem:
        raise ResourceError(problem)
    is_here = options.target.ram is options.target.vram is options.target.gpu is None
    if is_here and not prediction.steps[-1].command.startswith(launch.PROGRAM):
        _note_missing_packages()


def _note_missing_packages() -> None:
    """Print a note with the command that installs the packages of our server, if they are missing."""
    from ktconvert.layouts.extras import require_packages
    from ktconvert.pipeline.models.loading import REQUIRED_PACKAGES

    try:
        require_packages("`ktconvert serve`", REQUIRED_PACKAGES["serve"], "serve")
    except MissingPackageError as error:
        Reporter().note(error.text)


class Prediction(NamedTuple):
    """A prediction as a JSON object, and its parts.

    problem  sentence that says why nothing fits; "" if something does
    """

    document: dict[str, Any]
    problem: str
    model: NamedShape
    steps: list[Step]


def predict(options: FitOptions | UpOptions, *, run_here: bool = False) -> Prediction:
    """Predict the choices for a model.

    run_here  the steps run on this machine, and on the commits that the hub has now

    Raises KTConvertError for options, models and hubs that cannot be used.
    """
    from ktconvert.pipeline.fit.estimate import list_choices
    from ktconvert.pipeline.fit.reading import read_model
    from ktconvert.pipeline.fit.steps import list_steps, suggest_comparison, suggest_map

    target = describe_machine(options.target)
    runtime = choose_runtime(options.target, target)
    read = read_model(options, target.numa, runtime, pinned=run_here)
    use = _describe_use(options.target, runtime, read.shape.positions)
    if run_here and read.names.rest == launch.ORIGINAL:
        raise UsageError(
            f"{options.model}: a GGUF has only the experts in usable form; give the model that it was made from "
            "(directory or hub id) as --config MODEL."
        )
    for note in read.notes:
        Reporter().note(note)
    choices = list_choices(read.shape, target, use)
    document = _make_document(options.model, read.shape, target, use, choices)
    if choices[0].problem:
        return Prediction(document, f"{options.model}: nothing fits; {_explain_misfit(choices, use)}.", read, [])
    if run_here:
        target = replace(target, cores=machine.physical_cores())
    steps = [*list_steps(choices[0], read.names, target, use)]
    document["map_command"] = suggest_map(choices[0], read.names, target, use)
    document["compare_command"] = suggest_comparison(choices[0], read.names)
    document["commands"] = [{"step": step.name, "command": step.command} for step in steps]
    return Prediction(document, "", read, steps)


def describe_machine(options: Target) -> Machine:
    """Return the machine of the options; what they leave out is this machine's. Raises UsageError."""
    from ktconvert.pipeline.fit.estimate import Machine
    from ktconvert.pipeline.fit.machines import USUAL_GPU_BANDWIDTH

    vram, known = _choose_gpus(options)
    gpu_bandwidth = options.gpu_bandwidth or (known.bandwidth if known else USUAL_GPU_BANDWIDTH)
    cores = machine.physical_cores() if options.bandwidth is None else None
    return Machine(
        options.ram or min(machine.memory_total(), machine.memory_limit() or machine.memory_total()),
        vram,
        options.numa or machine.pool_count(),
        options.disk or machine.disk_free(Path()),
        options.bandwidth or _measure_bandwidth(machine.physical_cores()),
        gpu_bandwidth,
        cores,
    )


def _measure_bandwidth(threads: int) -> float:
    """Return the bytes per second that the cores of this machine read from memory; takes a second."""
    from ktconvert.native_quant.runtime.benchmark import read_bandwidth

    return max(read_bandwidth(threads).values())


def _choose_gpus(options: Target) -> tuple[tuple[int, ...], Gpu | None]:
    """Return the memory of each GPU, and what is known about their kind.

    Raises UsageError for an unknown name.
    """
    from ktconvert.pipeline.fit.machines import GPUS, find_gpu, list_gpus

    if options.gpu is None:
        if options.vram is not None:
            return options.vram, None
        gpus = list_gpus()
        return tuple(memory for _, memory in gpus), find_gpu(gpus[0][0]) if gpus else None
    match = GPU_CHOICE.fullmatch(options.gpu.strip())
    known = find_gpu(match[2]) if match else None
    if match is None or known is None or match[1] == "0":
        raise UsageError(f"--gpu {options.gpu}: unknown; give --vram and --gpu-bandwidth, or one of {', '.join(GPUS)}.")
    return (known.memory,) * int(match[1] or 1), known


def choose_runtime(options: Target, target: Machine) -> str:
    """Return the server that is given, else the one for the machine. Raises UsageError if it cannot be used."""
    from ktconvert.pipeline.fit.estimate import KTCONVERT, SGLANG

    runtime = options.runtime or (SGLANG if target.vram else KTCONVERT)
    if runtime == SGLANG and not target.vram:
        raise UsageError("--runtime sglang needs a GPU; give --vram or --gpu, or --runtime ktconvert.")
    return runtime


def _describe_use(options: Target, runtime: str, positions: int | None) -> Use:
    """Return the use of the options; `positions`: the model's limit. Raises UsageError for a longer context."""
    from ktconvert.pipeline.fit.estimate import USUAL_CONTEXT, Use

    if positions and options.context and options.context > positions:
        problem = f"the model computes at most {positions} tokens (max_position_embeddings of its config)"
        raise UsageError(f"--context {options.context}: {problem}; give {positions} or less.")
    context = options.context or min(USUAL_CONTEXT, positions or USUAL_CONTEXT)
    return Use(context, options.sequences, runtime, options.prefer)


def _explain_misfit(choices: list[Choice], use: Use) -> str:
    """Return why the smallest choice does not fit, and what to do."""
    smallest = min(choices, key=lambda choice: (bool(choice.form.refusal), choice.ram_bytes + choice.vram_bytes))
    form = f"the smallest form, {smallest.form.name} with the rest {_describe_rest(smallest.rest.name)}, "
    if smallest.form.refusal:
        return f"{form}is {smallest.problem}; give fewer NUMA nodes (--numa)"
    fewer = ", fewer --sequences" if use.sequences > 1 else ""
    return f"{form}{smallest.problem}; use a larger machine, a shorter --context{fewer}, or a smaller model"


def _describe_rest(name: str) -> str:
    return "as published" if name == "published" else f"in {name}"


def _make_document(model: str, shape: ModelShape, target: Machine, use: Use, choices: list[Choice]) -> dict[str, Any]:
    """Return the predictions as a JSON object: sizes in bytes, rates in bytes per second, times in seconds."""
    return {
        "event": "fit",
        "model": model,
        "machine": {
            "ram": target.ram,
            "vram": list(target.vram),
            "numa": target.numa,
            "disk": target.disk,
            "bandwidth": round(target.bandwidth),
            "gpu_bandwidth": round(target.gpu_bandwidth),
        },
        "runtime": use.runtime,
        "context": use.context,
        "sequences": use.sequences,
        "prefer": use.prefer,
        "layers": shape.layers,
        "moe_layers": len(shape.experts),
        "experts": max(shape.experts),
        "experts_per_token": shape.topk,
        "experts_per_token_from": shape.topk_from,
        "routed_bytes": shape.routed_bytes,
        "download_bytes": shape.download,
        "cache_known": bool(shape.caches),
        "choices": [_describe_choice(choice) for choice in choices],
        "commands": [],
        "map_command": None,
        "compare_command": None,
    }


def _describe_choice(choice: Choice) -> dict[str, Any]:
    return {
        "quant_method": choice.form.option or None,
        "method": choice.form.method,
        "scale": choice.form.scale,
        "rest": choice.rest.name,
        "gpu_experts": choice.gpu_experts,
        "ram": choice.ram_bytes,
        "ram_parts": choice.ram,
        "vram": choice.vram_bytes,
        "vram_parts": choice.vram,
        "disk": choice.disk,
        "output": choice.form.disk,
        "seconds": choice.seconds,
        "tokens_per_second": choice.tokens_per_second,
        "loss": choice.loss,
        "fits": not choice.problem,
        "problem": choice.problem,
        "limit": choice.limit,
    }


# --- text ------------------------------------------------------------------------------------------


def format_document(document: dict[str, Any], *, explain: bool) -> list[str]:
    """Return the lines of the report."""
    target = document["machine"]
    cards = ", ".join(map(size, target["vram"])) or "none"
    bandwidth = f"{target['bandwidth'] / 1e9:.1f} GB/s"
    cache = f"{document['context']} tokens, {document['sequences']} at a time"
    assumed = f" ({ASSUMED})" if document["experts_per_token_from"] == ASSUMED else ""
    rows = [
        ("model", f"{document['model']}: {document['moe_layers']} of {document['layers']} layers with experts"),
        ("experts", f"{document['experts']} per layer, {document['experts_per_token']} per token{assumed}"),
        ("RAM", f"{size(target['ram'])}, {bandwidth}, NUMA nodes: {target['numa']}"),
        ("GPUs", cards + (f", {target['gpu_bandwidth'] / 1e9:.1f} GB/s" if target["vram"] else "")),
        ("disk", f"{size(target['disk'])} free"),
        ("sequences", cache + ("" if document["cache_known"] else "; the config describes no attention: no KV cache")),
        ("runtime", document["runtime"]),
    ]
    choices = document["choices"] if explain else _keep_best(document["choices"])
    fitting = [choice for choice in choices if choice["fits"]]
    others = [choice for choice in choices if not choice["fits"]]
    lines = format_table(rows)
    if fitting:
        lines += ["", *format_table([HEADING, *map(_choice_row, fitting)]), "", LOSS]
    if others:
        lines += ["", "does not fit", *format_table([(_name(c), c["rest"], c["problem"]) for c in others], "  ")]
    if explain:
        lines += [line for choice in fitting for line in ("", *_explain_choice(choice))]
        lines += ["", f"process: {PROCESS_WITH_GPU if target['vram'] else PROCESS_WITHOUT_GPU}"]
    for step in document["commands"]:
        lines += ["", f"# {step['step']}", step["command"]]
    if document["compare_command"]:
        lines += [
            "",
            "# no step compares the experts with the source, which would download it a second time; this command does",
            document["compare_command"],
        ]
    if explain and document["map_command"]:
        lines += [
            "",
            "# or convert with a method for each layer, which may lose less in the same RAM",
            document["map_command"],
        ]
    return lines


def _keep_best(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first choice of each form of the experts, also of those that leave all of them to the CPU."""
    best: dict[tuple[str, bool], dict[str, Any]] = {}
    for choice in choices:
        best.setdefault((_name(choice), choice["rest"] == "no experts"), choice)
    return [*best.values()]


LOSS = "loss: mean KL divergence from the checkpoint, measured with a small model; below 0.001 it counts as none"
PROCESS_WITH_GPU = "an estimate for a server with a GPU: Python, torch, its libraries, and pinned buffers"
PROCESS_WITHOUT_GPU = "as measured for `ktconvert serve`: Python, torch, transformers, and their libraries"
HEADING = ("experts", "rest", "on GPU", "RAM", "VRAM", "disk", "time", "tokens/s", "loss (nats)")


def _choice_row(choice: dict[str, Any]) -> tuple[str, ...]:
    return (
        _name(choice),
        choice["rest"],
        str(choice["gpu_experts"]),
        size(choice["ram"]),
        size(choice["vram"]) if choice["vram"] else "-",
        size(choice["disk"]) if choice["disk"] else "-",
        duration(choice["seconds"]) if choice["seconds"] else "-",
        f"{choice['tokens_per_second']:.1f}",
        f"{choice['loss']:.4f}" if choice["loss"] else "none",
    )


def _name(choice: dict[str, Any]) -> str:
    scale = f", {choice['scale']}" if choice["scale"] != "absmax" else ""
    return f"{choice['quant_method']}{scale}" if choice["quant_method"] else f"as it is ({choice['method']})"


def _explain_choice(choice: dict[str, Any]) -> list[str]:
    rows = [
        (label, ", ".join(f"{part} {size(nbytes)}" for part, nbytes in parts.items() if nbytes))
        for label, parts in (("RAM", choice["ram_parts"]), ("each GPU", choice["vram_parts"]))
        if parts
    ]
    return [f"{_name(choice)}, rest {choice['rest']}", *format_table([*rows, ("limit", choice["limit"])], "  ")]
