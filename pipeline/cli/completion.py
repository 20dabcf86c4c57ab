"""Installation of shell completion, which click provides."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ktconvert.layouts.errors import OutputError, UsageError


@dataclass(frozen=True)
class Shell:
    """Start-up file of a shell, relative to the home directory, and the line that loads the completion of {program}."""

    startup_file: str
    line: str


# The program's whole path, since new shells have no virtual environment; nothing happens after it is uninstalled.
SHELLS: Mapping[str, Shell] = {
    "bash": Shell(".bashrc", '[ -x {program} ] && eval "$(_KTCONVERT_COMPLETE=bash_source {program})"'),
    "zsh": Shell(".zshrc", '[ -x {program} ] && eval "$(_KTCONVERT_COMPLETE=zsh_source {program})"'),
    "fish": Shell(
        ".config/fish/config.fish", "test -x {program}; and _KTCONVERT_COMPLETE=fish_source {program} | source"
    ),
}


def install_completion() -> str:
    """Append the line for the user's shell ($SHELL) to its start-up file, once; return what was done.

    Raises UsageError for other shells, OutputError if the file cannot be written.
    """
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        *others, last = SHELLS
        problem = f"SHELL: {name} has no completion" if name else "SHELL is not set"
        raise UsageError(f"{problem}; set it to {', '.join(others)} or {last}.")
    shell = SHELLS[name]
    program = shutil.which("ktconvert") or f"{sysconfig.get_path('scripts')}/ktconvert"
    line = shell.line.format(program=shlex.quote(program))
    file = Path.home() / shell.startup_file
    if file.exists() and line in file.read_text(errors="surrogateescape").splitlines():
        return f"{file}: already loads the completion of ktconvert"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.write(f"\n{line}\n")
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise OutputError(problem, f"have {name} run this at its start: {line}", path=file) from error
    return f"{file}: loads the completion of ktconvert in new shells"
