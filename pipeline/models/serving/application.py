"""The server's ASGI application: paths, limits and errors. What passes goes to transformers' handlers, with every
parameter in the form that is honoured there; what they would ignore, or break at, is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from pydantic_core import from_json
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler

from ktconvert.pipeline.models.serving import access, schemas, scoring
from ktconvert.pipeline.models.serving.model_manager import OneModel
from ktconvert.pipeline.models.serving.prompts import Prompts
from ktconvert.pipeline.models.serving.refused import Refused, ending
from ktconvert.pipeline.models.serving.replies import FAILED, edit_response, edit_text, edited, event, finished, respond
from ktconvert.pipeline.models.serving.request_options import RequestOptions, generation_config, noted
from ktconvert.pipeline.models.serving.scheduler import Scheduler, SchedulerState

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

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

    scope: Scope
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
            chunk = message.get("body", b"")
            self.came, self.unread = self.came + len(chunk), message.get("more_body", False)
            data = data + chunk if self.came <= limit else b""
        if self.came > limit:
            raise Refused(413, f"the body has more than {limit} bytes, the most for this model's context; shorten it")
        return data

    async def stream(self, events: AsyncIterator[bytes | str], name: str) -> None:
        response = StreamingResponse(events, media_type=EVENTS.decode(), headers={"x-request-id": name})
        await response(self.scope, self.receive, self.send)


class Application:
    def __init__(self, manager: OneModel, scheduler: Scheduler, key: bytes | None) -> None:
        """scheduler: generates; key: the API key that all but /health asks for."""
        self.manager, self.scheduler, self.key = manager, scheduler, key
        self.prompts = Prompts(manager.model, manager.processor)
        state: Any = SchedulerState(scheduler)
        kinds: tuple[Any, ...] = (ChatCompletionHandler, CompletionHandler, ResponseHandler)
        self.chats, self.completions, self.responses = (kind(manager, state) for kind in kinds)
        self.answered = 0  # requests, at this moment
        self.limit = max(BODY, PER_TOKEN * self.prompts.context)
        self.routes: dict[str, tuple[str, Callable[[Call], Awaitable[None]]]] = {
            "/health": ("GET", lambda call: respond(call.send, 200, {"status": "ok"})),
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/responses": ("POST", self._responses),
            "/load_model": ("POST", self._load_model),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = streaming = False

        async def watched(message: Message) -> None:
            nonlocal begun, streaming
            if message["type"] == "http.response.start":
                begun, streaming = True, any(value.startswith(EVENTS) for _, value in message["headers"])
            elif not message.get("more_body", False):
                streaming = False
            await send(message)

        call = Call(scope, receive, watched, uuid.uuid4().hex)
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

    async def _models(self, call: Call) -> None:
        await respond(call.send, 200, {"object": "list", "data": [self.manager.entry()]}, x_request_id=call.id)

    async def _model(self, call: Call) -> None:
        self.manager.check_name(call.scope["path"].removeprefix("/v1/models/"))
        await respond(call.send, 200, self.manager.entry(), x_request_id=call.id)

    async def _load_model(self, call: Call) -> None:
        await self._read(call, schemas.LoadModel)
        await call.stream(self.manager.load_model_streaming(self.manager.name), call.id)

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
        self.manager.check_name(request.model)
        return request

    async def _chat(self, call: Call) -> None:
        request: schemas.Chat = await self._read(call, schemas.Chat)
        fields, settings = {"role", "content", "tool_calls", "tool_call_id"}, request.chat_template_kwargs or {}
        messages = [message.model_dump(include=fields, exclude_none=True) for message in request.messages]
        body: dict[str, Any] = {"messages": messages, "chat_template_kwargs": settings, **_tools(request)}
        length = await self.prompts.chat(messages, body.get("tools"), settings, param="messages")
        await self._answer(call, self.chats, request, body, length, f"chatcmpl-{call.id}", "messages")

    async def _responses(self, call: Call) -> None:
        request: schemas.Responses = await self._read(call, schemas.Responses)
        body = {"input": [item.model_dump(exclude_none=True) for item in request.whole_input()], **_tools(request)}
        messages = self.responses._normalize_input(body)
        tools = self.responses._normalize_tools(body.get("tools"))
        length = await self.prompts.chat(messages, tools, {}, param="input")
        await self._answer(call, self.responses, request, body, length, call.id, "input")

    async def _completion(self, call: Call) -> None:
        request: schemas.Completion = await self._read(call, schemas.Completion)
        prompts = [await self.prompts.ids(prompt) for prompt in request.prompt]
        name = f"cmpl-{call.id}"
        if request.stream:
            body, ids = {"prompt": PLACEHOLDER}, prompts[0]
            return await self._answer(call, self.completions, request, body, len(ids), name, "prompt", ids)
        configs = [self._config(request, len(ids), "prompt") for ids in prompts]
        answers = []
        for number, (ids, config) in enumerate(zip(prompts, configs, strict=True)):
            own = name if number == 0 else f"{name}-{number}"
            answers.append(await self._one(request, request.prompt[number], ids, config, own))
        whole = answers[0]
        whole["choices"] = [{**answer["choices"][0], "index": n} for n, answer in enumerate(answers)]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        whole["usage"] = {count: sum(answer["usage"][count] for answer in answers) for count in counts}
        await respond(call.send, 200, whole, x_request_id=whole["id"])

    async def _one(self, request: Any, prompt: Any, ids: list[int], config: Any, name: str) -> Any:
        """The completion of one prompt: transformers' own, or ours where logarithms of probabilities are to come."""
        options = RequestOptions.of(request, ids)
        if request.logprobs is not None or request.max_tokens == 0:
            with noted(name, options):
                whole = await scoring.completion(self.manager, self.prompts, self.scheduler, request, ids, config, name)
            return finished(whole, options.cut)
        response = await self._handled(self.completions, {"prompt": PLACEHOLDER}, config, name, options)
        whole = finished(json.loads(response.body), options.cut)
        if request.echo:
            text = prompt if isinstance(prompt, str) else await self.prompts.decode(ids)
            whole["choices"][0]["text"] = text + whole["choices"][0]["text"]
        return whole

    async def _answer(
        self,
        call: Call,
        handler: Any,
        request: Any,
        body: dict[str, Any],
        length: int,
        name: str,
        param: str,
        ids: list[int] | None = None,
    ) -> None:
        """The handler's answer to this body, to the client.

        length  of the prompt, which came as the parameter `param`; ids: itself, in place of a text
        """
        options, is_text = RequestOptions.of(request, ids), isinstance(request, schemas.Generation)
        body["stream"] = request.stream
        response = await self._handled(handler, body, self._config(request, length, param), name, options)
        if not request.stream:
            whole = finished(json.loads(response.body), options.cut)
            return await respond(call.send, 200, whole, x_request_id=name)
        usage = is_text and request.stream_options is not None and request.stream_options.include_usage
        edit = edit_text(options, usage, length) if is_text else edit_response(options)
        await call.stream(edited(response.body_iterator, edit, done=is_text), name)

    def _config(self, request: schemas.CommonRequest, length: int, param: str) -> dict[str, Any]:
        """The generation_config for an answer to a prompt of this length. Raises Refused where it leaves none."""
        most = self.prompts.left_after(length, param)
        self.prompts.check_ids("logit_bias", getattr(request, "logit_bias", None) or {})
        return generation_config(request, self.manager.defaults, most)

    async def _handled(self, handler: Any, body: Any, config: Any, name: str, options: RequestOptions) -> Any:
        body |= {"model": self.manager.name, "generation_config": json.dumps(config)}
        try:
            with noted(name, options):
                return await handler.handle_request(body, name)
        except HTTPException as error:  # of a field that they do not know, 422; in OpenAI's API that is 400
            status = 400 if error.status_code == 422 else error.status_code
            raise Refused(status, str(error.detail)) from error


def _tools(request: schemas.Chat | schemas.Responses) -> dict[str, Any]:
    if not request.tools or request.tool_choice == "none":
        return {}
    return {"tools": [tool.model_dump(exclude_none=True) for tool in request.tools]}
