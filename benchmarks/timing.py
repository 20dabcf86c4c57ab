"""Runs one command and measures wall and CPU seconds, memory and bytes moved. Small: uses only the standard library."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SAMPLE_EVERY = 0.02  # seconds


@dataclass(frozen=True)
class Run:
    """One finished command.

    wall       seconds, including the final sync() if there is one
    user       CPU seconds in the process
    system     CPU seconds in the kernel on its behalf
    max_rss    bytes, including pages of mapped files. The kernel starts it at the peak of the process that called run()
    anonymous  bytes, the largest sample; 0 without samples
    read       bytes requested with read() (rchar), without pages of mapped files. None if not reported
    dirtied    bytes of the page cache or disk written (write_bytes), without pipes. None if not reported
    output     standard output and error
    """

    wall: float
    user: float
    system: float
    max_rss: int
    anonymous: int
    read: int | None
    dirtied: int | None
    output: str

    @property
    def cpu(self) -> float:
        """CPU seconds, user and system."""
        return self.user + self.system


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    sync: bool = False,
    sample: bool = False,
    ok: Sequence[int] = (0,),
) -> Run:
    """Run a command to its end; `sample` samples its anonymous memory, which slows it a little.

    Raises RuntimeError with its output if its exit code is not in `ok`.
    """
    with os.fdopen(os.memfd_create("output"), "w+b") as log:  # not on disk, whose writes are counted
        streams = [(os.POSIX_SPAWN_DUP2, log.fileno(), 1), (os.POSIX_SPAWN_DUP2, log.fileno(), 2)]
        start = time.perf_counter()
        pid = os.posix_spawnp(command[0], list(command), dict(os.environ | dict(env or {})), file_actions=streams)
        anonymous = _sample_anonymous_memory(pid) if sample else 0
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        counters = _read_io_counters(pid)  # the process has ended, and its numbers still exist
        _, status, usage = os.wait4(pid, 0)
        if sync:
            os.sync()
        wall = time.perf_counter() - start
        log.seek(0)
        output = log.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    if code not in ok:
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{output[-4000:]}")
    return Run(
        wall,
        usage.ru_utime,
        usage.ru_stime,
        usage.ru_maxrss << 10,
        anonymous,
        counters.get("rchar"),
        counters.get("write_bytes"),
        output,
    )


def _sample_anonymous_memory(pid: int) -> int:
    largest = 0
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        with contextlib.suppress(OSError):  # the process may just have ended
            fields = dict(line.split(":", 1) for line in rollup.read_text().splitlines()[1:])
            largest = max(largest, int(fields["Anonymous"].split()[0]) << 10)
        time.sleep(SAMPLE_EVERY)
    return largest


def _read_io_counters(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}


def median(runs: Sequence[Run], figure: str) -> float:
    """Return the median of one figure over some runs."""
    return float(statistics.median(getattr(run, figure) for run in runs))


def figures_of(run: Run) -> dict[str, Any]:
    """Return the figures of a run, for JSON."""
    return {key: value for key, value in asdict(run).items() if key != "output"} | {"cpu": run.cpu}


def in_subprocess(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process, so that this one stays small: a child's peak RSS starts at its parent's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def drop_caches(paths: Sequence[Path]) -> None:
    """Drop these files from the page cache, so that the next reader reads from disk."""
    os.sync()  # only clean pages can be dropped
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_caches(paths: Sequence[Path]) -> None:
    """Read these files once, so that they are in the page cache."""
    buffer = bytearray(4 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def machine() -> dict[str, str]:
    """Return a description of this machine, to go with the figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.machine()),
        "cpus": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": " ".join(f"{n:.1f}" for n in os.getloadavg()),
    }


def filesystem(path: Path) -> str:
    """Return the type of the file system of `path`, as df names it."""
    df = subprocess.run(["df", "--output=fstype", str(path)], capture_output=True, text=True, check=False)
    return df.stdout.split()[-1] if df.returncode == 0 else "unknown"
