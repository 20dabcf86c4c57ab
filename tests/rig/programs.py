"""Python programs in processes of their own: for what would end, hang or change the process of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rig import shims

Done = subprocess.CompletedProcess[str]


def python(program: str, *arguments: object, preload: Path | None = None, timeout: float = 300, **env: str) -> Done:
    """`python -c program arguments`, with a shim if there is one and these variables besides."""
    environment = {**os.environ, **(shims.preloaded(preload) if preload else {}), **env}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def printed(program: str, *arguments: object, preload: Path | None = None, timeout: float = 300, **env: str) -> str:
    """What a program printed that has to end well."""
    done = python(program, *arguments, preload=preload, timeout=timeout, **env)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout
