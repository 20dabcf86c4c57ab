"""One request to the server, and the connection to its client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Response
from fastapi.responses import StreamingResponse

from ktconvert.pipeline.models.serving.authentication import RequestError
from ktconvert.pipeline.models.serving.request_options import RequestOptions

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

MAX_DISCARDED = 1 << 26  # bytes that are read from a rejected request, so that its client reads the response
EVENT_STREAM = b"text/event-stream"


@dataclass
class Call:
    """One request, and the connection to its client.

    From the end of the body on it watches whether the client still waits for the answer, which neither Starlette nor
    transformers' handlers do.

    id            of the request, also for generation
    begin         when it came, in seconds
    status        HTTP status of the response, once it has begun
    refusal       why the request was refused; empty if it was not
    is_complete   whether the client got the whole response
    generations   the options of its generations
    has_more      whether more of the body may come
    received      bytes of the body so far
    is_active     whether it counts among the requests that are being answered
    disconnected  set when the client has disconnected
    """

    scope: Scope
    receive: Receive
    send: Send
    id: str
    begin: float = field(default_factory=time.perf_counter)
    status: int = 0
    refusal: str = ""
    is_complete: bool = False
    generations: list[RequestOptions] = field(default_factory=list)
    has_more: bool = True
    received: int = 0
    is_active: bool = False
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    watcher: asyncio.Task[None] | None = None

    async def read_body(self, limit: int) -> bytes:
        """Return the body. Raises RequestError with 413 for more than `limit` bytes, of which none is kept."""
        data = b""
        while self.has_more and self.received <= MAX_DISCARDED:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise RequestError(400, "the body is incomplete")
            chunk = message.get("body", b"")
            self.received = self.received + len(chunk)
            self.has_more = message.get("more_body", False)
            data = data + chunk if self.received <= limit else b""
        if self.received > limit:
            problem = f"the body has more than {limit} bytes, the limit for this model's context"
            raise RequestError(413, f"{problem}; shorten it")
        self.watcher = self.watcher or asyncio.create_task(self._watch())
        return data

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.disconnect()

    def disconnect(self) -> None:
        """Record that the client has disconnected."""
        self.disconnected.set()

    async def _wait_for_disconnect(self) -> Message:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def respond(self, status: int, body: dict[str, Any], request_id: str = "", **headers: str) -> None:
        """Send a complete answer.

        request_id  the id to send instead of `id`
        headers     additional headers
        """
        headers |= {"x-request-id": request_id or self.id}
        response = Response(json.dumps(body), status, headers, "application/json")
        await response(self.scope, self._wait_for_disconnect, self.send)

    async def respond_with(self, content: bytes, media_type: str, **headers: str) -> None:
        """Send a complete answer that is not JSON."""
        headers |= {"x-request-id": self.id}
        await Response(content, 200, headers, media_type)(self.scope, self._wait_for_disconnect, self.send)

    async def stream(self, events: AsyncIterator[bytes | str], request_id: str) -> None:
        """Send an answer as a stream of events."""
        headers = {"x-request-id": request_id}
        response = StreamingResponse(events, media_type=EVENT_STREAM.decode(), headers=headers)
        await response(self.scope, self._wait_for_disconnect, self.send)
