"""Schemas of messages, tool calls and tools in requests. Unknown parameters are rejected by name."""

from __future__ import annotations

import json
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

UNKNOWN = "unknown"  # type of the error for an unknown parameter
MAX_NAME = 64  # characters of an unknown parameter that are compared with the names of known ones
CLOSE = 0.75  # similarity of the known parameter that the error suggests


def invalid_value(message: str) -> PydanticCustomError:
    """Return the error for a validator to raise. parse_request puts the parameter's name before the message."""
    return PydanticCustomError("refused", message.replace("{", "{{").replace("}", "}}"))


def allow_only(*values: Any, reason: str) -> BeforeValidator:
    """Return the validator of a parameter that may only have these values, which change nothing, or null."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(allowed) and value == allowed for allowed in values):
            raise invalid_value(reason)
        return value

    return BeforeValidator(check)


def as_parts(value: Any) -> Any:
    """Return a message's content as a list of parts; a string becomes its only part."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise invalid_value("has to be a string or a list of text parts")
    kinds = [part.get("type") or "text" for part in value if isinstance(part, dict)]
    if others := [kind for kind in kinds if kind not in TEXT_TYPES]:
        raise invalid_value(f"has a part of the type {others[0]!r}; only parts of text can be read")
    return value


def as_json_object(value: Any) -> Any:
    """Return the arguments of a call as a JSON object in a string, which templates read as a mapping.

    Models that call a function without arguments write nothing or null, and clients send that back.
    """
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return "{}"
    with suppress(TypeError, ValueError, RecursionError):
        if isinstance(json.loads(value), dict):
            return value
    raise invalid_value("has to be a JSON object in a string")


TEXT_TYPES = ("text", "input_text", "output_text")  # of parts
FAIL_FAST = Field(fail_fast=True)
FunctionType = Annotated[
    Any,
    allow_only("function", reason="only functions can be called"),
    AfterValidator(lambda kind: kind or "function"),
]
NonEmptyText = Annotated[str, Field(min_length=1)]
OLDER_ROLE = AfterValidator(lambda role: "system" if role == "developer" else role)  # templates know this name
Unsupported = Annotated[Any, allow_only("", reason="this server cannot read it; leave it out")]
Ignored = Annotated[Any, Field(exclude=True)]  # accepted, but not passed to the chat template


class Strict(BaseModel):
    """A schema without type conversion ("5" and true are no numbers) that rejects unknown parameters."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                near = get_close_matches(name[:MAX_NAME], cls.model_fields, 1, CLOSE)
                raise PydanticCustomError(UNKNOWN, "{name}", {"name": name, "near": near})
        return value


class WithProviderFields(Strict):
    """Fields that client libraries add to messages, parts, calls and tools for other providers."""

    cache_control: Ignored = None
    provider_specific_fields: Ignored = None
    extra_content: Ignored = None


class TextPart(WithProviderFields):
    """A text part of a message's content."""

    type: Annotated[Any, AfterValidator(lambda kind: kind or "text")]  # checked by as_parts
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class FunctionCall(Strict):
    """The function of a tool call, and its arguments as a JSON object in a string."""

    name: NonEmptyText
    arguments: Annotated[str, BeforeValidator(as_json_object)] = "{}"


class ToolCall(WithProviderFields):
    id: str | None = None
    type: FunctionType = "function"
    index: Ignored = None
    function: FunctionCall


class Message(WithProviderFields):
    """A message of a chat. Accepts the fields of an earlier answer that clients send back."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], OLDER_ROLE]
    content: Annotated[list[TextPart], FAIL_FAST, BeforeValidator(as_parts)] | None = None
    tool_calls: Annotated[Annotated[list[ToolCall], FAIL_FAST] | None, BeforeValidator(lambda calls: calls or None)] = (
        None
    )
    tool_call_id: str | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    id: Ignored = None
    name: Annotated[str | None, Field(exclude=True)] = None
    reasoning_content: Ignored = None
    reasoning: Ignored = None
    reasoning_details: Ignored = None
    thinking_blocks: Ignored = None
    annotations: Ignored = None

    @model_validator(mode="after")
    def _require_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise invalid_value("has no content")
        return self


class Function(BaseModel):
    """A function that the model may call. The chat template gets its schema unchanged."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: NonEmptyText
    cache_control: Ignored = None


class Tool(WithProviderFields):
    type: FunctionType
    function: Function


class FlatTool(Function):
    """A tool of /v1/responses."""

    type: FunctionType


def join_parts(value: Any) -> Any:
    """Return the output of a function, with a list of text parts joined into one text as in a message."""
    return " ".join(TextPart.model_validate(part).text for part in value) if isinstance(value, list) else value


class Item(BaseModel):
    """An item of the input of /v1/responses. Accepts outputs of earlier responses with their ids and status."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Annotated[Literal["system", "developer", "user", "assistant"], OLDER_ROLE] | None = None
    content: Annotated[list[TextPart], FAIL_FAST, BeforeValidator(as_parts)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Annotated[str, BeforeValidator(as_json_object)] | None = None
    output: Annotated[str, BeforeValidator(join_parts)] | None = None

    @model_validator(mode="after")
    def _require_fields(self) -> Item:
        if self.type == "function_call" and self.arguments is None:
            self.arguments = "{}"
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name"),
            "function_call_output": ("call_id", "output"),
        }
        if missing := [name for name in needed.get(self.type, ()) if getattr(self, name) is None]:
            raise invalid_value(f"lacks {' and '.join(missing)}")
        return self
