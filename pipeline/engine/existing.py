"""Existing files at an output: refusals, comparison with a plan, and the files that --overwrite removes."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ktconvert.layouts.errors import InputError, OutputError, UsageError, VerificationError
from ktconvert.layouts.files import documents, manifest, publish
from ktconvert.layouts.files.documents import Number
from ktconvert.layouts.files.manifest import Manifest, SourceFile
from ktconvert.layouts.files.unfinished import WORK_FOLDER
from ktconvert.layouts.statistics import folder as statistics
from ktconvert.pipeline.engine import attempts, journal
from ktconvert.pipeline.engine.comparisons import compare_files, describe_different_settings, find_newer_file
from ktconvert.pipeline.engine.paths import Paths, has_size, locate
from ktconvert.pipeline.engine.plan import CARD, CONFIG, PLAN_VERSION, Plan, SavedPlan
from ktconvert.pipeline.engine.units import Status, Unit
from ktconvert.pipeline.engine.workdir import has_no_units, why_finished
from ktconvert.pipeline.report.progress import Reporter
from ktconvert.pipeline.report.text import plural, size

IGNORED_NAMES = {WORK_FOLDER, "lost+found"}
SAME = "made with these options, from files with the names, sizes and headers of this input"
MAX_NAMED = 5  # files to name in a message


class _Header(msgspec.Struct):
    version: Number = msgspec.field(name="ktconvert-plan")
    tool_version: str


def read_plan(paths: Paths) -> SavedPlan | None:
    """Read plan.json; None if no conversion was begun. Raises OutputError if it cannot be read."""
    try:
        data = paths.plan.read_bytes()
        header = documents.decode_document(data, _Header)
        if header.version != PLAN_VERSION:
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
    saved = None if has_no_units(paths) else read_plan(paths)
    recorded = saved or manifest.read_manifest(output)
    return dict(recorded.settings) if recorded else None


def find_unit_states(plan: Plan, paths: Paths) -> list[Status]:
    """Return which units are finished, which will run, and why. Nothing is changed."""
    finished = journal.find_finished_units(journal.read_records(paths.journal))
    attempted = {attempt.fingerprint for attempt in attempts.read_attempts(paths) if attempt.is_whole(paths)}
    stored_names = [path.name for path in paths.store.iterdir()] if paths.store.is_dir() else []
    stored_units = {name.rsplit(".", 2 if name.endswith(".safetensors") else 1)[0] for name in stored_names}

    def find_state(unit: Unit[Any]) -> Status:
        if (reason := why_finished(paths, finished, unit)) is not None:
            return Status(unit, True, reason)
        if unit.fingerprint in attempted:
            return Status(unit, True, "made, not yet recorded")
        is_stale = unit.name in stored_units
        return Status(unit, False, "made from different inputs or options" if is_stale else "not made yet")

    states: list[Status] = []
    for stage in plan.stages:
        stage_states = [find_state(unit) for unit in stage.units]
        states += _mark_replaced(stage_states) if stage.replaces else stage_states
    return states


def _mark_replaced(states: Sequence[Status]) -> list[Status]:
    """Return the states with all units before the last finished one as finished."""
    last = max((number for number, state in enumerate(states) if state.done), default=0)
    replaced = [state if state.done else Status(state.unit, True, "replaced by a later one") for state in states[:last]]
    return [*replaced, *states[last:]]


def count_finished(plan: Plan, paths: Paths) -> int:
    """Return the number of units that are finished, including those that later ones have replaced."""
    return sum(state.done for state in find_unit_states(plan, paths))


def predict_states(plan: Plan, paths: Paths, overwrite: bool) -> list[Status]:
    """Return the states of units after a run has compared the saved plan. Raise what the run would raise."""
    states = find_unit_states(plan, paths)
    saved = read_plan(paths)
    if saved is None:
        return states
    dropped, touched = compare_plans(plan, saved, overwrite or has_no_units(paths))
    changed_units = plan.units_reading(touched)
    reason = "dropped because of --overwrite" if dropped else "its input was modified"
    return [
        replace(state, done=False, reason=reason) if state.done and (dropped or state.unit in changed_units) else state
        for state in states
    ]


def require_directory(output: Path) -> None:
    """Raise OutputError for an output that exists and is no directory."""
    if os.path.lexists(output) and not output.is_dir():
        raise OutputError(f"{output} is a file or a broken link; give a directory for the output.")


def require_writable_output(plan: Plan, overwrite: bool) -> None:
    """Raise a KTConvertError if this plan cannot be run or resumed, because of the files at its output.

    Accepts an output that this plan has finished.
    """
    output = plan.options.output
    require_safe_inputs(plan)
    require_directory(output)
    paths = locate(output)
    if not output.is_dir():
        if not paths.root.is_dir():
            publish.require_creatable(output)
        if overwrite:
            require_replaceable(plan)  # folder of the side output
        return
    saved = read_plan(paths)
    if _is_being_moved_in(paths, saved):
        return
    if _continues_overwrite(plan, saved):
        if _read_assembled_inode(paths) == output.stat().st_ino:
            return
        overwrite = True
    if overwrite:
        require_replaceable(plan)
        return
    if (finished := manifest.read_manifest(output)) is not None:
        require_same_settings(output, finished, plan)
        require_same_source(output, finished.source, plan)
        require_files(output, finished)
        return
    foreign = [path.name for path in output.iterdir() if path.name not in IGNORED_NAMES]
    if foreign and not plan.extends_output and not (paths.inside and saved is not None):
        remedy = "choose a different --output, or replace it with --overwrite --delete-others"
        raise OutputError(f"{output} contains {foreign[0]} and is not an output of ktconvert; {remedy}.")
    if plan.extends_output:
        _require_no_clash(plan)


def is_finished(plan: Plan, overwrite: bool) -> bool:
    """Return whether the output is complete and was made by this plan; call require_writable_output before."""
    output = plan.options.output
    if not output.is_dir():
        return False
    paths = locate(output)
    saved = read_plan(paths)
    if _is_being_moved_in(paths, saved):
        return False
    if _continues_overwrite(plan, saved):
        return _read_assembled_inode(paths) == output.stat().st_ino
    if overwrite or (finished := manifest.read_manifest(output)) is None:
        return False
    # Another process may have written the output since it was checked.
    differences, _ = compare_files(finished.source, plan)
    differences += _compare_settings(finished, plan)
    return not differences and not _find_damaged_files(output, finished)


def _is_being_moved_in(paths: Paths, saved: SavedPlan | None) -> bool:
    """Return whether a run was about to move files into the output, or has moved some of them."""
    return saved is not None and paths.inside and _read_assembled_inode(paths) is not None


def _continues_overwrite(plan: Plan, saved: SavedPlan | None) -> bool:
    """Return whether a run with these settings was begun with --overwrite."""
    return saved is not None and saved.overwrite and saved.settings == plan.document().settings


def require_files(output: Path, finished: Manifest) -> None:
    """Raise VerificationError if a file of a finished output is missing, or has a different size."""
    if damaged := _find_damaged_files(output, finished):
        problem = f"is finished, but {damaged[0]} is missing or has a different size"
        raise VerificationError(f"{output} {problem}; repeat the command that wrote it, with --overwrite.")


def _find_damaged_files(output: Path, finished: Manifest) -> list[str]:
    """Return the names of files that are missing or whose size differs from the manifest."""
    return [file.name for file in finished.files if not has_size(output / file.name, file.size)]


def find_replaced_folders(plan: Plan) -> list[ReplacedFolder]:
    """Return the folders whose files --overwrite removes."""
    output = plan.options.output
    side_output = plan.side_output
    kept: set[str] = set()
    if locate(output).inside:
        kept = {*IGNORED_NAMES, *(folder.name for folder in plan.kept_folders or ())}
    folders = []
    if output.is_dir():
        folders.append(list_files(output, kept))
    if side_output is not None and os.path.lexists(side_output.folder):
        folders.append(list_files(side_output.folder))
    return [replaced for replaced in folders if replaced.listed[0] or replaced.others]


def require_replaceable(plan: Plan) -> None:
    """Raise OutputError if --overwrite would remove files that no manifest lists, without --delete-others."""
    for replaced in find_replaced_folders(plan):
        if replaced.others and not plan.options.existing.delete_others:
            kind, remedy = "", "move them away"
            if not (replaced.folder / manifest.NAME).exists():
                kind, remedy = "not an output of ktconvert, and ", "choose a different --output"
            problem = f"{kind}--overwrite would delete {replaced.describe_others()}"
            raise OutputError(f"{replaced.folder}: {problem}; {remedy}, or add --delete-others.")


def report_nothing_to_do(output: Path, reporter: Reporter, plan: Plan | None = None) -> None:
    """Report that an output is finished.

    plan  the plan with which its manifest was compared; None if it was not
    """
    reporter.event("finished", output=str(output), nothing_to_do=True)
    comparison = ""
    if plan is not None and (finished := manifest.read_manifest(output)) is not None:
        if newer := find_newer_file(finished.source, plan, (output / manifest.NAME).stat().st_mtime_ns):
            remedy = "if it has other weights now, replace the output with --overwrite"
            reporter.warn(f"{newer} was modified after {output} was made; {remedy}")
        comparison = f" ({SAME}); next: {plan.next_command}"
    reporter.say(f"{output} is finished: nothing to do{comparison}")


def _require_no_clash(plan: Plan) -> None:
    """Raise OutputError if a file beside the kept layers would be replaced by a different one."""
    copies = dict(plan.companions)
    for name in (*copies, CONFIG, CARD):
        path = plan.options.output / name
        is_same_copy = name in copies and path.is_file() and filecmp.cmp(path, copies[name], shallow=False)
        if os.path.lexists(path) and not is_same_copy:
            raise OutputError(f"{path}: the conversion writes a file with this name; move it away.")


def _read_assembled_inode(paths: Paths) -> int | None:
    return journal.find_assembled_inode(journal.read_records(paths.journal))


def require_safe_inputs(plan: Plan) -> None:
    """Raise UsageError if an input, by its real path, would be replaced or would contain the output."""
    options = plan.options
    side_output = plan.side_output
    input_folders = [path for path in options.input_paths() if path.is_dir()]
    written = [options.output]
    removed = [options.output, locate(options.output).root]
    if side_output is not None:
        written.append(side_output.folder)
        removed = [options.output, side_output.folder, locate(options.output).root, side_output.partial]
    for input_folder in input_folders:
        for path in written:
            if _is_in(_resolve(path), input_folder):
                remedy = "choose a different folder, since the input is never written to"
                raise UsageError(f"{path} is part of the input {input_folder}; {remedy}.")
    removed = [path for path in removed if path.exists()]
    if not removed:
        return
    for real_folder, input_path in _find_real_folders((*input_folders, *plan.reads)).items():
        for path in removed:
            if _is_in(real_folder, path):
                is_real = real_folder in (input_path, input_path.parent)
                real_place = "" if is_real else f", really in {real_folder},"
                raise UsageError(
                    f"{input_path}{real_place} is an input inside {path}, which this run would write to; "
                    "choose a different output."
                )


def _find_real_folders(paths: Iterable[Path]) -> dict[Path, Path]:
    """Return the real folders of files, and folders among the paths, each with the first path that leads there."""
    resolved: dict[Path, Path] = {}  # folder -> real folder, since resolving each of many files would take long
    real_folders: dict[Path, Path] = {}
    for path in paths:
        if path.is_symlink() or path.is_dir():
            real_path = _resolve(path)
            folder = real_path if real_path.is_dir() else real_path.parent
        else:
            folder = resolved.get(path.parent) or resolved.setdefault(path.parent, _resolve(path.parent))
        real_folders.setdefault(folder, path)
    return real_folders


def _resolve(path: Path) -> Path:
    """Resolve a path; unlike Path.resolve, without an error for links in a circle."""
    return Path(os.path.realpath(path))


def _is_in(path: Path, folder: Path) -> bool:
    """Return whether a resolved path is in a folder, also if a mount gives the folder a second name."""
    real_folder = _resolve(folder)
    return any(
        parent == real_folder or (parent.exists() and real_folder.exists() and parent.samefile(real_folder))
        for parent in (path, *path.parents)
    )


def compare_plans(plan: Plan, saved: SavedPlan, may_drop: bool) -> tuple[bool, list[str]]:
    """Compare a plan with the saved plan of an unfinished conversion.

    Return whether the old conversion is dropped, and the files that were touched since. Raises OutputError or
    InputError, with both values, if options or input differ.
    """
    new = plan.document()
    differences, touched = compare_files(saved.source, plan)
    if may_drop and (differences or touched or (saved.command, saved.settings) != (new.command, new.settings)):
        return True, []
    require_same_settings(plan.options.output, saved, plan)
    require_same_source(plan.options.output, saved.source, plan)
    if touched and not plan.options.verify_inputs:
        problem = f"{', '.join(touched[:3])} was modified after the conversion began (with the same size and header)"
        remedy = (
            "run again with --verify-inputs to convert the units that read it again, or with --overwrite to start over"
        )
        raise InputError(f"{plan.options.input}: {problem}; {remedy}.")
    return False, touched


def require_same_settings(output: Path, old: SavedPlan | Manifest, plan: Plan) -> None:
    """Raise OutputError if the command, or an option that can change a byte, differs from the old one."""
    if old.command != plan.options.command:
        kind = "an output" if isinstance(old, Manifest) else "an unfinished output"
        remedy = "choose a different --output, or replace it with --overwrite"
        raise OutputError(f"{output} is {kind} of `ktconvert {old.command}`; {remedy}.")
    if differences := _compare_settings(old, plan):
        raise OutputError(
            f"{output} was made with different options ({'; '.join(differences)}); use the old values, choose a "
            "different --output, or start over with --overwrite."
        )


def _compare_settings(old: SavedPlan | Manifest, plan: Plan) -> list[str]:
    """Return descriptions of the options that can change a byte and differ from the old ones."""
    new = plan.document()
    differences = describe_different_settings(old.settings, new.settings, type(plan.options))
    return [f"command was {old.command}, is {new.command}"] if old.command != new.command else differences


def require_same_source(output: Path, old: Iterable[SourceFile], plan: Plan) -> None:
    differences, _ = compare_files(old, plan)
    if differences:
        remedy = "restore the old input, choose a different --output, or start over with --overwrite"
        problem = f"{'; '.join(differences[:5])}; {remedy}"
        raise InputError(f"{plan.options.input} is not the input of {output}: {problem}.")


@dataclass(frozen=True)
class ReplacedFolder:
    """The files in a folder that --overwrite removes: those that a manifest lists, and with --delete-others all others.

    listed    number and bytes of the files that a manifest lists
    others    name -> bytes of the other files
    unlisted  why the manifest does not list the other files
    """

    folder: Path
    listed: tuple[int, int]
    others: dict[str, int]
    unlisted: str = "that no manifest lists"

    def __str__(self) -> str:
        count, nbytes = self.listed
        parts = []
        if count:
            parts.append(f"{plural(count, 'file')} ({size(nbytes)}) of the existing output")
        if self.others:
            parts.append(self.describe_others())
        return f"{self.folder}: {', and '.join(parts)}"

    def describe_others(self) -> str:
        names = [*self.others][:MAX_NAMED]
        more = f", and {len(self.others) - len(names)} more" if len(self.others) > len(names) else ""
        total = size(sum(self.others.values()))
        return f"{plural(len(self.others), 'file')} ({total}) {self.unlisted}: {', '.join(names)}{more}"

    def document(self) -> dict[str, object]:
        """Return the JSON object for --json."""
        return {
            "folder": str(self.folder),
            "text": str(self),
            "listed": {"files": self.listed[0], "bytes": self.listed[1]},
            "others": {
                "files": len(self.others),
                "bytes": sum(self.others.values()),
                "names": [*self.others][:MAX_NAMED],
            },
        }


def list_files(folder: Path, kept: Collection[str] = ()) -> ReplacedFolder:
    """List the files of a folder. A link counts as a file, wherever it leads.

    kept  names of entries of the folder to skip
    """
    if folder.is_symlink() or not folder.is_dir():
        return ReplacedFolder(folder, (0, 0), {folder.name: folder.lstat().st_size})
    known = set(statistics.list_files(folder))
    unlisted = ReplacedFolder.unlisted
    try:
        if (listing := manifest.read_manifest(folder)) is not None:
            known |= {manifest.NAME, *(file.name for file in listing.files)}
    except VerificationError:
        unlisted = "whose manifest cannot be read"
    files = dict(_walk_files(folder, kept))
    listed = [nbytes for name, nbytes in files.items() if name in known]
    others = {name: nbytes for name, nbytes in files.items() if name not in known}
    return ReplacedFolder(folder, (len(listed), sum(listed)), others, unlisted)


def _walk_files(folder: Path, kept: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield (name below the folder, bytes) of all files, except in entries with the names `kept`."""

    def raise_error(error: OSError) -> None:
        raise error

    for parent_path, folders, files in os.walk(folder, onerror=raise_error):
        parent = Path(parent_path)
        if parent == folder:
            folders[:] = [name for name in folders if name not in kept]
        links = [name for name in folders if (parent / name).is_symlink()]
        for name in sorted([*files, *links]):
            path = parent / name
            yield path.relative_to(folder).as_posix(), path.lstat().st_size
