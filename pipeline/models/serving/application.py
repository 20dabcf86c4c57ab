"""The server's ASGI application: paths, limits, errors, and answers in OpenAI's form. What passes goes to transformers'
handlers, with every parameter in the form that is honoured there; what they would ignore, or break at, is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from pydantic_core import from_json
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import GenerationState

from ktconvert.pipeline.models.serving import access, schemas, scoring
from ktconvert.pipeline.models.serving.access import Refused
from ktconvert.pipeline.models.serving.model_manager import OneModel, chat_inputs
from ktconvert.pipeline.models.serving.request_options import RequestOptions, generation_config, noted
from ktconvert.pipeline.models.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

BODY = 1 << 20  # bytes of a request, at least
PER_TOKEN = 16  # bytes of a request for each token of the context: ids, text and \uXXXX take less
ANSWERED = 256  # requests at the same time; further ones get a 503, which OpenAI's clients try again after
DRAINED = 1 << 26  # bytes that are read and thrown away, so that a client reads why it was refused
EVENTS = b"text/event-stream"
FAILED = "the server failed to answer; its log says why"
# Each request's handler, the beginning of its answer's id, and the parameter that holds the prompt.
KINDS: dict[type[schemas.CommonRequest], tuple[Any, str, str]] = {
    schemas.Chat: (ChatCompletionHandler, "chatcmpl-", "messages"),
    schemas.Completion: (CompletionHandler, "cmpl-", "prompt"),
    schemas.Responses: (ResponseHandler, "", "input"),
}

log = logging.getLogger("uvicorn.error")


@dataclass
class Call:
    """One request, under whose id generation knows it. Neither Starlette nor transformers' handlers ask whether the
    client still waits for its answer: that is watched from the end of the body on.

    unread, came  whether some of the body may be to come, and bytes of it that came
    counts        whether it is one of the requests that are being answered
    gone          set when the client has gone
    """

    scope: Scope
    receive: Receive
    send: Send
    id: str
    unread: bool = True
    came: int = 0
    counts: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    watching: asyncio.Task[None] | None = None

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
        self.watching = self.watching or asyncio.create_task(self._watch())
        return data

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        self.gone.set()

    async def _left(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def respond(self, status: int, body: dict[str, Any], name: str = "", **headers: str) -> None:
        """A whole answer. name: in place of the request's id; headers: more of them."""
        headers |= {"x-request-id": name or self.id}
        response = Response(json.dumps(body), status, headers, "application/json")
        await response(self.scope, self._left, self.send)

    async def stream(self, events: AsyncIterator[bytes | str], name: str) -> None:
        response = StreamingResponse(events, media_type=EVENTS.decode(), headers={"x-request-id": name})
        await response(self.scope, self._left, self.send)


