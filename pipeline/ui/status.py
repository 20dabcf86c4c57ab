"""How far a conversion is, for people and programs: read from its work directory alone, by whoever sees it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import OutputError
from ktconvert.layouts.files import manifest
from ktconvert.pipeline.engine import attempts, journal, lock, lockfile
from ktconvert.pipeline.engine.attempts import Attempt
from ktconvert.pipeline.engine.existing import saved_plan
from ktconvert.pipeline.engine.journal import Record
from ktconvert.pipeline.engine.paths import Paths, locate
from ktconvert.pipeline.ui.progress import duration, size

LISTED = 12  # units that are named one by one
FINISHED, RUNNING, STOPPED = "finished", "running", "stopped"


def look(output: Path) -> dict[str, Any]:
    """The status of the conversion into this output. Raises OutputError where there is none.

    state    finished; running: a process works on it, or may, on a host that cannot be asked from here; else stopped
    units    how many there are in all, None where an older ktconvert began it
    done     how many are recorded, or made and to be recorded by the next run
    bytes    of finished files
    by       host -> its finished units: how many, bytes, seconds
    making   units that are being made: unit, host, pid, since (seconds), alive (None: cannot be told from here)
    failed   units that could not be made, and are not done since: unit, host, why
    ended    why the last run ended, where it told
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


def _found(paths: Paths, old: dict[str, Any]) -> dict[str, Any]:
    """What the work directory of this plan tells. Raises FileNotFoundError where it was removed meanwhile."""
    records = journal.read(paths.journal)
    finished = journal.finished(records)
    tried = attempts.read(paths)
    made = {a.fingerprint: a for a in tried if a.is_whole(paths) and a.fingerprint not in finished}
    by: dict[str, dict[str, float]] = {}
    last_host = lockfile.Holder.this().host
    for record in records:
        if record.get("event") == "run" and (holder := lockfile.Holder.of(_process(record))):
            last_host = holder.host
        if record.get("event") == "done" and finished.get(record["fingerprint"]) is record:
            _count(by, record.get("host", last_host), record["files"], _seconds(record.get("seconds", 0.0)))
    for attempt in made.values():
        _count(by, attempt.host, (attempt.result or {})["files"], _seconds((attempt.ended or 0.0) - attempt.began))
    making = _making(tried, records)
    running = any(lockfile.lives(_process(r)) is not False for r in _running(records))
    alive = bool(making) or running or bool(lock.of_parts(paths.root))
    return {
        "output": str(paths.output),
        "state": RUNNING if alive else STOPPED,
        "command": old["command"],
        "input": old["input"],
        "units": old.get("units"),
        "done": len(finished) + len(made),
        "bytes": sum(int(host["bytes"]) for host in by.values()),
        "by": by,
        "making": making,
        "failed": _failed(records, tried, {*finished, *made}),
        "ended": next((r.get("why") for r in reversed(records) if r.get("event") in ("run", "end")), None),
    }


def _count(by: dict[str, dict[str, float]], host: str, files: list[Any], seconds: float) -> None:
    entry = by.setdefault(host, {"units": 0, "bytes": 0, "seconds": 0.0})
    entry["units"] += 1
    entry["bytes"] += sum(nbytes for _, nbytes, _ in files)
    entry["seconds"] = round(entry["seconds"] + seconds, 3)


def _running(records: list[Record]) -> list[Record]:
    """The last run, if it has not ended by itself."""
    last = next((record for record in reversed(records) if record.get("event") in ("run", "end")), None)
    return [last] if last is not None and last["event"] == "run" else []


def _process(record: Record) -> bytes:
    return str(record.get("process", "")).encode(errors="replace")


def _seconds(value: float) -> float:
    """A time as a journal or an attempt tells it: clocks go wrong, and files hold any number."""
    return float(value) if 0 <= value < attempts.LATEST else 0.0


def _making(tried: list[Attempt], records: list[Record]) -> list[dict[str, Any]]:
    now = time.time()
    making = []
    for attempt in tried:
        alive = lockfile.lives(attempt.process.encode())
        if attempt.ended is None and alive is not False:
            who = {"unit": attempt.unit, "host": attempt.host, "pid": attempt.pid, "alive": alive}
            making.append({**who, "since": round(max(0.0, now - attempt.began), 1)})
    for run in _running(records):
        holder = lockfile.Holder.of(_process(run))
        if holder is None or holder.lives() is False:
            continue
        begun: dict[str, Record] = {}
        for record in records[records.index(run) :]:
            if record.get("event") == "start" and "host" not in record:
                begun[record["unit"]] = record
            elif record.get("event") == "done":
                begun.pop(record["unit"], None)
        for unit, record in begun.items():
            since = round(max(0.0, now - (_seconds(record.get("at", now)) or now)), 1)
            alive = holder.lives()
            making.append({"unit": unit, "host": holder.host, "pid": holder.pid, "alive": alive, "since": since})
    return making


def _failed(records: list[Record], tried: list[Attempt], done: set[str]) -> list[dict[str, Any]]:
    """Failures since the last run began, of units that are not done; of parts, of each unit's last attempt."""
    units = {record["unit"] for record in records if record.get("event") == "done" and record["fingerprint"] in done}
    failed: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.get("event") == "run":
            failed.clear()
        if record.get("event") == "failed" and record["unit"] not in units:
            failed[record["unit"]] = {key: record.get(key) for key in ("unit", "host", "why")}
    for attempt in {attempt.fingerprint: attempt for attempt in tried}.values():
        if attempt.failure is not None and attempt.fingerprint not in done:
            failed[attempt.unit] = {"unit": attempt.unit, "host": attempt.host, "why": attempt.failure}
    return list(failed.values())


def lines(status: dict[str, Any]) -> list[str]:
    """The status for people."""
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
