"""Worker processes that take turns: one runs while the others are stopped. Uses only the standard library.

A worker reads requests, one JSON object per line, and answers each with one line. Its standard output goes to its log,
so that output of a library is not mistaken for an answer.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from state import Detector

PR_SET_PDEATHSIG = 1
WORKERS = "numa_"  # prefix of the names of kt-kernel's workers
LONG = 0.25  # seconds; a call that lasts longer needs no untimed call before it


class Worker:
    """A worker process. It is stopped between requests, so that its idle threads take no time from others."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=dict(os.environ | dict(env or {})),
            )

    def ask(self, verb: str, **arguments: Any) -> Any:
        """Send a request and return its answer. Raises RuntimeError with the end of the log if it fails."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.send_signal(signal.SIGCONT)
        try:
            print(json.dumps({"do": verb} | arguments), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.name} ended during '{verb}':\n{self.log.read_text(errors='replace')[-2000:]}")
        process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}, {verb}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def serve(verbs: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests until the input ends; `verbs` maps their names to functions. Runs in the worker."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a stopped process would outlive its parent
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": verbs[request.pop("do")](**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def time_calls(call: Callable[[int], None], first: int, count: int, warm: bool, detector: Detector) -> dict[str, Any]:
    """Time calls `first`, `first` + 1, ...; if `warm`, make an untimed call before them.

    walls    seconds of each call
    probes   states of the cores before the first call, between calls and after the last one (state.py)
    cpu      CPU seconds of the whole process per call, without the probes
    workers  CPU seconds per call of kt-kernel's worker threads alone; None if there are none
    """
    if warm:
        call(first + count)
    walls, probes = [], [detector.probe()]
    workers, cpu = worker_seconds(), time.process_time() - detector.cpu()
    for i in range(first, first + count):
        start = time.perf_counter()
        call(i)
        walls.append(time.perf_counter() - start)
        probes.append(detector.probe())
    cpu = time.process_time() - detector.cpu() - cpu
    after = worker_seconds()
    return {
        "walls": walls,
        "probes": probes,
        "cpu": cpu / count,
        "workers": None if workers is None or after is None else (after - workers) / count,
    }


def tasks() -> dict[int, str]:
    """Return the threads of this process: their ids and names."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            names[int(task.name)] = (task / "comm").read_text().strip()
        except OSError:
            continue
    return names


def touch_memory(size: int) -> None:
    """Touch `size` bytes of new memory and free them, right before something is timed that needs as much.

    The host of a virtual machine may reclaim memory that was free for a few seconds. The next process that needs it
    then waits for the host (3 s per GB were measured).
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for position in range(0, size, mmap.PAGESIZE):
            memory[position] = 1


def worker_seconds() -> float | None:
    """Return the CPU seconds of kt-kernel's workers (numa_* threads), without the thread that spins for the caller."""
    ids = [number for number, name in tasks().items() if name.startswith(WORKERS)]
    times = [int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) for number in ids]
    return sum(times) / 1e9 if times else None
