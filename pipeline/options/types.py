"""Click types of options: which texts they accept on the command line, and the values that they return.

The attribute `metavar` of a type stands for the value in --help.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

MAX_INTEGER = 1 << 62
MIN_PLAIN_SIZE = 1024  # least size without a unit: a smaller one lacks a unit by mistake
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Size(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.5
    """Bytes, written as 5GB, 500MiB or a plain number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value).lower())
        amount = float(match[1]) * FACTORS[match[2] or ""] if match else 0.0
        if match and not match[2] and 1 <= amount < MIN_PLAIN_SIZE:
            self.fail(f"{match[1]} without a unit means bytes; give a unit, such as {match[1]}GB", param, ctx)
        if match and not amount:
            self.fail(f"must be greater than 0, not {value}", param, ctx)
        if not 1 <= amount < MAX_INTEGER:
            self.fail(f"{str(value)[:40]!r} is not a size like 5GB or 500MiB", param, ctx)
        return int(amount)


class SizeList(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.5
    """Sizes, separated by commas, such as 24GB,24GB; 0 or none is an empty list."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        text = str(value).strip().lower()
        if text in ("0", "none"):
            return ()
        return tuple(Size().convert(part, param, ctx) for part in text.split(","))


class Integer(click.IntRange):
    """An integer below 2**62: C and torch take no larger ones."""

    name = "integer"
    metavar = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = click.INT.convert(value, param, ctx)
        if number >= MAX_INTEGER:
            self.fail(f"{str(value)[:40]!r} is too large", param, ctx)
        if problem := _range_problem(number, self.min or 0, self.max):
            self.fail(problem, param, ctx)
        return number


def _range_problem(number: float, low: float, high: float | None) -> str | None:
    """Return why a number is out of range; None if it is not."""
    if low <= number <= (math.inf if high is None else high):
        return None
    limits = f"at least {low}" if high is None else f"from {low} to {high}"
    return f"must be {limits}, not {number}"


class Flag(click.types.BoolParamType):
    """True or false, for which click's own message lists every spelling."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        flag = self.str_to_bool(value)
        if flag is None:
            self.fail(f"{value!r} is not a flag; give 1 or 0", param, ctx)
        return flag


class IntegerChoice(click.Choice):  # type: ignore[type-arg]  # generic only since click 8.2
    """One of some integers."""

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__([str(number) for number in numbers])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return int(super().convert(str(value), param, ctx))


class FiniteFloat(click.FloatRange):
    """A number that is neither infinite nor NaN."""

    metavar = "X"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        if self.min_open and not (self.min or 0) < number <= (math.inf if self.max is None else self.max):
            most = "" if self.max is None else f" and at most {self.max}"
            self.fail(f"must be greater than {self.min}{most}, not {value}", param, ctx)
        if problem := _range_problem(number, self.min or 0, self.max):
            self.fail(problem, param, ctx)
        return number


class FilePath(click.Path):
    """A file or a directory as a Path, never empty text.

    absolute   return an absolute path
    directory  refuse files
    """

    def __init__(self, *, absolute: bool = False, directory: bool = False) -> None:
        super().__init__(path_type=Path, readable=False)  # who reads it explains why not
        self._absolute, self._directory = absolute, directory

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if problem := _path_problem(value):
            self.fail(problem, param, ctx)
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
        if self._directory and path.is_file():
            self.fail(f"{path} is a file; give a folder", param, ctx)
        if path.name == "..":  # the work directory of an output is next to it and is named after it
            path = path.expanduser().resolve()
        return _make_absolute(path) if self._absolute else path


class NamedPath(FilePath):
    """PATH or NAME=PATH, as (NAME, PATH). The default name is the path's own; an existing PATH may contain a =."""

    def convert(  # type: ignore[override]
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Path]:
        name, equals, path_text = str(value).partition("=")
        is_named = equals and (_path_problem(value) is not None or not Path(value).exists())
        path = super().convert(path_text if is_named else value, param, ctx).expanduser()
        name = name if is_named else path.absolute().name
        if not name:
            self.fail(f"{value!r} has no name; give NAME=PATH", param, ctx)
        return name, path


class OutputPath(FilePath):
    """A file or a directory that the command writes, or an output that may be unfinished: it need not exist."""


class PathOrHubId(click.types.StringParamType):
    """A file, a directory or a hub id, as text; never empty.

    absolute  whether to make an existing path absolute
    """

    metavar = "PATH"

    def __init__(self, *, absolute: bool = False) -> None:
        self._absolute = absolute

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if problem := _path_problem(value):
            self.fail(problem, param, ctx)
        text = super().convert(value, param, ctx)
        return str(_make_absolute(Path(text))) if self._absolute and Path(text).expanduser().exists() else text

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        return FilePath().shell_complete(ctx, param, incomplete)


def _make_absolute(path: Path) -> Path:
    """Return an absolute path without `..`, unless these follow a symbolic link that leads elsewhere."""
    path = path.expanduser().absolute()
    normal = Path(os.path.normpath(path))
    return normal if os.path.realpath(normal) == os.path.realpath(path) else path


def _path_problem(value: Any) -> str | None:
    """Return why this cannot be a path; None if it can."""
    if not os.fspath(value):
        return "is empty; give a path"
    if "\0" in os.fspath(value):
        return f"{os.fspath(value)!r} has a NUL character; leave it out"
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        return f"{os.fspath(value)!r} is in the home directory of an unknown user"
    try:
        path.resolve()
        path.exists()
    except RuntimeError:
        return f"{os.fspath(value)!r} is a loop of symbolic links"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"{os.fspath(value)[:40]!r}... is too long for a path"
    return None


class Text(click.types.StringParamType):
    """UTF-8 text. Python passes other bytes on as surrogates, which nothing can encode."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("is not UTF-8 text", param, ctx)
        return text


class WordChoice(click.Choice):  # type: ignore[type-arg]  # generic only since click 8.2
    """One of some words in any case; help and messages show them as they are written here, not in lower case."""

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__(tuple(words), case_sensitive=False)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self.choices)}]"

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{value!r} is not one of {', '.join(map(repr, self.choices))}."


class ChoiceList(click.Choice):  # type: ignore[type-arg]  # generic only since click 8.2
    """Words of a choice in any case, separated by commas. Each word makes an output of its own.

    Words are shown with underscores, as in the docs; dashes are accepted, too.

    refused   words that the command refuses with a reason; --help and completion do not offer them
    synonyms  other words in lower case -> the word that they stand for; --help and completion do not offer them either
    """

    def __init__(self, words: Iterable[str], refused: Iterable[str], synonyms: Mapping[str, str]) -> None:
        super().__init__(tuple(words), case_sensitive=False)
        self._refused = frozenset(refused)
        self._synonyms = synonyms

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Complete the last word of a list; words before it are not offered again."""
        from click.shell_completion import CompletionItem

        before, comma, word = incomplete.rpartition(",")
        items = [
            item for item in super().shell_complete(ctx, param, word) if item.value not in before.lower().split(",")
        ]
        return [CompletionItem(f"{before}{comma}{item.value}") for item in items]

    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:
        return str(choice).casefold().replace("-", "_")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        words: list[str] = []
        for word in str(value).split(","):
            word = word.strip().lower()
            word = self._synonyms.get(word, word)
            words.append(word if word in self._refused else super().convert(word, param, ctx))
            if words[-1] in words[:-1]:
                self.fail(f"{words[-1]} is given twice", param, ctx)
        return ",".join(words)


class KeywordText(Text):
    """Text whose first word, if it matches the regular expression `words`, may be in any case, as in choices."""

    def __init__(self, words: str) -> None:
        self._words = re.compile(f"({words})(?=:|$)", re.IGNORECASE)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        match = self._words.match(text)
        return text if match is None else match[0].lower() + text[match.end() :]


class TokenCountList(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.5
    """Numbers of tokens, such as 1,4,16: each at least 1, in the user's order, without duplicates."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            counts = tuple(dict.fromkeys(int(text) for text in str(value).split(",")))
        except ValueError:
            counts = ()
        if not counts or not 1 <= min(counts) <= max(counts) <= 1 << 20:
            self.fail(f"{value!r} is not a list of numbers of tokens like 1,16,256", param, ctx)
        return counts
