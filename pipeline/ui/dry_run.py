"""A plan for people and for programs: stages, every unit with the reason why it will run or not, and the needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.assemble import require_free
from ktconvert.pipeline.engine.disk_space import FileSystem, disk_needed, disk_sentence, file_systems, fit_threads
from ktconvert.pipeline.engine.existing import (
    adopts,
    already_finished,
    saved_plan,
    states_once_begun,
    to_replace,
    unit_states,
)
from ktconvert.pipeline.engine.paths import locate
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.units import Status
from ktconvert.pipeline.ui.text import joined, size

LISTED = 12  # units shown one by one at either end of a long run of equals


def show_plans(plans: Sequence[Plan], *, as_json: bool, overwrite: bool = False) -> None:
    """Print the plans of one command, and what several need together; refuses what running them would refuse."""
    finished = [already_finished(plan, overwrite) for plan in plans]
    states = [_states(plan, done, overwrite) for plan, done in zip(plans, finished, strict=True)]
    documents = [describe(*each, overwrite) for each in zip(plans, finished, states, strict=True)]
    needs = file_systems(
        (plan, locate(plan.request.output, adopt=adopts(plan)), [s.unit for s in states_of if not s.done])
        for plan, done, states_of in zip(plans, finished, states, strict=True)
        if not done
    )
    if as_json:
        lines = [json.dumps({"event": "plan", **document}) for document in documents]
    else:
        lines = [_in_words(plan, document) for plan, document in zip(plans, documents, strict=True)]
    if len(plans) > 1:
        lines.append(_together(documents, needs, as_json=as_json))
    click.echo(("\n" if as_json else "\n\n").join(lines))


def _together(documents: Sequence[Mapping[str, Any]], needs: Sequence[FileSystem], *, as_json: bool) -> str:
    """What several outputs take."""
    sums = {name: sum(document[name] for document in documents) for name in ("bytes_in", "bytes_out")}
    if as_json:
        outputs = [document["output"] for document in documents]
        disks = [
            {
                "outputs": [str(output) for output in system.outputs],
                "disk_needed": sum(system.needed.values()),
                "disk": dict(system.needed),
                "disk_free": system.free,
            }
            for system in needs
        ]
        return json.dumps({"event": "plans", "outputs": outputs, **sums, "disks": disks})
    return "\n".join(
        [
            f"all {len(documents)} outputs",
            f"read          {size(sums['bytes_in'])}, from disk once what several read, while a layer fits in the page "
            "cache",
            f"write         {size(sums['bytes_out'])}",
            *(f"disk          {system}" for system in needs),
        ]
    )


def _in_words(plan: Plan, document: Mapping[str, Any]) -> str:
    """A plan for people."""
    facts = plan.facts
    out = [
        f"plan     {plan.request.command}: {plan.request.input}",
        f"      -> {plan.request.output}",
        *(
            f"{key:<13} {joined(facts[key])}"
            for key in ("architecture", "method", "numa", "experts", "hidden", "intermediate", "activation", "dtypes")
            if key in facts
        ),
        *([f"{'layers':<13} {len(facts['layers'])}"] if "layers" in facts else []),
        "",
        "stages",
    ]
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
        f"{'folders' if document['loose'] else 'files' if plan.assembly.loose else 'shards'}, "
        f"and {size(plan.extra_bytes)} of companion files",
        *(f"remove        {replaced['text']}" for replaced in document["replaces"]),
        f"disk          {disk_sentence(document['disk'])}, {size(document['disk_free'])} free",
        f"memory        {size(document['peak_memory'])} at most, with {document['threads']} threads",
    ]
    out += ["", *(f"advice        {sentence}" for sentence in plan.advice)] if plan.advice else []
    if document["finished"]:
        out.append("the output is finished: nothing to do")
    return "\n".join(out)


def _states(plan: Plan, finished: bool, overwrite: bool) -> list[Status]:
    """Which units will run, and why: as they lie there, or as they will when the run has begun."""
    paths = locate(plan.request.output, adopt=adopts(plan))
    if finished:
        return [replace(state, done=True, reason="the output is finished") for state in unit_states(plan, paths)]
    return states_once_begun(plan, paths, overwrite)


def describe(plan: Plan, finished: bool, states: Sequence[Status], overwrite: bool = False) -> dict[str, Any]:
    """The plan as one JSON object."""
    paths = locate(plan.request.output, adopt=adopts(plan))
    old = None if finished else saved_plan(paths)
    replaced = not finished and (overwrite or bool(old and old.overwrite))
    if not finished:
        require_free(plan, journal.finished(journal.read(paths.journal)), replaced)
    done = {state.unit: state.done for state in states}
    threads = fit_threads([plan])
    todo = [unit for unit in plan.units if not done[unit]]
    disk = {} if finished else disk_needed(plan, todo)
    stages: list[dict[str, Any]] = [
        {
            "name": stage.name,
            "title": stage.title,
            "needs": list(stage.needs),
            "units": len(stage.units),
            "to_run": sum(not done[u] for u in stage.units),
            "bytes_in": sum(u.bytes_in for u in stage.units),
            "bytes_out": sum(u.bytes_out for u in stage.units),
        }
        for stage in plan.stages
    ]
    stages.append(
        {
            "name": "assemble",
            "title": "companions, config, card, manifest, index; then the output appears",
            "needs": [stage.name for stage in plan.stages],
            "units": 1,
            "to_run": int(not finished),
            "bytes_in": plan.extra_bytes,
            "bytes_out": plan.extra_bytes,
        }
    )
    return {
        "command": plan.request.command,
        "input": plan.request.input,
        "output": str(plan.request.output),
        "settings": plan.request.options.settings,
        "model": plan.facts,
        "notes": list(plan.notes),
        "advice": list(plan.advice),
        "stages": stages,
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
        "bytes_in": sum(u.bytes_in for u in todo),
        "bytes_out": sum(u.bytes_out for u in todo),
        "replaces": [each.document() for each in to_replace(plan)] if replaced else [],
        "disk_needed": sum(disk.values()),
        "disk": disk,
        "disk_free": machine.disk_free(paths.root),
        "threads": threads,
        "peak_memory": plan.conversion.peak_memory(threads),
        "finished": finished,
    }
