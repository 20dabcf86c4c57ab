"""`ktconvert` with an extra row in one of its tables.

A test file that uses it is the program, and is forked for each run.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rig import forks, killpoint


class Toy(contextlib.AbstractContextManager[Any]):
    """The program of a test file, as a context manager. command: starts it in a process of its own."""

    def __init__(self, file: str, folder: Path) -> None:
        self.command = (sys.executable, file)
        self.folder = folder
        self._forks = forks.Forks([], program=(file, "serve"))

    def __exit__(self, *_: object) -> None:
        self._forks.__exit__()

    def __call__(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        result = self._forks.run([*map(str, arguments)], self.folder / "log", printed=self.folder / "printed")
        assert result.returncode == code, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr
        return result

    def check_resume(self, folder: Path, *arguments: object) -> None:
        """Assert that a conversion that is killed twice and resumed gives the same bytes."""
        convert = (*self.command, *map(str, arguments), "-o")
        killpoint.check_resume(lambda out: [*convert, out], lambda out: self("resume", out), folder, 1 / 3, 1 / 2)


def main(add: Callable[[], object]) -> None:
    """Add the row, then run the server or the command line."""
    add()
    if sys.argv[1:2] == ["serve"]:
        forks.serve(int(sys.argv[2]), [])
    else:
        from ktconvert.pipeline.cli import main as ktconvert

        ktconvert()
