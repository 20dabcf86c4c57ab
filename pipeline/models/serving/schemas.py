"""The requests that are answered: what each parameter may be. All else is refused by name.

A parameter is honoured, or it changes no answer, or it may only have the value that changes nothing (`only`);
docs/reference/server.md has the table.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ktconvert.pipeline.models.serving.access import Refused

MOST_PROMPTS = 256  # of one request
MOST_STOPS = 16  # of one request, each of at most LONGEST_STOP characters
LONGEST_STOP = 256
MOST_BIASES = 1024
MOST_METADATA = 16  # as in OpenAI's API
UNKNOWN = "unknown"  # the type of the error that names a parameter
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
INT64 = 1 << 63
# What pydantic's types of errors are called here; others keep its words.
WORDS = {UNKNOWN: "is no parameter that this server honours; leave it out", "missing": "is missing"}
WORDS |= dict.fromkeys(("dict_type", "model_type"), "has to be an object")


def fault(message: str) -> PydanticCustomError:
    """What a validator raises: the message comes after the parameter's name."""
    return PydanticCustomError("refused", message.replace("{", "{{").replace("}", "}}"))


def only(*values: Any, why: str) -> BeforeValidator:
    """Of a parameter that may only have values which change nothing, or null."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            raise fault(why)
        return value

    return BeforeValidator(check)


def parts(value: Any) -> Any:
    """A message's content: a string is its only part."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise fault("has to be a string or a list of text parts")
    return value


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def prompts(value: Any) -> list[Any]:
    """A text, token ids, or a list of either, as a list."""
    several = [value] if isinstance(value, str) or is_ids(value) else value
    if not isinstance(several, list) or not all(isinstance(p, str) or is_ids(p) for p in several):
        raise fault("has to be a text, a list of token ids, or a list of either; none may be empty")
    if not 1 <= len(several) <= MOST_PROMPTS:
        raise fault(f"one request may have 1 to {MOST_PROMPTS} prompts, this one has {len(several)}")
    return several


def items(value: Any) -> Any:
    """The input of /v1/responses: a string is its only message, and parts of text in a row are one of the user's."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    messages: list[Any] = []
    for are_parts, run in groupby(value, lambda item: isinstance(item, dict) and item.get("type") == "input_text"):
        several = list(run)
        messages += [{"type": "message", "role": "user", "content": several}] if are_parts else several
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("type", "message") != "message":
        raise fault("has to begin with a message")
    return messages


def token_ids(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if not all(TOKEN_ID.fullmatch(name) for name in value):
        raise fault("has to name token ids")
    return {int(name): bias for name, bias in value.items()}


def json_object(value: Any) -> Any:
    """The arguments of a call, which templates read as a mapping."""
    with suppress(TypeError, ValueError, RecursionError):
        if isinstance(json.loads(value), dict):
            return value
    raise fault("has to be a JSON object in a string")


FIRST = Field(fail_fast=True)
FUNCTION = Annotated[Any, only("function", why="only functions can be called")]
CHOICE = Annotated[Any, only("auto", "none", why="only auto and none are honoured")]
PARALLEL = Annotated[Any, only(True, why="cannot be forbidden; leave it out")]
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
ONE_OR_MORE = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
OLDER_ROLE = BeforeValidator(lambda role: "system" if role == "developer" else role)  # templates know this name
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Nothing = Annotated[Any, only(why="this server cannot read it; leave it out")]


class Strict(BaseModel):
    """No guessing at types: "5" and true are no numbers. The first fault is named, others are not looked for."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                raise PydanticCustomError(UNKNOWN, "{name}", {"name": name})
        return value


class TextPart(Strict):
    """A piece of a message's content. Of text only."""

    type: Annotated[Any, only("text", "input_text", "output_text", why="only parts of text can be read")]
    text: str
    annotations: Any = None
    logprobs: Any = None


class Called(Strict):
    name: Text
    arguments: Annotated[str, BeforeValidator(json_object)]


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: Called


class Message(Strict):
    """One message of a chat. What clients send back of an answer of ours is accepted with it."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], OLDER_ROLE]
    content: Annotated[list[TextPart], FIRST, BeforeValidator(parts)] | None = None
    tool_calls: Annotated[list[ToolCall], FIRST] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    annotations: Any = None

    @model_validator(mode="after")
    def _whole(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise fault("has no content")
        return self


class Function(BaseModel):
    """A function that the model may call; its schema is for the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: Text


class Tool(Strict):
    type: FUNCTION
    function: Function


