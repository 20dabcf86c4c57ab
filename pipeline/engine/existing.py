"""What lies at an output already: a finished one, an unfinished conversion, something else; and whether a plan agrees
with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import InputError, OutputError, UsageError, VerificationError
from ktconvert.layouts.files import documents, manifest
from ktconvert.layouts.files.documents import NUMBER
from ktconvert.pipeline.engine import attempts, journal
from ktconvert.pipeline.engine.places import INSIDE, Places, has_size, locate
from ktconvert.pipeline.engine.plan import FORMAT, Plan, changed_files, require_same_settings, require_same_source
from ktconvert.pipeline.engine.units import Status, Unit, statuses
from ktconvert.pipeline.engine.workdir import done_reason

IGNORED = {INSIDE, "lost+found"}
SOURCE = {
    "name": str,
    "size": NUMBER,
    "mtime_ns?": int,
    "header_sha256?": (str, None),
    "blob?": (str, None),
    "sha256?": (str, None),
}
# plan.json. Settings and tuning are the command's own (pipeline/plans/commands.py).
PLAN = {
    "command": str,
    "input": str,
    "settings": {},
    "tuning": {},
    "source": [SOURCE],
    "units?": NUMBER,
    "overwrite?": bool,
}


def saved_plan(places: Places) -> dict[str, Any] | None:
    """plan.json of a conversion that was begun, or None. Raises OutputError where it cannot be understood."""
    try:
        document = documents.parse(places.plan.read_bytes())
        wrong = documents.mismatch(document, {"ktconvert-plan": NUMBER, "tool_version": str})
        if wrong is None and document["ktconvert-plan"] != FORMAT:
            raise OutputError(
                f"{places.plan}: written by another ktconvert ({document['tool_version']}); finish it with that one."
            )
        wrong = wrong or documents.mismatch(document, PLAN)
        if wrong is not None:
            raise ValueError(wrong)
        return dict(document)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OutputError(f"{places.plan}: not a plan ({error}); remove {places.root} and start again.") from error


def begun_with(output: Path) -> dict[str, Any] | None:
    """The settings with which this output was begun or finished, or None."""
    old = saved_plan(locate(output)) or manifest.read(output)
    return dict(old["settings"]) if old else None


def unit_states(plan: Plan, places: Places) -> list[Status]:
    """Which units are done, which will run, and why; reads the work directory, changes nothing."""
    finished = journal.finished(journal.read(places.journal))
    made = {attempt.fingerprint for attempt in attempts.read(places) if attempt.is_whole(places)}
    stored = [p.name for p in places.store.iterdir()] if places.store.is_dir() else []

    def reason(unit: Unit[Any]) -> str | None:
        return done_reason(places, finished, unit) or ("made, to be recorded" if unit.fingerprint in made else None)

    return statuses(plan.stages, reason, stored)


def already_finished(plan: Plan, overwrite: bool) -> bool:
    """Whether the output is complete and made by this very plan.

    Raises OutputError, InputError or VerificationError where something else lies there, unless it is to be overwritten.
    """
    output = plan.request.output
    guard_source(plan)
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
        damaged = [f["name"] for f in done["files"] if not has_size(output / f["name"], f["size"])]
        if damaged:
            raise VerificationError(
                f"{output} is finished, but {damaged[0]} is missing or has another size; convert again with "
                "--overwrite."
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


def guard_source(plan: Plan) -> None:
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


def agree(plan: Plan, old: dict[str, Any], overwrite: bool) -> tuple[bool, list[str]]:
    """What becomes of the unfinished conversion of plan.json `old`: whether it is dropped, and which files were touched
    since.

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
            f"{plan.request.input}: {', '.join(touched[:3])} was modified since the conversion began (same size and "
            "header); "
            "run again with --verify-inputs to convert what came from it once more, or --overwrite to start over."
        )
    return False, touched
