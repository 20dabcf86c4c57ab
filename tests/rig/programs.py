"""Python programs in their own processes, for tests that would end, block or change the test process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rig import shims

Done = subprocess.CompletedProcess[str]


def run_python(program: str, *arguments: object, preload: Path | None = None, timeout: float = 300, **env: str) -> Done:
    """Run `python -c program arguments` with these environment variables, and with a shim if one is given."""
    environment = {**os.environ, **(shims.preload_environment(preload) if preload else {}), **env}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def python_output(
    program: str, *arguments: object, preload: Path | None = None, timeout: float = 300, **env: str
) -> str:
    """Run a program, require that it succeeds, and return its output."""
    result = run_python(program, *arguments, preload=preload, timeout=timeout, **env)
    assert result.returncode == 0, f"{result.returncode}: {result.stdout}{result.stderr}"
    return result.stdout
