"""`ktconvert` with one row of a test's own in one of its tables: the test's file is that program, and is forked for each
run."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rig import forks, killpoint


class Toy(contextlib.AbstractContextManager[Any]):
    """A context manager. command: of a process of its own."""

    def __init__(self, file: str, folder: Path) -> None:
        self.command = (sys.executable, file)
        self.folder = folder
        self._forks = forks.Forks([], 1, program=(file, "serve"))

    def __exit__(self, *_: object) -> None:
        self._forks.__exit__()

    def __call__(self, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = self._forks.run([*map(str, words)], self.folder / "log", printed=self.folder / "printed")
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    def check_resumed(self, folder: Path, *words: object) -> None:
        """A conversion with these words: killed twice and resumed to the same bytes."""
        convert = (*self.command, *map(str, words), "-o")
        killpoint.check_resumed(lambda out: [*convert, out], lambda out: self("resume", out), folder, 1 / 3, 1 / 2)


def main(add: Callable[[], object]) -> None:
    add()
    if sys.argv[1:] == ["serve"]:
        forks.serve([])
    else:
        from ktconvert.pipeline.cli import main as ktconvert

        ktconvert()
