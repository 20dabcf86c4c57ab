"""Where things lie for one output, and whether they are there (resume.md)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.files import publish
from ktconvert.native_quant import machine

INSIDE = ".ktconvert"
WORK = ".work"  # what the name of a work directory beside an output adds
File = tuple[Path, int, str]  # bytes and sha256, as recorded


class Below:
    """A property of Paths: the path of this name below its root."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: Paths, _: object = None) -> Path:
        return paths.root / self._name


@dataclass(frozen=True)
class Paths:
    """Where things lie for one output. inside: it cannot be renamed to; work lies below it, files move into place."""

    output: Path
    root: Path
    inside: bool

    plan = Below("plan.json")  # what was asked, complete
    journal = Below("journal.jsonl")  # one line per finished unit
    partial = Below("partial")  # files being written; emptied at every start, but for attempts that may count
    attempts = Below("attempts")  # a record of each attempt to make a unit in another process (attempts.py)
    token = Below("token")  # a name of the coordinator's run, by which workers know that they see this very folder
    store = Below("store")  # finished units, named by their fingerprints
    assembly = Below("out")  # where the final directory is put together
    old = Below("old")  # what lay at the output, where two folders cannot be swapped in one step

    @property
    def finals(self) -> tuple[Path, ...]:
        """Folders where a finished unit may lie under its final name."""
        return (self.assembly, self.output) if self.inside else (self.assembly,)


def locate(output: Path, *, adopt: bool = False) -> Paths:
    """Where the work for this output lies or will lie; adopt: the output already holds folders that are kept."""
    output = output.absolute()
    inside = Paths(output, output / INSIDE, inside=True)
    if not output.name:  # nothing lies beside the root folder
        return inside
    outside = Paths(output, output.with_name(output.name + WORK), inside=False)
    for begun in (inside, outside):
        if begun.plan.exists():
            return begun
    if inside.root.is_dir():
        return inside
    if output.is_symlink() and output.is_dir():
        return inside
    if output.is_dir() and (adopt or machine.is_mount_point(output) or not os.access(output.parent, os.W_OK)):
        return inside
    return outside


def output_of(root: Path) -> Path | None:
    """The output of which this folder is the work directory beside it; None where it is none."""
    name = root.name.removesuffix(WORK)
    return root.with_name(name) if name not in ("", root.name) and (root / "plan.json").exists() else None


def has_size(path: Path, nbytes: int) -> bool:
    try:
        return path.stat().st_size == nbytes
    except (OSError, ValueError):  # a damaged record may name what no file can be called
        return False


def has_content(path: Path, nbytes: int, sha256: str) -> bool:
    """Whether a file is there, can be read and holds what was recorded."""
    try:
        return has_size(path, nbytes) and publish.sha256_file(path) == sha256
    except OSError:
        return False
