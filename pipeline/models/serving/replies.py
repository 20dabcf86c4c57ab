"""The answers of transformers' handlers, whole or streamed, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from ktconvert.pipeline.models.serving.refused import Refused

if TYPE_CHECKING:
    from starlette.types import Send

    from ktconvert.pipeline.models.serving.request_options import RequestOptions

FAILED = "the server failed to answer; its log says why"
Edit = Callable[[Any], Iterator[Any]]  # an event of a stream -> the events to send instead


async def respond(send: Send, status: int, body: dict[str, Any], **headers: str) -> None:
    """A whole answer. headers: their names with _ for -."""
    data = json.dumps(body).encode()
    fields = {"content-type": "application/json", "content-length": str(len(data)), **headers}
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": data})


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def edited(stream: AsyncIterator[str], edit: Edit, done: bool) -> AsyncIterator[bytes]:
    """The events of a handler's stream, each of whose chunks holds whole ones, changed by `edit`.

    done: whether OpenAI ends such a stream with [DONE]
    """
    async for chunk in stream:
        yield b"".join(event(new) for old in chunk.split("\n\n")[:-1] for new in edit(_content(old)))
    if done:
        yield b"data: [DONE]\n\n"


def _content(text: str) -> Any:
    text = text.removeprefix("data: ")
    try:
        content = json.loads(text)
    except ValueError:  # an error's words come as they are, with quotes in them
        content = {"error": text.removeprefix('{"error": "').removesuffix('"}')}
    return Refused(500, content["error"]).body() if isinstance(content.get("error"), str) else content


def finished(answer: dict[str, Any], cut: bool) -> dict[str, Any]:
    """A whole answer, or the last event of a stream, which says whether it was cut off. Theirs call a response always
    completed, and a text cut off that ends with the last token that was permitted.
    """
    if answer.get("object") == "response":
        reason = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {**answer, **reason} if cut else answer
    for choice in answer["choices"]:
        if choice.get("finish_reason", "stop") in ("stop", "length"):
            choice["finish_reason"] = "length" if cut else "stop"
    return answer


def edit_response(options: RequestOptions) -> Edit:
    """For the events of /v1/responses: the last one says whether the answer was cut off."""

    def edit(content: Any) -> Iterator[Any]:
        if content.get("type") == "response.completed":
            content["response"] = finished(content["response"], options.cut)
            content["type"] = f"response.{content['response']['status']}"
        yield content

    return edit


def edit_text(options: RequestOptions, with_usage: bool, prompt: int) -> Edit:
    """For a stream of chat.completion.chunk or text_completion: numbers of tokens in a last event of their own, or
    nowhere, where theirs stand in the last event with a choice. prompt: the number of its tokens.
    """

    def edit(content: Any) -> Iterator[Any]:
        if any(choice.get("finish_reason") for choice in content.get("choices", ())):
            finished(content, options.cut)
        usage = content.pop("usage", None)
        yield content
        if with_usage and usage is not None:
            usage |= {"prompt_tokens": prompt, "total_tokens": prompt + usage["completion_tokens"]}
            yield {**content, "choices": [], "usage": usage}

    return edit
