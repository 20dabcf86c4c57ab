"""Terminal output: escaped control characters, as names in a file must not control the terminal, and short paths."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

# All characters that a terminal acts on: C0 (except tab and newline), DEL, C1, line separators, and those that change
# the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# tqdm, in the downloads of huggingface_hub, rewrites its line and moves up to earlier lines.
REWRITE_LINE = re.compile("\r|(?:\x1b\\[A)+$")

STDOUT = "standard output"
STDERR = "standard error"
# Name of a stream, or number of one that was closed -> its name in messages
NAMES = {"<stdout>": STDOUT, 1: STDOUT, "<stderr>": STDERR, 2: STDERR}


def escape(text: str) -> str:
    """Return a text whose control characters are replaced by Python's escape sequences."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shorten_paths(text: str) -> str:
    """Return a text for people, whose paths below the current directory begin there."""
    try:
        here = str(Path.cwd())
    except OSError:  # it was removed
        return text
    if here == "/" or here not in text:
        return text
    path = rf"(?<![\w./-]){re.escape(here)}"
    text = re.sub(rf"{path}/(?=[\w.-]+\[)", "./", text)  # a folder with an extra; pip looks up names without slashes
    return re.sub(rf"{path}(?![\w./-])", ".", re.sub(rf"{path}/(?=[\w.])", "", text))


@contextlib.contextmanager
def name_in_errors(stream: TextIO) -> Iterator[None]:
    """Name a standard stream in the OSError of a write to it."""
    try:
        yield
    except OSError as error:
        error.filename = NAMES.get(stream.name)
        raise


class EscapingStream(io.TextIOWrapper):
    """A text stream on the file of a given stream; it escapes everything that is written to it.

    edit  is called with each text before it is escaped
    """

    def __init__(self, stream: io.TextIOWrapper, edit: Callable[[str], str] = str) -> None:
        encoding = "utf-8" if stream.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968") else stream.encoding
        settings: dict[str, Any] = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        stream.flush()
        super().__init__(stream.buffer, encoding, "backslashreplace", **settings)
        self._edit = edit
        self.raw_stream = stream  # this reference is needed, because a deleted stream closes the file

    def write(self, text: str) -> int:
        rewrite = REWRITE_LINE.match(text) if self.isatty() else None
        start = rewrite.end() if rewrite is not None else 0
        with name_in_errors(self):
            super().write(text[:start] + escape(self._edit(text[start:])))
        return len(text)

    def flush(self) -> None:
        with name_in_errors(self):
            super().flush()


def install() -> None:
    """Escape everything that this process prints, whichever library prints it, and shorten the paths of messages."""
    for name, edit in (("stdout", str), ("stderr", shorten_paths)):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, EscapingStream):
            stream.reconfigure(errors="backslashreplace")  # names of files and tensors may be invalid text
            setattr(sys, name, EscapingStream(stream, edit))


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream below an EscapingStream.

    It is for styled text whose parts were escaped before, and for text that a program reads.
    """
    return getattr(stream, "raw_stream", stream)
