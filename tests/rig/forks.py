"""Servers that run the real command line many times, without the half second that starting Python takes.

A server imports the command line once and forks for each run, which is a process of its own and can be killed. As a
script, this file is the server: it reads an order per line from stdin, and writes a return code per line to stdout.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import queue
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND_LINE = "ktconvert.pipeline.cli:main"
PACKAGES = ("cli", "engine", "plans", "report", "verify")  # packages of ktconvert.pipeline that import nothing heavy


class Forks(contextlib.AbstractContextManager[Any]):
    """Several servers, for as many runs at a time.

    modules  modules to import besides the command line (torch starts no threads before a child needs them)
    program  arguments of Python for a program that calls serve
    """

    def __init__(
        self,
        preload: Sequence[Path],
        count: int,
        prefix: Sequence[str] = (),
        modules: Sequence[str] = (),
        program: Sequence[str] = ("-P", __file__),
    ) -> None:
        one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        libraries = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), *map(str, preload)]))
        env = {**os.environ, "LD_PRELOAD": libraries, **one}
        env.pop("KILLPOINT_ROOT", None)
        command = [*prefix, sys.executable, *program, *modules]
        self._all = [
            subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        self._free: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for server in self._all:
            self._free.put(server)

    def __exit__(self, *_: object) -> None:
        for server in self._all:
            server.kill()
            server.wait()

    def run(
        self,
        arguments: Sequence[str | Path],
        log: Path,
        env: Any = None,
        printed: Path | None = None,
        program: str = COMMAND_LINE,
    ) -> Any:
        """Run `ktconvert` with these arguments in the caller's working directory; return a CompletedProcess.

        log      file for stderr
        printed  file for stdout; by default, stdout also goes to log
        program  function to call instead of the command line, MODULE:FUNCTION
        """
        server: Any = self._free.get()
        words = list(map(str, arguments))
        order = {"arguments": words, "log": str(log), "printed": printed and str(printed), "env": dict(env or {})}
        order["program"] = program
        try:
            server.stdin.write(json.dumps(order | {"folder": str(Path.cwd())}) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
        finally:
            self._free.put(server)
        return subprocess.CompletedProcess(words, code, printed.read_text() if printed else "", log.read_text())


def serve(modules: Sequence[str]) -> None:
    """Import the command line and these modules, and run the orders on stdin."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for rig
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for return codes, and llmcompressor prints messages
        for package in PACKAGES:
            path = importlib.import_module(f"ktconvert.pipeline.{package}").__path__
            for module in pkgutil.iter_modules(path, f"ktconvert.pipeline.{package}."):
                importlib.import_module(module.name)
        for name in modules:
            importlib.import_module(name)
    importlib.import_module("ktconvert.native_quant.kernels").isa()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, name in ((2, "log"), (1, "printed")):
                path = order[name]
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) if path else 2, number)
            os.chdir(order["folder"])
            os.environ.update(order["env"])
            sys.argv = ["ktconvert", *order["arguments"]]
            module, _, name = order["program"].partition(":")
            code = 1
            try:
                getattr(importlib.import_module(module), name)()
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
