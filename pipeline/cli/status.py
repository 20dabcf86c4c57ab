"""`ktconvert status`: progress of a conversion, read only from its work directory, on any host that sees it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ktconvert.layouts.errors import absent_path, bad_file
from ktconvert.layouts.files import manifest
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.engine import attempts, journal, lock
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.existing import read_plan, require_files
from ktconvert.pipeline.engine.journal import Done, End, Failed, Record, Run, Start
from ktconvert.pipeline.engine.lock import Holder
from ktconvert.pipeline.engine.paths import Paths, locate, require_no_work_directory
from ktconvert.pipeline.engine.plan import SavedPlan
from ktconvert.pipeline.engine.units import Result
from ktconvert.pipeline.options.queries import StatusOptions
from ktconvert.pipeline.report.terminal import raw_stream, shorten_paths
from ktconvert.pipeline.report.text import duration, format_table, one_line, plural, size

MAX_LISTED = 12  # units to list
FINISHED, RUNNING, STOPPED = "finished", "running", "stopped"
INTERVAL = 2.0  # seconds between two reads with --watch


@command("status", StatusOptions)
def status(options: StatusOptions) -> None:
    """Show the progress of a conversion: units that each host has finished or is making, and failures.

    Hosts are listed by their names. The command reads only the work directory next to OUTPUT, so it runs on any host
    that sees it.

    Examples:
      ktconvert status OUT            show the progress once
      ktconvert status OUT --watch    refresh until it ends
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    output = options.output
    watch = options.watch
    as_json = options.as_json
    console = Console(file=raw_stream(sys.stdout), highlight=False, soft_wrap=True)
    shown = None
    alive = watch and not as_json and console.is_terminal
    with (
        Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        if alive
        else contextlib.nullcontext() as live
    ):
        while True:
            document = read_status(output)
            text = json.dumps(document) if as_json else shorten_paths("\n".join(map(one_line, status_lines(document))))
            if live is not None:
                live.update(Text(text), refresh=True)
            elif text != shown:
                click.echo(text)
            if not watch or document["state"] != RUNNING:
                return
            shown = text
            time.sleep(INTERVAL)


def read_status(output: Path) -> dict[str, Any]:
    """Return the status of the conversion into this output.

    Raises InputError if there is none, VerificationError if it is finished and files are missing.

    state    "finished", "running" or "stopped"; "running" if a process works on the output, or may do so on a host
             that is not visible from here
    units    total number of units
    done     number of units that are recorded, or finished and recorded by the next run
    bytes    size of the files that these units wrote
    by       host -> number, bytes and seconds of its finished units
    making   running units: unit, host, pid, since (seconds), alive (None if unknown)
    failed   units that failed and are not done since: unit, host, why
    ended    the reason why the last run ended, if the journal has it
    """
    while True:
        paths = locate(output)
        saved = read_plan(paths)
        if saved is None:
            if output.is_dir() and (finished := manifest.read_manifest(output)) is not None:
                require_files(output, finished)
                return {"output": str(output), "state": FINISHED}
            if not output.exists():
                raise absent_path(output)
            require_no_work_directory(output)
            remedy = "give the output of one, or start it, as with `ktconvert cpu`"
            raise bad_file(output, "has no conversion", remedy)
        try:
            document = _read_work_directory(paths, saved)
        except FileNotFoundError:
            if paths.plan.exists():
                raise
            continue
        if paths.plan.exists():  # otherwise the conversion ended meanwhile, and the document may be incomplete
            return document


def _read_work_directory(paths: Paths, plan: SavedPlan) -> dict[str, Any]:
    """Return the status of an unfinished conversion. Raises FileNotFoundError if the directory has been removed."""
    records = journal.read_records(paths.journal)
    finished = journal.find_finished_units(records)
    all_attempts = attempts.read_attempts(paths)
    finished_attempts = (a for a in all_attempts if not a.portion and a.is_whole(paths))
    unrecorded = {a.fingerprint: a for a in finished_attempts if a.fingerprint not in finished}
    by_host: dict[str, dict[str, float]] = {}
    last_host = Holder.this().host
    for record in records:
        if isinstance(record, Run):
            last_host = record.process.host
        if isinstance(record, Done) and finished.get(record.fingerprint) is record:
            _add_result(by_host, record.host or last_host, record.result, record.seconds)
    for attempt in unrecorded.values():
        _add_result(by_host, attempt.process.host, attempt.require_result(), (attempt.ended or 0.0) - attempt.began)
    run = journal.find_killed_run(records)
    making = _find_running_units(all_attempts, run)
    running = run is not None and run[0].process.is_alive() is not False
    last_event = next((record for record in reversed(records) if isinstance(record, Run | End)), None)
    return {
        "output": str(paths.output),
        "state": RUNNING if making or running or lock.has_active_shares(paths.root) else STOPPED,
        "command": plan.command,
        "input": plan.input,
        "units": plan.units,
        "done": len(finished) + len(unrecorded),
        "bytes": sum(int(host["bytes"]) for host in by_host.values()),
        "by": by_host,
        "making": making,
        "failed": _find_failures(records, all_attempts, {*finished, *unrecorded}),
        "ended": last_event.why if isinstance(last_event, End) else None,
    }


