"""Servers on free ports for real clients: in their own process, or in this process, where tests can observe them."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ktconvert.pipeline.models.loading import ModelChoice

PATIENCE = 300  # seconds to wait for an event


def free_port() -> int:
    """Return a free port outside the range from which Linux assigns ports, so that it stays free."""
    while True:
        port = random.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def start_server(model: Path, log: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start `ktconvert serve` as a background job of a shell, with SIGINT ignored; yield the process and its address.

    log: file for its output.
    """
    with start_command(log, "serve", str(model), *options, "--threads", "1") as running:
        yield running


@contextmanager
def start_command(log: Path, *arguments: str, **env: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a command of ktconvert that ends with a server, as start_server does."""
    port = free_port()
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", *arguments, "--port", str(port)]
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    with log.open("wb") as out:
        environment = {**os.environ, **env}
        process = subprocess.Popen([*ignoring, *command], stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:  # not listening yet, or too busy to answer
            time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text()}")


@dataclass
class RunningServer:
    """A running server.

    application   answers requests
    scheduler     generates for it
    passes        passes through the model, in order: (thread, shape of input_ids, shape of logits)
    running       number of current generations
    disconnected  clients that the server saw disconnect while it generated
    end           acts as a signal does
    """

    model: Path
    application: Any
    scheduler: Any
    url: str = ""
    passes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    running: int = 0
    disconnected: int = 0
    end: Callable[[], None] = lambda: None

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait until something has happened."""
        end = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < end, "the event did not happen"
            time.sleep(0.002)

    @contextmanager
    def waiting(self, after: int, happened: Callable[[], bool]) -> Iterator[None]:
        """Block passes through the model after the first `after` ones, until something has happened."""

        def wait(*_: Any) -> None:
            if len(self.passes) >= after:
                self.until(happened)

        handle = self.scheduler.model.register_forward_pre_hook(wait)
        try:
            yield
        finally:
            handle.remove()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record passes through the model, generations, and clients that disconnect."""
        from ktconvert.pipeline.models.serving.application import Call

        model = self.scheduler.model
        generate, disconnect = model.generate, Call.disconnect

        def record_pass(_: Any, args: Any, named: dict[str, Any], out: Any) -> None:
            shape = tuple(named["input_ids"].shape)
            self.passes.append((threading.current_thread().name, shape, tuple(out.logits.shape)))

        def count_running(*args: Any, **options: Any) -> Any:
            self.running += 1
            try:
                return generate(*args, **options)
            finally:
                self.running -= 1

        def record_disconnect(call: Call) -> None:
            disconnect(call)
            self.disconnected += bool(self.running)

        model.register_forward_hook(record_pass, with_kwargs=True)
        monkeypatch.setattr(model, "generate", count_running)
        monkeypatch.setattr(Call, "disconnect", record_disconnect)


@contextmanager
def serve_in_process(model: Path, choice: ModelChoice | None = None, **options: Any) -> Iterator[RunningServer]:
    """Serve the model, with its experts as they are stored unless a choice is given. options: of load_application."""
    from ktconvert.pipeline.models.serving.server import Server, load_application

    choice = choice or ModelChoice(str(model), cpu_weights=model, threads=1)
    application, scheduler = load_application(choice, **options)
    server = Server(application, scheduler, port=0, log_level="warning")
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        running = RunningServer(model, application, scheduler, end=lambda: server.handle_exit(signal.SIGINT, None))
        with pytest.MonkeyPatch.context() as monkeypatch:
            running.watch(monkeypatch)
            running.until(lambda: server.started)
            running.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            yield running
    finally:
        scheduler.interrupt()
        server.should_exit = True
        thread.join()
        scheduler.stop()


def copy_with_template(example: Path, to: Path, template: str | None) -> Path:
    """Return a copy of the model whose tokenizer has this chat template, or none."""
    shutil.copytree(example, to)
    settings = to / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    return to
