"""ktconvert status: how far a conversion is, read from its work directory alone, by whoever sees it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from ktconvert.layouts.errors import OutputError
from ktconvert.layouts.files import manifest
from ktconvert.pipeline.cli import one_line
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.engine import attempts, journal, lock
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.existing import saved_plan
from ktconvert.pipeline.engine.journal import Done, End, Failed, Record, Run, Start
from ktconvert.pipeline.engine.lock import Holder
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.engine.plan import SavedPlan
from ktconvert.pipeline.engine.units import Result
from ktconvert.pipeline.options.queries import StatusOptions
from ktconvert.pipeline.report.terminal import unescaped
from ktconvert.pipeline.report.text import duration, size

LISTED = 12  # units that are named one by one
FINISHED, RUNNING, STOPPED = "finished", "running", "stopped"
EVERY = 2.0  # seconds between two looks


@command("status", StatusOptions)
def status(options: StatusOptions) -> None:
    """Tell how far a conversion is, which host makes what, and what failed.

    Reads the work directory next to OUTPUT and nothing else, so any host that sees it can tell.

    Examples:
      ktconvert status /shared/DeepSeek-V3.1-INT8             how far it is, and who makes what
      ktconvert status /shared/DeepSeek-V3.1-INT8 --watch     again and again, until it has ended
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    output, watch, as_json = options.output, options.watch, options.as_json
    console, shown = Console(file=unescaped(sys.stdout), highlight=False, soft_wrap=True), None
    alive = watch and not as_json and console.is_terminal
    with (
        Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        if alive
        else contextlib.nullcontext() as live
    ):
        while True:
            found = look(output)
            text = json.dumps(found) if as_json else "\n".join(map(one_line, lines(found)))
            if live is not None:
                live.update(Text(text), refresh=True)
            elif text != shown:
                click.echo(text)
            if not watch or found["state"] != RUNNING:
                return
            shown = text
            time.sleep(EVERY)


def look(output: Path) -> dict[str, Any]:
    """The status of the conversion into this output. Raises OutputError where there is none.

    state    finished; running: a process works on it, or may, on a host that cannot be seen from here; else stopped
    units    how many there are in all; done: how many are recorded, or made and to be recorded by the next run
    bytes    of finished files
    by       host -> its finished units: how many, bytes, seconds
    making   units that are being made: unit, host, pid, since (seconds), alive (None: cannot be told from here)
    failed   units that could not be made, and are not done since: unit, host, why
    ended    why the last run ended, where the journal says so
    """
    while True:
        paths = locate(output)
        old = saved_plan(paths)
        if old is None:
            if output.is_dir() and manifest.read(output) is not None:
                return {"output": str(output), "state": FINISHED}
            raise OutputError(f"{output}: no conversion into it was begun.")
        try:
            found = _found(paths, old)
        except FileNotFoundError:
            if paths.plan.exists():
                raise
            continue
        if paths.plan.exists():  # else the conversion came to its end meanwhile, and what was read is a part of it
            return found


def _found(paths: Paths, plan: SavedPlan) -> dict[str, Any]:
    """What the work directory of this plan tells. Raises FileNotFoundError where it was removed meanwhile."""
    records = journal.read(paths.journal)
    finished = journal.finished(records)
    tried = attempts.read(paths)
    whole = (a for a in tried if not a.portion and a.is_whole(paths))
    made = {a.fingerprint: a for a in whole if a.fingerprint not in finished}
    by: dict[str, dict[str, float]] = {}
    last_host = Holder.this().host
    for record in records:
        if isinstance(record, Run):
            last_host = record.process.host
        if isinstance(record, Done) and finished.get(record.fingerprint) is record:
            _count(by, record.host or last_host, record.result, record.seconds)
    for attempt in made.values():
        _count(by, attempt.process.host, attempt.written(), (attempt.ended or 0.0) - attempt.began)
    run = journal.last_run(records)
    making = _making(tried, run)
    running = run is not None and run[0].process.lives() is not False
    last = next((record for record in reversed(records) if isinstance(record, Run | End)), None)
    return {
        "output": str(paths.output),
        "state": RUNNING if making or running or lock.parts_at_work(paths.root) else STOPPED,
        "command": plan.command,
        "input": plan.input,
        "units": plan.units,
        "done": len(finished) + len(made),
        "bytes": sum(int(host["bytes"]) for host in by.values()),
        "by": by,
        "making": making,
        "failed": _failed(records, tried, {*finished, *made}),
        "ended": last.why if isinstance(last, End) else None,
    }


