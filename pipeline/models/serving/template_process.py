"""The process that renders chat templates, which are programs that come with a model and may never end.

It does each job in a fork of its own, whose time and memory the kernel limits: a loop in a thread could not be ended,
and would hold the interpreter's lock against every other client. It imports no torch, so that a fork is small and fast.
"""

from __future__ import annotations

import asyncio
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

SECONDS = 5  # of a CPU, for one job
MEMORY = 2 << 30  # bytes of an address space, of the process too: what could be compiled in a fork can be there
LONGEST = 1 << 24  # characters of a text
PROGRAM = "ktconvert.pipeline.models.serving.template_process"
DONE, FAILED = b"+", b"-"  # how a reply begins
FORKED, KEPT = b"f", b"k"  # where a job is done: in a fork, or in the process, whose later forks have what it compiled


class TemplateError(Exception):
    """An error of a chat template, or a limit that it reached."""


class TemplateProcess:
    """The process, which is started at once and ends with its parent."""

    def __init__(self, seconds: float = SECONDS) -> None:
        """seconds: of a CPU, for one job."""
        self.seconds = seconds
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", PROGRAM, str(theirs.fileno()), str(self.seconds)]
        with theirs:
            # In a session of its own Ctrl-C does not reach it: it ends when the socket does.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "USE_TORCH": "0", "OMP_NUM_THREADS": "1"},
            )

    async def find_variables(self, template: str) -> frozenset[str]:
        """Return the names that a template reads, which is compiled once for all later jobs. Raises TemplateError."""
        job = json.dumps(["find_variables", {"template": template}]).encode()
        names = await self._do(job)
        await self._do(job, KEPT)
        return frozenset(names.split())

    async def render(self, job: bytes) -> str:
        """Return the text of a chat; job: of `job_to_render`. Raises TemplateError."""
        return await self._do(job)

    async def _do(self, job: bytes, where: bytes = FORKED) -> str:
        ours, theirs = socket.socketpair()
        with theirs:
            self._hand_over(theirs, where)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(job)
            writer.write_eof()
            reply = await reader.read()
        except ConnectionError:
            reply = b""
        finally:
            writer.close()
        if not reply.startswith((DONE, FAILED)):
            limits = f"{self.seconds:g} seconds of a CPU, {MEMORY >> 30} GiB of memory or {LONGEST} characters"
            raise TemplateError(f"it takes more than {limits}")
        if reply.startswith(FAILED):
            raise TemplateError(reply[1:].decode())
        return reply[1:].decode()

    def _hand_over(self, connection: socket.socket, where: bytes) -> None:
        try:
            socket.send_fds(self._control, [where], [connection.fileno()])
        except ConnectionError:  # it was killed
            self._control.close()
            self._process.wait()
            self._start()
            socket.send_fds(self._control, [where], [connection.fileno()])


the_process = functools.cache(TemplateProcess)  # of all models of this process


def job_to_render(arguments: dict[str, Any]) -> bytes:
    """Return the job for these arguments of transformers' render_jinja_template."""
    return json.dumps(["render", arguments]).encode()


# --- in the process -------------------------------------------------------------------------------


def main() -> None:
    """Do jobs until the parent ends."""
    from transformers.utils import chat_template_utils

    def find_variables(template: str) -> str:
        return " ".join(chat_template_utils._get_template_variables(template))

    def render(**arguments: Any) -> str:
        return str(chat_template_utils.render_jinja_template(**arguments)[0][0])

    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while True:
        where, connections, _, _ = socket.recv_fds(control, 1, 1)
        if not where:
            return
        with socket.socket(fileno=connections[0]) as connection:
            if where == KEPT:
                _do_job(connection, [find_variables])
            elif os.fork() == 0:
                control.close()
                signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the fork then, whatever it is doing
                signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
                _do_job(connection, [find_variables, render])
                os._exit(0)


def _do_job(connection: socket.socket, tasks: list[Callable[..., str]]) -> None:
    with connection.makefile("rb") as file:
        name, arguments = json.loads(file.read())
    try:
        text = {task.__name__: task for task in tasks}[name](**arguments)
        if len(text) > LONGEST:
            return
        reply = DONE + text.encode()
    except MemoryError:
        return
    except Exception as error:  # a template may raise anything
        reply = FAILED + " ".join(str(error).split())[:1000].encode(errors="replace")
    connection.sendall(reply)


if __name__ == "__main__":
    main()
