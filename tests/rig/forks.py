"""The real command line many times over, without the half second of starting Python: it is loaded once and forked for
each run.

A run is a process of its own, killed for real; what it changes is counted by the shim of killpoint.py, which the server
was started under. As a script this file is that server: an order per line on stdin, a return code per line on stdout.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MODULES = (
    "plans.cpu",
    "plans.merge",
    "plans.commands",
    "engine.execute",
    "tell.show",
    "cli.cpu",
    "cli.merge",
    "cli.resume",
)


class Forks:
    """A few servers, so that a few runs go on at once. Use as a context manager.

    modules  what they load beside the command line. torch starts no threads before a child needs them, so that it can
    be among these.
    """

    def __init__(
        self, preload: Sequence[Path], count: int, prefix: Sequence[str] = (), modules: Sequence[str] = ()
    ) -> None:
        one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        env = {**os.environ, "LD_PRELOAD": ":".join(map(str, preload)), **one}
        env.pop("KILLPOINT_ROOT", None)
        self._all = [
            subprocess.Popen(
                [*prefix, sys.executable, "-P", __file__, *modules],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]
        self._free: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for server in self._all:
            self._free.put(server)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._all:
            server.kill()
            server.wait()

    def run(
        self, arguments: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `ktconvert` with these arguments to its end, or to its death; what it prints goes to the file `log`."""
        server = self._free.get()
        assert server.stdin is not None
        assert server.stdout is not None
        words = list(map(str, arguments))
        try:
            server.stdin.write(json.dumps({"arguments": words, "log": str(log), "env": dict(env or {})}) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
        finally:
            self._free.put(server)
        return subprocess.CompletedProcess(words, code, "", log.read_text())


def serve(modules: Sequence[str]) -> None:
    """Fork a child for each order and wait for it."""
    main = importlib.import_module("ktconvert.pipeline.cli").main
    with contextlib.redirect_stdout(sys.stderr):  # ours is for return codes, and llmcompressor prints messages
        for name in (*(f"ktconvert.pipeline.{name}" for name in MODULES), *modules):
            importlib.import_module(name)
    importlib.import_module("ktconvert.native_quant.kernels").isa()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(order["env"])
            sys.argv = ["ktconvert", *order["arguments"]]
            code = 1
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