def _count(by: dict[str, dict[str, float]], host: str, result: Result, seconds: float) -> None:
    entry = by.setdefault(host, {"units": 0, "bytes": 0, "seconds": 0.0})
    entry["units"] += 1
    entry["bytes"] += sum(file.nbytes for file in result.files)
    entry["seconds"] = round(entry["seconds"] + max(0.0, seconds), 3)  # clocks go wrong


def _making(tried: list[Attempt], run: tuple[Run, dict[str, Start]] | None) -> list[dict[str, Any]]:
    begun = [(attempt.unit, attempt.process, attempt.began) for attempt in tried if attempt.ended is None]
    if run is not None:
        begun += [(unit, run[0].process, start.at) for unit, start in run[1].items() if start.host is None]
    now, making = time.time(), []
    for unit, process, since in begun:
        if (alive := process.lives()) is not False:
            who = {"unit": unit, "host": process.host, "pid": process.pid, "alive": alive}
            making.append({**who, "since": round(max(0.0, now - since), 1)})
    return making


def _failed(records: list[Record], tried: list[Attempt], done: set[str]) -> list[dict[str, Any]]:
    """Failures since the last run began, of units that are not done; of parts, of each unit's last attempt."""
    units = {record.unit for record in records if isinstance(record, Done) and record.fingerprint in done}
    failed: dict[str, dict[str, Any]] = {}
    for record in records:
        if isinstance(record, Run):
            failed.clear()
        if isinstance(record, Failed) and record.unit not in units:
            failed[record.unit] = {"unit": record.unit, "host": record.host, "why": record.why}
    for attempt in {attempt.fingerprint: attempt for attempt in tried}.values():
        if attempt.failure is not None and attempt.fingerprint not in done:
            failed[attempt.unit] = {"unit": attempt.unit, "host": attempt.process.host, "why": attempt.failure}
    return list(failed.values())


def lines(status: dict[str, Any]) -> list[str]:
    if status["state"] == FINISHED:
        return [f"{status['output']} is finished"]
    total = f" of {status['units']}" if status["units"] else ""
    out = [
        f"{status['command']}: {status['input']} -> {status['output']}",
        f"{status['state']}: {status['done']}{total} units done, {size(status['bytes'])} of finished files",
    ]
    for host, share in sorted(status["by"].items()):
        took = f" in {duration(share['seconds'])} of work" if share["seconds"] else ""
        out.append(f"  {host}: {share['units']} units, {size(share['bytes'])}{took}")
    if status["making"]:
        out.append("being made:")
    for unit in status["making"][:LISTED]:
        doubt = "" if unit["alive"] else ", as far as can be told from here"
        out.append(f"  {unit['unit']}: {unit['host']}, process {unit['pid']}, since {duration(unit['since'])}{doubt}")
    if len(status["making"]) > LISTED:
        out.append(f"  ... {len(status['making']) - LISTED} more")
    if status["failed"]:
        out.append("failed:")
    out += [f"  {failure['unit']}: {failure['why']}" for failure in status["failed"][:LISTED]]
    if status["state"] == STOPPED:
        why = f" ({status['ended']})" if status["ended"] and not status["failed"] else ""
        out.append(f"`ktconvert resume {status['output']}` goes on{why}")
    return out
