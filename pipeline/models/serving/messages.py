"""Messages, tool calls and tools, as requests have them: what each parameter may be. All else is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

UNKNOWN = "unknown"  # the type of the error that names a parameter


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


def json_object(value: Any) -> Any:
    """The arguments of a call, which templates read as a mapping. Models that call a function without arguments write
    nothing or null, and clients send that back.
    """
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return "{}"
    with suppress(TypeError, ValueError, RecursionError):
        if isinstance(json.loads(value), dict):
            return value
    raise fault("has to be a JSON object in a string")


FIRST = Field(fail_fast=True)
FUNCTION = Annotated[
    Any, only("function", why="only functions can be called"), AfterValidator(lambda kind: kind or "function")
]
Text = Annotated[str, Field(min_length=1)]
OLDER_ROLE = BeforeValidator(lambda role: "system" if role == "developer" else role)  # templates know this name
Nothing = Annotated[Any, only("", why="this server cannot read it; leave it out")]
Unused = Annotated[Any, Field(exclude=True)]  # accepted, and no part of what the chat template gets


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


class Marked(Strict):
    """Marks that clients and their libraries add to messages, parts, calls and tools for other providers."""

    cache_control: Unused = None
    provider_specific_fields: Unused = None
    extra_content: Unused = None


class TextPart(Marked):
    """A piece of a message's content. Of text only."""

    type: Annotated[
        Any,
        only("text", "input_text", "output_text", why="only parts of text can be read"),
        AfterValidator(lambda kind: kind or "text"),
    ]
    text: str
    annotations: Unused = None
    logprobs: Unused = None


class Called(Strict):
    name: Text
    arguments: Annotated[str, BeforeValidator(json_object)] = "{}"


class ToolCall(Marked):
    id: str | None = None
    type: FUNCTION = "function"
    index: Unused = None
    function: Called


class Message(Marked):
    """One message of a chat. What clients send back of an answer of ours is accepted with it."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], OLDER_ROLE]
    content: Annotated[list[TextPart], FIRST, BeforeValidator(parts)] | None = None
    tool_calls: Annotated[Annotated[list[ToolCall], FIRST] | None, BeforeValidator(lambda calls: calls or None)] = None
    tool_call_id: str | None = None
    refusal: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    id: Unused = None
    name: Annotated[str | None, Field(exclude=True)] = None
    reasoning_content: Unused = None
    reasoning: Unused = None
    reasoning_details: Unused = None
    thinking_blocks: Unused = None
    annotations: Unused = None

    @model_validator(mode="after")
    def _whole(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise fault("has no content")
        return self


class Function(BaseModel):
    """A function that the model may call; its schema is for the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: Text
    cache_control: Unused = None


class Tool(Marked):
    type: FUNCTION
    function: Function


class FlatTool(Function):
    """A tool of /v1/responses."""

    type: FUNCTION


def join_parts(value: Any) -> Any:
    """Return the output of a function with a list of text parts joined into one text, as for a message."""
    return " ".join(TextPart.model_validate(part).text for part in value) if isinstance(value, list) else value


class Item(BaseModel):
    """One item of the input of /v1/responses; outputs of earlier responses are accepted with their ids and status."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Annotated[Literal["system", "user", "assistant"], OLDER_ROLE] | None = None
    content: Annotated[list[TextPart], FIRST, BeforeValidator(parts)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Annotated[str, BeforeValidator(json_object)] | None = None
    output: Annotated[str, BeforeValidator(join_parts)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Item:
        if self.type == "function_call" and self.arguments is None:
            self.arguments = "{}"
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name"),
            "function_call_output": ("call_id", "output"),
        }
        if missing := [name for name in needed.get(self.type, ()) if getattr(self, name) is None]:
            raise fault(f"lacks {' and '.join(missing)}")
        return self
