"""Whether a client still waits for its answer.

Servers tell an application that a client has gone only if the application asks, and neither Starlette nor transformers'
handlers ask while an answer is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Client:
    """The client of one request; `current` is that of this one, if there is any."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    def left(self) -> None:
        self.gone.set()


current: ContextVar[Client] = ContextVar("client")


class Watched:
    """An ASGI application around another one, only for http; it listens to the client when its request is whole."""

    def __init__(self, application: ASGIApp) -> None:
        self.application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, watching = Client(), None

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            client.left()

        async def listen() -> Message:
            nonlocal watching
            if watching is None:
                message = await receive()
                if message["type"] == "http.disconnect":
                    client.left()
                elif not message.get("more_body", False):
                    watching = asyncio.create_task(watch())
                return message
            await client.gone.wait()
            return {"type": "http.disconnect"}

        token = current.set(client)
        try:
            await self.application(scope, listen, send)
        finally:
            current.reset(token)
            if watching is not None:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
