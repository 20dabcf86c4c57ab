"""The second folder that a plan may fill: refused early where something else lies there, delivered complete or not at
all.

It is delivered before the output appears: whoever sees the output, sees it too, and a run that is cut off in between
finds its own work again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ktconvert.layouts.errors import OutputError, UsageError
from ktconvert.layouts.files import publish
from ktconvert.layouts.files.direct_file import explained
from ktconvert.pipeline.engine.journal import Done
from ktconvert.pipeline.engine.paths import has_content, locate
from ktconvert.pipeline.engine.plan import Plan
from ktconvert.pipeline.engine.workdir import WorkDir

Finished = Mapping[str, Done]  # the journal's records of finished units, by fingerprint


def require_free(plan: Plan, finished: Finished, may_replace: bool) -> None:
    """Raise where the folder cannot be filled: UsageError if it would be, hold or lie in the output, OutputError if
    something else lies there and must not be replaced.
    """
    side_output = plan.assembly.side_output
    if side_output is None:
        return
    folder = Path(os.path.realpath(side_output.folder))
    for path in (plan.request.output, locate(plan.request.output).root):
        other = Path(os.path.realpath(path))
        if folder.is_relative_to(other) or other.is_relative_to(folder):
            raise UsageError(f"{side_output.folder} is, contains or lies in {path}; choose another folder for it.")
    if os.path.lexists(side_output.folder) and not (may_replace or _delivered(plan, finished)):
        raise OutputError(
            f"{side_output.folder} exists already; choose another folder, or give --overwrite to replace it."
        )
    if not folder.parent.is_dir():
        raise UsageError(f"{side_output.folder}: its parent folder does not exist; make it first.")


def require_delivered(plan: Plan) -> None:
    """Raise OutputError where an output is finished, and the folder that was filled with it is gone."""
    side_output = plan.assembly.side_output
    if side_output is not None and not all((side_output.folder / unit.final).is_file() for unit in plan.side_units):
        raise OutputError(
            f"{plan.request.output} is finished, but {side_output.folder} does not have what was gathered with it; "
            "give the folder that has it, or start over with --overwrite."
        )


def deliver(plan: Plan, work: WorkDir) -> None:
    """Let the folder appear, with copies of its files. May be cut off and run again."""
    side_output = plan.assembly.side_output
    if side_output is None:
        return
    partial = side_output.partial
    publish.remove_tree(partial)  # left by a kill
    if _delivered(plan, work.finished):
        return
    with explained(partial):
        partial.mkdir()
    for unit in plan.side_units:
        publish.copy_file(work.paths.store / unit.stored_name, partial / unit.final)
    publish.sync_folder(partial)
    if os.path.lexists(side_output.folder):
        if not work.may_replace:
            raise OutputError(
                f"{side_output.folder}: something was put there while the conversion ran; move it away and resume."
            )
        publish.exchange(partial, side_output.folder, aside=partial.with_name(f"{partial.name}.old"))
        publish.remove_tree(partial)
    else:
        publish.publish(partial, side_output.folder)


def _delivered(plan: Plan, finished: Finished) -> bool:
    """Whether the folder holds what this very plan puts there."""
    side_output = plan.assembly.side_output
    assert side_output is not None
    for unit in plan.side_units:
        record = finished.get(unit.fingerprint)
        if record is None:
            return False
        file = record.result.files[0]
        if not has_content(side_output.folder / unit.final, file.nbytes, file.sha256):
            return False
    return True
