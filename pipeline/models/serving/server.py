"""`ktconvert serve`: the endpoints, chat templates and handlers of `transformers serve`; only the experts are ours. And
uvicorn's server and connections: how long a client may take over its request, which connection is closed where there
are too many, and an end within two seconds of Ctrl-C or SIGTERM, in the midst of answers too.

uvicorn waits for requests for ever, and refuses all further clients when it has enough connections.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ktconvert.layouts.errors import KtconvertError
from ktconvert.pipeline.models import building
from ktconvert.pipeline.models.loading import ModelChoice, prepare
from ktconvert.pipeline.models.serving.template_process import the_process

if TYPE_CHECKING:
    from ktconvert.pipeline.models.serving.scheduler import Scheduler

KEPT = 512  # connections; a further one takes the place of that which has waited longest for its client
HEADERS = 10.0  # seconds for a request's headers, from the beginning of the connection or the end of the answer before
BODY = 60.0  # seconds for its body, from there
READING = 60.0  # seconds for the client to read some of an answer of which no more can be sent
PATIENCE = 1  # seconds at the end for what is on its way; a client that does not read it does not hold the server
INTERRUPTED = 130  # the exit code
LAST = 5.0  # seconds from a signal to the end of the process, whatever still runs


def _then_look(name: str) -> Any:
    """The method of this name of uvicorn's class, and then a look whose part is next."""

    def method(self: Connection, *arguments: Any) -> None:
        getattr(H11Protocol, name)(self, *arguments)
        self._look()

    return method


class Connection(H11Protocol):
    """uvicorn's, which is closed where the client does not do its part in time."""

    _awaited: tuple[object, float] | None = None  # whose part it is, a request or an answer, and the seconds for it
    _since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it; another connection may have to go."""
        super().connection_made(transport)
        self._look()
        # The client that sends nothing has to go first, then the one that reads nothing.
        others = [one for one in self.connections if isinstance(one, Connection) and one._awaited and one is not self]
        if len(self.connections) > KEPT and others:
            min(others, key=lambda one: (one.flow.write_paused, one._since)).transport.abort()

    # After each of these it may be another one's part: after on_response_complete the next request may begin, after
    # pause_writing the client does not read.
    data_received = _then_look("data_received")
    on_response_complete = _then_look("on_response_complete")
    pause_writing = _then_look("pause_writing")
    resume_writing = _then_look("resume_writing")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._await(None)

    def _look(self) -> None:
        if self.flow.write_paused:
            self._await((self.flow, READING))
        elif self.cycle is None or self.cycle.response_complete:
            self._await((self.cycle, HEADERS))
        else:
            self._await((self.cycle, BODY) if self.cycle.more_body else None)

    def _await(self, awaited: tuple[object, float] | None) -> None:
        if awaited == self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._awaited, self._since, self._timer = awaited, self.loop.time(), None
        if awaited is not None:
            self._timer = self.loop.call_later(awaited[1], self._give_up)

    def _give_up(self) -> None:
        if self.flow.write_paused:
            self.transport.abort()
        else:
            self.transport.close()  # after what the client has still to read


class Server(uvicorn.Server):
    """uvicorn's, which waits for the answers that it is giving; here they end at once."""

    def __init__(self, application: Any, scheduler: Scheduler, **settings: Any) -> None:
        more: dict[str, Any] = {"http": Connection, "ws": "none", "lifespan": "off", "use_colors": False}
        super().__init__(uvicorn.Config(application, timeout_graceful_shutdown=PATIENCE, **more, **settings))
        self._scheduler = scheduler

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._scheduler.interrupt()
        super().handle_exit(sig, frame)

    def _end_in_time(self) -> None:
        while not self._captured_signals:
            time.sleep(0.2)
        time.sleep(LAST)
        os._exit(128 + self._captured_signals[0])

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Until a signal, which uvicorn raises again at the end: SIGTERM ends the process, SIGINT is an exception."""
        if threading.current_thread() is threading.main_thread():  # only there uvicorn gets signals
            threading.Thread(target=self._end_in_time, daemon=True, name="end").start()
        try:
            super().run(*args, **kwargs)
        except KeyboardInterrupt:
            # The interpreter would take the model apart first, which is seconds, and wait for layers in computation.
            atexit.register(os._exit, INTERRUPTED)
            raise


def listen(choice: ModelChoice, host: str, port: int, **more: Any) -> None:
    """Load the model and answer at http://host:port/v1 until interrupted; more: of load. Raises KtconvertError at once
    for a port that is taken.
    """
    _require_free(host, port)
    application, scheduler = load(choice, **more)
    Server(application, scheduler, host=host, port=port, log_level="info").run()


def load(
    choice: ModelChoice, name: str | None = None, key: bytes | None = None, adapters: Mapping[str, Path] | None = None
) -> tuple[Any, Any]:
    """The ASGI application that answers for this model and its adapters, and the Scheduler. name, key: of clients, for
    the model; adapters: by the names of clients for them.
    """
    the_process()  # which starts meanwhile
    config = prepare(choice)  # before torch is imported
    from ktconvert.pipeline.models.serving.application import Application
    from ktconvert.pipeline.models.serving.model_manager import OneModel
    from ktconvert.pipeline.models.serving.scheduler import Scheduler
    from ktconvert.pipeline.models.serving.stream_decoder import parse_answers_of

    with building.explained(choice.model, building.GENERATION):
        manager = OneModel(choice, config, name or choice.model, adapters or {})
        parse_answers_of(manager.prompts.template, manager.model)
        scheduler = Scheduler(manager.model, manager.processor, manager.adapters.switch)
    return Application(manager, scheduler, key), scheduler


def _require_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise KtconvertError(f"{host}:{port}: cannot listen there ({why}); choose --host and --port") from None
