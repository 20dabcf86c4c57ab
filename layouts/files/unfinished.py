"""Unfinished outputs, found by the plan in their work directory."""

from __future__ import annotations

from pathlib import Path

WORK_FOLDER = ".ktconvert"  # work directory in its output
WORK_SUFFIX = ".work"  # suffix of a work directory beside its output
PLAN = "plan.json"  # complete in every work directory whose conversion was begun


def is_unfinished(output: Path) -> bool:
    """Return whether a directory to read is not complete. One that was finished before stays complete meanwhile."""
    if _exists(output / WORK_FOLDER / PLAN):
        return True
    if output.name == "" or _exists(output):  # the root folder has no siblings
        return False
    return _exists(output.with_name(output.name + WORK_SUFFIX) / PLAN)


def find_output(root: Path) -> Path | None:
    """Return the output that has this work directory beside it, or None if the folder is no work directory."""
    name = root.name.removesuffix(WORK_SUFFIX)
    return root.with_name(name) if name not in ("", root.name) and _exists(root / PLAN) else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long with the suffix, or a directory may not be entered
        return False
