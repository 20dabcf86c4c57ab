"""Existing files at an output: refusals, comparison with a plan, and the files that --overwrite removes."""

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
from ktconvert.layouts.files.publish import WORK_FOLDER
from ktconvert.layouts.statistics import folder as statistics
from ktconvert.pipeline.engine import attempts, journal
from ktconvert.pipeline.engine.paths import Paths, has_size, locate
from ktconvert.pipeline.engine.plan import CARD, CONFIG, FORMAT, Plan, SavedPlan
from ktconvert.pipeline.engine.units import Status, Unit
from ktconvert.pipeline.engine.workdir import why_finished
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural, size

IGNORED = {WORK_FOLDER, "lost+found"}
NAMED = 5  # files to name in a message


class _Header(msgspec.Struct):
    version: Number = msgspec.field(name="ktconvert-plan")
    tool_version: str


def read_plan(paths: Paths) -> SavedPlan | None:
    """Read plan.json; None if no conversion was begun. Raise OutputError if it cannot be read."""
    try:
        data = paths.plan.read_bytes()
        header = documents.decode_document(data, _Header)
        if header.version != FORMAT:
            raise OutputError(
                f"{paths.plan}: written by a different ktconvert ({header.tool_version}); finish it with that version."
            )
        return documents.decode_document(data, SavedPlan)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OutputError(f"{paths.plan}: not a plan ({error}); remove {paths.root} and start again.") from error


def read_settings(output: Path) -> dict[str, Any] | None:
    """Return the settings with which an output was begun or finished, or None."""
    paths = locate(output)
    old = (None if has_no_units(paths) else read_plan(paths)) or manifest.read_manifest(output)
    return dict(old.settings) if old else None


def has_no_units(paths: Paths) -> bool:
    """Return whether no unit was finished yet, by this process or a job share, so that the saved plan does not count.

    A unit in the store counts without its record, since a kill may have come between the two.
    """
    return (
        not journal.find_finished_units(journal.read(paths.journal))
        and not any(attempt.is_whole(paths) for attempt in attempts.read(paths))
        and not (paths.store.is_dir() and any(paths.store.iterdir()))
    )


def unit_states(plan: Plan, paths: Paths) -> list[Status]:
    """Return which units are finished, which will run, and why. Nothing is changed."""
    finished = journal.find_finished_units(journal.read(paths.journal))
    attempted = {attempt.fingerprint for attempt in attempts.read(paths) if attempt.is_whole(paths)}
    stored = [p.name for p in paths.store.iterdir()] if paths.store.is_dir() else []
    stale = {name.rsplit(".", 2 if name.endswith(".safetensors") else 1)[0] for name in stored}

    def state(unit: Unit[Any]) -> Status:
        done = why_finished(paths, finished, unit) or (
            "made, not yet recorded" if unit.fingerprint in attempted else None
        )
        missing = "made from different inputs or options" if unit.name in stale else "not made yet"
        return Status(unit, done is not None, done or missing)

    return [state(unit) for unit in plan.units]


def predict_states(plan: Plan, paths: Paths, overwrite: bool) -> list[Status]:
    """Return the states of units after a run has compared the saved plan. Raise what the run would raise."""
    states, old = unit_states(plan, paths), read_plan(paths)
    if old is None:
        return states
    dropped, touched = compare_plans(plan, old, overwrite or has_no_units(paths))
    again = plan.units_reading(touched)
    return [
        replace(state, done=False, reason="dropped because of --overwrite" if dropped else "its input was modified")
        if state.done and (dropped or state.unit in again)
        else state
        for state in states
    ]


def is_finished(plan: Plan, overwrite: bool) -> bool:
    """Return whether the output is complete and of this very plan. Raise an error if something else is in the way."""
    output = plan.options.output
    guard_inputs(plan)
    if os.path.lexists(output) and not output.is_dir():
        raise OutputError(f"{output} is a file or a broken link; give a directory for the output.")
    if not output.is_dir():
        if overwrite:
            require_replaceable(plan)  # folder of the side output
        return False
    own = locate(output)
    old = read_plan(own)
    if old is not None and own.inside and _read_assembled_inode(own) is not None:
        return False  # its files were about to be moved there, or some were
    if old is not None and old.overwrite and old.settings == plan.document().settings:
        if _read_assembled_inode(own) == output.stat().st_ino:
            return True
        overwrite = True
    if overwrite:
        require_replaceable(plan)
        return False
    if (done := manifest.read_manifest(output)) is not None:
        require_same_settings(output, done, plan)
        require_same_source(output, done.source, plan)
        damaged = [f.name for f in done.files if not has_size(output / f.name, f.size)]
        if damaged:
            remedy = "convert again with --overwrite"
            raise VerificationError(
                f"{output} is finished, but {damaged[0]} is missing or has a different size; {remedy}."
            )
        return True
    foreign = [p.name for p in output.iterdir() if p.name not in IGNORED]
    if foreign and not plan.extends_output and not (own.inside and old is not None):
        remedy = "choose a different --output, or replace it with --overwrite --delete-others"
        raise OutputError(f"{output} contains {foreign[0]} and is not an output of ktconvert; {remedy}.")
    if plan.extends_output:
        _require_no_clash(plan)
    return False


