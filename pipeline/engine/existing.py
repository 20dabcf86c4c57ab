"""What lies at an output already, and whether a plan agrees with it."""

from __future__ import annotations

import contextlib
import filecmp
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ktconvert.layouts.errors import InputError, OutputError, UsageError, VerificationError
from ktconvert.layouts.files import documents, manifest
from ktconvert.layouts.files.documents import Number
from ktconvert.layouts.files.manifest import Manifest, SourceFile
from ktconvert.layouts.outputs import loose
from ktconvert.layouts.statistics import folder as statistics
from ktconvert.pipeline.engine import attempts, journal
from ktconvert.pipeline.engine.paths import INSIDE, Paths, has_size, locate
from ktconvert.pipeline.engine.plan import CARD, CONFIG, FORMAT, Plan, SavedPlan
from ktconvert.pipeline.engine.units import Status, Unit
from ktconvert.pipeline.engine.workdir import done_reason
from ktconvert.pipeline.options.declare import input_paths, option_fields
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural, size

IGNORED = {INSIDE, "lost+found"}
NAMED = 5  # files that a message names


class _Header(msgspec.Struct):
    version: Number = msgspec.field(name="ktconvert-plan")
    tool_version: str


def saved_plan(paths: Paths) -> SavedPlan | None:
    """plan.json of a conversion that was begun, or None. Raises OutputError where it cannot be understood."""
    try:
        data = paths.plan.read_bytes()
        header = documents.read(data, _Header)
        if header.version != FORMAT:
            raise OutputError(
                f"{paths.plan}: written by another ktconvert ({header.tool_version}); finish it with that one."
            )
        return documents.read(data, SavedPlan)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OutputError(f"{paths.plan}: not a plan ({error}); remove {paths.root} and start again.") from error


def begun_with(output: Path) -> dict[str, Any] | None:
    """The settings with which this output was begun or finished, or None."""
    paths = locate(output)
    old = (None if nothing_made(paths) else saved_plan(paths)) or manifest.read(output)
    return dict(old.settings) if old else None


def nothing_made(paths: Paths) -> bool:
    """Whether no unit was finished yet, here or by a part: what was begun, and perhaps refused, then binds nobody.
    A unit in the store counts without its record, too: a kill may have come between the two.
    """
    return (
        not journal.finished(journal.read(paths.journal))
        and not any(attempt.is_whole(paths) for attempt in attempts.read(paths))
        and not (paths.store.is_dir() and any(paths.store.iterdir()))
    )


def unit_states(plan: Plan, paths: Paths) -> list[Status]:
    """Which units are done, which will run, and why; reads the work directory, changes nothing."""
    finished = journal.finished(journal.read(paths.journal))
    made = {attempt.fingerprint for attempt in attempts.read(paths) if attempt.is_whole(paths)}
    stored = [p.name for p in paths.store.iterdir()] if paths.store.is_dir() else []

    others = {name.rsplit(".", 2 if name.endswith(".safetensors") else 1)[0] for name in stored}

    def state(unit: Unit[Any]) -> Status:
        done = done_reason(paths, finished, unit) or ("made, to be recorded" if unit.fingerprint in made else None)
        left = "made from other inputs or options" if unit.name in others else "not made yet"
        return Status(unit, done is not None, done or left)

    return [state(unit) for unit in plan.units]


def states_once_begun(plan: Plan, paths: Paths, overwrite: bool) -> list[Status]:
    """The same as a run will find them, which drops some or makes some again; raises what would refuse it."""
    states, old = unit_states(plan, paths), saved_plan(paths)
    if old is None:
        return states
    dropped, touched = agree(plan, old, overwrite or nothing_made(paths))
    again = plan.units_reading(touched)
    return [
        replace(state, done=False, reason="dropped, as --overwrite says" if dropped else "its input was modified")
        if state.done and (dropped or state.unit in again)
        else state
        for state in states
    ]


def already_finished(plan: Plan, overwrite: bool) -> bool:
    """Whether the output is complete and made by this very plan. Raises where something else is in the way."""
    output = plan.request.output
    guard_inputs(plan)
    if os.path.lexists(output) and not output.is_dir():
        raise OutputError(f"{output} is a file or a broken link; give a directory for the output.")
    if not output.is_dir():
        if overwrite:
            require_replaceable(plan)  # of the side output
        return False
    own = locate(output)
    old = saved_plan(own)
    if old is not None and own.inside and _assembled(own) is not None:
        return False  # it was about to move in file by file, or is in the midst of it
    if old is not None and old.overwrite and old.settings == plan.document().settings:
        if _assembled(own) == output.stat().st_ino:
            return True
        overwrite = True
    if overwrite:
        require_replaceable(plan)
        return False
    if (done := manifest.read(output)) is not None:
        require_same_settings(output, done, plan)
        require_same_source(output, done.source, plan)
        damaged = [f.name for f in done.files if not has_size(output / f.name, f.size)]
        if damaged:
            remedy = "convert again with --overwrite"
            raise VerificationError(f"{output} is finished, but {damaged[0]} is missing or has another size; {remedy}.")
        return True
    strangers = [p.name for p in output.iterdir() if p.name not in IGNORED]
    if strangers and not plan.adopts and not (own.inside and old is not None):
        remedy = "choose another --output, or --overwrite --delete-others to replace it"
        raise OutputError(f"{output} is not empty and holds no output of ktconvert (it has {strangers[0]}); {remedy}.")
    if plan.adopts:
        _require_no_clash(plan)
    return False


