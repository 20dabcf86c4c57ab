"""Plans as text and JSON: stages, every unit with the reason why it will run or not, memory and disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from ktconvert.layouts.checkpoints.expert_function import describe_record
from ktconvert.layouts.outputs import kt_kernel
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import existing, journal
from ktconvert.pipeline.engine.assemble import require_free_side_output
from ktconvert.pipeline.engine.disk_space import FileSystem, disk_needed, disk_sentence, find_file_systems
from ktconvert.pipeline.engine.paths import Paths
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.threads import fit_threads
from ktconvert.pipeline.engine.units import Status, Unit
from ktconvert.pipeline.report.terminal import shorten_paths
from ktconvert.pipeline.report.text import join_values, plural, size

MAX_LISTED = 12  # units to show at either end of a long list


def show_plans(plans: Sequence[Plan], *, as_json: bool, overwrite: bool = False, with_workers: bool = False) -> None:
    """Print the plans of a command, and the needs of several together. Raises the errors that a run would raise."""
    documents = []
    needs = []
    for plan in plans:
        paths = plan.locate()
        existing.require_writable_output(plan, overwrite)
        finished = existing.is_finished(plan, overwrite)
        if finished:
            states = [
                replace(state, done=True, reason="the output is finished")
                for state in existing.find_unit_states(plan, paths)
            ]
        else:
            states = existing.predict_states(plan, paths, overwrite)
            needs.append((plan, paths, [state.unit for state in states if not state.done]))
        documents.append(_make_document(plan, paths, finished, states, overwrite, with_workers))
    if as_json:
        lines = [json.dumps({"event": "plan", **document}) for document in documents]
    else:
        lines = [_format_plan(plan, document) for plan, document in zip(plans, documents, strict=True)]
    if len(plans) > 1:
        lines.append(_format_summary(documents, find_file_systems(needs, with_workers=with_workers), as_json=as_json))
    click.echo("\n".join(lines) if as_json else shorten_paths("\n\n".join(lines)))


def _format_summary(documents: Sequence[Mapping[str, Any]], needs: Sequence[FileSystem], *, as_json: bool) -> str:
    """Return the needs of all outputs together, as text or JSON."""
    sums = {name: sum(document[name] for document in documents) for name in ("bytes_in", "bytes_out")}
    if as_json:
        outputs = [document["output"] for document in documents]
        disks: list[dict[str, Any]] = []
        for system in needs:
            disk = {"disk_needed": sum(system.needed.values()), "disk": dict(system.needed), "disk_free": system.free}
            disks.append({"outputs": [str(output) for output in system.outputs], **disk})
        return json.dumps({"event": "plans", "outputs": outputs, **sums, "disks": disks})
    lines = [
        f"all {len(documents)} outputs",
        f"read          {size(sums['bytes_in'])}, from disk only once if a layer fits in the page cache",
        f"write         {size(sums['bytes_out'])}",
        *(f"disk          {system}" for system in needs),
    ]
    return "\n".join(lines)


def _format_plan(plan: Plan, document: Mapping[str, Any]) -> str:
    """Return the plan as text."""
    facts: Mapping[str, Any] = plan.facts
    known = ("architecture", "method", "numa", "experts", "hidden", "intermediate", "dtypes")
    rows = [(key, join_values(facts[key])) for key in known if key in facts]
    rows += [(method, f"layers {layers}") for method, layers in facts.get("methods", {}).items()]
    rows += [("compute", describe_record(facts["functions"]))] if "functions" in facts else []
    rows += [("layers", str(len(facts["layers"])))] if "layers" in facts else []
    if facts.get("method") in kt_kernel.KT_METHODS:
        rows.append(("kt-kernel", kt_kernel.describe_support(plan.facts)))
    kind = "folder" if document["loose"] else "shard" if plan.has_index else "file"
    written = f"{size(document['bytes_out'])} in {plural(document['shards'], kind)}"
    needs = [
        # The units of a plan that reads its input at once have no input of their own.
        *([] if plan.read_once else [("read", size(document["bytes_in"]))]),
        ("write", f"{written}, and {size(plan.companion_bytes)} of companion files"),
        *(("remove", replaced["text"]) for replaced in document["replaces"]),
        ("disk", f"{disk_sentence(document['disk'])}, {size(document['disk_free'])} free"),
        ("memory", f"{size(document['peak_memory'])} at most, with {plural(document['threads'], 'thread')}"),
    ]
    lines = [f"plan     {plan.options.command}: {plan.options.input}", f"      -> {plan.options.output}"]
    lines += [*_format_rows(rows), "", "stages"]
    for stage in document["stages"]:
        lines += _format_stage(stage, [u for u in document["units"] if u["unit"].startswith(f"{stage['name']}.")])
    if "download" in document:
        lines += ["", *_format_download(document["download"])]
    lines += ["", *_format_rows(needs)]
    if plan.needs.advice:
        lines += ["", *_format_rows([("advice", sentence) for sentence in plan.needs.advice])]
    if document["finished"]:
        lines.append("the output is finished: nothing to do")
    return "\n".join(lines)


def _format_rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{label:<13} {text}" for label, text in rows]


def _format_stage(stage: Mapping[str, Any], units: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line on a stage, and one on each unit; only the first and the last units of many."""
    count = f"{plural(stage['units'], 'unit')}, {stage['to_run']} to run"
    needs = " + ".join(stage["needs"])
    lines = [f"  {needs} -> {stage['name']}: {stage['title']}; {count}{_format_sizes(stage, ', {} in, {} out')}"]
    hidden = max(0, len(units) - 2 * MAX_LISTED)
    for number, unit in enumerate(units):
        if hidden and MAX_LISTED <= number < MAX_LISTED + hidden:
            if number == MAX_LISTED:
                lines.append(f"      ... {hidden} more")
            continue
        verb = "skip" if unit["done"] else "run "
        lines.append(
            f"      {verb}  {unit['unit'].partition('.')[2]:<14} {unit['final']}"
            f"{_format_sizes(unit, '  {} -> {}')}  ({unit['reason']})"
        )
    return lines