def folders_to_replace(plan: Plan) -> list[ReplacedFolder]:
    """Return the folders whose files --overwrite removes."""
    output, side_output = plan.options.output, plan.side_output
    kept = {*IGNORED, *(folder.name for folder in plan.kept_folders or ())} if locate(output).inside else set()
    folders = [list_files(output, kept)] if output.is_dir() else []
    folders += (
        [list_files(side_output.folder)] if side_output is not None and os.path.lexists(side_output.folder) else []
    )
    return [replaced for replaced in folders if replaced.listed[0] or replaced.others]


def require_replaceable(plan: Plan) -> None:
    """Raise OutputError if --overwrite would remove files that no manifest lists, without --delete-others."""
    for replaced in folders_to_replace(plan):
        if replaced.others and not plan.options.existing.delete_others:
            remedy = "move them away, or add --delete-others"
            raise OutputError(f"{replaced.folder}: --overwrite would delete {replaced.describe_others()}; {remedy}.")


def report_nothing_to_do(output: Path, reporter: Reporter) -> None:
    reporter.event("finished", output=str(output), nothing_to_do=True)
    reporter.say(f"{output} is finished: nothing to do")


def _require_no_clash(plan: Plan) -> None:
    """Raise OutputError if a file beside the kept layers would be replaced by a different one."""
    output = plan.options.output
    copies = dict(plan.companions)
    for name in (*copies, CONFIG, CARD):
        own = output / name
        if os.path.lexists(own) and not (
            name in copies and own.is_file() and filecmp.cmp(own, copies[name], shallow=False)
        ):
            raise OutputError(f"{own}: the conversion writes a file with this name; move it away.")


def _read_assembled_inode(paths: Paths) -> int | None:
    return journal.find_assembled_inode(journal.read(paths.journal))


def guard_inputs(plan: Plan) -> None:
    """Raise UsageError if an input, by its real path, would be replaced or would contain the output."""
    options, side_output = plan.options, plan.side_output
    folders = [path for path in options.input_paths() if path.is_dir()]
    written = (options.output, *(() if side_output is None else (side_output.folder,)))
    for folder in folders:
        for place in written:
            if _is_in(_real(place), folder):
                remedy = "choose a different folder, since the input is never written to"
                raise UsageError(f"{place} is part of the input {folder}; {remedy}.")
    removed = [*written, locate(options.output).root, *(() if side_output is None else (side_output.partial,))]
    removed = [place for place in removed if place.exists()]
    if not removed:
        return
    for folder, path in _real_folders((*folders, *plan.reads)).items():
        for place in removed:
            if _is_in(folder, place):
                really = "" if folder in (path, path.parent) else f", really in {folder},"
                raise UsageError(
                    f"{path}{really} is an input inside {place}, which this run would write to; choose a different "
                    "output."
                )


def _real_folders(paths: Iterable[Path]) -> dict[Path, Path]:
    """Return the real folders of files, and folders among the paths, each with the first path that leads there."""
    known: dict[Path, Path] = {}  # folder as it is named -> real folder, since resolving each of many files takes long
    real_folders: dict[Path, Path] = {}
    for path in paths:
        if path.is_symlink() or path.is_dir():
            real = _real(path)
            folder = real if real.is_dir() else real.parent
        else:
            folder = known.get(path.parent) or known.setdefault(path.parent, _real(path.parent))
        real_folders.setdefault(folder, path)
    return real_folders


def _real(path: Path) -> Path:
    """Resolve a path; unlike Path.resolve, without an error for links in a circle."""
    return Path(os.path.realpath(path))


def _is_in(path: Path, folder: Path) -> bool:
    """Return whether a resolved path is in a folder, also if a mount gives the folder a second name."""
    real = _real(folder)
    return any(p == real or (p.exists() and real.exists() and p.samefile(real)) for p in (path, *path.parents))


def compare_plans(plan: Plan, old: SavedPlan, may_drop: bool) -> tuple[bool, list[str]]:
    """Compare a plan with the saved plan of an unfinished conversion.

    Return whether the old conversion is dropped, and the files that were touched since. Raise OutputError or
    InputError, with both values, if options or input differ.
    """
    new = plan.document()
    differences, touched = compare_files(old.source, plan)
    if may_drop and (differences or touched or (old.command, old.settings) != (new.command, new.settings)):
        return True, []
    require_same_settings(plan.options.output, old, plan)
    require_same_source(plan.options.output, old.source, plan)
    if touched and not plan.options.verify_inputs:
        problem = f"{', '.join(touched[:3])} was modified after the conversion began (with the same size and header)"
        remedy = (
            "run again with --verify-inputs to convert the units that read it again, or with --overwrite to start over"
        )
        raise InputError(f"{plan.options.input}: {problem}; {remedy}.")
    return False, touched


