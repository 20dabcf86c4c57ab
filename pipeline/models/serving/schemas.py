"""The requests that are answered: what each parameter may be. All else is refused by name.

A parameter is honoured, or it changes no answer, or it may only have the value that changes nothing (`only`);
docs/SERVING.md has the table.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from ktconvert.pipeline.models.serving.errors import Refused
from ktconvert.pipeline.models.serving.fields import (
    FIRST,
    MOST_BIASES,
    MOST_METADATA,
    MOST_STOPS,
    UNKNOWN,
    Bias,
    FlatTool,
    Item,
    Message,
    Part,
    Penalty,
    Stop,
    Strict,
    Tool,
    at_most,
    fault,
    items,
    only,
    prompts,
    texts,
    token_ids,
)

INT64 = 1 << 63
# What pydantic's types of errors are called here; others keep its words.
WORDS = {
    UNKNOWN: "is no parameter that this server honours; leave it out",
    "missing": "is missing",
    "dict_type": "has to be an object",
    "model_type": "has to be an object",
}


class Request(Strict):
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
    metadata: Annotated[dict[str, str], at_most(MOST_METADATA)] | None = None


class StreamOptions(Strict):
    """include_obfuscation would add what hides the length of pieces: there is none."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, only(False, why="is not done; leave it out")] = None


class Generation(Request):
    """What chats and completions share."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True), BeforeValidator(texts)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(token_ids), at_most(MOST_BIASES)] | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Any, only(1, why="one answer is given for each request; send the request again for another")] = None

    @model_validator(mode="after")
    def _streamed(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options: only with stream")
        return self


class Chat(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[Tool], FIRST] | None = None
    tool_choice: Annotated[Any, only("auto", "none", why="only auto and none are honoured")] = None
    parallel_tool_calls: Annotated[Any, only(True, why="cannot be forbidden; leave it out")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: Annotated[Any, only({"type": "text"}, why="only text is given: a form cannot be enforced")] = None
    modalities: Annotated[Any, only(["text"], why="only text is given")] = None
    logprobs: Annotated[Any, only(False, why="are given by /v1/completions only")] = None


class Completion(Generation):
    """POST /v1/completions."""

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


class Responses(Request):
    """POST /v1/responses."""

    input: Annotated[list[Item], Field(min_length=1, fail_fast=True), BeforeValidator(items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FlatTool], FIRST] | None = None
    tool_choice: Annotated[Any, only("auto", "none", why="only auto and none are honoured")] = None
    parallel_tool_calls: Annotated[Any, only(True, why="cannot be forbidden; leave it out")] = None
    text: Annotated[Any, only({"format": {"type": "text"}}, why="only text is given: a form cannot be enforced")] = None
    truncation: Annotated[Any, only("disabled", why="what is too long is refused; leave it out")] = None
    include: Annotated[Any, only([], why="nothing more is included; leave it out")] = None
    background: Annotated[Any, only(False, why="answers come at once; leave it out")] = None

    def whole_input(self) -> list[Item]:
        """The input, after the instructions: templates know one system message, so a first one is their second part."""
        if not self.instructions:
            return self.input
        said = [Part(type="input_text", text=self.instructions)]
        first = self.input[0]
        if first.role == "system":
            return [first.model_copy(update={"content": said + (first.content or [])}), *self.input[1:]]
        return [Item(role="system", content=said), *self.input]


class LoadModel(Strict):
    """POST /load_model, by which `transformers chat` begins."""

    model: str


def read(kind: type[Any], body: Any) -> Any:
    """The request that this body is; null stands for a parameter that was left out.

    Raises Refused with 400 and the parameter's name.
    """
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
