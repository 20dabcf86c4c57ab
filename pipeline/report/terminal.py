"""Output to terminals with control characters escaped: a terminal would obey what names in files hold."""

from __future__ import annotations

import io
import re
import sys
from typing import Any, TextIO

# All that a terminal obeys: C0 but tab and newline, DEL, C1, separators of lines, and what turns the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# How tqdm, in the downloads of huggingface_hub, begins its line again and goes up to an earlier one.
LINE_AGAIN = re.compile("\r|(?:\x1b\\[A)+$")


def escape(text: str) -> str:
    """Return a text in which escape codes stand for control characters, as in Python's literals."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class EscapingStream(io.TextIOWrapper):
    """A text stream on the file of another one, that escapes all that is written to it."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        encoding = "utf-8" if stream.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968") else stream.encoding
        how: dict[str, Any] = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        stream.flush()
        super().__init__(stream.buffer, encoding, "backslashreplace", **how)
        self.unescaped = stream  # kept also since it closes the file when it goes

    def write(self, text: str) -> int:
        begin = LINE_AGAIN.match(text) if self.isatty() else None
        start = begin.end() if begin is not None else 0
        super().write(text[:start] + escape(text[start:]))
        return len(text)


def install() -> None:
    """Escape everything that this process prints, whichever library prints it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, EscapingStream):
            stream.reconfigure(errors="backslashreplace")  # names of files and tensors need not be text
            setattr(sys, name, EscapingStream(stream))


def unescaped(stream: TextIO) -> TextIO:
    """Return the stream below, for styled text, whose parts are escaped before, and for text that a program reads."""
    return getattr(stream, "unescaped", stream)
