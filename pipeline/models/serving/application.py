"""The server's ASGI application: paths, limits, errors, and answers in OpenAI's format.

Requests go to transformers' handlers, with each parameter in the form that these support. The application rejects
parameters that the handlers would ignore or fail on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import time
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from pydantic import BaseModel
from pydantic_core import from_json
from transformers.cli.serving import utils
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import GenerationState

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.pipeline.models.generating import Speed
from ktconvert.pipeline.models.serving import answers, completions, metrics, pages, request_parsing, schemas
from ktconvert.pipeline.models.serving.authentication import RequestError, require_api_key, shutdown_error
from ktconvert.pipeline.models.serving.call import EVENT_STREAM, Call
from ktconvert.pipeline.models.serving.constraints import Constraint, Constraints
from ktconvert.pipeline.models.serving.model_manager import ServedModel, chat_inputs
from ktconvert.pipeline.models.serving.pages import PathDescription
from ktconvert.pipeline.models.serving.request_options import RequestOptions, generation_config, register_options
from ktconvert.pipeline.models.serving.scheduler import Scheduler
from ktconvert.pipeline.models.serving.stream_decoder import find_reasoning_texts
from ktconvert.pipeline.report.text import one_line

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

MIN_BODY_LIMIT = 1 << 20  # bytes of a request's body
BYTES_PER_TOKEN = 16  # bytes of a body for each token of the context: ids, text and \uXXXX need less
MAX_ACTIVE = 256  # requests at the same time; further ones get a 503, after which OpenAI's clients try again
DISCONNECTED = 499  # status in logs and metrics if the client disconnected before the end of the answer
QUIET = {"/health", "/metrics"}  # paths that programs ask all the time, and that the log leaves out
FAILED = "the server failed to answer; see its log"
# For each kind of request: its handler, the prefix of its id, and the parameter that holds the prompt.
KINDS: dict[type[schemas.CommonRequest], tuple[Any, str, str]] = {
    schemas.Chat: (ChatCompletionHandler, "chatcmpl-", "messages"),
    schemas.Completion: (CompletionHandler, "cmpl-", "prompt"),
    schemas.Responses: (ResponseHandler, "", "input"),
}
PUBLIC = {"/", "/docs", "/health"}  # paths that need no key
PATHS = (
    PathDescription("POST", schemas.Chat.path, "The next message of a chat.", schemas.Chat, pages.CHAT_EXAMPLE),
    PathDescription(
        "POST", schemas.Completion.path, "The continuation of a text.", schemas.Completion, {"prompt": "import os"}
    ),
    PathDescription(
        "POST", schemas.Responses.path, "A chat in the format of Responses.", schemas.Responses, {"input": "Hello!"}
    ),
    PathDescription("GET", "/v1/models", "The model and its adapters; /v1/models/NAME describes one of them."),
    PathDescription(
        "POST", "/load_model", "The first request of transformers chat.", schemas.LoadModel, {"model": "NAME"}
    ),
    PathDescription("GET", "/metrics", "Metrics of the server for Prometheus."),
    PathDescription("GET", "/health", "Whether the server answers; needs no key."),
    PathDescription("GET", "/", "A page with a chat; needs no key, but asks for it."),
    PathDescription("GET", "/docs", "This page; needs no key."),
)

log = logging.getLogger("uvicorn.error")


class Application:
    """The ASGI application.

    active  number of requests that are being answered
    """

    def __init__(self, manager: ServedModel, scheduler: Scheduler, key: bytes | None) -> None:
        """Set up the handlers and paths.

        scheduler  generates tokens
        key        the API key for every path but those in PUBLIC
        """
        self.manager = manager
        self.scheduler = scheduler
        self.key = key
        self.prompts = manager.prompts
        self.constraints: Constraints | None = None  # made by the first request that needs it: for a second, perhaps
        state: Any = GenerationState()
        state.get_manager = lambda *_arguments, **_settings: scheduler
        self.handlers = {kind: handler(manager, state) for kind, (handler, _, _) in KINDS.items()}
        self.active = 0
        self.metrics = metrics.Metrics(scheduler)
        self.body_limit = max(MIN_BODY_LIMIT, BYTES_PER_TOKEN * self.prompts.context)
        respond: dict[str, Callable[[Call], Awaitable[None]]] = {
            "/": lambda call: call.respond_with(self.chat_page, pages.HTML, **pages.HEADERS),
            "/docs": self._describe_paths,
            "/health": lambda call: call.respond(200, {"status": "ok"}),
            "/metrics": lambda call: call.respond_with(self.metrics.format(), metrics.CONTENT_TYPE),
            "/v1/models": self._list_models,
            schemas.Chat.path: self._create_chat_completion,
            schemas.Completion.path: self._create_completion,
            schemas.Responses.path: self._create_response,
            "/load_model": self._load_model,
        }
        self.routes = {path.path: (path, respond[path.path]) for path in PATHS}
        self.chat_page = pages.read_chat_page(key is not None)
        self.docs_page = pages.render_docs_page(PATHS, key is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI calls it."""
        has_begun = is_streaming = False

        async def track_and_send(message: Message) -> None:
            nonlocal has_begun, is_streaming
            if message["type"] == "http.response.start":
                has_begun = True
                call.status = message["status"]
                is_streaming = any(value.startswith(EVENT_STREAM) for _, value in message["headers"])
            elif not message.get("more_body", False):
                is_streaming = False
                call.is_complete = not call.disconnected.is_set()
            await send(message)

        call = Call(scope, receive, track_and_send, uuid.uuid4().hex)
        try:
            await self._route(call)
        except RequestError as error:
            call.refusal = error.message
            with contextlib.suppress(RequestError):
                await call.read_body(0)  # a client that is still sending would not read the response
            more = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            await call.respond(error.status, error.body(), **more)
        except asyncio.CancelledError:  # the server shuts down, and has waited for this answer
            shutdown = shutdown_error()
            if not has_begun:
                await call.respond(shutdown.status, shutdown.body())
            elif is_streaming:
                event = answers.format_event(shutdown.body())
                await send({"type": "http.response.body", "body": event, "more_body": False})
        except Exception:
            if has_begun:
                raise
            log.exception("%s: request %s failed", scope["path"], call.id)
            await call.respond(500, RequestError(500, FAILED).body())
        finally:
            self.active -= call.is_active
            if call.watcher is not None:
                call.watcher.cancel()
            self._report(call)

    def _report(self, call: Call) -> None:
        """Log an answered request with its speed, and add it to the metrics."""
        path = call.scope["path"]
        seconds = time.perf_counter() - call.begin
        status = call.status if call.is_complete else DISCONNECTED
        speeds = [options.speed for options in call.generations if options.speed is not None]
        self.metrics.observe(path if path in self.routes else "other", status, seconds, speeds)
        level = logging.DEBUG if path in QUIET else logging.INFO
        client, _ = call.scope["client"] or ("unknown", 0)
        speed = f", {Speed.add(speeds).describe()}" if speeds else ""
        request = f"{client} {call.scope['method']} {urllib.parse.quote(path)}"
        reason = f": {one_line(call.refusal)}" if call.refusal else ""
        log.log(level, "%s %s: %d in %.2f s%s%s", call.id, request, status, seconds, speed, reason)

    async def _route(self, call: Call) -> None:
        path = call.scope["path"]
        method = call.scope["method"]
        if path not in PUBLIC:
            require_api_key(call.scope["headers"], self.key)
        description, respond = self.routes.get(path, (None, None))
        if path.startswith("/v1/models/"):
            description, _ = self.routes["/v1/models"]
            respond = self._show_model
        if description is None or respond is None:
            raise RequestError(404, f"unknown path {path}; use {', '.join(self.routes)}", None, "unknown_url")
        if method != description.method:
            raise RequestError(405, f"{path}: answers {description.method}, not {method}", None, "method_not_allowed")
        await respond(call)

    async def _describe_paths(self, call: Call) -> None:
        page = pages.insert_address(self.docs_page, call.scope["scheme"], call.scope["headers"])
        await call.respond_with(page, pages.HTML, **pages.HEADERS)

    async def _list_models(self, call: Call) -> None:
        await call.respond(200, {"object": "list", "data": [*map(self.manager.describe, self.manager.names)]})

    async def _show_model(self, call: Call) -> None:
        name = self.manager.resolve_name(call.scope["path"].removeprefix("/v1/models/"))
        await call.respond(200, self.manager.describe(name))

    async def _load_model(self, call: Call) -> None:
        request = await self._read_request(call, schemas.LoadModel)
        await call.stream(self.manager.load_model_streaming(request.model), call.id)

    async def _read_request(self, call: Call, kind: type[Any]) -> Any:
        """Return the request, with the name of the model or adapter to use.

        Raises RequestError for too many requests, a body that is too long or no JSON, and invalid parameters.
        """
        data = await call.read_body(self.body_limit)
        if self.active >= MAX_ACTIVE:
            raise RequestError(503, f"{MAX_ACTIVE} requests are being answered; ask again later")
        call.is_active = True
        self.active = self.active + 1
        request = await asyncio.to_thread(_parse_body, kind, data)
        request.model = self.manager.resolve_name(request.model)
        return request

    async def _create_chat_completion(self, call: Call) -> None:
        request: schemas.Chat = await self._read_request(call, schemas.Chat)
        messages, tools = await asyncio.to_thread(lambda: (_dump(request.messages), _tools(request)))
        settings = request.chat_template_kwargs or {}
        inputs = await self.prompts.encode_chat(messages, tools, settings, request.effort(), "messages")
        await self._answer(call, request, inputs)

    async def _create_response(self, call: Call) -> None:
        request: schemas.Responses = await self._read_request(call, schemas.Responses)
        handler = self.handlers[schemas.Responses]

        def normalize() -> tuple[Any, Any]:
            items = {"input": _dump(request.input_with_instructions())}
            return handler._normalize_input(items), handler._normalize_tools(_tools(request))

        messages, tools = await asyncio.to_thread(normalize)
        inputs = await self.prompts.encode_chat(messages, tools, {}, request.effort(), "input")
        await self._answer(call, request, inputs)

    async def _create_completion(self, call: Call) -> None:
        """Answer /v1/completions; the texts of several prompts are generated one after another."""
        request: schemas.Completion = await self._read_request(call, schemas.Completion)
        prompts = [await self.prompts.encode(prompt) for prompt in request.prompt]
        if request.stream:
            return await self._answer(call, request, None, prompts[0])
        configs = [self._generation_config(request, len(ids)) for ids in prompts]
        texts = [*zip(request.prompt, prompts, configs, strict=True)]
        whole: list[dict[str, Any]] = []
        for (prompt, ids, config), number in itertools.product(texts, range(request.n)):
            request_id = f"cmpl-{call.id}" + (f"-{len(whole)}" if whole else "")
            with self._register(call, request, request_id, number, ids) as options:
                answer = await completions.complete(self.manager, self.scheduler, request, prompt, config, request_id)
            whole.append(answers.set_finish_reason(answer, options.truncated))
        await call.respond(200, answers.merge_answers(whole, request.n), whole[0]["id"])

    @contextlib.contextmanager
    def _register(
        self, call: Call, request: Any, request_id: str, number: int, ids: list[int] | None
    ) -> Iterator[RequestOptions]:
        """Register the options of one of a request's choices until the end of the context."""
        options = RequestOptions.from_request(request, call.disconnected, number, ids)
        call.generations.append(options)
        with register_options(request_id, options):
            yield options

    async def _answer(self, call: Call, request: Any, inputs: Any, ids: list[int] | None = None) -> None:
        """Send the handler's answers to the client; several choices are generated one after another.

        inputs  the model's inputs, for a chat or response
        ids     token ids of the prompt, for a completion
        """
        _, prefix, prompt = KINDS[type(request)]
        request_id = prefix + call.id
        length = inputs["input_ids"].shape[-1] if ids is None else len(ids)
        # A placeholder for the prompt, which the handler gets from chat_inputs or the registered options.
        body = {prompt: [] if ids is None else ".", "stream": request.stream, "model": request.model}
        body["generation_config"] = json.dumps(self._generation_config(request, length))
        chat_inputs.set(inputs)
        constrain = await self._prepare_constraint(request, inputs) if ids is None else None

        async def generate(number: int) -> tuple[Any, RequestOptions]:
            try:
                with self._register(call, request, request_id, number, ids) as options:
                    if constrain is not None:
                        options.constraint = await asyncio.to_thread(constrain)
                    return await self.handlers[type(request)].handle_request(body, request_id), options
            except HTTPException as error:  # 422 for an unknown field, which is 400 in OpenAI's API
                status = 400 if error.status_code == 422 else error.status_code
                raise RequestError(status, str(error.detail)) from error

        choices = getattr(request, "n", 1)
        if request.stream:
            return await call.stream(_stream_choices(request, generate, choices, length), request_id)
        whole = []
        for number in range(choices):
            response, options = await generate(number)
            whole.append(answers.convert_answer(json.loads(response.body), options))
        await call.respond(200, answers.merge_answers(whole, choices), request_id)

    async def _prepare_constraint(
        self, request: schemas.Chat | schemas.Responses, inputs: Any
    ) -> Callable[[], Constraint] | None:
        """Return the function that starts the constraint of an answer; None if it may be any text.

        Raises RequestError for an unsupported schema, tool or model.
        """
        functions = request.list_forced_functions()
        schema = request.json_schema()
        if not functions and schema is None:
            return None
        param = "tool_choice" if functions else "response_format" if isinstance(request, schemas.Chat) else "text"

        def prepare() -> Callable[[], Constraint]:
            try:
                self.constraints = self.constraints or self._make_constraints()
            except (ValueError, UnsupportedError) as error:
                raise RequestError(400, f"{param}: not supported for this model: {error}", param) from error
            call_grammar, json_grammar = self.constraints.make_call_grammar, self.constraints.make_json_grammar
            grammar = call_grammar(functions) if functions else json_grammar(schema or {}, param)
            end = utils._decode_prefix(self.prompts.tokenizer, inputs["input_ids"])
            return functools.partial(self.constraints.start, grammar, end)

        constrain: Callable[[], Constraint] = await self.prompts.run_in_thread(prepare)
        return constrain

    def _make_constraints(self) -> Constraints:
        reasoning = find_reasoning_texts(self.manager.processor, self.manager.model)
        end_ids = self.scheduler.end_ids(self.manager.model.generation_config)
        return Constraints(self.prompts.tokenizer, self.prompts.vocabulary, end_ids, reasoning)

    def _generation_config(self, request: schemas.CommonRequest, length: int) -> dict[str, Any]:
        """Return the generation_config for a prompt of this length. Raises RequestError if no token is left."""
        max_length = self.prompts.count_remaining_tokens(length, KINDS[type(request)][2])
        self.prompts.check_token_ids("logit_bias", getattr(request, "logit_bias", None) or {})
        return generation_config(request, self.manager.defaults, max_length)


