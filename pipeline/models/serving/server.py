"""`ktconvert serve`: the endpoints, chat templates and handlers of `transformers serve`; only the experts are ours."""

from __future__ import annotations

import socket
from typing import Any

from ktconvert.layouts.errors import KtconvertError
from ktconvert.pipeline.models.loading import ModelChoice, explained, prepare


def listen(choice: ModelChoice, host: str, port: int, name: str | None = None, key: bytes | None = None) -> None:
    """Load the model and answer at http://host:port/v1 until interrupted. name, key: see `load`. Raises KtconvertError
    for a port that is taken (before the model is loaded), and what loading.load raises.
    """
    _require_free(host, port)
    application, scheduler = load(choice, name, key)
    from ktconvert.pipeline.models.serving.uvicorn_server import Server

    Server(application, scheduler, host=host, port=port, log_level="info").run()


def load(choice: ModelChoice, name: str | None = None, key: bytes | None = None) -> tuple[Any, Any]:
    """The ASGI application that answers for this model, and the Scheduler that generates for it. name: what clients
    call the model, as it is called here by default; key: the API key that they have to send
    """
    config = prepare(choice)  # before torch is imported
    from ktconvert.pipeline.models.serving.application import Application
    from ktconvert.pipeline.models.serving.clients import Watched
    from ktconvert.pipeline.models.serving.model_manager import OneModel
    from ktconvert.pipeline.models.serving.scheduler import Scheduler

    with explained(choice.model):
        manager = OneModel(choice, config, name or choice.model)
        scheduler = Scheduler(manager.model, manager.processor)
    return Watched(Application(manager, scheduler, key)), scheduler


def _require_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise KtconvertError(f"{host}:{port}: cannot listen there ({why}); choose --host and --port") from None
