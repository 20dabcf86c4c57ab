"""Schemas of the requests. Unknown parameters are rejected by name.

A known parameter is supported, or has no effect on the answer, or may only have a value that changes nothing
(`allow_only`); docs/reference/server.md has the table.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ktconvert.pipeline.models.serving.messages import (
    FAIL_FAST,
    FlatTool,
    Function,
    Item,
    Message,
    Strict,
    TextPart,
    Tool,
    allow_only,
    invalid_value,
)

MAX_PROMPTS = 256  # prompts of one request
MAX_STOPS = 16  # stop strings of one request
MAX_STOP_LENGTH = 256  # characters of a stop string
MAX_SCHEMA = 1 << 16  # characters of a JSON schema
SCHEMA_FIELDS = {"name", "description", "schema", "strict"}
MAX_BIASES = 1024
MAX_CHOICES = 16  # answers to one prompt
MAX_LOGPROBS = 20  # likeliest tokens at a position
MAX_METADATA = 16  # entries, the limit of OpenAI's API
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
INT64 = 1 << 63


def is_token_ids(value: Any) -> bool:
    """Return whether a value is a list of integers that is not empty."""
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def as_prompts(value: Any) -> list[Any]:
    """Return the prompts of a completion as a list. One prompt may be a text or token ids."""
    prompts = [value] if isinstance(value, str) or is_token_ids(value) else value
    if not isinstance(prompts, list) or not all(isinstance(p, str) or is_token_ids(p) for p in prompts):
        raise invalid_value("must be a string, a list of token ids, or a list of either; none may be empty")
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid_value(f"a request may have 1 to {MAX_PROMPTS} prompts, but this one has {len(prompts)}")
    return prompts


def as_stops(value: Any) -> Any:
    """Return stop strings as a list; one may be a string."""
    if isinstance(value, str):
        return [value]
    if value is not None and not isinstance(value, list):
        raise invalid_value("has to be a string or a list of strings")
    return value


def as_items(value: Any) -> Any:
    """Return the input of /v1/responses as a list of items.

    A string becomes the only message, consecutive text parts become one message of the user, and the reasoning of
    earlier responses is left out.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid_value("has to be a string or a list")
    items: list[Any] = []
    for kind, group in groupby(value, lambda item: item.get("type") if isinstance(item, dict) else None):
        same_kind = list(group)
        if kind == "input_text":
            items.append({"type": "message", "role": "user", "content": same_kind})
        elif kind != "reasoning":
            items += same_kind
    first = items[0] if items else None
    if isinstance(first, dict) and first.get("type", "message") != "message":
        raise invalid_value("has to begin with a message")
    return items


def as_token_ids(value: Any) -> Any:
    """Return logit_bias with integers as keys, which are strings in JSON."""
    if not isinstance(value, dict):
        return value
    if not all(TOKEN_ID.fullmatch(name) for name in value):
        raise invalid_value("keys have to be token ids")
    return {int(name): bias for name, bias in value.items()}


