"""A process that renders chat templates, which are programs that come with a model and may never end.

It runs each job in a fork whose time and memory the kernel limits. A loop in a thread could not be stopped, and would
hold the interpreter's lock against all other clients. The process does not import torch, so that forks are small and
fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

CPU_SECONDS = 5  # CPU time of one job
MAX_MEMORY = 2 << 30  # bytes of address space, of each fork and of the process, so that both can compile a template
MAX_TEXT = 1 << 24  # characters of a rendered text
PROGRAM = "ktconvert.pipeline.models.serving.template_process"
SUCCESS, FAILURE = b"+", b"-"  # the first byte of a reply
IN_FORK, IN_PROCESS = b"f", b"k"  # the process of a job; later forks inherit the templates that the process compiles


class TemplateError(Exception):
    """An error of a chat template, or of one that exceeds a limit."""


class TemplateProcess:
    """The process, which starts at once and ends with its parent."""

    def __init__(self, seconds: float = CPU_SECONDS) -> None:
        """Start the process.

        seconds  CPU time for one job
        """
        self.seconds = seconds
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", PROGRAM, str(theirs.fileno()), str(self.seconds)]
        with theirs:
            # In its own session it does not get Ctrl-C; it ends when the socket is closed.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "USE_TORCH": "0", "OMP_NUM_THREADS": "1"},
            )

    async def find_variables(self, template: str) -> frozenset[str]:
        """Return the names that a template reads, and compile it for all later jobs. Raises TemplateError."""
        job = json.dumps(["find_variables", {"template": template}]).encode()
        names = await self._run(job)
        await self._run(job, IN_PROCESS)
        return frozenset(names.split())

    async def render(self, job: bytes) -> str:
        """Return the text of a chat. Raises TemplateError.

        job  the job from `encode_render_job`
        """
        return await self._run(job)

    async def _run(self, job: bytes, mode: bytes = IN_FORK) -> str:
        """Send a job to a child of the template process, and return its text; raise TemplateError if it fails."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._send_socket(theirs, mode)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(job)
            writer.write_eof()
            reply = await reader.read()
        except ConnectionError:
            reply = b""
        finally:
            writer.close()
        if not reply.startswith((SUCCESS, FAILURE)):
            limits = f"{self.seconds:g} seconds of a CPU, {MAX_MEMORY >> 30} GiB of memory or {MAX_TEXT} characters"
            raise TemplateError(f"it takes more than {limits}")
        if reply.startswith(FAILURE):
            raise TemplateError(reply[1:].decode())
        return reply[1:].decode()

    def _send_socket(self, connection: socket.socket, mode: bytes) -> None:
        try:
            socket.send_fds(self._control, [mode], [connection.fileno()])
        except ConnectionError:  # the process was killed
            self._control.close()
            self._process.wait()
            self._start()
            socket.send_fds(self._control, [mode], [connection.fileno()])


shared_process = functools.cache(TemplateProcess)


def encode_render_job(arguments: dict[str, Any]) -> bytes:
    """Return the job to render a chat.

    arguments  arguments of transformers' render_jinja_template
    """
    return json.dumps(["render", arguments]).encode()


# --- code of the process --------------------------------------------------------------------------


def main() -> None:
    """Run jobs until the parent process ends."""
    try:
        from transformers.utils import chat_template_utils
    except Exception:  # the server imports it, too, and reports the error
        sys.exit(1)

    def find_variables(template: str) -> str:
        return " ".join(chat_template_utils._get_template_variables(template))

    def render(**arguments: Any) -> str:
        return str(chat_template_utils.render_jinja_template(**arguments)[0][0])

    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended forks
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    while True:
        mode, connections, _, _ = socket.recv_fds(control, 1, 1)
        if not mode:
            return
        with socket.socket(fileno=connections[0]) as connection:
            if mode == IN_PROCESS:
                _run_job(connection, [find_variables])
            elif os.fork() == 0:
                control.close()
                signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the fork in any state
                signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
                _run_job(connection, [find_variables, render])
                os._exit(0)


def _run_job(connection: socket.socket, tasks: list[Callable[..., str]]) -> None:
    with connection.makefile("rb") as file:
        name, arguments = json.loads(file.read())
    try:
        text = {task.__name__: task for task in tasks}[name](**arguments)
        if len(text) > MAX_TEXT:
            return
        reply = SUCCESS + text.encode()
    except MemoryError:
        return
    except Exception as error:  # a template may raise any error
        reply = FAILURE + " ".join(str(error).split())[:1000].encode(errors="replace")
    with contextlib.suppress(BrokenPipeError):  # the server was interrupted
        connection.sendall(reply)


if __name__ == "__main__":
    main()
