"""What stands before transformers' server: it answers what that one does not know, refuses what would be ignored or
break it, and hands on the rest with every parameter in the form that is honoured there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from ktconvert.pipeline.models.serving import access, schemas, scoring
from ktconvert.pipeline.models.serving.clients import Application, Message, Receive, Send
from ktconvert.pipeline.models.serving.errors import Refused, ending
from ktconvert.pipeline.models.serving.replies import (
    FAILED,
    Streamed,
    Whole,
    event,
    finished,
    of_response,
    of_text,
    respond,
)
from ktconvert.pipeline.models.serving.request_options import RequestOptions, asking
from ktconvert.pipeline.models.serving.served import Served

BODY = 1 << 20  # bytes of a request, at least
PER_TOKEN = 16  # bytes of a request for each token of the context: ids, text and \uXXXX take less
ANSWERED = 256  # requests at the same time; further ones get a 503, which OpenAI's clients try again after
DRAINED = 1 << 26  # bytes that are read and thrown away, so that a client reads why it was refused
EVENTS = b"text/event-stream"
PLACEHOLDER = "."  # where the ids of a prompt are handed over beside the request

log = logging.getLogger("uvicorn.error")


@dataclass
class Call:
    """One request.

    id      under which generation knows it
    unread  whether some of its body may be to come
    came    bytes of it that came
    counts  whether it is one of the requests that are being answered
    """

    scope: Message
    receive: Receive
    send: Send
    id: str
    unread: bool = True
    came: int = 0
    counts: bool = False

    async def read(self, limit: int) -> bytes:
        """The body. Raises Refused with 413 for a longer one, of which no more than `limit` is kept."""
        data = b""
        while self.unread and self.came <= DRAINED:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "the body was not sent to its end")
            piece = message.get("body", b"")
            self.came, self.unread = self.came + len(piece), message.get("more_body", False)
            data = data + piece if self.came <= limit else b""
        if self.came > limit:
            raise Refused(413, f"the body has more than {limit} bytes, the most for this model's context; shorten it")
        return data


class Front:
    """An ASGI application around transformers' own."""

    def __init__(self, application: Application, served: Served, generator: Any, key: bytes | None) -> None:
        """generator: what generates for the application; key: the API key that all but /health asks for."""
        self.application, self.served, self.generator, self.key = application, served, generator, key
        self.answered = 0  # requests, at this moment
        self.limit = max(BODY, PER_TOKEN * served.context)
        self.routes: dict[str, tuple[str, Callable[[Call], Awaitable[None]]]] = {
            "/health": ("GET", self._as_it_is),
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/responses": ("POST", self._responses),
            "/load_model": ("POST", self._load_model),
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] == "lifespan":
            return await self.application(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        begun = streaming = False

        async def noted(message: Message) -> None:
            nonlocal begun, streaming
            if message["type"] == "http.response.start":
                begun, streaming = True, any(value.startswith(EVENTS) for _, value in message["headers"])
            elif not message.get("more_body", False):
                streaming = False
            await send(message)

        call = Call(scope, receive, noted, uuid.uuid4().hex)
        try:
            await self._route(call)
        except Refused as refused:
            with contextlib.suppress(Refused):
                await call.read(0)  # a client that is still sending would find the connection closed, and no answer
            more = {"www_authenticate": "Bearer"} if refused.status == 401 else {}
            await respond(send, refused.status, refused.body(), x_request_id=call.id, **more)
        except asyncio.CancelledError:  # by the server, which ends, and has waited for this answer
            last = ending()
            if not begun:
                await respond(send, last.status, last.body(), x_request_id=call.id)
            elif streaming:
                await send({"type": "http.response.body", "body": event(last.body()), "more_body": False})
        except Exception:
            if begun:
                raise
            log.exception("%s: request %s failed", scope["path"], call.id)
            await respond(send, 500, Refused(500, FAILED).body(), x_request_id=call.id)
        finally:
            self.answered -= call.counts

    async def _route(self, call: Call) -> None:
        path, method = call.scope["path"], call.scope["method"]
        if path != "/health":
            access.check(call.scope["headers"], self.key)
        expected, answer = self.routes.get(path, (None, None))
        if path.startswith("/v1/models/"):
            expected, answer = "GET", self._model
        if expected is None or answer is None:
            raise Refused(404, f"unknown path {path}; there are {', '.join(self.routes)}", None, "unknown_url")
        if method != expected:
            raise Refused(405, f"{path}: answers {expected}, not {method}", None, "method_not_allowed")
        await answer(call)

    async def _as_it_is(self, call: Call) -> None:
        await self.application(call.scope, call.receive, call.send)

    async def _models(self, call: Call) -> None:
        await respond(call.send, 200, {"object": "list", "data": [self.served.entry()]}, x_request_id=call.id)

    async def _model(self, call: Call) -> None:
        self.served.check_name(call.scope["path"].removeprefix("/v1/models/"))
        await respond(call.send, 200, self.served.entry(), x_request_id=call.id)

    async def _read(self, call: Call, kind: type[Any]) -> Any:
        """The request. Raises Refused for a body that is too long, no JSON, or no such request."""
        data = await call.read(self.limit)
        if self.answered >= ANSWERED:
            raise Refused(503, f"{ANSWERED} requests are being answered; ask again later")
        call.counts, self.answered = True, self.answered + 1
        try:
            body = from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise Refused(400, f"the body is not JSON: {error}") from error
        request = schemas.read(kind, body)
        self.served.check_name(request.model)
        return request

    async def _load_model(self, call: Call) -> None:
        request = await self._read(call, schemas.LoadModel)
        await self._hand_on(call, request.model_dump(), call.id, RequestOptions(), call.send)

    async def _chat(self, call: Call) -> None:
        request: schemas.Chat = await self._read(call, schemas.Chat)
        fields = {"role", "content", "tool_calls", "tool_call_id"}
        body: dict[str, Any] = {"messages": [m.model_dump(include=fields, exclude_none=True) for m in request.messages]}
        if request.tools and request.tool_choice != "none":
            body["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        if request.chat_template_kwargs:
            body["chat_template_kwargs"] = request.chat_template_kwargs
        length = await self.served.chat(
            body["messages"], body.get("tools"), request.chat_template_kwargs, param="messages"
        )
        config = self.served.generation(request, length, "messages")
        await self._answer(call, request, body, config, f"chatcmpl-{call.id}", length)

    async def _responses(self, call: Call) -> None:
        from transformers.cli.serving.response import ResponseHandler

        request: schemas.Responses = await self._read(call, schemas.Responses)
        body: dict[str, Any] = {"input": [item.model_dump(exclude_none=True) for item in request.whole_input()]}
        if request.tools and request.tool_choice != "none":
            body["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        handler: Any = ResponseHandler
        messages, tools = handler._normalize_input(body), handler._normalize_tools(body.get("tools"))
        length = await self.served.chat(messages, tools, None, param="input")
        config = self.served.generation(request, length, "input")
        await self._answer(call, request, body, config, call.id, length)

    async def _answer(
        self, call: Call, request: Any, body: Any, config: Any, name: str, length: int, ids: list[int] | None = None
    ) -> None:
        """transformers' answer to this body, to the client. length: of the prompt; ids: itself, in place of a text."""
        body |= {"model": self.served.name, "stream": request.stream, "generation_config": json.dumps(config)}
        asked, is_text = _asked(request, ids), isinstance(request, schemas.Generation)
        if not request.stream:
            answer = Whole()
            await self._hand_on(call, body, name, asked, answer.send)
            return await respond(call.send, 200, finished(answer.json(), asked.cut), x_request_id=name)
        usage = is_text and request.stream_options is not None and request.stream_options.include_usage
        stream = Streamed(call.send, of_text(asked, usage, length) if is_text else of_response(asked), done=is_text)
        await self._hand_on(call, body, name, asked, stream.send)
        stream.check()

    async def _completion(self, call: Call) -> None:
        request: schemas.Completion = await self._read(call, schemas.Completion)
        prompts = await self.served.prompts(request)
        configs = [self.served.generation(request, len(ids), "prompt") for ids in prompts]
        if request.stream:
            name, ids = f"cmpl-{call.id}", prompts[0]
            return await self._answer(call, request, {"prompt": PLACEHOLDER}, configs[0], name, len(ids), ids)
        answers = []
        for number, (ids, config) in enumerate(zip(prompts, configs, strict=True)):
            name = f"cmpl-{call.id}" if number == 0 else f"cmpl-{call.id}-{number}"
            answers.append(await self._one(call, request, request.prompt[number], ids, config, name))
        whole = answers[0]
        whole["choices"] = [{**answer["choices"][0], "index": n} for n, answer in enumerate(answers)]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        whole["usage"] = {name: sum(answer["usage"][name] for answer in answers) for name in counts}
        await respond(call.send, 200, whole, x_request_id=whole["id"])

    async def _one(self, call: Call, request: Any, prompt: Any, ids: list[int], config: Any, name: str) -> Any:
        """The completion of one prompt: transformers' own, or ours where logarithms of probabilities are wanted."""
        asked = _asked(request, ids)
        if request.logprobs is not None or request.max_tokens == 0:
            with asking(name, asked):
                whole = await scoring.completion(self.served, self.generator, request, ids, config, name)
            return finished(whole, asked.cut)
        body = {"prompt": PLACEHOLDER, "model": self.served.name, "generation_config": json.dumps(config)}
        answer = Whole()
        await self._hand_on(call, body, name, asked, answer.send)
        whole = finished(answer.json(), asked.cut)
        if request.echo:
            said = prompt if isinstance(prompt, str) else await self.served.apart(self.served.tokenizer.decode, ids)
            whole["choices"][0]["text"] = said + whole["choices"][0]["text"]
        return whole

    async def _hand_on(self, call: Call, body: Any, name: str, asked: RequestOptions, send: Send) -> None:
        """Have transformers' application answer this body, under this id."""
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(data)), "x-request-id": name}
        scope = {**call.scope, "headers": [(key.encode(), value.encode()) for key, value in headers.items()]}
        unread = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Message:
            return unread.pop() if unread else await call.receive()

        with asking(name, asked):
            await self.application(scope, receive, send)


def _asked(request: Any, ids: list[int] | None = None) -> RequestOptions:
    """What transformers' handlers would not pass on."""
    shared = ("presence_penalty", "frequency_penalty", "logit_bias")
    given = {name: getattr(request, name) for name in shared if getattr(request, name, None) is not None}
    return RequestOptions(ids, request.seed, **given)
