"""The program `ktconvert`. It imports the command line late, so that it can report a Ctrl-C during these imports."""

from __future__ import annotations

import sys


def main() -> None:
    """Import and run the command line."""
    try:
        from ktconvert.pipeline import cli

        cli.main()
    except KeyboardInterrupt:
        print("\nktconvert: interrupted.", file=sys.stderr)
        sys.exit(130)
