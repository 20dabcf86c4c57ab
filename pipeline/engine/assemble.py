"""The last stage: put finished units, companions, config, card, manifest and index together, and publish the output."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ktconvert.layouts.errors import OutputError, UsageError
from ktconvert.layouts.files import manifest, publish
from ktconvert.layouts.files.direct_file import explain_full_disk
from ktconvert.layouts.files.manifest import OutputFile
from ktconvert.layouts.files.shards import index_json
from ktconvert.layouts.sources.containers.safetensors import INDEX, read_header
from ktconvert.pipeline.engine import journal
from ktconvert.pipeline.engine.existing import require_replaceable
from ktconvert.pipeline.engine.journal import Done
from ktconvert.pipeline.engine.paths import Paths, has_content, locate
from ktconvert.pipeline.engine.plan import CARD, CONFIG, KeptFolder, Plan, require_unchanged, tool_version
from ktconvert.pipeline.engine.units import Unit
from ktconvert.pipeline.engine.workdir import WorkDir

# Errors of a rename to a path that exists.
EXISTS_ERRORS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
NOT_OURS = {"lost+found"}


def assemble_output(plan: Plan, workdir: WorkDir) -> None:
    """Put the output together and publish it. May be interrupted and run again at any point."""
    target = workdir.paths.assembly
    units = [unit for unit in plan.units if unit.in_output]
    files = fill_output_folder(target, plan, units, workdir)
    if all((target / file.name).exists() for unit in units for file in _list_unit_files(unit, workdir)):
        plan.hooks.check(target)
    if workdir.may_replace and journal.find_assembled_inode(workdir.journal.records) is None:
        require_replaceable(plan)  # files may have been added while the conversion ran
    publish_side_output(plan, workdir)
    workdir.journal.append(journal.Assembled(inode=target.stat().st_ino), sync=True)
    if workdir.paths.inside:
        _move_files_in(workdir.paths, [f.name for f in files], workdir.may_replace)
    else:
        _rename_folder(workdir.paths, workdir.may_replace)
    workdir.remove()


def fill_output_folder(target: Path, plan: Plan, units: list[Unit[Any]], workdir: WorkDir) -> list[OutputFile]:
    """Fill a folder with finished units and the files that go with them, synced; return the files of its manifest."""
    weights = {file.name: file for unit in units for file in _list_unit_files(unit, workdir)}
    target.mkdir(exist_ok=True)
    publish.remove_all_but(target, weights.keys())  # files of an interrupted assembly
    for unit in units:
        stored = workdir.paths.store / unit.stored_name
        if stored.exists():
            publish.link_or_move(stored, target / unit.final)
    files = [*weights.values(), *_list_kept_files(workdir.paths.output, plan.kept_folders or ())]
    for name, source in plan.companions:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        files.append(OutputFile(name, *publish.copy_file(source, target / name)))
    if not plan.read_once:
        require_unchanged(plan)
    if plan.config is not None:
        files.append(_write_file(target, CONFIG, plan.config))
    finished = (workdir.finished.get(unit.fingerprint) for unit in plan.units)
    stats = [record.result.stats for record in finished if record is not None and record.result.stats]
    files.append(_write_file(target, CARD, plan.hooks.render_card(stats)))
    files += [_write_file(target, name, data) for name, data in plan.hooks.extra_files(stats).items()]
    if plan.has_index:
        shards = []
        for unit in units:
            candidates = (folder / unit.final for folder in (target, workdir.paths.output))
            header = read_header(next(path for path in candidates if path.exists()))
            shards.append((unit.final, [e.name for e in header.entries], sum(e.nbytes for e in header.entries)))
        files.append(_write_file(target, INDEX, index_json(shards)))
    document = manifest.encode_manifest(
        tool_version=tool_version(),
        command=plan.options.command,
        settings=dict(sorted(plan.options.settings.items())),
        facts={**plan.facts, **plan.hooks.measured_facts(stats)},
        source=tuple(f.without_mtime() for f in plan.source),
        files=files,
    )
    _write_file(target, manifest.NAME, document)
    for folder in (target, *(p for p in target.rglob("*") if p.is_dir())):
        publish.sync_folder(folder)
    return files


def _list_unit_files(unit: Unit[Any], workdir: WorkDir) -> Iterator[OutputFile]:
    """Yield the files of a finished unit with their names in the output."""
    result = workdir.finished[unit.fingerprint].result
    for written in result.files:
        name = (PurePosixPath(unit.final) / written.path).as_posix()
        yield OutputFile(name, written.nbytes, written.sha256, None if written.path else result.tensors)


def _write_file(target: Path, name: str, data: bytes) -> OutputFile:
    return OutputFile(name, len(data), publish.write_file(target / name, data))


def _list_kept_files(output: Path, folders: Iterable[KeptFolder]) -> list[OutputFile]:
    files = []
    for folder in folders:
        for path in sorted((output / folder.name).glob(folder.files)):
            name = path.relative_to(output).as_posix()
            files.append(OutputFile(name, path.stat().st_size, publish.sha256_file(path)))
    return files


def _rename_folder(paths: Paths, may_replace: bool) -> None:
    """Publish the output with one rename; an old output is swapped out and removed last.

    Raises OutputError if a different file or folder has appeared at the output.
    """
    output = paths.output
    with explain_full_disk(output):
        try:
            paths.assembly.rename(output)
        except OSError as error:
            if error.errno not in EXISTS_ERRORS:
                raise
            if not may_replace:
                remedy = "move it away and resume, or run the same command with --overwrite"
                raise OutputError(
                    f"{output}: a different file or folder appeared during the conversion; {remedy}."
                ) from error
            publish.exchange_paths(paths.assembly, output, aside=paths.old)
    publish.sync_folder(output.parent)


def _move_files_in(paths: Paths, names: list[str], may_replace: bool) -> None:
    """Move the files into the output one by one.

    The old index is removed before the first file and the new one comes after the last, so no index names a mixture.
    """
    output = paths.output
    assembly = paths.assembly
    (output / manifest.NAME).unlink(missing_ok=True)
    (output / INDEX).unlink(missing_ok=True)
    publish.sync_folder(output)
    if may_replace:
        publish.remove_all_but(output, {*names, manifest.NAME}, spare={*NOT_OURS, paths.root.name})
    last_names = [name for name in (manifest.NAME, INDEX) if name == manifest.NAME or name in names]
    folders = {output}
    for name in names:
        if name not in last_names and (assembly / name).exists():
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (assembly / name).rename(output / name)
            folders.update(output / parent for parent in Path(name).parents)
    for folder in folders:
        publish.sync_folder(folder)
    for name in last_names:
        publish.publish_path(assembly / name, output / name)


# The side output, a second folder that a plan may fill, appears before the output: a finished output has its own.
FinishedUnits = Mapping[str, Done]  # the journal's records of finished units, by fingerprint


def require_free_side_output(plan: Plan, finished: FinishedUnits, may_replace: bool) -> None:
    """Raise UsageError if the side output and the output overlap, OutputError if its folder has foreign files."""
    if (side_output := plan.side_output) is None:
        return
    folder = Path(os.path.realpath(side_output.folder))
    for path in (plan.options.output, locate(plan.options.output).root):
        other = Path(os.path.realpath(path))
        if folder.is_relative_to(other) or other.is_relative_to(folder):
            raise UsageError(f"{side_output.folder} and {path} overlap; choose a different folder for statistics.")
    if os.path.lexists(side_output.folder) and not (may_replace or _has_side_output(plan, finished)):
        raise OutputError(
            f"{side_output.folder} exists already; choose a different folder, or replace it with --overwrite."
        )
    if not folder.parent.is_dir():
        raise OutputError(f"{side_output.folder}: its parent folder does not exist; create it first.")


def require_side_output(plan: Plan) -> None:
    """Raise OutputError if the side output of a finished output is missing."""
    side_output = plan.side_output
    if side_output is not None and not all((side_output.folder / unit.final).is_file() for unit in plan.side_units):
        raise OutputError(
            f"{plan.options.output} is finished, but {side_output.folder} does not contain its statistics; give the "
            "folder that does, or start over with --overwrite."
        )


def publish_side_output(plan: Plan, workdir: WorkDir) -> None:
    """Publish the side output with copies of its files. May be interrupted and run again."""
    if (side_output := plan.side_output) is None:
        return
    partial = side_output.partial
    publish.remove_tree(partial)  # left by a killed run
    if _has_side_output(plan, workdir.finished):
        return
    with explain_full_disk(partial):
        partial.mkdir()
    for unit in plan.side_units:
        publish.copy_file(workdir.paths.store / unit.stored_name, partial / unit.final)
    publish.sync_folder(partial)
    if os.path.lexists(side_output.folder):
        if not workdir.may_replace:
            raise OutputError(
                f"{side_output.folder}: a different folder appeared during the conversion; move it away and resume."
            )
        publish.exchange_paths(partial, side_output.folder, aside=partial.with_name(f"{partial.name}.old"))
        publish.remove_tree(partial)
    else:
        publish.publish_path(partial, side_output.folder)


def _has_side_output(plan: Plan, finished: FinishedUnits) -> bool:
    side_output = plan.side_output
    assert side_output is not None
    for unit in plan.side_units:
        if (record := finished.get(unit.fingerprint)) is None:
            return False
        file = record.result.files[0]
        if not has_content(side_output.folder / unit.final, file.nbytes, file.sha256):
            return False
    return True