def as_json_schema(value: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a response format; None for plain text.

    Chats have it under json_schema, responses beside the type.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid_value("type has to be text, json_object or json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    declared = value.get("json_schema", {name: more for name, more in value.items() if name != "type"})
    if not isinstance(declared, dict) or declared.keys() - SCHEMA_FIELDS:
        raise invalid_value(f"json_schema has to be an object with {', '.join(sorted(SCHEMA_FIELDS))}")
    schema = declared.get("schema")
    if not isinstance(schema, dict):
        raise invalid_value("the schema has to be an object")
    if len(json.dumps(schema)) > MAX_SCHEMA:
        raise invalid_value(f"the schema has more than {MAX_SCHEMA} characters")
    return schema


def as_tool_choice(value: Any) -> tuple[str, str | None]:
    """Return a tool choice as auto, none, required or function, and the name of the function."""
    if value in ("auto", "none", "required"):
        return value, None
    function = value.get("function", value) if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid_value("has to be auto, none, required, or an object with the type function and a name")
    return "function", name


JsonFormat = Annotated[dict[str, Any] | None, BeforeValidator(as_json_schema)]
ToolChoice = Annotated[tuple[str, str | None], BeforeValidator(as_tool_choice)]
NO_LOGPROBS = "only chats and completions return log probabilities"
UNSUPPORTED = "only the default is supported; leave it out"
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Defaults(Strict):
    """Parameters of vLLM and llama.cpp's server, which clients send with the default values of these."""

    ignore_eos: Annotated[Any, allow_only(False, reason=UNSUPPORTED)] = None
    skip_special_tokens: Annotated[Any, allow_only(True, reason=UNSUPPORTED)] = None
    include_stop_str_in_output: Annotated[Any, allow_only(False, reason=UNSUPPORTED)] = None
    use_beam_search: Annotated[Any, allow_only(False, reason=UNSUPPORTED)] = None
    length_penalty: Annotated[Any, allow_only(1, 1.0, reason=UNSUPPORTED)] = None
    min_tokens: Annotated[Any, allow_only(0, reason=UNSUPPORTED)] = None
    stop_token_ids: Annotated[Any, allow_only([], reason=UNSUPPORTED)] = None
    bad_words: Annotated[Any, allow_only([], reason=UNSUPPORTED)] = None


class CommonRequest(Defaults):
    """Parameters of all three endpoints."""

    path: ClassVar[str]

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT64), AfterValidator(lambda k: max(k, 0))] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    service_tier: Annotated[
        Any, allow_only("auto", "default", reason="only one service tier is available; leave it out")
    ] = None
    store: Annotated[Any, allow_only(False, reason="storing is not supported; leave it out")] = None
    # Without effect on the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None


class StreamOptions(Strict):
    """Options of a stream. include_obfuscation, padding that hides the length of chunks, is not supported."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[Any, allow_only(False, reason=UNSUPPORTED)] = None
    include_obfuscation: Annotated[Any, allow_only(False, reason="is not supported; leave it out")] = None


class ReasoningOptions(Strict):
    """Amount of reasoning before an answer. Summaries are not supported."""

    effort: Effort | None = None
    summary: Annotated[Any, allow_only(reason=UNSUPPORTED)] = None


class WithReasoning(Strict):
    """Parameters of requests to models that may reason."""

    reasoning: ReasoningOptions | None = None

    def effort(self) -> str | None:
        """Return the requested effort; None for the model's default."""
        return self.reasoning.effort if self.reasoning is not None else None


class TextRequest(CommonRequest):
    """Parameters of chats and completions."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True), BeforeValidator(as_stops)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(as_token_ids), Field(max_length=MAX_BIASES)] | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1

    @model_validator(mode="after")
    def _require_stream(self) -> TextRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid_value("stream_options: only with stream")
        return self


class WithTools(Strict):
    """Parameters of requests with tools. Subclasses declare `tools`, whose type differs."""

    tool_choice: ToolChoice = ("auto", None)
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tool_choice(self) -> WithTools:
        kind, name = self.tool_choice
        names = [function.name for function in self.list_functions()]
        if kind == "required" and not names:
            raise invalid_value("tool_choice: required needs tools")
        if kind == "function" and name not in names:
            raise invalid_value(f"tool_choice: {name} is not among the tools")
        if kind == "auto" and names and self.json_schema() is not None:
            raise invalid_value("tool_choice: give none, required or a function; auto is not supported with a format")
        return self

    def list_functions(self) -> list[Function]:
        """Return the functions of all tools."""
        return [getattr(tool, "function", tool) for tool in getattr(self, "tools", None) or ()]

    def list_forced_functions(self) -> list[Function]:
        """Return the functions of which the answer has to call one; none if the model decides."""
        kind, name = self.tool_choice
        is_forced = kind in ("required", "function")
        return [function for function in self.list_functions() if is_forced and name in (None, function.name)]

    def json_schema(self) -> dict[str, Any] | None:
        """Return the schema of the answer; None for plain text."""
        raise NotImplementedError


class Chat(TextRequest, WithTools, WithReasoning):
    """A request to /v1/chat/completions."""

    path: ClassVar[str] = "/v1/chat/completions"

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[Tool], FAIL_FAST] | None = None
    functions: Annotated[Any, allow_only([], reason="was replaced by tools; use tools")] = None
    function_call: Annotated[Any, allow_only("auto", "none", reason="was replaced by tool_choice; use that")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: JsonFormat = None
    modalities: Annotated[Any, allow_only(["text"], reason="only text is supported")] = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: Annotated[Any, allow_only(True, reason=UNSUPPORTED)] = None
    verbosity: Annotated[Any, allow_only("medium", reason=UNSUPPORTED)] = None
    prediction: Any = None
    echo: Annotated[Any, allow_only(False, reason="only /v1/completions supports it")] = None
    add_generation_prompt: Annotated[Any, allow_only(True, reason=UNSUPPORTED)] = None
    continue_final_message: Annotated[Any, allow_only(False, reason=UNSUPPORTED)] = None

    @model_validator(mode="after")
    def _require_logprobs(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs: only with logprobs")
        return self

    def json_schema(self) -> dict[str, Any] | None:
        """Return the schema of the answer; None for plain text."""
        return self.response_format

    def effort(self) -> str | None:
        """Return the requested effort; None for the model's default."""
        return self.reasoning_effort or super().effort()


