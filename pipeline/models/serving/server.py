"""The hand-over to `transformers serve`: its endpoints, its chat templates, its handlers; only the experts are ours."""

from __future__ import annotations

import inspect
import socket
from typing import Any

from ktconvert.layouts.errors import KtconvertError
from ktconvert.pipeline.models.generate import Choice, explained, prepare


def listen(choice: Choice, host: str, port: int) -> None:
    """Load the model and answer at http://host:port/v1 until interrupted.

    Raises KtconvertError for a port that is taken (before the model is loaded), and what generate.load raises.
    """
    _require_free(host, port)
    config = prepare(choice)
    import uvicorn

    from ktconvert.pipeline.models.serving.keeper import OneModel

    with explained(choice.model):
        keeper = OneModel(choice, config, choice.model)
    uvicorn.Server(uvicorn.Config(_application(keeper), host=host, port=port, log_level="info")).run()


def _application(keeper: Any) -> Any:
    """transformers' own application: its handlers of chat completions, completions and responses over one model."""
    from transformers.cli.serving import chat_completion, completion, response, server, utils

    state = utils.GenerationState()
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
