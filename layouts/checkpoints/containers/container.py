"""The contract of a container of weights: the tensors of a file, and the files of a directory that make up a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktconvert.layouts.tensors import TensorInfo


@dataclass(frozen=True)
class Header:
    """The header of a file of weights.

    entries   its tensors, in file order.
    size, sha256   the file's identity, independent of its path: its bytes, and a hash of names, dtypes, shapes and
                   offsets.
    config    the model's configuration, as in a config.json; {} if the file has none.
    """

    entries: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    size: int
    mtime_ns: int
    sha256: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """The files of a directory that make up a checkpoint.

    names    in their order.
    index    tensor name -> file, from an index; None without one.
    ignored  files of the same container that do not belong to it.
    """

    names: list[str]
    index: dict[str, str] | None = None
    ignored: tuple[str, ...] = ()


def alone(path: Path) -> Selection:
    """A checkpoint of this file alone."""
    return Selection([path.name])


def any_files(root: Path, names: Sequence[str], headers: Sequence[Header]) -> None:
    """Files do not say how many of them there should be."""


@dataclass(frozen=True)
class Container:
    """A kind of weight file: a row of CONTAINERS.

    title         its usual name, for messages.
    read_header   (path, what tensors have as their file): reads a file's header and checks every length against the
                  file, without reading weights. InputError.
    select        (directory, its files) -> the checkpoint that they make up; None if no file is of this kind.
                  InputError.
    of_file       the checkpoint that a named file belongs to. InputError.
    check         (directory, names, headers): InputError where the files say that they are not one checkpoint.
    input_type    its name in --input-type, where it has one.
    experts_only  tensors other than experts are not stored as in a Hugging Face checkpoint, so nothing else is read.
    """

    title: str
    suffix: str
    read_header: Callable[[Path, str], Header]
    select: Callable[[Path, list[str]], Selection | None]
    of_file: Callable[[Path], Selection] = alone
    check: Callable[[Path, Sequence[str], Sequence[Header]], None] = any_files
    input_type: str | None = None
    experts_only: bool = False
