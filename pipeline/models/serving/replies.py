"""What transformers' server answers, whole or streamed, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from ktconvert.pipeline.models.serving.clients import Message, Send
from ktconvert.pipeline.models.serving.errors import Refused
from ktconvert.pipeline.models.serving.request_options import RequestOptions

FAILED = "the server failed to answer; its log says why"


async def respond(send: Send, status: int, body: dict[str, Any], **headers: str) -> None:
    """A whole answer. headers: their names with _ for -."""
    data = json.dumps(body).encode()
    fields = {"content-type": "application/json", "content-length": str(len(data)), **headers}
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": data})


def event(content: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class Whole:
    """Takes an answer instead of a client."""

    def __init__(self) -> None:
        self.status, self.body = 500, b""

    async def send(self, message: Message) -> None:
        """As ASGI has it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")

    def json(self) -> dict[str, Any]:
        """The answer. Raises Refused for one that is an error."""
        try:
            body = json.loads(self.body)
        except ValueError:
            body = {}
        if self.status < 400:
            answer: dict[str, Any] = body
            return answer
        said = body.get("detail") or body.get("error") or FAILED
        # What their checks call 422 (a field that they do not know) is 400 in OpenAI's API.
        raise Refused(400 if self.status == 422 else self.status, said if isinstance(said, str) else json.dumps(said))


class Streamed:
    """Passes a stream of events on to the client, each changed by `edit`, which gives the events to send instead."""

    def __init__(self, send: Send, edit: Callable[[Any], Iterator[Any]], done: bool) -> None:
        """done: whether OpenAI ends such a stream with [DONE]."""
        self._send, self._edit, self._done = send, edit, done
        self._refused: Whole | None = None
        self._rest = b""

    async def send(self, message: Message) -> None:
        """As ASGI has it; an answer that is an error instead of a stream is kept for `check`."""
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._refused = Whole()
        if self._refused is not None:
            return await self._refused.send(message)
        if message["type"] == "http.response.body":
            *events, self._rest = (self._rest + message.get("body", b"")).split(b"\n\n")
            data = b"".join(new for old in events for new in self._changed(old))
            more = message.get("more_body", False)
            if not more and self._done:
                data += b"data: [DONE]\n\n"
            message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(message)

    def check(self) -> None:
        """Raises Refused for an answer that was no stream but an error."""
        if self._refused is not None:
            self._refused.json()

    def _changed(self, old: bytes) -> Iterator[bytes]:
        text = old.removeprefix(b"data: ")
        try:
            piece = json.loads(text)
        except ValueError:  # an error's words come as they are, with quotes in them
            piece = {"error": text.decode(errors="replace").removeprefix('{"error": "').removesuffix('"}')}
        if isinstance(piece.get("error"), str):
            piece = Refused(500, piece["error"]).body()
        for changed in self._edit(piece):
            yield event(changed)


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


def of_response(asked: RequestOptions) -> Callable[[Any], Iterator[Any]]:
    """Of the events of /v1/responses: the last one says whether the answer was cut off."""

    def edit(piece: Any) -> Iterator[Any]:
        if piece.get("type") == "response.completed":
            piece["response"] = finished(piece["response"], asked.cut)
            piece["type"] = f"response.{piece['response']['status']}"
        yield piece

    return edit


def of_text(asked: RequestOptions, with_usage: bool, prompt: int) -> Callable[[Any], Iterator[Any]]:
    """Of a stream of chat.completion.chunk or text_completion: numbers of tokens in a last event of their own, or
    nowhere, where theirs stand in the last event with a choice. prompt: the number of its tokens.
    """

    def edit(piece: Any) -> Iterator[Any]:
        if any(choice.get("finish_reason") for choice in piece.get("choices", ())):
            finished(piece, asked.cut)
        usage = piece.pop("usage", None)
        yield piece
        if with_usage and usage is not None:
            usage |= {"prompt_tokens": prompt, "total_tokens": prompt + usage["completion_tokens"]}
            yield {**piece, "choices": [], "usage": usage}

    return edit
