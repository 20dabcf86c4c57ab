"""A plan for people and for programs: stages, every unit with the reason why it will run or not, and the needs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import existing, journal
from ktconvert.pipeline.engine.assemble import require_free
from ktconvert.pipeline.engine.disk_space import FileSystem, disk_needed, disk_sentence, file_systems, fit_threads
from ktconvert.pipeline.engine.paths import Paths
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.units import Status, Unit
from ktconvert.pipeline.report.text import joined, size

LISTED = 12  # units shown one by one at either end of a long run of equals


def show_plans(plans: Sequence[Plan], *, as_json: bool, overwrite: bool = False) -> None:
    """Print the plans of one command, and what several need together; refuses what running them would refuse."""
    documents, needs = [], []
    for plan in plans:
        paths = plan.locate()
        if finished := existing.already_finished(plan, overwrite):
            lying = existing.unit_states(plan, paths)
            states = [replace(state, done=True, reason="the output is finished") for state in lying]
        else:
            states = existing.states_once_begun(plan, paths, overwrite)
            needs.append((plan, paths, [state.unit for state in states if not state.done]))
        documents.append(_document(plan, paths, finished, states, overwrite))
    if as_json:
        lines = [json.dumps({"event": "plan", **document}) for document in documents]
    else:
        lines = [_in_words(plan, document) for plan, document in zip(plans, documents, strict=True)]
    if len(plans) > 1:
        lines.append(_together(documents, file_systems(needs), as_json=as_json))
    click.echo(("\n" if as_json else "\n\n").join(lines))


def _together(documents: Sequence[Mapping[str, Any]], needs: Sequence[FileSystem], *, as_json: bool) -> str:
    sums = {name: sum(document[name] for document in documents) for name in ("bytes_in", "bytes_out")}
    if as_json:
        outputs, disks = [document["output"] for document in documents], list[dict[str, Any]]()
        for system in needs:
            disk = {"disk_needed": sum(system.needed.values()), "disk": dict(system.needed), "disk_free": system.free}
            disks.append({"outputs": [str(output) for output in system.outputs], **disk})
        return json.dumps({"event": "plans", "outputs": outputs, **sums, "disks": disks})
    once = "from disk once what several read, while a layer fits in the page cache"
    out = [f"all {len(documents)} outputs", f"read          {size(sums['bytes_in'])}, {once}"]
    out += [f"write         {size(sums['bytes_out'])}", *(f"disk          {system}" for system in needs)]
    return "\n".join(out)


def _in_words(plan: Plan, document: Mapping[str, Any]) -> str:
    facts = plan.facts
    known = ("architecture", "method", "numa", "experts", "hidden", "intermediate", "activation", "dtypes")
    out = [f"plan     {plan.request.command}: {plan.request.input}", f"      -> {plan.request.output}"]
    out += [f"{key:<13} {joined(facts[key])}" for key in known if key in facts]
    out += [f"{'layers':<13} {len(facts['layers'])}"] if "layers" in facts else []
    out += ["", "stages"]
    for stage in document["stages"]:
        needs = " + ".join(stage["needs"])
        out.append(
            f"  {needs} -> {stage['name']}: {stage['title']}; {stage['units']} units, {stage['to_run']} to run, "
            f"{size(stage['bytes_in'])} in, {size(stage['bytes_out'])} out"
        )
        units = [u for u in document["units"] if u["unit"].startswith(f"{stage['name']}.")]
        shown = units if len(units) <= 2 * LISTED else [*units[:LISTED], None, *units[-LISTED:]]
        for unit in shown:
            if unit is None:
                out.append(f"      ... {len(units) - 2 * LISTED} more")
                continue
            verb = "skip" if unit["done"] else "run "
            out.append(
                f"      {verb}  {unit['unit'].partition('.')[2]:<14} {unit['final']}  "
                f"{size(unit['bytes_in'])} -> {size(unit['bytes_out'])}  ({unit['reason']})"
            )
    out += [
        "",
        f"read          {size(document['bytes_in'])}",
        f"write         {size(document['bytes_out'])} in {document['shards']} "
        f"{'folders' if document['loose'] else 'files' if plan.loose else 'shards'}, "
        f"and {size(plan.extra_bytes)} of companion files",
        *(f"remove        {replaced['text']}" for replaced in document["replaces"]),
        f"disk          {disk_sentence(document['disk'])}, {size(document['disk_free'])} free",
        f"memory        {size(document['peak_memory'])} at most, with {document['threads']} threads",
    ]
    out += ["", *(f"advice        {sentence}" for sentence in plan.advice)] if plan.advice else []
    if document["finished"]:
        out.append("the output is finished: nothing to do")
    return "\n".join(out)


def _sizes(units: Iterable[Unit[Any]]) -> dict[str, int]:
    return {name: sum(getattr(unit, name) for unit in units) for name in ("bytes_in", "bytes_out")}


def _document(plan: Plan, paths: Paths, finished: bool, states: Sequence[Status], overwrite: bool) -> dict[str, Any]:
    old = None if finished else existing.saved_plan(paths)
    replaced = not finished and (overwrite or bool(old and old.overwrite))
    if not finished:
        require_free(plan, journal.finished(journal.read(paths.journal)), replaced)
    done = {state.unit: state.done for state in states}
    threads = fit_threads([plan])
    todo = [unit for unit in plan.units if not done[unit]]
    disk = {} if finished else disk_needed(plan, todo)
    stages: list[dict[str, Any]] = []
    for stage in plan.stages:
        about = {"name": stage.name, "title": stage.title, "needs": list(stage.needs), "units": len(stage.units)}
        stages.append({**about, "to_run": sum(not done[unit] for unit in stage.units), **_sizes(stage.units)})
    title, needs = "companions, config, card, manifest, index; then the output appears", [s.name for s in plan.stages]
    extra = {"bytes_in": plan.extra_bytes, "bytes_out": plan.extra_bytes}
    assemble = {"name": "assemble", "title": title, "needs": needs, "units": 1, "to_run": int(not finished), **extra}
    return {
        "command": plan.request.command,
        "input": plan.request.input,
        "output": str(plan.request.output),
        "settings": plan.request.options.settings,
        "model": plan.facts,
        "notes": list(plan.notes),
        "advice": list(plan.advice),
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
        "shards": sum(unit.kept for unit in plan.units),
        **_sizes(todo),
        "replaces": [each.document() for each in existing.to_replace(plan)] if replaced else [],
        "disk_needed": sum(disk.values()),
        "disk": disk,
        "disk_free": machine.disk_free(paths.root),
        "threads": threads,
        "peak_memory": plan.peak_memory(threads),
        "finished": finished,
    }
