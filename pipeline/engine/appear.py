"""The moment an assembled output appears: renamed as a whole, or moved into place file by file with the index last."""

from __future__ import annotations

import errno
from pathlib import Path

from ktconvert.layouts.checkpoints.containers.safetensors import INDEX
from ktconvert.layouts.errors import OutputError
from ktconvert.layouts.files import manifest, publish
from ktconvert.layouts.files.direct_file import explained
from ktconvert.pipeline.engine.paths import Paths
from ktconvert.pipeline.engine.workdir import WorkDir

TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
NOT_OURS = {"lost+found"}


def appear(work: WorkDir, names: list[str]) -> None:
    """Let the synced folder with files of these names become the output. May be cut off and run again."""
    if work.paths.inside:
        _move_in(work.paths, names, work.may_replace)
    else:
        _rename(work.paths, work.may_replace)


def _rename(paths: Paths, may_replace: bool) -> None:
    """One rename; where something lies there already, swap the two and remove the old one last.

    Raises OutputError where something was put there while the conversion ran.
    """
    output = paths.output
    with explained(output):
        try:
            paths.assembly.rename(output)
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            if not may_replace:
                raise OutputError(
                    f"{output}: something was put there while the conversion ran; "
                    "move it away and resume, or run the same command with --overwrite."
                ) from error
            publish.exchange(paths.assembly, output, aside=paths.old)
    publish.sync_folder(output.parent)


def _move_in(paths: Paths, names: list[str], may_replace: bool) -> None:
    """File by file. Before the first the old index goes, after the last the new one comes: no index ever names a
    mixture.

    A loader that opens every *.safetensors without looking at the index, as kt-kernel's does, must wait until this has
    ended."""
    output, target = paths.output, paths.assembly
    (output / manifest.NAME).unlink(missing_ok=True)
    (output / INDEX).unlink(missing_ok=True)
    publish.sync_folder(output)
    if may_replace:
        publish.keep_only(output, {*names, manifest.NAME}, spare={*NOT_OURS, paths.root.name})
    last = [name for name in (manifest.NAME, INDEX) if name == manifest.NAME or name in names]
    folders = {output}
    for name in names:
        if name not in last and (target / name).exists():
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).rename(output / name)
            folders.update(output / parent for parent in Path(name).parents)
    for folder in folders:
        publish.sync_folder(folder)
    for name in last:
        publish.publish(target / name, output / name)
