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


@dataclass(frozen=True)
class Paths:
    """Where things lie for one output. inside: it cannot be renamed to; work lies below it, files move into place."""

    output: Path
    root: Path
    inside: bool

    @property
    def plan(self) -> Path:
        """What was asked, complete."""
        return self.root / "plan.json"

    @property
    def journal(self) -> Path:
        """One line per finished unit."""
        return self.root / "journal.jsonl"

    @property
    def partial(self) -> Path:
        """Files being written; emptied at every start, but for attempts that are finished or may live."""
        return self.root / "partial"

    @property
    def attempts(self) -> Path:
        """A record of each attempt to make a unit in another process (attempts.py)."""
        return self.root / "attempts"

    @property
    def token(self) -> Path:
        """A name of the coordinator's run, by which workers know that they see this very folder."""
        return self.root / "token"

    @property
    def store(self) -> Path:
        """Finished units, named by their fingerprints."""
        return self.root / "store"

    @property
    def assembly(self) -> Path:
        """Where the final directory is put together."""
        return self.root / "out"

    @property
    def old(self) -> Path:
        """What lay at the output, where two folders cannot be swapped in one step."""
        return self.root / "old"

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
    """Whether a file is there and has this size."""
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
