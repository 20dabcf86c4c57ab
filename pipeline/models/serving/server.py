"""The HTTP server of `ktconvert serve`: uvicorn with time limits, a limit of connections and a quick shutdown.

uvicorn waits for requests without a time limit, and refuses further clients when it has enough connections. Here a
client has limited time for its request, the connection that has waited longest is closed if there are too many, and
Ctrl-C or SIGTERM ends the server within two seconds, also while it answers.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ktconvert.pipeline.models import pretrained
from ktconvert.pipeline.models.loading import ModelChoice, prepare_config
from ktconvert.pipeline.models.serving.listener import open_listener
from ktconvert.pipeline.models.serving.template_process import shared_process

if TYPE_CHECKING:
    from ktconvert.pipeline.models.serving.scheduler import Scheduler

MAX_CONNECTIONS = 512  # one more replaces the connection that has waited longest for its client
HEADER_SECONDS = 10.0  # limit for headers, from the start of the connection or the end of the previous answer
BODY_SECONDS = 60.0  # limit for its body, after the headers
READ_SECONDS = 60.0  # limit for the client to read part of an answer whose buffer is full
SHUTDOWN_SECONDS = 1  # limit for answers in transit; a client that does not read does not delay the shutdown
EXIT_SECONDS = 5.0  # limit from a signal to the end of the process, also if threads still run
INTERRUPTED = 130  # exit code
LOG = logging.getLogger("uvicorn.error")
LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        "uvicorn": {"handlers": ["stderr"], "propagate": False},
        "transformers.cli.serving": {"level": "ERROR"},  # its handlers warn of every request
        "asyncio": {"level": "ERROR"},  # it warns of clients that leave during an answer
    },
}


def _update_after(name: str) -> Any:
    """Return a method that calls uvicorn's method of this name and then updates the deadline."""

    def method(self: Connection, *arguments: Any) -> None:
        getattr(H11Protocol, name)(self, *arguments)
        self._update_deadline()

    return method


class Connection(H11Protocol):
    """A connection of uvicorn that is closed if its client does not send or read in time."""

    _awaited: tuple[object, float] | None = None  # the request or answer that the client delays, and the seconds for it
    _since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, and close a different one if there are too many."""
        super().connection_made(transport)
        self._update_deadline()
        # Clients that send nothing are closed before those that read nothing.
        others = [
            connection
            for connection in self.connections
            if isinstance(connection, Connection) and connection._awaited and connection is not self
        ]
        if len(self.connections) > MAX_CONNECTIONS and others:
            min(others, key=lambda connection: (connection.flow.write_paused, connection._since)).transport.abort()

    # Each of these may change whom the connection waits for: after on_response_complete it waits for the next request,
    # after pause_writing for the client to read.
    data_received = _update_after("data_received")
    on_response_complete = _update_after("on_response_complete")
    pause_writing = _update_after("pause_writing")
    resume_writing = _update_after("resume_writing")

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up, and cancel the deadline."""
        super().connection_lost(exc)
        self._set_deadline(None)

    def _update_deadline(self) -> None:
        if self.flow.write_paused:
            self._set_deadline((self.flow, READ_SECONDS))
        elif self.cycle is None or self.cycle.response_complete:
            self._set_deadline((self.cycle, HEADER_SECONDS))
        else:
            self._set_deadline((self.cycle, BODY_SECONDS) if self.cycle.more_body else None)

    def _set_deadline(self, awaited: tuple[object, float] | None) -> None:
        if awaited == self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._awaited = awaited
        self._since = self.loop.time()
        self._timer = None
        if awaited is not None:
            self._timer = self.loop.call_later(awaited[1], self._close)

    def _close(self) -> None:
        if self.flow.write_paused:
            self.transport.abort()
        else:
            self.transport.close()  # after the client has read the rest


class Server(uvicorn.Server):
    """A uvicorn server that ends answers at a signal, where uvicorn waits for them."""

    def __init__(self, application: Any, scheduler: Scheduler, **settings: Any) -> None:
        more: dict[str, Any] = {"http": Connection, "ws": "none", "lifespan": "off", "log_config": LOGGING}
        more["access_log"] = False  # the application logs each request when its answer is complete
        super().__init__(uvicorn.Config(application, timeout_graceful_shutdown=SHUTDOWN_SECONDS, **more, **settings))
        self._scheduler = scheduler

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, and log the addresses, which uvicorn logs only without `sockets`."""
        await super().startup(sockets)
        if self.started:
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            url = f"http://{host}:{self.config.port}"
            LOG.info("Ready: %s/v1, and a chat page at %s/ (Ctrl-C ends the server)", url, url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Interrupt all generation, and shut down."""
        self._scheduler.interrupt()
        super().handle_exit(sig, frame)

    def _force_exit(self) -> None:
        while not self._captured_signals:
            time.sleep(0.2)
        time.sleep(EXIT_SECONDS)
        os._exit(128 + self._captured_signals[0])

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Run until a signal, which uvicorn raises again: SIGTERM ends the process, SIGINT is a KeyboardInterrupt."""
        if threading.current_thread() is threading.main_thread():  # uvicorn handles signals only there
            threading.Thread(target=self._force_exit, daemon=True, name="exit").start()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a server without a message
        try:
            super().run(*args, **kwargs)
        except KeyboardInterrupt:
            # Skip the interpreter's cleanup, which takes seconds for a model and waits for running layers.
            atexit.register(os._exit, INTERRUPTED)
            sys.exit(INTERRUPTED)  # without a message: this is how a server is stopped


def listen(choice: ModelChoice, host: str, port: int, origins: Sequence[str] = (), **options: Any) -> None:
    """Load the model and serve it at http://host:port/v1 until interrupted.

    origins  origins of web pages that may send requests; * for all
    options  arguments of load_application

    Requests wait while the model is loaded. Raises KTConvertError, before that, if the port is in use.
    """
    with open_listener(host, port, "choose a different --host or --port") as listener:
        application, scheduler = load_application(choice, **options)
        if origins:
            from starlette.middleware.cors import CORSMiddleware

            methods = ("GET", "POST")
            application = CORSMiddleware(application, origins, methods, ["*"], expose_headers=["x-request-id"])
        Server(application, scheduler, host=host, port=port, log_level="info").run(sockets=[listener])


def load_application(
    choice: ModelChoice, name: str | None = None, key: bytes | None = None, adapters: Mapping[str, Path] | None = None
) -> tuple[Any, Any]:
    """Return the ASGI application for a model and its adapters, and its Scheduler.

    name      the model's name for clients
    key       the API key
    adapters  directories by their names for clients
    """
    shared_process()  # starts while the model is loaded
    config = prepare_config(choice)  # before torch is imported
    from ktconvert.pipeline.models.serving.application import Application
    from ktconvert.pipeline.models.serving.model_manager import ServedModel
    from ktconvert.pipeline.models.serving.scheduler import Scheduler
    from ktconvert.pipeline.models.serving.stream_decoder import install_parser

    with pretrained.explain_errors(choice.model, pretrained.GENERATION):
        manager = ServedModel(choice, config, name or choice.model, adapters or {})
        install_parser(manager.prompts.template, manager.model)
        scheduler = Scheduler(manager.model, manager.processor, manager.adapters.switch)
    return Application(manager, scheduler, key), scheduler
