"""Servers that run the real command line many times, without the seconds that imports take.

A server imports the command line once and forks for each run, which is a process of its own and can be killed. As a
script, this file is the server: it reads one order from each connection, and answers with a return code.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

COMMAND_LINE = "ktconvert.pipeline.cli:main"
PACKAGES = ("cli", "engine", "plans", "report", "verify")  # packages of ktconvert.pipeline that import nothing heavy


class Forks(contextlib.AbstractContextManager[Any]):
    """A server; several threads may run commands at the same time.

    modules  modules to import besides the command line (torch starts no threads before a child needs them)
    program  arguments of Python for a program that calls serve
    env      environment of the server, by default that of this process
    """

    def __init__(
        self,
        preload: Sequence[Path],
        prefix: Sequence[str] = (),
        modules: Sequence[str] = (),
        program: Sequence[str] = ("-P", __file__),
        env: Mapping[str, str] = os.environ,
    ) -> None:
        one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        libraries = ":".join(filter(None, [env.get("LD_PRELOAD"), *map(str, preload)]))
        env = {**env, "LD_PRELOAD": libraries, **one}
        env.pop("KILLPOINT_ROOT", None)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # an abstract address that Linux chooses
            listener.listen(64)
            self._address = listener.getsockname()
            number = listener.fileno()
            command = [*prefix, sys.executable, *program, str(number), *modules]
            self._server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, pass_fds=[number])

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.communicate()

    def run(
        self,
        arguments: Sequence[str | Path],
        log: Path,
        env: Any = None,
        printed: Path | None = None,
        program: str = COMMAND_LINE,
        folder: Path | None = None,
    ) -> Any:
        """Run `ktconvert` with these arguments; return a CompletedProcess.

        log      file for stderr
        printed  file for stdout; by default, stdout also goes to log
        program  function to call instead of the command line, MODULE:FUNCTION
        folder   working directory; by default, that of the caller
        """
        words = list(map(str, arguments))
        order = {"arguments": words, "log": str(log), "printed": printed and str(printed), "env": dict(env or {})}
        order |= {"program": program, "folder": str(folder or Path.cwd())}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            with connection.makefile("rw") as stream:
                stream.write(json.dumps(order) + "\n")
                stream.flush()
                code = int(stream.readline())
        return subprocess.CompletedProcess(words, code, printed.read_text() if printed else "", log.read_text())


def serve(listener: int, modules: Sequence[str]) -> None:
    """Import the command line and these modules, and run an order per connection until the parent process ends."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for rig
    with contextlib.redirect_stdout(sys.stderr):  # llmcompressor prints messages
        for package in PACKAGES:
            path = importlib.import_module(f"ktconvert.pipeline.{package}").__path__
            for module in pkgutil.iter_modules(path, f"ktconvert.pipeline.{package}."):
                importlib.import_module(module.name)
        for name in modules:
            importlib.import_module(name)
    importlib.import_module("ktconvert.native_quant.kernels").isa()
    gc.collect()
    gc.freeze()  # children need not traverse, and so copy, the objects of imported modules
    with socket.socket(fileno=listener) as accepting:
        while True:
            ready, _, _ = select.select([accepting, sys.stdin], [], [])
            if sys.stdin in ready:  # closed: the parent process has ended
                break
            connection, _ = accepting.accept()
            if os.fork() == 0:
                accepting.close()
                _answer(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer(connection: socket.socket) -> NoReturn:
    """Run the order of this connection in a child, and send its return code."""
    with connection.makefile("rw") as stream:
        order = json.loads(stream.readline())
        pid = os.fork()
        if pid == 0:
            stream.close()
            connection.close()
            _run(order)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            stream.write(f"{code}\n")
            stream.flush()
    os._exit(0)


def _run(order: dict[str, Any]) -> NoReturn:
    """Run the order in this process."""
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


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