def _add_result(by_host: dict[str, dict[str, float]], host: str, result: Result, seconds: float) -> None:
    entry = by_host.setdefault(host, {"units": 0, "bytes": 0, "seconds": 0.0})
    entry["units"] += 1
    entry["bytes"] += sum(file.nbytes for file in result.files)
    entry["seconds"] = round(entry["seconds"] + max(0.0, seconds), 3)  # clocks may be wrong


def _find_running_units(all_attempts: list[Attempt], run: tuple[Run, dict[str, Start]] | None) -> list[dict[str, Any]]:
    """Return the units whose attempts have not ended, and whose process may be alive."""
    unended = [(attempt.unit, attempt.process, attempt.began) for attempt in all_attempts if attempt.ended is None]
    if run is not None:
        unended += [(unit, run[0].process, start.at) for unit, start in run[1].items() if start.host is None]
    now = time.time()
    running = []
    for unit, process, since in unended:
        if (alive := process.is_alive()) is not False:
            fields = {"unit": unit, "host": process.host, "pid": process.pid, "alive": alive}
            running.append({**fields, "since": round(max(0.0, now - since), 1)})
    return running


def _find_failures(records: list[Record], all_attempts: list[Attempt], done: set[str]) -> list[dict[str, Any]]:
    """Return the failures since the last run began, of units that are not done; for job shares, of the last attempt."""
    units = {record.unit for record in records if isinstance(record, Done) and record.fingerprint in done}
    failed: dict[str, dict[str, Any]] = {}
    for record in records:
        if isinstance(record, Run):
            failed.clear()
        if isinstance(record, Failed) and record.unit not in units:
            failed[record.unit] = {"unit": record.unit, "host": record.host, "why": record.why}
    for attempt in {attempt.fingerprint: attempt for attempt in all_attempts}.values():
        if attempt.failure is not None and attempt.fingerprint not in done:
            failed[attempt.unit] = {"unit": attempt.unit, "host": attempt.process.host, "why": attempt.failure}
    return list(failed.values())


def status_lines(status: dict[str, Any]) -> list[str]:
    """Return the status as text."""
    if status["state"] == FINISHED:
        return [f"{status['output']} is finished"]
    total = f" of {status['units']}" if status["units"] else ""
    lines = [
        f"{status['command']}: {status['input']} -> {status['output']}",
        f"{status['state']}: {status['done']}{total} units done, {size(status['bytes'])} written",
    ]
    hosts = []
    for host, share in sorted(status["by"].items()):
        time_text = f"{duration(share['seconds'])} of work" if share["seconds"] else ""
        hosts.append((host, plural(int(share["units"]), "unit"), size(share["bytes"]), time_text))
    lines += _format_section("done, by host:", hosts)
    running = []
    for unit in status["making"]:
        uncertainty = "" if unit["alive"] else " (perhaps ended)"
        running.append(
            (unit["unit"], unit["host"], f"process {unit['pid']}", f"for {duration(unit['since'])}{uncertainty}")
        )
    lines += _format_section("running:", running)
    lines += _format_section("failed:", [(failure["unit"], failure["why"]) for failure in status["failed"]])
    if status["state"] == STOPPED:
        ended = (status["ended"] or "").partition("; run `ktconvert resume ")[0]
        reason = f" ({ended})" if ended and not status["failed"] else ""
        lines.append(f"run `ktconvert resume {status['output']}` to continue{reason}")
    return lines


def _format_section(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a title and the first rows, indented; nothing if there are no rows."""
    if not rows:
        return []
    more = [f"  ... {len(rows) - MAX_LISTED} more"] if len(rows) > MAX_LISTED else []
    return [title, *format_table(rows[:MAX_LISTED], "  "), *more]