class FlatTool(Function):
    """A tool of /v1/responses."""

    type: FUNCTION


class Item(BaseModel):
    """One item of the input of /v1/responses; outputs of earlier responses are accepted with their ids and status."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Annotated[Literal["system", "user", "assistant"], OLDER_ROLE] | None = None
    content: Annotated[list[TextPart], FIRST, BeforeValidator(parts)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Annotated[str, BeforeValidator(json_object)] | None = None
    output: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Item:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }
        if missing := [name for name in needed.get(self.type, ()) if getattr(self, name) is None]:
            raise fault(f"lacks {' and '.join(missing)}")
        return self


# --- requests --------------------------------------------------------------------------------------


class CommonRequest(Strict):
    """What all three endpoints know."""

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    service_tier: Annotated[Any, only("auto", "default", why="there is one service; leave it out")] = None
    store: Annotated[Any, only(False, why="nothing is stored; leave it out")] = None
    # They change no answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MOST_METADATA)] | None = None


class StreamOptions(Strict):
    """include_obfuscation would add what hides the length of pieces: there is none."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, only(False, why="is not done; leave it out")] = None


class Generation(CommonRequest):
    """What chats and completions share."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True), ONE_OR_MORE] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(token_ids), Field(max_length=MOST_BIASES)] | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Any, only(1, why="one answer is given for each request; send the request again for another")] = None

    @model_validator(mode="after")
    def _streamed(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options: only with stream")
        return self


class Chat(Generation):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[Tool], FIRST] | None = None
    tool_choice: CHOICE = None
    parallel_tool_calls: PARALLEL = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: Annotated[Any, only({"type": "text"}, why="only text is given: a form cannot be enforced")] = None
    modalities: Annotated[Any, only(["text"], why="only text is given")] = None
    logprobs: Annotated[Any, only(False, why="are given by /v1/completions only")] = None


class Completion(Generation):
    prompt: Annotated[list[Any], BeforeValidator(prompts)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[Any, only(1, why="one answer is given for each prompt; leave it out")] = None
    suffix: Annotated[Any, only("", why="text cannot be inserted before a suffix; leave it out")] = None

    @model_validator(mode="after")
    def _together(self) -> Completion:
        if self.max_tokens == 0 and not self.echo:
            raise fault("max_tokens: 0 gives nothing without echo")
        if self.stream and (self.logprobs is not None or self.echo or len(self.prompt) > 1):
            name = "logprobs" if self.logprobs is not None else "echo" if self.echo else "prompt"
            raise fault(f"{name}: {'several come' if name == 'prompt' else 'comes'} without stream only")
        if self.stop and self.logprobs is not None:
            raise fault("stop: not together with logprobs")
        return self


class Responses(CommonRequest):
    input: Annotated[list[Item], Field(min_length=1, fail_fast=True), BeforeValidator(items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FlatTool], FIRST] | None = None
    tool_choice: CHOICE = None
    parallel_tool_calls: PARALLEL = None
    text: Annotated[Any, only({"format": {"type": "text"}}, why="only text is given: a form cannot be enforced")] = None
    truncation: Annotated[Any, only("disabled", why="what is too long is refused; leave it out")] = None
    include: Annotated[Any, only([], why="nothing more is included; leave it out")] = None
    background: Annotated[Any, only(False, why="answers come at once; leave it out")] = None

    def whole_input(self) -> list[Item]:
        """The input, after the instructions: templates know one system message, so a first one is their second part."""
        if not self.instructions:
            return self.input
        instructions = [TextPart(type="input_text", text=self.instructions)]
        first = self.input[0]
        if first.role == "system":
            return [first.model_copy(update={"content": instructions + (first.content or [])}), *self.input[1:]]
        return [Item(role="system", content=instructions), *self.input]


class LoadModel(Strict):
    """POST /load_model, by which `transformers chat` begins."""

    model: str


def read(kind: type[Any], body: Any) -> Any:
    """The request that this body is; null: left out. Raises Refused with 400 and the parameter's name."""
    if not isinstance(body, dict):
        raise Refused(400, "the body has to be a JSON object")
    try:
        return kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    names = [*first["loc"], *([first["msg"]] if first["type"] == UNKNOWN else [])]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")
    what = WORDS.get(first["type"]) or re.sub(r"^\w+ should", "has to", first["msg"]).replace(" after validation", "")
    if not names:  # of parameters that do not go together
        path, _, what = what.partition(": ")
    raise Refused(400, f"{path}: {what}", path)
