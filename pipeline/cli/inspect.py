"""ktconvert inspect: what lies at a path (checkpoint, output, unfinished conversion), and what it can become."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ktconvert.layouts.checkpoints import config as cfg
from ktconvert.layouts.checkpoints.arch_file import parse_arch
from ktconvert.layouts.checkpoints.archs import ACTIVATIONS, ARCHS, MOST_LAYERS, Arch
from ktconvert.layouts.checkpoints.moe_model import MoeModel, recognise
from ktconvert.layouts.checkpoints.source import TensorSource, open_checkpoint
from ktconvert.layouts.errors import KtconvertError, UnsupportedError, UsageError
from ktconvert.layouts.outputs.card import ranges
from ktconvert.layouts.outputs.measuring import Measure, measure
from ktconvert.layouts.outputs.opening import is_output, open_output
from ktconvert.layouts.outputs.output import Output
from ktconvert.native_quant import kernels
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.existing import saved_plan, unit_states
from ktconvert.pipeline.engine.paths import Paths, locate, output_of
from ktconvert.pipeline.options.declare import with_values
from ktconvert.pipeline.options.queries import InspectOptions
from ktconvert.pipeline.plans.commands import plan_request, saved_request
from ktconvert.pipeline.plans.makeable import commands, dequantized, gpu_commands, gpu_types, methods
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import aligned, first_of, joined, size
from ktconvert.pipeline.stages.quantize_experts import sample_experts
from ktconvert.pipeline.verify.contents import check_codes, codes_of_others
from ktconvert.pipeline.verify.structure import check_structure, weights_whole
from ktconvert.pipeline.verify.verify import Report, facts, facts_rows
from ktconvert.quantizers import equalizing


@command("inspect", InspectOptions)
def inspect(options: InspectOptions) -> None:
    """Describe a checkpoint, an output or an unfinished conversion, and list what it can be converted to.

    PATH is a directory, a .safetensors or .gguf file, or a hub id (org/name, org/name:FILE.gguf). Headers only are
    read; of an AMXINT4 output without our manifest also the codes: kt-kernel misreads those that are -8; with --columns
    also weights of a checkpoint. The exit code is 3 for a checkpoint of which no command makes anything.

    Examples:
      ktconvert inspect /models/Qwen3-30B-A3B          the outputs that it can be converted to, and the commands
      ktconvert inspect /models/Qwen3-30B-A3B-INT8     its format and sizes, and whether it is complete
      ktconvert inspect /models/Qwen3-30B-A3B --columns    whether --equalize is for it
    """
    revision, row = options.hub.revision, options.arch.text()
    document = look(options.path, Reporter(), revision, row, columns=options.columns)
    refused = document.get("refused") if "dequantize" not in document else None
    if options.as_json:
        click.echo(json.dumps(document))
        if refused is not None:  # the object holds the reason: an error event would repeat it
            click.echo(f"ktconvert: {refused}", err=True)
            sys.exit(UnsupportedError.exit_code)
        return
    click.echo("\n".join(aligned(rows(document))))
    for note in document.get("notes", []):
        click.echo(f"\nnote: {note}")
    lines = [*document.get("convert", []), *document.get("convert_gpu", []), *document.get("dequantize", [])]
    if lines:
        click.echo("\n" + "\n".join(lines))
    if refused is not None:
        raise UnsupportedError(refused)


def look(
    where: str, reporter: Reporter, revision: str | None = None, arch_file: str | None = None, *, columns: bool = False
) -> dict[str, Any]:
    """Everything about a path or hub id, as one JSON object; "kind" is "checkpoint", "output" or "unfinished". A model
    that `cpu` and `gpu` cannot convert has "refused" with the reason. reporter: of the bytes of weights, where any are
    read. columns: those of a checkpoint are. Raises InputError for what is damaged or not there, UsageError for columns
    of what is no checkpoint.
    """
    path = Path(where).expanduser()
    work_of = output_of(path)
    paths = locate(work_of or path)
    unfinished = work_of is not None or (paths.plan.exists() and (paths.inside or not path.exists()))
    if not unfinished and not is_output(path):
        return _checkpoint(where, revision, arch_file, columns=columns)
    if columns:
        raise UsageError(f"{path}: --columns is for checkpoints, before they are converted; leave it out.")
    return _conversion(paths) if unfinished else _output(path, reporter)


def _checkpoint(where: str, revision: str | None, arch_file: str | None, *, columns: bool) -> dict[str, Any]:
    """What a checkpoint is, by its headers, and which outputs can be made of it."""
    rows: Sequence[Arch] = ARCHS if arch_file is None else (parse_arch(arch_file), *ARCHS)
    with open_checkpoint(where, revision) as source:
        document: dict[str, Any] = {"kind": "checkpoint", "path": where, **_files(source)}
        document |= dequantized(source, where)
        try:
            model = recognise(source, rows, to_read=True)
        except UnsupportedError as error:
            return document | {"refused": str(error)}
        document |= _experts(model, source)
        if columns:
            document |= {"columns": {str(layer): _columns(model, layer) for layer in model.layers}}
        if model.refusal is not None:
            return document | {"refused": model.refusal}
        document |= {"methods": methods(model), "convert": commands(model, where), "gpu": (gpu := gpu_types(model))}
        return document | {"convert_gpu": gpu_commands(gpu, where)}


def _files(source: TensorSource) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for info in source.tensors.values():
        dtypes[info.dtype] += info.nbytes
    return {
        "container": source.container.title,
        "model_type": cfg.families(source.config),
        "shards": len(source.shards),
        "tensors": len(source.tensors),
        "total_bytes": sum(info.nbytes for info in source.tensors.values()),
        "dtypes": dict(dtypes.most_common()),
        "ignored_files": list(source.ignored),
    }


def _experts(model: MoeModel, source: TensorSource) -> dict[str, Any]:
    routed = sum(info.nbytes for layer in model.layers for info in model.layer_tensors(layer))
    mtp = sum(source.tensors[name].nbytes for name in model.mtp_tensors if name in source.tensors)
    limit = cfg.number(source.config, model.arch.layers)
    every = range(limit[1]) if limit is not None and limit[1] <= MOST_LAYERS else range(max(model.layers) + 1)
    moe = set(model.layers)
    shapes = [model.shape(layer) for layer in model.layers]

    return {
        "architecture": model.arch.name,
        "moe_layers": list(model.layers),
        "dense_layers": [n for n in every if n not in moe],
        "mtp_layers": list(model.mtp_layers),
        "mtp_left_out_tensors": len(model.mtp_tensors),
        "experts": sorted({e for e, _, _ in shapes}),
        "hidden": sorted({h for _, h, _ in shapes}),
        "intermediate": sorted({i for _, _, i in shapes}),
        "expert_dtypes": list(model.dtypes),
        "shared_experts": model.has_shared_experts,
        "activation": model.activation,
        "activation_formula": ACTIVATIONS[model.activation],
        "weights_on": model.weights_on,
        "plain": model.plain,
        "routed_bytes": routed,
        "mtp_bytes": mtp,
        "rest_bytes": sum(info.nbytes for info in source.tensors.values()) - routed - mtp,
        "notes": list(model.notes),
    }


def _columns(model: MoeModel, layer: int) -> dict[str, Any]:
    """How much the columns of down differ (numerics.md, section 10), in some experts of a layer."""
    found = {}
    for expert in sample_experts(model.shape(layer)[0]):
        down = kernels.decode(model.linear(layer, expert, "down"))
        found[expert] = equalizing.center_and_spread(equalizing.levels(down))[1]
        for info in model.expert_tensors(layer, expert):
            model.source.release(info)
    worst = max(found, key=lambda expert: found[expert])
    return {
        "experts": len(found),
        "median": round(statistics.median(found.values()), 3),
        "most": round(found[worst], 3),
        "of_expert": worst,
        "above": sum(spread > equalizing.THRESHOLD for spread in found.values()),
    }


def _output(path: Path, reporter: Reporter) -> dict[str, Any]:
    """What an output is and whether it is complete, by names, sizes and headers; of codes of 4 bits, also by bytes."""
    output = open_output(path)
    measured = measure(output)
    report = Report(output, measured, check_structure(output, measured))
    return {
        "kind": "output",
        "path": str(path),
        **facts(output, measured),
        "architecture": output.facts.get("architecture"),
        "activation": output.facts.get("activation"),
        "expert_dtypes": output.facts.get("dtypes"),
        "settings": output.settings,
        "complete": not report.problems,
        "problems": report.problems,
        "codes": _misread(output, measured, reporter),
        "notes": report.notes,
    }


def _misread(output: Output, measured: Measure, reporter: Reporter) -> list[str] | None:
    """The tensors with codes that kt-kernel misreads, a sentence each; None where there is nothing to read."""
    if not weights_whole(output) or not (codes := codes_of_others(output, measured)):
        return None
    reporter.begin(sum(tensor.nbytes for tensor in codes), 0)
    try:
        return list(check_codes(output, codes, reporter).problems)
    finally:
        reporter.end()


def _conversion(paths: Paths) -> dict[str, Any]:
    """Where a conversion stands. With its source at hand, every unit; without, what the journal says."""
    old = saved_plan(paths)
    assert old is not None
    records = journal.read(paths.journal)
    last = journal.last_run(records)
    document = {
        "kind": "unfinished",
        "path": str(paths.output),
        "work_directory": str(paths.root),
        "command": old.command,
        "input": old.input,
        "settings": old.settings,
        "units_done": len(journal.finished(records)),
        "died_in": list(last[1]) if last else [],
        "resume": shlex.join(["ktconvert", "resume", str(paths.output)]),
    }
    try:
        request = saved_request(paths.output, old)
        plan = plan_request(replace(request, options=with_values(request.options, verify_inputs=False)))
        states = unit_states(plan, paths)
    except KtconvertError as error:
        return document | {"units": None, "source_problem": str(error)}
    todo = [state.unit for state in states if not state.done]
    return document | {
        "units": len(states),
        "units_done": len(states) - len(todo),
        "bytes_left": sum(unit.bytes_in for unit in todo),
        "units_left": [unit.name for unit in todo],
    }


def rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    return ROWS[document["kind"]](document)


def _checkpoint_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    files = f"{document['shards']} {document['container']}, {document['tensors']} tensors"
    out = [
        ("checkpoint", document["path"]),
        ("model type", joined(document["model_type"]) or "unknown (no config.json)"),
        ("files", f"{files}, {size(document['total_bytes'])}"),
        ("dtypes", joined([f"{name} {size(nbytes)}" for name, nbytes in document["dtypes"].items()])),
    ]
    if document["ignored_files"]:
        out.append(("left aside", joined(document["ignored_files"][:5])))
    if "architecture" in document:
        out += _expert_rows(document)
    if "dequantize" in document:
        out += [("cpu, gpu", f"not possible: {document['refused']}")] if "refused" in document else []
        out.append(("BF16", f"the whole model, {size(document['dequantized_bytes'])}"))
    return out


def _expert_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    dense, mtp, left_out = document["dense_layers"], document["mtp_layers"], document["mtp_left_out_tensors"]
    shared = "yes" if document["shared_experts"] else "no"
    of_mtp = f"layers {ranges(mtp)}: " if mtp else ""
    out = [
        ("architecture", document["architecture"]),
        ("MoE layers", f"{len(document['moe_layers'])} ({ranges(document['moe_layers'])})"),
        ("dense layers", f"{len(dense)} ({ranges(dense)})" if dense else "none"),
        ("MTP", f"{of_mtp}{left_out} expert tensors, left out" if left_out else "none"),
        ("experts", f"{joined(document['experts'])} per layer; shared experts: {shared}"),
        ("hidden size", joined(document["hidden"])),
        ("expert width", joined(document["intermediate"])),
        ("expert dtypes", joined(document["expert_dtypes"])),
        ("activation", f"{document['activation']}: {document['activation_formula']}"),
        ("routing weights", f"on the {document['weights_on']} of an expert"),
        ("routed experts", size(document["routed_bytes"])),
        *_column_rows(document.get("columns", {})),
        *([("MTP experts", size(document["mtp_bytes"]))] if document["mtp_bytes"] else []),
        ("all the rest", size(document["rest_bytes"])),
    ]
    for method in document.get("methods", []):
        sizes = [size(nbytes) for nbytes in method["bytes"].values()]
        what = f"NUMA parts {joined(method['legal'])}; {sizes[0]} of output" if sizes else "not possible"
        out.append((f"{method['quant_method']} ({method['method']})", what))
        out += [("", f"not {t}: {reason}") for t, reason in method["illegal"].items()]
    for kind in document.get("gpu", []):
        why = kind["refused"]
        what = f"the whole model, {size(kind['bytes'])}" if why is None else f"not possible: {why}"
        out.append((f"{kind['quant_type']} (GPU)", what))
    return out


def _column_rows(layers: dict[str, Any]) -> Iterator[tuple[str, str]]:
    label = "columns of down"
    for layer, c in layers.items():
        what = f"{c['above']} of {c['experts']} sampled experts above {equalizing.THRESHOLD:g}"
        yield label, f"layer {layer}: {c['median']:.2f} (median), {c['most']:.2f} (expert {c['of_expert']}); {what}"
        label = ""


def _output_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    labels = (("architecture", "architecture"), ("activation", "activation"), ("made from", "expert_dtypes"))
    out = facts_rows(document) + [(label, joined(document[name])) for label, name in labels if document[name]]
    if document["codes"] is not None:
        out.append(("codes", first_of(document["codes"]) or "all from -7 to 7"))
    how = "checks every byte" if document["made_by"] else "--against SOURCE checks the bytes"
    yes = f"yes, by names and sizes; `ktconvert verify` {how}"
    return [*out, ("complete", yes if document["complete"] else f"no: {first_of(document['problems'])}")]


def _unfinished_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    known = document["units"] is not None
    of = f" of {document['units']}" if known else ""
    left = f", {size(document['bytes_left'])} left to read" if document["units"] else ""
    return [
        ("unfinished", document["path"]),
        ("work directory", document["work_directory"]),
        ("command", f"ktconvert {document['command']} -i {document['input']}"),
        ("options", ", ".join(f"{k} {v}" for k, v in document["settings"].items() if v not in (None, False))),
        ("units", f"{document['units_done']}{of} finished{left}"),
        *([("last run", f"died in {joined(document['died_in'])}")] if document["died_in"] else []),
        *([] if known else [("source", document["source_problem"])]),
        ("go on with", document["resume"]),
    ]


ROWS = {"checkpoint": _checkpoint_rows, "output": _output_rows, "unfinished": _unfinished_rows}
