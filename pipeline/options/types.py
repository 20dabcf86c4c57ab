"""The types of options' values: what may be written on the command line, and what it becomes."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

MOST = 1 << 62
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Size(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.5
    """Bytes, written as 5GB, 500MiB or a plain number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value).lower())
        amount = float(match[1]) * FACTORS[match[2] or ""] if match else 0.0
        if not 1 <= amount < MOST:
            self.fail(f"{str(value)[:40]!r} is not a size like 5GB or 500MiB", param, ctx)
        return int(amount)


class Number(click.IntRange):
    """A whole number, and none that no machine could count to: C and torch take no longer ones."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = super().convert(value, param, ctx)
        if number >= MOST:
            self.fail(f"{str(value)[:40]!r} is too large", param, ctx)
        return number


class OneNumber(click.Choice):  # type: ignore[type-arg]  # generic only since click 8.2
    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__([str(number) for number in numbers])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return int(super().convert(str(value), param, ctx))


class Real(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class FilePath(click.Path):
    """A file or a directory as a Path, never "" (the current directory). absolute: holds from any directory; directory:
    one that exists.
    """

    def __init__(self, *, absolute: bool = False, directory: bool = False) -> None:
        super().__init__(path_type=Path, exists=directory, file_okay=not directory)
        self._absolute = absolute

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if wrong := _no_path(value):
            self.fail(wrong, param, ctx)
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
        if path.name == "..":  # the work directory of an output stands next to it, and has its name
            path = path.expanduser().resolve()
        return path.expanduser().absolute() if self._absolute else path


class NamedPath(FilePath):
    """PATH or NAME=PATH, as (NAME, PATH); without a name it is the path's own. An existing PATH may have a = in it."""

    def convert(  # type: ignore[override]
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Path]:
        name, equals, rest = str(value).partition("=")
        is_named = equals and (_no_path(value) is not None or not Path(value).exists())
        path = super().convert(rest if is_named else value, param, ctx).expanduser()
        name = name if is_named else path.absolute().name
        if not name:
            self.fail(f"{value!r} has no name; give NAME=PATH", param, ctx)
        return name, path


class OutputPath(FilePath):
    """A file or a directory that is written."""


class PathOrHubId(click.types.StringParamType):
    """A file, a directory or a hub id, as text; never "". absolute: an existing path holds from any directory."""

    def __init__(self, *, absolute: bool = False) -> None:
        self._absolute = absolute

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if wrong := _no_path(value):
            self.fail(wrong, param, ctx)
        text = super().convert(value, param, ctx)
        path = Path(text).expanduser()
        return str(path.absolute()) if self._absolute and path.exists() else text


def _no_path(value: Any) -> str | None:
    """Why this can be no path; None where it can."""
    if not os.fspath(value):
        return "is empty; give a path"
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        return f"{os.fspath(value)!r} begins with a user who has no home directory here"
    try:
        path.resolve()
        path.exists()
    except RuntimeError:
        return f"{os.fspath(value)!r} is a symbolic link that leads to itself"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"{os.fspath(value)[:40]!r}... is too long for a path"
    return None


class Text(click.types.StringParamType):
    """Text: Python passes bytes that are none on as characters that nothing can write or encode."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("is not UTF-8 text", param, ctx)
        return text


class OneOrMore(click.Choice):  # type: ignore[type-arg]  # generic only since click 8.2
    """Words of a choice in any case, with commas between them: each makes an output of its own."""

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__(tuple(words), case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        words: list[str] = []
        for word in str(value).split(","):
            words.append(super().convert(word.strip(), param, ctx))
            if words[-1] in words[:-1]:
                self.fail(f"{words[-1]} is there twice", param, ctx)
        return ",".join(words)


class Spelled(Text):
    """Text, of which a word at the beginning (words: a regular expression) may be in capitals, as choices may."""

    def __init__(self, words: str) -> None:
        self._words = re.compile(f"({words})(?=:|$)", re.IGNORECASE)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        found = self._words.match(text)
        return text if found is None else found[0].lower() + text[found.end() :]
