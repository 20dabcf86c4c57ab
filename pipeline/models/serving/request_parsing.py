"""Reading of requests: the body becomes a schema's object, or an error that names the parameter and what to do."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from ktconvert.pipeline.models.serving.authentication import RequestError
from ktconvert.pipeline.models.serving.messages import UNKNOWN
from ktconvert.pipeline.models.serving.schemas import Chat, CommonRequest, Completion, Responses

# Messages for pydantic's types of errors; other types keep pydantic's message.
MESSAGES = {UNKNOWN: "is not a parameter here", "missing": "is missing"}
MESSAGES |= dict.fromkeys(("dict_type", "model_type"), "has to be an object")
MESSAGES |= {"list_type": "has to be a list", "string_type": "has to be a string"}
REQUESTS: tuple[type[CommonRequest], ...] = (Chat, Completion, Responses)
# Parameters that say the same on different paths, and fields of those that are objects.
SAME_MEANING = (
    ("messages", "prompt", "input"),
    ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    ("response_format", "text"),
    ("reasoning_effort", "reasoning"),
)
FIELDS = {"text": "text.format", "reasoning": "reasoning.effort"}


def parse_request(kind: type[Any], body: Any) -> Any:
    """Return the request of a JSON body; null means that a parameter is not given.

    Raises RequestError with 400 and the parameter's name.
    """
    if not isinstance(body, dict):
        raise RequestError(400, "the body has to be a JSON object")
    try:
        return kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    names = [*first["loc"], *([first["msg"]] if first["type"] == UNKNOWN else [])]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")
    message = MESSAGES.get(first["type"]) or re.sub(r"^\w+ should", "has to", first["msg"]).replace(
        " after validation", ""
    )
    if first["type"] == UNKNOWN:
        near = first["ctx"]["near"]
        remedy = _find_equivalent(kind, first["msg"]) if len(names) == 1 else None  # not of a message or an option
        message += f"; {remedy or (f'did you mean {near[0]}?' if near else 'leave it out')}"
    if not names:  # from a validator of several parameters, whose message begins with a name
        path, _, message = message.partition(": ")
    raise RequestError(400, f"{path}: {message}", path)


def _find_equivalent(kind: type[Any], name: str) -> str | None:
    """Return what to use in place of a parameter of other paths, or that there is nothing; None for other names."""
    names = next((names for names in SAME_MEANING if name in names), ())
    if (known := next((other for other in names if other in kind.model_fields), None)) is not None:
        return f"use {FIELDS.get(known, known)}"
    paths = [request.path for request in REQUESTS if name in request.model_fields]
    return f"only {' and '.join(paths)} {'has' if len(paths) == 1 else 'have'} it; leave it out" if paths else None
