"""`ktconvert inspect`: description of a checkpoint, an output or an unfinished conversion, as text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from ktconvert.layouts.checkpoints.expert_function import describe_record
from ktconvert.layouts.errors import UnsupportedError
from ktconvert.layouts.tensors import format_ranges
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.cli.describe import describe_path
from ktconvert.pipeline.options.queries import InspectOptions
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import format_table, join_values, size, summarize
from ktconvert.pipeline.verify.verify import output_rows
from ktconvert.quantizers import equalizing


@command("inspect", InspectOptions)
def inspect(options: InspectOptions) -> None:
    """Describe a checkpoint, an output or an unfinished conversion, and list the possible conversions.

    Only headers are read, with two exceptions: --columns reads weights, and an AMXINT4 output without ktconvert's
    manifest is searched for codes of -8, which kt-kernel misreads. The exit code is 3 if no command can convert a
    checkpoint.

    Examples:
      ktconvert inspect Qwen/Qwen3-30B-A3B    possible outputs, and the commands
      ktconvert inspect OUT                   format, sizes, completeness
      ktconvert inspect MODEL --columns       would --equalize help?
    """
    revision = options.hub.revision
    row = options.arch.load_text()
    document = describe_path(options.path, Reporter(), revision, row, columns=options.columns)
    refused = document.get("refused") if "dequantize" not in document else None
    if options.as_json:
        click.echo(json.dumps(document))
        if refused is not None:  # the object contains the reason: an error event would repeat it
            click.echo(f"ktconvert: {UnsupportedError(refused)}", err=True)
            sys.exit(UnsupportedError.exit_code)
        return
    click.echo("\n".join(format_table(ROWS[document["kind"]](document))))
    for note in document.get("notes", []):
        click.echo(f"\nnote: {note}")
    lines = [*document.get("convert", []), *document.get("convert_gpu", []), *document.get("dequantize", [])]
    if lines:
        click.echo("\n" + "\n".join(lines))
    if refused is not None:
        raise UnsupportedError(refused)


def _checkpoint_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    files = f"{document['shards']} {document['container']}, {document['tensors']} tensors"
    rows = [
        ("checkpoint", document["path"]),
        ("model type", join_values(document["model_type"]) or "unknown (no config.json names it)"),
        ("files", f"{files}, {size(document['total_bytes'])}"),
        ("dtypes", join_values([f"{name} {size(nbytes)}" for name, nbytes in document["dtypes"].items()])),
    ]
    if document["ignored_files"]:
        rows.append(("ignored files", join_values(document["ignored_files"][:5])))
    if "architecture" in document:
        rows += _expert_rows(document)
    if "dequantize" in document:
        rows += [("cpu, gpu", f"not possible: {document['refused']}")] if "refused" in document else []
        rows.append(("BF16", f"the whole model, {size(document['dequantized_bytes'])}"))
    return rows


def _expert_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the table of a checkpoint's experts and possible conversions: (label, text) rows."""
    dense_layers = document["dense_layers"]
    mtp_layers = document["mtp_layers"]
    skipped_tensors = document["mtp_left_out_tensors"]
    shared = "yes" if document["shared_experts"] else "no"
    mtp_text = f"layers {format_ranges(mtp_layers)}: " if mtp_layers else ""
    rows = [
        ("architecture", document["architecture"]),
        ("MoE layers", f"{len(document['moe_layers'])} ({format_ranges(document['moe_layers'])})"),
        ("dense layers", f"{len(dense_layers)} ({format_ranges(dense_layers)})" if dense_layers else "none"),
        ("MTP", f"{mtp_text}{skipped_tensors} expert tensors, left out" if skipped_tensors else "none"),
        ("experts", f"{join_values(document['experts'])} per layer; shared experts: {shared}"),
        ("hidden size", join_values(document["hidden"])),
        ("expert width", join_values(document["intermediate"])),
        ("expert dtypes", join_values(document["expert_dtypes"])),
        ("experts compute", describe_record(document["functions"])),
        ("routed experts", size(document["routed_bytes"])),
        *_column_rows(document.get("columns", {})),
        *([("MTP experts", size(document["mtp_bytes"]))] if document["mtp_bytes"] else []),
        ("other tensors", size(document["rest_bytes"])),
    ]
    for method in document.get("methods", []):
        sizes = [size(nbytes) for nbytes in method["bytes"].values()]
        text = f"NUMA slices {join_values(method['legal'])}; {sizes[0]} of output" if sizes else "not possible"
        rows.append((f"{method['quant_method']} ({method['method']})", text))
        rows += [("", f"not {t}: {reason}") for t, reason in method["illegal"].items()]
    for kind in document.get("gpu", []):
        reason = kind["refused"]
        text = f"the whole model, {size(kind['bytes'])}" if reason is None else f"not possible: {reason}"
        rows.append((f"{kind['quant_type']} (GPU)", text))
    return rows


def _column_rows(layers: dict[str, Any]) -> Iterator[tuple[str, str]]:
    label = "columns of down"
    for layer, columns in layers.items():
        spreads = f"{columns['median']:.2f} (median), {columns['most']:.2f} (expert {columns['of_expert']})"
        above = f"{columns['above']} of {columns['experts']} sampled experts above {equalizing.THRESHOLD:g}"
        yield label, f"layer {layer}: {spreads}; {above}"
        label = ""


def _output_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    labels = (("architecture", "architecture"), ("made from", "expert_dtypes"))
    rows = output_rows(document) + [(label, join_values(document[name])) for label, name in labels if document[name]]
    if document["functions"]:
        rows.append(("experts compute", describe_record(document["functions"])))
    if document["codes"] is not None:
        rows.append(("codes", summarize(document["codes"]) or "all from -7 to 7"))
    option = "" if document["made_by"] else " --against SOURCE"
    complete_text = f"yes, by names and sizes; `ktconvert verify{option}` checks the bytes"
    return [*rows, ("complete", complete_text if document["complete"] else f"no: {summarize(document['problems'])}")]


def _conversion_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    is_readable = document["units"] is not None
    total = f" of {document['units']}" if is_readable else ""
    remaining = f", {size(document['bytes_left'])} left to read" if document.get("bytes_left") else ""
    options = ", ".join(f"{name} {value}" for name, value in document["settings"].items() if value not in (None, False))
    return [
        ("unfinished", document["path"]),
        ("work directory", document["work_directory"]),
        ("command", f"ktconvert {document['command']} -i {document['input']}"),
        *([("options", options)] if options else []),
        ("units", f"{document['units_done']}{total} finished{remaining}"),
        *([("last run", f"stopped in {join_values(document['died_in'])}")] if document["died_in"] else []),
        *([] if is_readable else [("source", document["source_problem"])]),
        ("running", f"`ktconvert status {document['path']}` shows its progress")
        if document["running"]
        else ("resume with", document["resume"]),
    ]


ROWS = {"checkpoint": _checkpoint_rows, "output": _output_rows, "unfinished": _conversion_rows}
