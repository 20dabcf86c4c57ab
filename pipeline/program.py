"""The program `ktconvert`. It imports the command line late, so that it can report a Ctrl-C during these imports."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Import and run the command line."""
    try:
        signal.signal(signal.SIGINT, _end)  # until the command line handles signals itself
        from ktconvert.pipeline import cli

        cli.main()
    except KeyboardInterrupt:
        print("\nktconvert: interrupted; run the same command again.", file=sys.stderr)
        sys.exit(130)


def _end(_number: int, _frame: FrameType | None) -> None:
    """End the process: code that is being imported may ignore an exception, or raise its own."""
    os.write(2, b"\nktconvert: interrupted; run the same command again.\n")
    os._exit(130)