def to_replace(plan: Plan) -> list[Replaced]:
    """What --overwrite removes, folder by folder; none where nothing lies."""
    output, side_output = plan.request.output, plan.side_output
    kept = {*IGNORED, *map(loose.layer_folder, plan.kept_layers or ())} if locate(output).inside else set()
    found = [look(output, kept)] if output.is_dir() else []
    found += [look(side_output.folder)] if side_output is not None and os.path.lexists(side_output.folder) else []
    return [replaced for replaced in found if replaced.listed[0] or replaced.others]


def require_replaceable(plan: Plan) -> None:
    """Raise OutputError where files would be removed that no manifest lists, unless --delete-others is given."""
    for replaced in to_replace(plan):
        if replaced.others and not plan.request.options.existing.delete_others:
            remedy = "move them away, or add --delete-others"
            raise OutputError(f"{replaced.folder}: --overwrite would delete {replaced.others_in_words()}; {remedy}.")


def nothing_to_do(output: Path, reporter: Reporter) -> None:
    reporter.event("finished", output=str(output), nothing_to_do=True)
    reporter.say(f"{output} is finished: nothing to do")


def _require_no_clash(plan: Plan) -> None:
    """Raise OutputError where a file beside the layers that are kept would be replaced by another one."""
    output = plan.request.output
    copies = dict(plan.companions)
    for name in (*copies, CONFIG, CARD):
        own = output / name
        if os.path.lexists(own) and not (
            name in copies and own.is_file() and filecmp.cmp(own, copies[name], shallow=False)
        ):
            raise OutputError(f"{own}: the conversion has a file of that name, too; move it away.")


def _assembled(paths: Paths) -> int | None:
    return journal.assembled(journal.read(paths.journal))


def guard_inputs(plan: Plan) -> None:
    """Raise UsageError where a file that is read, wherever it really lies, would be replaced, or hold the output."""
    request, side_output = plan.request, plan.side_output
    folders = [path for path in input_paths(request.options) if path.is_dir()]
    written = (request.output, *(() if side_output is None else (side_output.folder,)))
    for folder in folders:
        for place in written:
            if _lies_in(_real(place), folder):
                remedy = "the input is never written to: choose another folder"
                raise UsageError(f"{place} is or lies inside {folder}, which is read; {remedy}.")
    removed = [*written, locate(request.output).root, *(() if side_output is None else (side_output.partial,))]
    removed = [place for place in removed if place.exists()]
    if not removed:
        return
    for folder, path in _real_folders((*folders, *plan.reads)).items():
        for place in removed:
            if _lies_in(folder, place):
                really = "" if folder in (path, path.parent) else f", really in {folder},"
                raise UsageError(
                    f"{path}{really} is read, and {place} is or contains it, which this run replaces or works in; the "
                    "input is never written to: choose another output."
                )


def _real_folders(paths: Iterable[Path]) -> dict[Path, Path]:
    """The folders in which files really lie (or that are among the paths) -> the first of the paths of each."""
    known: dict[Path, Path] = {}  # folder as it is named -> where it really is: resolving each of many files takes long
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_symlink() or path.is_dir():
            real = _real(path)
            folder = real if real.is_dir() else real.parent
        else:
            folder = known.get(path.parent) or known.setdefault(path.parent, _real(path.parent))
        found.setdefault(folder, path)
    return found


