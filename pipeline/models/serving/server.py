"""The hand-over to `transformers serve`: its endpoints, its chat templates, its handlers; only the experts are ours."""

from __future__ import annotations

import inspect
import socket
from typing import Any

from ktconvert.layouts.errors import KtconvertError
from ktconvert.pipeline.models.generate import Choice, explained, prepare


def listen(choice: Choice, host: str, port: int, name: str | None = None, key: bytes | None = None) -> None:
    """Load the model and answer at http://host:port/v1 until interrupted. name, key: see `load`.

    Raises KtconvertError for a port that is taken (before the model is loaded), and what generate.load raises.
    """
    _require_free(host, port)
    application, turns = load(choice, name, key)
    serving(application, turns, host=host, port=port, log_level="info").run()


def load(choice: Choice, name: str | None = None, key: bytes | None = None) -> tuple[Any, Any]:
    """The ASGI application that answers for this model, and the Turns that generate for it.

    name: what clients call the model, as it is called here by default; key: the API key that they have to send
    """
    config = prepare(choice)
    from ktconvert.pipeline.models.serving.clients import Watched
    from ktconvert.pipeline.models.serving.front import Front
    from ktconvert.pipeline.models.serving.model_manager import OneModel
    from ktconvert.pipeline.models.serving.scheduler import OneByOne, Scheduler
    from ktconvert.pipeline.models.serving.served import Served

    with explained(choice.model):
        keeper = OneModel(choice, config, name or choice.model)
        served = Served.of(keeper)
        turns = Scheduler(*keeper.load_model_and_processor(keeper.name))
    return Watched(Front(_application(keeper, OneByOne(turns)), served, turns, key)), turns


def serving(application: Any, turns: Any, **settings: Any) -> Any:
    """The server of what `load` gave. settings: of uvicorn."""
    import uvicorn

    from ktconvert.pipeline.models.serving.connections import Connection
    from ktconvert.pipeline.models.serving.stopping import Server

    return Server(uvicorn.Config(application, http=Connection, ws="none", **settings), turns)


def _application(keeper: Any, state: Any) -> Any:
    """transformers' own application: its handlers of chat completions, completions and responses over one model.

    state: gives the handlers who generates
    """
    from transformers.cli.serving import chat_completion, completion, response, server

    handlers = {
        "chat_handler": chat_completion.ChatCompletionHandler(keeper, state),
        "completion_handler": completion.CompletionHandler(keeper, state),
        "response_handler": response.ResponseHandler(keeper, state),
    }
    build: Any = server.build_server
    others = {name: None for name in inspect.signature(build).parameters if name.endswith("_handler")}
    return build(keeper, generation_state=state, **{**others, **handlers})


def _require_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise KtconvertError(f"{host}:{port}: cannot listen there ({why}); choose --host and --port") from None
