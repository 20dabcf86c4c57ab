"""What --overwrite removes: files that a manifest of ours lists, and with --delete-others all others."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.errors import OutputError, VerificationError
from ktconvert.layouts.files import manifest
from ktconvert.layouts.statistics import folder as statistics
from ktconvert.pipeline.ui.text import size

NAMED = 5  # files that a message names


@dataclass(frozen=True)
class Replaced:
    """The files in a folder that is to be replaced.

    listed  number and bytes of those that a manifest lists
    others  names and bytes of those that none lists
    """

    folder: Path
    listed: tuple[int, int]
    others: dict[str, int]

    def __str__(self) -> str:
        count, nbytes = self.listed
        ours = [f"{_files(count)} ({size(nbytes)}) of the output that lies there"] if count else []
        return f"{self.folder}: {', and '.join([*ours, *([self.others_in_words()] if self.others else [])])}"

    def others_in_words(self) -> str:
        """The others in words."""
        names = [*self.others][:NAMED]
        more = f", and {len(self.others) - len(names)} more" if len(self.others) > len(names) else ""
        total = size(sum(self.others.values()))
        return f"{_files(len(self.others))} ({total}) that no manifest lists: {', '.join(names)}{more}"

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
    known = _listed(folder)
    files = dict(_walk(folder, kept))
    ours = [nbytes for name, nbytes in files.items() if name in known]
    return Replaced(folder, (len(ours), sum(ours)), {name: n for name, n in files.items() if name not in known})


def require_ours(replaced: Replaced, *, delete_others: bool) -> None:
    """Raise OutputError for files that no manifest lists, unless they may be deleted."""
    if replaced.others and not delete_others:
        raise OutputError(
            f"{replaced.folder}: --overwrite would delete {replaced.others_in_words()}; move them away, or add "
            "--delete-others."
        )


def _listed(folder: Path) -> set[str]:
    """The names of the files that a manifest lists, and its own; none of a damaged one."""
    names: set[str] = set()
    try:
        if (listing := manifest.read(folder)) is not None:
            names |= {manifest.NAME, *(file.name for file in listing.files)}
    except VerificationError:
        pass
    return names | statistics.listed(folder)


def _walk(folder: Path, kept: Collection[str]) -> Iterator[tuple[str, int]]:
    """The name and the size of each file below a folder."""

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


def _files(count: int) -> str:
    return f"{count} file{'s' if count != 1 else ''}"