def _format_sizes(item: Mapping[str, Any], template: str) -> str:
    """Return the sizes of input and output; "" for steps of a training, which have neither."""
    nbytes = (item["bytes_in"], item["bytes_out"])
    return template.format(*map(size, nbytes)) if any(nbytes) else ""


def _format_download(download: Mapping[str, Any]) -> list[str]:
    """Return a line on the download, and one on each file in the order of fetching; only the first and last of many."""
    files = download["files"]
    whole = f"{plural(len(files), 'whole file')}, at most {size(download['peak_bytes'])} on disk at a time"
    kinds = [whole] if files else []
    kinds += [f"{size(download['parts_bytes'])} of single tensors"] if download["parts_bytes"] else []
    lines = [f"download {size(download['bytes'])}: {'; '.join(kinds)}" if kinds else "download nothing"]
    listed = [f"      {file['name']}  {size(file['bytes'])}" for file in files]
    if hidden := max(0, len(files) - 2 * MAX_LISTED):
        listed[MAX_LISTED:-MAX_LISTED] = [f"      ... {hidden} more"]
    return lines + listed


def _sum_sizes(units: Iterable[Unit[Any]]) -> dict[str, int]:
    """Return the bytes that these units read and write."""
    return {name: sum(getattr(unit, name) for unit in units) for name in ("bytes_in", "bytes_out")}


def _make_document(
    plan: Plan, paths: Paths, finished: bool, states: Sequence[Status], overwrite: bool, with_workers: bool
) -> dict[str, Any]:
    """Return the plan as a JSON object."""
    saved = None if finished else existing.read_plan(paths)
    replaced = not finished and (overwrite or bool(saved and saved.overwrite))
    if not finished:
        require_free_side_output(plan, journal.find_finished_units(journal.read_records(paths.journal)), replaced)
    done = {state.unit: state.done for state in states}
    threads = fit_threads([plan])
    remaining = [unit for unit in plan.units if not done[unit]]
    download = {} if plan.download is None else {"download": plan.download.forecast(remaining).document()}
    disk = {} if finished else disk_needed(plan, remaining, with_workers=with_workers)
    stages: list[dict[str, Any]] = []
    for stage in plan.stages:
        description = {"name": stage.name, "title": stage.title, "needs": ["source"], "units": len(stage.units)}
        stages.append({**description, "to_run": sum(not done[unit] for unit in stage.units), **_sum_sizes(stage.units)})
    title = "companions, config, card, manifest, index; then the output appears"
    needs = [s.name for s in plan.stages]
    extra = {"bytes_in": plan.companion_bytes, "bytes_out": plan.companion_bytes}
    assemble = {"name": "assemble", "title": title, "needs": needs, "units": 1, "to_run": int(not finished), **extra}
    return {
        "command": plan.options.command,
        "input": plan.options.input,
        "output": str(plan.options.output),
        "settings": plan.options.settings,
        "model": plan.facts,
        "notes": list(plan.notes),
        "advice": list(plan.needs.advice),
        "stages": [*stages, assemble],
        "units": [
            {
                "unit": s.unit.name,
                "final": s.unit.final,
                "fingerprint": s.unit.fingerprint,
                "done": done[s.unit],
                "reason": s.reason,
                "bytes_in": s.unit.bytes_in,
                "bytes_out": s.unit.bytes_out,
            }
            for s in states
        ],
        "loose": any(unit.folder for unit in plan.units),
        "shards": sum(unit.in_output for unit in plan.units),
        **_sum_sizes(remaining),
        "replaces": [folder.document() for folder in existing.find_replaced_folders(plan)] if replaced else [],
        **download,
        "disk_needed": sum(disk.values()),
        "disk": disk,
        "disk_free": machine.disk_free(paths.root),
        "threads": threads,
        "peak_memory": plan.hooks.peak_memory(threads),
        "finished": finished,
    }
