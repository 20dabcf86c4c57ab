"""Sizes, times, numbers and tables as text for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE = 1000  # characters
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: float) -> str:
    """Return a number of bytes as text: 1.5 GiB."""
    amount, unit = _choose_unit(nbytes)
    return f"{amount:.0f} B" if unit == UNITS[0] else f"{amount:.1f} {unit}"


def round_up_size(nbytes: int) -> str:
    """Return a number of bytes, rounded up, as options accept it: 1.6GiB."""
    amount, unit = _choose_unit(nbytes)
    return f"{math.ceil(amount * 10) / 10:g}{unit}"


def _choose_unit(nbytes: float) -> tuple[float, str]:
    step = 0
    while abs(nbytes) >= 1024 and step < len(UNITS) - 1:
        nbytes /= 1024
        step += 1
    return nbytes, UNITS[step]


def tokens(count: float) -> str:
    """Return a number of tokens as text: 512 tokens."""
    return plural(round(count), "token")


def duration(seconds: float) -> str:
    """Return a duration as text: 3 min 05 s."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.1f} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 file, 2 files."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


def join_values(value: Any) -> str:
    """Return a list's values with commas between them, and any other value as it is."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def format_table(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Return the lines of a table.

    Each column is as wide as its widest cell, except for a row's last cell, which may be longer than its column. Rows
    may have different lengths. A table with a heading has it as its first row.
    """
    widths = [max((len(row[i]) for row in rows if i < len(row) - 1), default=0) for i in range(max(map(len, rows)))]
    return [indent + "  ".join(f"{cell:<{widths[i]}}" for i, cell in enumerate(row)).rstrip() for row in rows]


def summarize(problems: Sequence[str]) -> str:
    """Return the first problem and the number of the others; "" if there is no problem."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] + more if problems else ""


def first_line(error: BaseException) -> str:
    """Return the first line of a library's exception, without its full stop.

    If that line ends with a colon, the next line follows it. A KeyError has only the name that was not found.
    """
    if isinstance(error, KeyError):
        return f"{error} is missing or unknown"
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".")


def one_line(text: str) -> str:
    """Return a message as one line of limited length: messages quote text from files."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return plain if len(plain) <= MAX_MESSAGE else f"{plain[: MAX_MESSAGE // 2]} ... {plain[-MAX_MESSAGE // 2 :]}"