class Completion(TextRequest):
    """A request to /v1/completions."""

    path: ClassVar[str] = "/v1/completions"

    prompt: Annotated[list[Any], BeforeValidator(as_prompts)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[Any, allow_only(1, reason="each prompt gets one answer; leave it out")] = None
    suffix: Annotated[Any, allow_only("", reason="text cannot be inserted before a suffix; leave it out")] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Completion:
        if len(self.prompt) * self.n > MAX_PROMPTS:
            raise invalid_value(f"n: a request may have {MAX_PROMPTS} answers, those to all prompts together")
        if self.max_tokens == 0 and not self.echo:
            raise invalid_value("max_tokens: 0 is only supported with echo")
        if self.stream and (self.logprobs is not None or self.echo or len(self.prompt) > 1):
            name = "logprobs" if self.logprobs is not None else "echo" if self.echo else "prompt"
            raise invalid_value(f"{name}: {'several are' if name == 'prompt' else 'is'} not supported with stream")
        if self.stop and self.logprobs is not None:
            raise invalid_value("stop: not supported together with logprobs")
        return self


class TextOptions(Strict):
    """The format of a response's text."""

    format: JsonFormat = None
    verbosity: Annotated[Any, allow_only("medium", reason=UNSUPPORTED)] = None


class Responses(CommonRequest, WithTools, WithReasoning):
    """A request to /v1/responses."""

    path: ClassVar[str] = "/v1/responses"

    input: Annotated[list[Item], Field(min_length=1, fail_fast=True), BeforeValidator(as_items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FlatTool], FAIL_FAST] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of OpenAI's own tools
    text: TextOptions | None = None
    stream_options: StreamOptions | None = None
    top_logprobs: Annotated[Any, allow_only(0, reason=NO_LOGPROBS)] = None
    truncation: Annotated[Any, allow_only("disabled", reason="inputs that are too long are rejected; leave it out")] = (
        None
    )
    include: Annotated[Any, allow_only([], reason="only the default output is supported; leave it out")] = None
    background: Annotated[
        Any, allow_only(False, reason="responses in the background are not supported; leave it out")
    ] = None

    def json_schema(self) -> dict[str, Any] | None:
        """Return the schema of the answer; None for plain text."""
        return self.text.format if self.text is not None else None

    def input_with_instructions(self) -> list[Item]:
        """Return the input after the instructions.

        Templates allow one system message: if the input begins with one, the instructions become its first part.
        """
        if not self.instructions:
            return self.input
        instructions = [TextPart(type="input_text", text=self.instructions)]
        first = self.input[0]
        if first.role == "system":
            return [first.model_copy(update={"content": instructions + (first.content or [])}), *self.input[1:]]
        return [Item(role="system", content=instructions), *self.input]


class LoadModel(Strict):
    """A request to /load_model, with which `transformers chat` begins."""

    model: str