def require_same_settings(output: Path, old: SavedPlan | Manifest, plan: Plan) -> None:
    """Raise OutputError, with both values, if an option that can change a byte differs from the old one."""
    new = plan.document()
    differing = []
    if old.command != new.command:
        differing.append(f"command was {old.command}, is {new.command}")
    names = sorted({*old.settings, *new.settings})
    for name in names:
        was, now = old.settings.get(name), new.settings.get(name)
        if was != now:
            before, after = ("not given" if value is None else value for value in (was, now))
            differing.append(f"{plan.options.flag_of(name)} was {before}, is {after}")
    if differing:
        raise OutputError(
            f"{output} was made with different options ({'; '.join(differing)}); use the old values, choose a "
            "different --output, or start over with --overwrite."
        )


def compare_files(old: Iterable[SourceFile], plan: Plan) -> tuple[list[str], list[str]]:
    """Return the differences between the old input files and the plan's, and the files that were only touched since."""
    before = {f.name: f for f in old}
    now = {f.name: f for f in plan.source}
    differences = [f"{name} is missing" for name in before if name not in now] + [
        f"{name} is new" for name in now if name not in before
    ]
    touched = []
    for name in before.keys() & now.keys():
        a, b = before[name], now[name]
        if a.size != b.size:
            differences.append(f"{name} had {a.size} bytes, has {b.size}")
        elif a.header_sha256 != b.header_sha256:
            differences.append(f"the header of {name} was {str(a.header_sha256)[:12]}, is {str(b.header_sha256)[:12]}")
        elif a.sha256 and b.sha256 and a.sha256 != b.sha256:
            differences.append(f"the content of {name} was {a.sha256[:12]}, is {b.sha256[:12]}")
        elif a.mtime_ns not in (None, b.mtime_ns) and not (a.sha256 and a.sha256 == b.sha256):
            touched.append(name)
    return sorted(differences), sorted(touched)


def require_same_source(output: Path, old: Iterable[SourceFile], plan: Plan) -> None:
    differences, _ = compare_files(old, plan)
    if differences:
        problem = f"{'; '.join(differences[:5])}; restore the old input, or start over with --overwrite"
        raise InputError(f"{plan.options.input} is not the input of {output}: {problem}.")


@dataclass(frozen=True)
class ReplacedFolder:
    """The files in a folder that --overwrite removes: those that a manifest lists, and with --delete-others all others.

    listed  number and bytes of the files that a manifest lists
    others  name -> bytes of the other files
    """

    folder: Path
    listed: tuple[int, int]
    others: dict[str, int]

    def __str__(self) -> str:
        count, nbytes = self.listed
        ours = [f"{plural(count, 'file')} ({size(nbytes)}) of the existing output"] if count else []
        return f"{self.folder}: {', and '.join([*ours, *([self.describe_others()] if self.others else [])])}"

    def describe_others(self) -> str:
        names = [*self.others][:NAMED]
        more = f", and {len(self.others) - len(names)} more" if len(self.others) > len(names) else ""
        total = size(sum(self.others.values()))
        return f"{plural(len(self.others), 'file')} ({total}) missing from its manifest: {', '.join(names)}{more}"

    def document(self) -> dict[str, object]:
        """Return the JSON object for --json."""
        return {
            "folder": str(self.folder),
            "text": str(self),
            "listed": {"files": self.listed[0], "bytes": self.listed[1]},
            "others": {"files": len(self.others), "bytes": sum(self.others.values()), "names": [*self.others][:NAMED]},
        }


def list_files(folder: Path, kept: Collection[str] = ()) -> ReplacedFolder:
    """List the files of a folder, without entries of these names. A link counts as a file, wherever it leads."""
    if folder.is_symlink() or not folder.is_dir():
        return ReplacedFolder(folder, (0, 0), {folder.name: folder.lstat().st_size})
    known = set(statistics.list_files(folder))
    with contextlib.suppress(VerificationError):
        if (listing := manifest.read_manifest(folder)) is not None:
            known |= {manifest.NAME, *(file.name for file in listing.files)}
    files = dict(_walk(folder, kept))
    ours = [nbytes for name, nbytes in files.items() if name in known]
    return ReplacedFolder(folder, (len(ours), sum(ours)), {name: n for name, n in files.items() if name not in known})


def _walk(folder: Path, kept: Collection[str]) -> Iterator[tuple[str, int]]:
    def refuse(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=refuse):
        parent = Path(place)
        if parent == folder:
            folders[:] = [name for name in folders if name not in kept]
        links = [name for name in folders if (parent / name).is_symlink()]
        for name in sorted([*files, *links]):
            path = parent / name
            yield path.relative_to(folder).as_posix(), path.lstat().st_size
