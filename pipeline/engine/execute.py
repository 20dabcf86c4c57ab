"""From a plan to an output: what lies there already, whether there is room, the run, the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import InputError, OutputError, ResourceError, UsageError, VerificationError
from ktconvert.layouts.files import manifest, publish
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.assemble import assemble
from ktconvert.pipeline.engine.loop import StopFlag, recorded, run_units
from ktconvert.pipeline.engine.plan import Plan, changed_files, require_same_settings, require_same_source
from ktconvert.pipeline.engine.units import Status, Unit, statuses
from ktconvert.pipeline.engine.workdir import INSIDE, Places, WorkDir, done_reason, locate
from ktconvert.pipeline.tell.report import Reporter, duration, size

SLACK = 16 << 20  # bytes of disk for headers, index, manifest, card, journal and directory entries
IGNORED = {INSIDE, "lost+found"}
PLAN_KEYS = {"command": str, "input": str, "settings": dict, "tuning": dict, "source": list}


def saved_plan(places: Places) -> dict[str, Any] | None:
    """plan.json of a conversion that was begun, or None. Raises OutputError where it cannot be understood."""
    try:
        document = json.loads(places.plan.read_bytes())
        if document["ktconvert-plan"] != 1:
            raise OutputError(
                f"{places.plan}: written by another ktconvert ({document['tool_version']}); finish it with that one."
            )
        for key, kind in PLAN_KEYS.items():
            if not isinstance(document[key], kind):
                raise ValueError(f"{key} is no {kind.__name__}")
        return dict(document)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{places.plan}: not a plan ({error}); remove {places.root} and start again.") from error


def begun_with(output: Path) -> dict[str, Any] | None:
    """The settings with which this output was begun or finished, or None."""
    old = saved_plan(locate(output)) or manifest.read(output)
    return dict(old["settings"]) if old else None


def unit_states(plan: Plan, places: Places) -> list[Status]:
    """Which units are done, which will run, and why; reads the work directory, changes nothing."""
    finished = journal.finished(journal.read(places.journal))
    stored = [p.name for p in places.store.iterdir()] if places.store.is_dir() else []
    return statuses(plan.stages, lambda unit: done_reason(places, finished, unit), stored)


def already_finished(plan: Plan, overwrite: bool) -> bool:
    """Whether the output is complete and made by this very plan.

    Raises OutputError, InputError or VerificationError where something else lies there, unless it is to be overwritten.
    """
    output = plan.request.output
    _guard_source(plan)
    if os.path.lexists(output) and not output.is_dir():
        raise OutputError(f"{output} is a file or a broken link; give a directory for the output.")
    if not output.is_dir():
        return False
    own = locate(output)
    old = saved_plan(own)
    if old is not None and own.inside and _assembled(own) is not None:
        return False  # it was about to move in file by file, or is in the midst of it
    if old is not None and old.get("overwrite") and old["settings"] == plan.document()["settings"]:
        return _assembled(own) == output.stat().st_ino
    if overwrite:
        return False
    done = manifest.read(output)
    if done is not None:
        require_same_settings(output, done, plan)
        require_same_source(output, done["source"], plan)
        damaged = [f["name"] for f in done["files"] if not _has_size(output / f["name"], f["size"])]
        if damaged:
            raise VerificationError(
                f"{output} is finished, but {damaged[0]} is missing or has another size; convert again with --overwrite."
            )
        return True
    strangers = [p.name for p in output.iterdir() if p.name not in IGNORED]
    if strangers and not adopts(plan) and not (own.inside and old is not None):
        raise OutputError(
            f"{output} is not empty and holds no output of ktconvert (it has {strangers[0]}); "
            "choose another --output, or --overwrite to replace it."
        )
    return False


def adopts(plan: Plan) -> bool:
    """Whether the output already holds loose layer folders that --resume-layer builds upon."""
    return plan.request.settings.get("kept_layers") is not None


def _assembled(places: Places) -> int | None:
    return journal.assembled(journal.read(places.journal))


def tidy(places: Places) -> None:
    """Remove what is left beside a finished output: the last run was cut off after the output had appeared."""
    if places.root.is_dir():
        with WorkDir(places) as work:
            work.remove()


def execute(plan: Plan, reporter: Reporter, *, overwrite: bool = False) -> bool:
    """Do what the plan says, from wherever it stands. Returns False when there was nothing to do."""
    places = locate(plan.request.output, adopt=adopts(plan))
    if already_finished(plan, overwrite):
        tidy(places)
        reporter.event("finished", output=str(plan.request.output), nothing_to_do=True)
        reporter.say(f"{plan.request.output} is finished: nothing to do")
        return False
    plan.conversion.require_ready()
    with WorkDir(places) as work:
        _adopt_plan(plan, work, reporter, overwrite)
        _tell_of_death(work, plan, reporter)
        threads = _require_room(plan, work, reporter)
        stop = StopFlag()
        with stop.installed(), recorded(work):
            run_units(plan, work, reporter, threads, stop)
            work.journal.append({"event": "start", "unit": "assemble"})
            assemble(plan, work)
    _summary(plan, reporter)
    return True


def _guard_source(plan: Plan) -> None:
    """Raise UsageError if the output or the work directory would be, hold or lie in what is read."""
    output = plan.request.output.resolve()
    for path in (plan.request.input, plan.request.tuning.get("original_path")):
        if path is None or not Path(path).exists():
            continue
        source = Path(path).resolve()
        folder = source if source.is_dir() else source.parent
        if any(folder.is_relative_to(own) for own in (output, locate(output).root)):
            raise UsageError(
                f"--output {plan.request.output} is or contains the input {path}, or would work in it; "
                "the input is never written to: choose another."
            )
        if output.is_relative_to(folder) and source.is_dir():
            raise UsageError(
                f"--output {plan.request.output} lies inside the input {path}; the input is never written to: "
                "choose another."
            )


def _adopt_plan(plan: Plan, work: WorkDir, reporter: Reporter, overwrite: bool) -> None:
    """Agree with what was begun here before, or begin."""
    old = saved_plan(work.places)
    document = plan.document()
    dropped, touched = agree(plan, old, overwrite) if old is not None else (False, [])
    if dropped:
        reporter.note("the unfinished conversion with other options or input is dropped, as --overwrite says")
        work.drop()
        old = None
    work.may_replace = overwrite or bool(old and old.get("overwrite"))
    if work.may_replace:
        document["overwrite"] = True
    if touched:
        units = plan.units_reading(touched)
        for unit in units:
            work.forget(unit)
        reporter.note(f"{', '.join(touched[:3])} was modified since: {len(units)} units that read it are made again")
    if old != document:
        work.save_plan(document)


def agree(plan: Plan, old: dict[str, Any], overwrite: bool) -> tuple[bool, list[str]]:
    """What becomes of the unfinished conversion of plan.json `old`: whether it is dropped, and which files were touched since.

    Raises OutputError or InputError, showing both values, where it was begun with other options or another input.
    """
    new = plan.document()
    others, touched = changed_files(old["source"], plan)
    if overwrite and (others or touched or any(old[key] != new[key] for key in ("command", "settings"))):
        return True, []
    require_same_settings(plan.request.output, old, plan)
    require_same_source(plan.request.output, old["source"], plan)
    if touched and not plan.request.tuning.get("verify_inputs"):
        raise InputError(
            f"{plan.request.input}: {', '.join(touched[:3])} was modified since the conversion began (same size and header); "
            "run again with --verify-inputs to convert what came from it once more, or --overwrite to start over."
        )
    return False, touched


def _tell_of_death(work: WorkDir, plan: Plan, reporter: Reporter) -> None:
    last = journal.death(work.journal.records)
    done = sum(done_reason(work.places, work.finished, unit) is not None for unit in plan.units)
    if last is None:
        if done:
            reporter.say(f"resuming: {done} of {len(plan.units)} units are finished")
        return
    where = f" in {', '.join(last['units'])}" if last["units"] else ""
    kills, before = machine.oom_kills(), last["oom_kills"]
    memory = (
        "; the kernel has killed for memory since then: lower --cpuinfer-threads or set --max-memory"
        if kills and before is not None and kills > before
        else ""
    )
    reporter.note(
        f"the last run (process {last['pid']}) died{where}{memory}; {done} of {len(plan.units)} units are finished and kept"
    )


def _require_room(plan: Plan, work: WorkDir, reporter: Reporter) -> int:
    """Raise ResourceError where disk or memory cannot do; returns the number of threads that memory allows."""
    todo = [unit for unit in plan.units if done_reason(work.places, work.finished, unit) is None]
    needed = disk_needed(plan, todo)
    free = machine.disk_free(work.places.root)
    if sum(needed.values()) > free:
        raise ResourceError(
            f"{work.places.root}: {room_sentence(needed)}, {size(free)} free; free some space or choose another --output."
        )
    limit = machine.file_size_limit()
    copied = [path.stat().st_size for _, path in plan.assembly.companions]
    largest = max([unit.bytes_out for unit in todo if not unit.folder] + copied, default=0)
    if limit is not None and largest + SLACK > limit:
        raise ResourceError(
            f"{work.places.root}: a file of {size(largest)} is over the file size limit of {size(limit)} (ulimit -f); "
            "raise it or set --max-shard-size."
        )
    return fit_threads(plan, reporter)


def disk_needed(plan: Plan, todo: Iterable[Unit[Any]]) -> dict[str, int]:
    """What making these units and the end takes of the disk, at most at any time: what for -> bytes."""
    todo = list(todo)
    chained = any(unit.stage == stage.name for stage in plan.stages if stage.chain for unit in todo)
    return {
        "of weights": sum(unit.bytes_out for unit in todo),
        "of files that exist only meanwhile": plan.scratch_bytes if chained else 0,
        "of companion files": plan.extra_bytes,
        "to spare for headers, index, manifest and journal": SLACK,
    }


def room_sentence(needed: Mapping[str, int]) -> str:
    """The sum, and what it consists of."""
    parts = [f"{size(nbytes)} {what}" for what, nbytes in needed.items() if nbytes]
    return f"{size(sum(needed.values()))} needed" + (f" ({', '.join(parts)})" if parts else "")


def fit_threads(plan: Plan, reporter: Reporter | None = None) -> int:
    """As many threads as asked for, fewer where memory does not hold their buffers. Raises ResourceError when one is too many."""
    asked = int(plan.request.tuning["cpuinfer_threads"])
    budget = plan.request.tuning.get("max_memory") or machine.memory_available()
    threads = asked
    while threads > 1 and plan.conversion.peak_memory(threads) > budget:
        threads -= 1
    if plan.conversion.peak_memory(threads) > budget:
        limit = "--max-memory" if plan.request.tuning.get("max_memory") else "free memory"
        raise ResourceError(
            f"one thread needs {size(plan.conversion.peak_memory(1))}, {limit} is {size(budget)}. {plan.remedies}"
        )
    if threads < asked and reporter is not None:
        reporter.note(f"{threads} of {asked} threads, so that memory stays below {size(budget)}")
    return threads


def hash_inputs(paths: list[Path], threads: int, advance: Callable[[int], None]) -> list[str]:
    """sha256 of whole files, several at a time."""

    def one(path: Path) -> str:
        digest = publish.sha256_file(path)
        advance(path.stat().st_size)
        return digest

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, paths))


def _summary(plan: Plan, reporter: Reporter) -> None:
    done, seconds = reporter.rate()
    out = sum(unit.bytes_out for unit in plan.units if unit.kept)
    reporter.event(
        "finished", output=str(plan.request.output), bytes=out, seconds=round(seconds, 3), peak_rss=machine.peak_rss()
    )
    reporter.say(
        f"{plan.request.output}: {size(out)} in {duration(seconds)} "
        f"({size(done / max(seconds, 1e-9))}/s read, peak RSS {size(machine.peak_rss())})"
    )


def _has_size(path: Path, nbytes: int) -> bool:
    try:
        return path.stat().st_size == nbytes
    except OSError:
        return False
