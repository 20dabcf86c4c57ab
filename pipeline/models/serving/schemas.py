"""The requests that are answered: what each parameter may be. All else is refused by name.

A parameter is honoured, or it changes no answer, or it may only have the value that changes nothing (`only`);
docs/reference/server.md has the table.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from ktconvert.pipeline.models.serving.access import Refused
from ktconvert.pipeline.models.serving.messages import (
    FIRST,
    UNKNOWN,
    FlatTool,
    Item,
    Message,
    Strict,
    TextPart,
    Tool,
    fault,
    only,
)

MOST_PROMPTS = 256  # of one request
MOST_STOPS = 16  # of one request, each of at most LONGEST_STOP characters
LONGEST_STOP = 256
MOST_BIASES = 1024
MOST_METADATA = 16  # as in OpenAI's API
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
INT64 = 1 << 63
# What pydantic's types of errors are called here; others keep its words.
WORDS = {UNKNOWN: "is no parameter that this server honours; leave it out", "missing": "is missing"}
WORDS |= dict.fromkeys(("dict_type", "model_type"), "has to be an object")


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
    """The input of /v1/responses: a string is its only message, and parts of text in a row are one of the user's.
    Reasoning of earlier responses is left out.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    messages: list[Any] = []
    for kind, run in groupby(value, lambda item: item.get("type") if isinstance(item, dict) else None):
        several = list(run)
        if kind == "reasoning":
            continue
        messages += [{"type": "message", "role": "user", "content": several}] if kind == "input_text" else several
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


CHOICE = Annotated[Any, only("auto", "none", why="only auto and none are honoured")]
NO_LOGPROBS = "logarithms of probabilities are given by /v1/completions only"
NO_REASONING = "is not honoured; leave it out, or set what the chat template reads with chat_template_kwargs"
UNSET_REASONING = ({"effort": None}, {"summary": None}, {"effort": None, "summary": None})
UNSUPPORTED = "is honoured with its default only; leave it out"
FORMAT, VERBOSITY = {"format": {"type": "text"}}, {"verbosity": "medium"}
PLAIN_TEXT: tuple[Any, ...] = ({}, FORMAT, VERBOSITY, FORMAT | VERBOSITY)
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
ONE_OR_MORE = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Defaults(Strict):
    """Parameters of vLLM and llama.cpp's server, which clients send with the values that they have there anyway."""

    ignore_eos: Annotated[Any, only(False, why=UNSUPPORTED)] = None
    skip_special_tokens: Annotated[Any, only(True, why=UNSUPPORTED)] = None
    include_stop_str_in_output: Annotated[Any, only(False, why=UNSUPPORTED)] = None
    use_beam_search: Annotated[Any, only(False, why=UNSUPPORTED)] = None
    length_penalty: Annotated[Any, only(1, 1.0, why=UNSUPPORTED)] = None
    min_tokens: Annotated[Any, only(0, why=UNSUPPORTED)] = None
    stop_token_ids: Annotated[Any, only([], why=UNSUPPORTED)] = None
    bad_words: Annotated[Any, only([], why=UNSUPPORTED)] = None


class CommonRequest(Defaults):
    """What all three endpoints know."""

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT64), AfterValidator(lambda k: max(k, 0))] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    service_tier: Annotated[Any, only("auto", "default", why="there is one service; leave it out")] = None
    store: Annotated[Any, only(False, why="nothing is stored; leave it out")] = None
    # They change no answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MOST_METADATA)] | None = None


class StreamOptions(Strict):
    """include_obfuscation would add what hides the length of pieces: there is none."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[Any, only(False, why=UNSUPPORTED)] = None
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


class WithTools(Strict):
    """tools come with the requests that know them."""

    tool_choice: CHOICE = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _parallel(self) -> WithTools:
        if self.parallel_tool_calls is False and getattr(self, "tools", None) and self.tool_choice != "none":
            raise fault("parallel_tool_calls: cannot be forbidden; leave it out")
        return self


class Chat(Generation, WithTools):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[Tool], FIRST] | None = None
    functions: Annotated[Any, only([], why="is tools today; send these")] = None
    function_call: Annotated[Any, only("auto", "none", why="is tool_choice today; send this")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: Annotated[Any, only({"type": "text"}, why="only text is given: a form cannot be enforced")] = None
    modalities: Annotated[Any, only(["text"], why="only text is given")] = None
    logprobs: Annotated[Any, only(False, why=NO_LOGPROBS)] = None
    top_logprobs: Annotated[Any, only(0, why=NO_LOGPROBS)] = None
    reasoning: Annotated[Any, only({}, *UNSET_REASONING, why=NO_REASONING)] = None
    include_reasoning: Annotated[Any, only(True, why=UNSUPPORTED)] = None
    verbosity: Annotated[Any, only("medium", why=UNSUPPORTED)] = None
    prediction: Any = None
    echo: Annotated[Any, only(False, why="is honoured by /v1/completions only")] = None
    add_generation_prompt: Annotated[Any, only(True, why=UNSUPPORTED)] = None
    continue_final_message: Annotated[Any, only(False, why=UNSUPPORTED)] = None


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


class Responses(CommonRequest, WithTools):
    input: Annotated[list[Item], Field(min_length=1, fail_fast=True), BeforeValidator(items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FlatTool], FIRST] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of OpenAI's own tools
    text: Annotated[Any, only(*PLAIN_TEXT, why="only text is given: a form cannot be enforced")] = None
    stream_options: StreamOptions | None = None
    top_logprobs: Annotated[Any, only(0, why=NO_LOGPROBS)] = None
    reasoning: Annotated[Any, only({}, *UNSET_REASONING, why=NO_REASONING)] = None
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
