"""Regular expressions from files, limited in size and time; errors name the file.

`re` cannot be interrupted: a pattern of 15 characters can run for years on one tensor name. The package `regex` takes
the same patterns and has time limits.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ktconvert.layouts.errors import InputError

MAX_PATTERN = 10_000  # characters of a pattern
LARGEST = 100_000  # elements of a compiled pattern: `regex` unrolls repeat counts, at 4 µs and 300 bytes per element
ONE_MATCH = 1.0  # seconds
PER_MATCH, SLACK = 100e-6, 3.0  # seconds for all patterns of a file together: per match, and in addition

# Patterns as in most lists: literals, numbers between dots, and up to three ".*". A match of a short name takes at most
# length^3 steps, so it needs no time limit, which costs up to 10 times as much as the match.
SIMPLE = re.compile(
    r"\^?(?:\(\.\*\\\.\)\?)?(?:[\w-]|\\\.(?:\\d\+(?=\\\.|\(|\$|\Z))?|\.\*)*(?:\(\\\.\.\*\)\?)?\$?", re.ASCII
)
LONGEST_SIMPLE = 200  # characters of the name


class Pattern:
    """A regular expression from a file. Matches that take too long, alone or together, raise InputError."""

    def __init__(self, text: str, path: Path | str, timer: _Timer) -> None:
        self.text, self._path, self._timer = text, path, timer
        self._compiled = _compile(text, path)
        self._is_simple = SIMPLE.fullmatch(text) is not None and text.count(".*") <= 3

    def match(self, name: str) -> Any:
        return self._run(self._compiled.match, name, self._is_simple)

    def fullmatch(self, name: str) -> Any:
        return self._run(self._compiled.fullmatch, name, self._is_simple)

    def search(self, name: str) -> Any:
        return self._run(self._compiled.search, name)

    def _run(self, function: Callable[..., Any], name: str, is_simple: bool = False) -> Any:
        start = time.perf_counter()
        try:
            found = function(name) if is_simple and len(name) <= LONGEST_SIMPLE else function(name, timeout=ONE_MATCH)
        except (TimeoutError, MemoryError):
            raise self._slow(name) from None
        if self._timer.add(min(time.perf_counter() - start, ONE_MATCH)):
            raise self._slow(name)
        return found

    def _slow(self, name: str) -> InputError:
        problem = f"the regular expression {_short(self.text)} takes too long for names like {_short(name)}"
        return InputError(problem, "write it without nested repeats", path=self._path)


class _Timer:
    """Time that the patterns of one file have used beyond PER_MATCH for each match."""

    def __init__(self) -> None:
        self._spent = 0.0

    def add(self, seconds: float) -> bool:
        """Add the time of a match and return whether the file's patterns have taken too long."""
        self._spent += seconds - PER_MATCH
        return self._spent > SLACK


def compile(text: str, path: Path | str) -> Pattern:
    """Compile a regular expression from this file. Raises InputError if it is invalid or too large."""
    return compile_all([text], path)[0]


def compile_all(texts: Iterable[str], path: Path | str) -> list[Pattern]:
    """Compile the regular expressions of one file; their matches share a time limit."""
    timer = _Timer()
    return [Pattern(text, path, timer) for text in texts]


def _compile(text: str, path: Path | str) -> Any:
    import regex

    unrolled = math.prod(max(1.0, float(count)) for count in re.findall(r"\{\s*([0-9]+)", text))
    if len(text) > MAX_PATTERN or len(text) * unrolled > LARGEST:
        raise InputError(f"the regular expression {_short(text)} is too large", "shorten it", path=path)
    try:
        return regex.compile(text, regex.VERSION0, cache_pattern=False)
    except Exception as error:  # regex.error, RecursionError, ValueError ...: parsing strange text
        reason = error if isinstance(error, regex.error) else type(error).__name__
        problem = f"{_short(text)} is not a regular expression ({reason})"
        raise InputError(problem, "correct it", path=path) from None


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
