"""Kill a real process before the N-th call that changes a directory, and list those calls in order (killpoint.c)."""

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
from rig.conversion import differing, tree
from rig.forks import Forks

KILLED = -signal.SIGKILL  # the return code of a run that reached its kill point


class Call(NamedTuple):
    """One call that changed something: libc's name less its 64 or v2, and the path (or both paths) it changed."""

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
    """Run `command` and kill it before its n-th change to what begins with `root` (n from 1; 0 lets it finish), such as
    `root/x` and `root.work`; a sync of the directory that holds `root` counts as well. `log` gets a line per call.
    The returncode is KILLED if the kill point was reached.
    """
    environment = {**os.environ, **(env or {}), **shims.preloaded(shim), **settings(root, n, log)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def settings(root: Path, n: int, log: Path | None = None) -> dict[str, str]:
    """What the shim reads, where a process has it already (forks.py); a log that is there goes."""
    found = {"KILLPOINT_ROOT": os.path.realpath(root), "KILLPOINT_N": str(n)}
    if log is not None:
        log.unlink(missing_ok=True)
        found["KILLPOINT_LOG"] = str(log)
    return found


def stopping(shim: Path, root: Path | str, n: int, number: signal.Signals = signal.SIGSTOP) -> dict[str, str]:
    """The environment of a process that sends itself a signal, once, before its n-th change to what begins with `root`."""
    where = {"KILLPOINT_ROOT": os.path.realpath(root), "KILLPOINT_N": str(n), "KILLPOINT_SIGNAL": str(int(number))}
    return {**shims.preloaded(shim), **where}


@contextlib.contextmanager
def held(
    source: Path, seen: Path, *options: str, output: Path | None = None, preload: Sequence[Path] = (), **env: str
) -> Iterator[subprocess.Popen[str]]:
    """A real conversion, stopped (SIGSTOP) while its first layers are in flight; it goes on when SIGCONT is sent. seen:
    the output as this process sees it, where the conversion knows it under another name.
    """
    command = [*conversion.KTCONVERT, "cpu", "-i", str(source), "-o", str(output or seen), *options]
    with tempfile.TemporaryDirectory() as folder:
        shim = build(Path(folder))
        env = {**os.environ, **env, **stopping(shim, f"{seen}.work/partial/experts", 1)}
        env |= shims.preloaded(*preload, shim)
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            conversion.wait_until_stopped(process)
            yield process
        finally:
            process.kill()
            process.communicate()


def calls(log: Path, base: Path | None = None) -> list[Call]:
    """The calls that were made, in order; the one before which the process was killed is not among them. base: the folder
    that their paths are shown from."""
    made = [call for kind, call in _lines(log) if kind == "call"]
    return [Call(name, *(path.removeprefix(f"{base}/") for path in paths if path)) for name, *paths in made]


def killed_before(log: Path) -> Call | None:
    """The call that the kill prevented, or None if the process was not killed."""
    return next((call for kind, call in _lines(log) if kind == "kill"), None)


def count(log: Path) -> int:
    """How many calls were made: the number of kill points of a run that finished."""
    return len(calls(log))


def _lines(log: Path) -> list[tuple[str, Call]]:
    # Threads may write their lines out of order; the number says which call was first.
    lines = log.read_text().splitlines() if log.exists() else []
    fields = sorted((line.split("\t") for line in lines), key=lambda field: int(field[0]))
    return [(kind, Call(re.sub(r"(64(v2)?|(?<=v)2)$", "", name), *paths)) for _, kind, name, *paths in fields]


def check_resumed(
    convert: Callable[[Path], Sequence[str | Path]],
    resume: Callable[[Path], object],
    folder: Path,
    *where: float,
    servers: Forks | None = None,
) -> None:
    """Killed at these fractions of its calls and resumed, a conversion to an output gives what it gives undisturbed.
    servers: those that fork for each run, with the shim in them; the command is ktconvert's arguments then.
    """
    log, whole = folder / "log", folder / "whole"
    shim = build(folder)

    def start(output: Path, n: int) -> subprocess.CompletedProcess[str]:
        if servers is None:
            return run(convert(output), output, n, shim, log)
        return servers.run(convert(output), folder / "said", settings(output, n, log))

    done = start(whole, 0)
    assert done.returncode == 0, done.stderr
    calls = count(log)
    for number, fraction in enumerate(where):
        killed = folder / f"killed{number}"
        assert start(killed, int(fraction * calls)).returncode == KILLED
        resume(killed)
        assert differing(tree(killed), tree(whole)) == []