def _real(path: Path) -> Path:
    """Where a path leads; unlike Path.resolve without an error where links lead in a circle."""
    return Path(os.path.realpath(path))


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether a resolved path lies in that folder, also where a mount gives the folder another name."""
    there = _real(folder)
    return any(p == there or (p.exists() and there.exists() and p.samefile(there)) for p in (path, *path.parents))


def agree(plan: Plan, old: SavedPlan, may_drop: bool) -> tuple[bool, list[str]]:
    """Whether the unfinished conversion of plan.json `old` is dropped, and which files were touched since. Raises
    OutputError or InputError, showing both values, where it was begun with other options or another input.
    """
    new = plan.document()
    others, touched = changed_files(old.source, plan)
    if may_drop and (others or touched or (old.command, old.settings) != (new.command, new.settings)):
        return True, []
    require_same_settings(plan.request.output, old, plan)
    require_same_source(plan.request.output, old.source, plan)
    if touched and not plan.request.options.verify_inputs:
        what = f"{', '.join(touched[:3])} was modified since the conversion began (same size and header)"
        remedy = "run again with --verify-inputs to convert what came from it once more, or --overwrite to start over"
        raise InputError(f"{plan.request.input}: {what}; {remedy}.")
    return False, touched


def require_same_settings(output: Path, old: SavedPlan | Manifest, plan: Plan) -> None:
    """Raise OutputError, showing both values, where an option that can change a byte differs from the old one."""
    new = plan.document()
    differing = []
    if old.command != new.command:
        differing.append(f"command was {old.command}, is {new.command}")
    names = sorted({*old.settings, *new.settings})
    flags = {option_field.name: option_field.flag for option_field in option_fields(type(plan.request.options))}
    for name in names:
        was, now = old.settings.get(name), new.settings.get(name)
        if was != now:
            before, after = ("not given" if value is None else value for value in (was, now))
            differing.append(f"{flags.get(name, name)} was {before}, is {after}")
    if differing:
        raise OutputError(
            f"{output} was made with other options: {'; '.join(differing)}. Give the old values, choose another "
            "--output, or start over with --overwrite."
        )


def changed_files(old: Iterable[SourceFile], plan: Plan) -> tuple[list[str], list[str]]:
    """Files of the source that are certainly other ones (with what differs), and those that were only touched since."""
    before = {f.name: f for f in old}
    now = {f.name: f for f in plan.source}
    other = [f"{name} is gone" for name in before if name not in now] + [
        f"{name} is new" for name in now if name not in before
    ]
    touched = []
    for name in before.keys() & now.keys():
        a, b = before[name], now[name]
        if a.size != b.size:
            other.append(f"{name} had {a.size} bytes, has {b.size}")
        elif a.header_sha256 != b.header_sha256:
            other.append(f"the header of {name} was {str(a.header_sha256)[:12]}, is {str(b.header_sha256)[:12]}")
        elif a.sha256 and b.sha256 and a.sha256 != b.sha256:
            other.append(f"the content of {name} was {a.sha256[:12]}, is {b.sha256[:12]}")
        elif a.mtime_ns not in (None, b.mtime_ns) and not (a.sha256 and a.sha256 == b.sha256):
            touched.append(name)
    return sorted(other), sorted(touched)


def require_same_source(output: Path, old: Iterable[SourceFile], plan: Plan) -> None:
    other, _ = changed_files(old, plan)
    if other:
        what = f"{'; '.join(other[:5])}. Put the old input back, or start over with --overwrite"
        raise InputError(f"{plan.request.input} is not the input that {output} was begun with: {what}.")


# What --overwrite removes: files that a manifest of ours lists, and with --delete-others all others.
@dataclass(frozen=True)
class Replaced:
    """The files in a folder to be replaced: number and bytes of those that a manifest lists; others by name."""

    folder: Path
    listed: tuple[int, int]
    others: dict[str, int]

    def __str__(self) -> str:
        count, nbytes = self.listed
        ours = [f"{plural(count, 'file')} ({size(nbytes)}) of the output that lies there"] if count else []
        return f"{self.folder}: {', and '.join([*ours, *([self.others_in_words()] if self.others else [])])}"

    def others_in_words(self) -> str:
        names = [*self.others][:NAMED]
        more = f", and {len(self.others) - len(names)} more" if len(self.others) > len(names) else ""
        total = size(sum(self.others.values()))
        return f"{plural(len(self.others), 'file')} ({total}) that no manifest lists: {', '.join(names)}{more}"

    def document(self) -> dict[str, object]:
        """For --json."""
        return {
            "folder": str(self.folder),
            "text": str(self),
            "listed": {"files": self.listed[0], "bytes": self.listed[1]},
            "others": {"files": len(self.others), "bytes": sum(self.others.values()), "names": [*self.others][:NAMED]},
        }


def look(folder: Path, kept: Collection[str] = ()) -> Replaced:
    """What a folder holds, but for entries of these names. A link counts as a file, wherever it leads."""
    if folder.is_symlink() or not folder.is_dir():
        return Replaced(folder, (0, 0), {folder.name: folder.lstat().st_size})
    known = set(statistics.list_files(folder))
    with contextlib.suppress(VerificationError):
        if (listing := manifest.read(folder)) is not None:
            known |= {manifest.NAME, *(file.name for file in listing.files)}
    files = dict(_walk(folder, kept))
    ours = [nbytes for name, nbytes in files.items() if name in known]
    return Replaced(folder, (len(ours), sum(ours)), {name: n for name, n in files.items() if name not in known})


def _walk(folder: Path, kept: Collection[str]) -> Iterator[tuple[str, int]]:
    def refuse(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=refuse):
        here = Path(place)
        if here == folder:
            folders[:] = [name for name in folders if name not in kept]
        links = [name for name in folders if (here / name).is_symlink()]
        for name in sorted([*files, *links]):
            path = here / name
            yield path.relative_to(folder).as_posix(), path.lstat().st_size
