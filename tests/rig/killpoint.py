"""Kills of real processes before the N-th call that changes a directory, and the list of those calls (killpoint.c)."""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rig import conversion, shims
from rig.conversion import find_differences, tree
from rig.forks import Forks

KILLED = -signal.SIGKILL  # the return code of a run that reached its kill point


class Call(NamedTuple):
    """A call that changed a file: its name in libc without 64 or v2, and the one or two paths that it changed."""

    name: str
    path: str
    second: str | None = None


def build(folder: Path) -> Path:
    """Compile the shim into `folder` and return the path of the shared library."""
    shim = folder / "killpoint.so"
    source = Path(__file__).with_suffix(".c")
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", shim, source, "-ldl"], check=True)
    return shim


def run(
    command: Sequence[str | Path],
    root: Path,
    n: int,
    shim: Path,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and kill it before its n-th change to a path that begins with `root`; its code is then KILLED.

    n counts from 1; 0 lets the command finish. `root/x` and `root.work` count, and so does a sync of the directory that
    contains `root`. `log` gets a line per call.
    """
    environment = {**os.environ, **(env or {}), **shims.preload_environment(shim), **shim_settings(root, n, log)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def shim_settings(root: Path, n: int, log: Path | None = None) -> dict[str, str]:
    """Return the environment that the shim reads, for processes that have loaded it (forks.py); remove an old log."""
    env = {"KILLPOINT_ROOT": os.path.realpath(root), "KILLPOINT_N": str(n)}
    if log is not None:
        log.unlink(missing_ok=True)
        env["KILLPOINT_LOG"] = str(log)
    return env


def signal_environment(shim: Path, root: Path | str, n: int, number: signal.Signals = signal.SIGSTOP) -> dict[str, str]:
    """Return the environment of a process that sends itself a signal before its n-th change to a path below `root`."""
    where = {"KILLPOINT_ROOT": os.path.realpath(root), "KILLPOINT_N": str(n), "KILLPOINT_SIGNAL": str(int(number))}
    return {**shims.preload_environment(shim), **where}


@contextlib.contextmanager
def hold_conversion(
    source: Path, visible: Path, *options: str, output: Path | None = None, preload: Sequence[Path] = (), **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a real conversion that stops (SIGSTOP) while it converts its first layers; SIGCONT resumes it.

    visible: path of the output in this process, if the conversion knows it by a different name (`output`).
    """
    command = [*conversion.KTCONVERT, "cpu", "-i", str(source), "-o", str(output or visible), *options]
    with tempfile.TemporaryDirectory() as folder:
        shim = build(Path(folder))
        env = {**os.environ, **env, **signal_environment(shim, f"{visible}.work/partial/experts", 1)}
        env |= shims.preload_environment(*preload, shim)
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            conversion.wait_until_stopped(process)
            yield process
        finally:
            process.kill()
            process.communicate()


def read_calls(log: Path, base: Path | None = None) -> list[Call]:
    """Return the calls that were made, in order, without the call that the kill prevented.

    base: folder to which their paths are relative.
    """
    calls = [call for kind, call in _lines(log) if kind == "call"]
    return [Call(name, *(path.removeprefix(f"{base}/") for path in paths if path)) for name, *paths in calls]


def find_prevented_call(log: Path) -> Call | None:
    """Return the call that the kill prevented, or None if the process was not killed."""
    return next((call for kind, call in _lines(log) if kind == "kill"), None)


def count_calls(log: Path) -> int:
    """Count the calls that were made: the number of kill points of a run that finished."""
    return len(read_calls(log))


def _lines(log: Path) -> list[tuple[str, Call]]:
    # Threads may write their lines out of order; the number is the order of the calls.
    lines = log.read_text().splitlines() if log.exists() else []
    fields = sorted((line.split("\t") for line in lines), key=lambda field: int(field[0]))
    return [(kind, Call(re.sub(r"(64(v2)?|(?<=v)2)$", "", name), *paths)) for _, kind, name, *paths in fields]


def check_resume(
    convert: Callable[[Path], Sequence[str | Path]],
    resume: Callable[[Path], object],
    folder: Path,
    *fractions: float,
    servers: Forks | None = None,
) -> None:
    """Assert that a conversion gives the same output if it is killed at these fractions of its calls and resumed.

    servers: servers with the shim, to fork each run; `convert` then returns only the arguments of ktconvert.
    """
    log, undisturbed = folder / "log", folder / "whole"
    shim = build(folder)

    def start(output: Path, n: int) -> subprocess.CompletedProcess[str]:
        if servers is None:
            return run(convert(output), output, n, shim, log)
        return servers.run(convert(output), folder / "said", shim_settings(output, n, log))

    result = start(undisturbed, 0)
    assert result.returncode == 0, result.stderr
    calls = count_calls(log)
    for number, fraction in enumerate(fractions):
        killed = folder / f"killed{number}"
        assert start(killed, int(fraction * calls)).returncode == KILLED
        resume(killed)
        assert find_differences(tree(killed), tree(undisturbed)) == []