def _parse_body(kind: type[Any], data: bytes) -> Any:
    """Return the request of a body. Call it in a thread: a megabyte of short messages takes half a second."""
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    return request_parsing.parse_request(kind, body)


def _dump(items: Iterable[BaseModel]) -> list[dict[str, Any]]:
    return [item.model_dump(exclude_none=True) for item in items]


def _tools(request: schemas.Chat | schemas.Responses) -> list[dict[str, Any]] | None:
    return _dump(request.tools) if request.tools and request.tool_choice[0] != "none" else None


async def _stream_choices(
    request: Any, generate: Callable[[int], Awaitable[tuple[Any, RequestOptions]]], choices: int, prompt_tokens: int
) -> AsyncIterator[bytes]:
    """Yield the events of all choices, one choice after another.

    generate  returns the handler's response for the choice of an index, and its options
    """
    is_text = isinstance(request, schemas.TextRequest)
    has_usage = is_text and request.stream_options is not None and request.stream_options.include_usage
    completion_tokens = 0
    last: dict[str, Any] = {}
    for number in range(choices):
        response, options = await generate(number)
        async for chunk in response.body_iterator:
            for content in answers.parse_events(chunk):
                last = answers.convert_event(content, options, number)
                completion_tokens += (last.pop("usage", None) or {}).get("completion_tokens", 0)
                yield answers.format_event(last)
        if "error" in last:
            break
    if has_usage and "error" not in last:
        yield answers.format_event(
            {**last, "choices": [], "usage": answers.count_usage(prompt_tokens, completion_tokens)}
        )
    if is_text:
        yield answers.DONE
