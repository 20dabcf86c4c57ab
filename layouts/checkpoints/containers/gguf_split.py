"""Which GGUF files make up a checkpoint: one file, or all files of a split, as llama.cpp's gguf-split names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ktconvert.layouts.checkpoints.containers.container import Header, Selection
from ktconvert.layouts.errors import REMEDY, InputError, damaged_file

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
COUNT = "split.count"
# Beside a model's weights: a vision or audio encoder, and statistics for quantizing.
OTHER = re.compile(r"mmproj|imatrix", re.I)


def select(root: Path, files: list[str]) -> Selection | None:
    """The GGUF files of a directory that are a checkpoint. InputError where one is missing, or for several models."""
    present = [f for f in files if f.endswith(".gguf")]
    if not present:
        return None
    main = [f for f in present if not OTHER.search(f)] or present
    first = {parts[0]: parts for parts in map(parts_of, main)}
    if len(first) > 1:
        raise InputError(f"{root}: holds several GGUF models ({', '.join(first)}); name one of these files")
    (parts,) = first.values()
    _complete(root, parts)
    return Selection(parts, None, tuple(f for f in present if f not in parts))


def of_file(path: Path) -> Selection:
    """The file with the others of its split, if it is of one. InputError where one is missing."""
    parts = parts_of(path.name)
    _complete(path.parent, parts)
    return Selection(parts)


def parts_of(name: str) -> list[str]:
    """All names of the split that a file is of, in their order."""
    part = PART.fullmatch(name)
    if part is None or not 1 <= int(part[2]) <= int(part[3]):
        return [name]
    return [f"{part[1]}-{number:05d}-of-{part[3]}.gguf" for number in range(1, int(part[3]) + 1)]


def _complete(root: Path, parts: Sequence[str]) -> None:
    for name in parts:
        if len(parts) > 1 and not (root / name).exists():
            raise damaged_file(root / name, f"missing, one of {len(parts)} files of a split")


def check(root: Path, names: Sequence[str], headers: Sequence[Header]) -> None:
    """Raises InputError unless the files say of themselves that they are the parts of one split, in this order."""
    tensors = sum(len(header.entries) for header in headers)
    for number, (name, header) in enumerate(zip(names, headers, strict=True)):
        for key, value in ((COUNT, len(names)), ("split.no", number), ("split.tensors.count", tensors)):
            recorded = header.metadata.get(key, "missing" if key == COUNT and len(names) > 1 else str(value))
            merged = key == COUNT and recorded == "0" and len(names) == 1  # what gguf-split --merge leaves
            if recorded != str(value) and not merged:
                raise InputError(
                    f"{root / name}: {key} is {recorded}, but by the files' names and tensors it should be {value}; "
                    f"files of a split must keep their names and lie in one directory, else {REMEDY}"
                )
