"""What requests are made of: prompts, messages, calls, and the values that parameters may have."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MOST_PROMPTS = 256  # of one request
MOST_STOPS = 16  # of one request, each of at most LONGEST_STOP characters
LONGEST_STOP = 256
MOST_BIASES = 1024
MOST_METADATA = 16  # as in OpenAI's API
UNKNOWN = "unknown"  # the type of the error that names a parameter
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


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


def at_most(count: int) -> BeforeValidator:
    """Of an object with so many entries; no more are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise fault(f"may have at most {count} entries, this one has {len(value)}")
        return value

    return BeforeValidator(check)


def texts(value: Any) -> list[str]:
    """Stop strings: one or a list."""
    return [value] if isinstance(value, str) else value


def parts(value: Any) -> Any:
    """A message's content: a string is its only part."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise fault("has to be a string or a list of text parts")
    return value


def is_ids(value: Any) -> bool:
    """Whether these are token ids."""
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
    """The names in logit_bias, as numbers."""
    if not isinstance(value, dict):
        return value
    if not all(TOKEN_ID.fullmatch(name) for name in value):
        raise fault("has to name token ids")
    return {int(name): bias for name, bias in value.items()}


def older_role(value: Any) -> Any:
    """Two names for one role; templates know the older one."""
    return "system" if value == "developer" else value


def json_object(value: Any) -> Any:
    """The arguments of a call, which templates read as a mapping."""
    try:
        good = isinstance(json.loads(value), dict)
    except (TypeError, ValueError, RecursionError):
        good = False
    if not good:
        raise fault("has to be a JSON object in a string")
    return value


FIRST = Field(fail_fast=True)
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Nothing = Annotated[Any, only(why="this server cannot read it; leave it out")]


class Strict(BaseModel):
    """No guessing at types: "5" and true are no numbers. The first fault is told, others are not looked for."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                raise PydanticCustomError(UNKNOWN, "{name}", {"name": name})
        return value


class Part(Strict):
    """A piece of a message's content. Of text only."""

    type: Annotated[Any, only("text", "input_text", "output_text", why="only parts of text can be read")]
    text: str
    annotations: Any = None
    logprobs: Any = None


class Called(Strict):
    """The function of a tool call."""

    name: Text
    arguments: Annotated[str, BeforeValidator(json_object)]


class ToolCall(Strict):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: Called


class Message(Strict):
    """One message of a chat. What clients send back of an answer of ours is accepted with it."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(older_role)]
    content: Annotated[list[Part], FIRST, BeforeValidator(parts)] | None = None
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
    """A tool of a chat."""

    type: Annotated[Any, only("function", why="only functions can be called")]
    function: Function


class FlatTool(Function):
    """A tool of /v1/responses."""

    type: Annotated[Any, only("function", why="only functions can be called")]


class Item(BaseModel):
    """One item of the input of /v1/responses; outputs of earlier responses are accepted with their ids and status."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(older_role)] | None = None
    content: Annotated[list[Part], FIRST, BeforeValidator(parts)] | None = None
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