class Application:
    def __init__(self, manager: OneModel, scheduler: Scheduler, key: bytes | None) -> None:
        """scheduler: generates; key: the API key that all but /health asks for."""
        self.manager, self.scheduler, self.key, self.prompts = manager, scheduler, key, manager.prompts
        state: Any = GenerationState()
        state.get_manager = lambda *_arguments, **_settings: scheduler
        self.handlers = {kind: handler(manager, state) for kind, (handler, _, _) in KINDS.items()}
        self.answered = 0  # requests, at this moment
        self.limit = max(BODY, PER_TOKEN * self.prompts.context)
        self.routes: dict[str, tuple[str, Callable[[Call], Awaitable[None]]]] = {
            "/health": ("GET", lambda call: call.respond(200, {"status": "ok"})),
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
            more = {"www-authenticate": "Bearer"} if refused.status == 401 else {}
            await call.respond(refused.status, refused.body(), **more)
        except asyncio.CancelledError:  # by the server, which ends, and has waited for this answer
            last = access.ending()
            if not begun:
                await call.respond(last.status, last.body())
            elif streaming:
                await send({"type": "http.response.body", "body": event(last.body()), "more_body": False})
        except Exception:
            if begun:
                raise
            log.exception("%s: request %s failed", scope["path"], call.id)
            await call.respond(500, Refused(500, FAILED).body())
        finally:
            self.answered -= call.counts
            if call.watching is not None:
                call.watching.cancel()

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
        await call.respond(200, {"object": "list", "data": [*map(self.manager.entry, self.manager.names)]})

    async def _model(self, call: Call) -> None:
        name = self.manager.name_of(call.scope["path"].removeprefix("/v1/models/"))
        await call.respond(200, self.manager.entry(name))

    async def _load_model(self, call: Call) -> None:
        request = await self._read(call, schemas.LoadModel)
        await call.stream(self.manager.load_model_streaming(request.model), call.id)

    async def _read(self, call: Call, kind: type[Any]) -> Any:
        """The request, with the name of who answers. Raises Refused: a body too long, no JSON, or no such request."""
        data = await call.read(self.limit)
        if self.answered >= ANSWERED:
            raise Refused(503, f"{ANSWERED} requests are being answered; ask again later")
        call.counts, self.answered = True, self.answered + 1
        request = await asyncio.to_thread(_parse, kind, data)
        request.model = self.manager.name_of(request.model)
        return request

    async def _chat(self, call: Call) -> None:
        request: schemas.Chat = await self._read(call, schemas.Chat)
        messages, tools = await asyncio.to_thread(lambda: (_dump(request.messages), _tools(request)))
        settings = request.chat_template_kwargs or {}
        await self._answer(call, request, await self.prompts.chat(messages, tools, settings, param="messages"))

    async def _responses(self, call: Call) -> None:
        request: schemas.Responses = await self._read(call, schemas.Responses)
        handler = self.handlers[schemas.Responses]

        def normalize() -> tuple[Any, Any]:
            items = {"input": _dump(request.whole_input())}
            return handler._normalize_input(items), handler._normalize_tools(_tools(request))

        messages, tools = await asyncio.to_thread(normalize)
        await self._answer(call, request, await self.prompts.chat(messages, tools, {}, param="input"))

    async def _completion(self, call: Call) -> None:
        request: schemas.Completion = await self._read(call, schemas.Completion)
        prompts = [await self.prompts.ids(prompt) for prompt in request.prompt]
        if request.stream:
            return await self._answer(call, request, None, prompts[0])
        configs = [self._config(request, len(ids)) for ids in prompts]
        answers = []
        for number, (ids, config) in enumerate(zip(prompts, configs, strict=True)):
            name, prompt = f"cmpl-{call.id}" + (f"-{number}" if number else ""), request.prompt[number]
            with noted(name, RequestOptions.of(request, call.gone, ids)) as options:
                whole = await scoring.completion(self.manager, self.scheduler, request, prompt, config, name)
            answers.append(finished(whole, options.cut))
        whole = answers[0]
        whole["choices"] = [{**answer["choices"][0], "index": n} for n, answer in enumerate(answers)]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        whole["usage"] = {count: sum(answer["usage"][count] for answer in answers) for count in counts}
        await call.respond(200, whole, whole["id"])

    async def _answer(self, call: Call, request: Any, inputs: Any, ids: list[int] | None = None) -> None:
        """The handler's answer to the client. inputs: the model's, of a chat; ids: the prompt of a completion."""
        options, is_text = RequestOptions.of(request, call.gone, ids), isinstance(request, schemas.Generation)
        _, prefix, prompt = KINDS[type(request)]
        name, length = prefix + call.id, inputs["input_ids"].shape[-1] if ids is None else len(ids)
        config = json.dumps(self._config(request, length))
        # The prompt is handed over beside the request.
        body = {prompt: [] if ids is None else ".", "stream": request.stream, "model": request.model}
        body["generation_config"] = config
        chat_inputs.set(inputs)
        try:
            with noted(name, options):
                response = await self.handlers[type(request)].handle_request(body, name)
        except HTTPException as error:  # of a field that they do not know, 422; in OpenAI's API that is 400
            status = 400 if error.status_code == 422 else error.status_code
            raise Refused(status, str(error.detail)) from error
        if not request.stream:
            return await call.respond(200, finished(json.loads(response.body), options.cut), name)
        usage = is_text and request.stream_options is not None and request.stream_options.include_usage
        await call.stream(edited(response.body_iterator, options, length if usage else None, done=is_text), name)

    def _config(self, request: schemas.CommonRequest, length: int) -> dict[str, Any]:
        """The generation_config for an answer to a prompt of this length. Raises Refused where it leaves none."""
        most = self.prompts.left_after(length, KINDS[type(request)][2])
        self.prompts.check_ids("logit_bias", getattr(request, "logit_bias", None) or {})
        return generation_config(request, self.manager.defaults, most)


def _parse(kind: type[Any], data: bytes) -> Any:
    """The request; in a thread, since a megabyte of short messages takes half a second."""
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    return schemas.read(kind, body)


def _dump(items: Iterable[BaseModel]) -> list[dict[str, Any]]:
    return [item.model_dump(exclude_none=True) for item in items]


def _tools(request: schemas.Chat | schemas.Responses) -> list[dict[str, Any]] | None:
    return _dump(request.tools) if request.tools and request.tool_choice != "none" else None


# --- answers --------------------------------------------------------------------------------------


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def edited(
    stream: AsyncIterator[str], options: RequestOptions, prompt: int | None, done: bool
) -> AsyncIterator[bytes]:
    """The events of a handler's stream, each of whose chunks holds whole ones, in OpenAI's form. prompt: the number of
    its tokens, where the client asks for numbers; done: whether OpenAI ends such a stream with [DONE]
    """
    async for chunk in stream:
        contents = map(_content, chunk.split("\n\n")[:-1])
        yield b"".join(event(new) for old in contents for new in edit(old, options.cut, prompt))
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
    """A whole answer, or a stream's last event, with how it ended: theirs call a response always completed, and a text
    cut off that ends with the last token that was permitted.
    """
    if answer.get("object") == "response":
        reason = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {**answer, **reason} if cut else answer
    for choice in answer["choices"]:
        if choice.get("finish_reason", "stop") in ("stop", "length"):
            choice["finish_reason"] = "length" if cut else "stop"
    return answer


def edit(content: Any, cut: bool, prompt: int | None) -> Iterator[Any]:
    """An event as OpenAI has it: the last one says how the answer ended; numbers of tokens have their own."""
    if content.get("type") == "response.completed":
        content["response"] = finished(content["response"], cut)
        content["type"] = f"response.{content['response']['status']}"
    if any(choice.get("finish_reason") for choice in content.get("choices", ())):
        finished(content, cut)
    usage = content.pop("usage", None)
    yield content
    if prompt is not None and usage is not None:
        usage |= {"prompt_tokens": prompt, "total_tokens": prompt + usage["completion_tokens"]}
        yield {**content, "choices": [], "usage": usage}
