"""Prompts and chats as the model's inputs, within the limits of its context.

transformers applies chat templates, but they are rendered in a separate process, in bounded time and memory.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import processing_utils, tokenization_utils_base
from transformers.cli.serving.utils import BaseHandler, Modality
from transformers.utils import chat_template_utils

from ktconvert.pipeline.models.loading import context_length
from ktconvert.pipeline.models.serving.authentication import RequestError
from ktconvert.pipeline.models.serving.template_process import encode_render_job, shared_process

DEFAULT_CONTEXT = 32768  # tokens, for a model whose config does not say
CHUNK = 1 << 16  # characters that are tokenized at a time to find out whether a long text is too long
LONG = 4 * CHUNK  # characters of a long text
MAX_RENDERING = 8  # chats whose templates are rendered at the same time

_render, _find_variables = chat_template_utils.render_jinja_template, chat_template_utils._get_template_variables
_variables: dict[str, frozenset[str]] = {}  # template compiled in the other process -> its variables
# In a context where this is set, `apply_chat_template` calls it instead of rendering a chat.
_replacement: ContextVar[Callable[[dict[str, Any]], str] | None] = ContextVar("replacement", default=None)


def _render_or_replace(*chats: Any, **arguments: Any) -> Any:
    replace = _replacement.get()
    return _render(*chats, **arguments) if replace is None else ([replace(arguments)], [[]])


def _list_variables(template: str) -> frozenset[str]:
    return _variables.get(template) or _find_variables(template)


_tokenizers: Any = tokenization_utils_base
_processors: Any = processing_utils
_tokenizers.render_jinja_template = _processors.render_jinja_template = _render_or_replace
_processors._get_template_variables = _list_variables  # the original would compile the template in this process


@contextmanager
def _replace_rendering(replace: Callable[[dict[str, Any]], str]) -> Iterator[None]:
    token = _replacement.set(replace)
    try:
        yield
    finally:
        _replacement.reset(token)


class _RenderRequest(Exception):
    """The rendering job that `apply_chat_template` asks for."""


class ChatTemplate:
    """The chat template of a processor or tokenizer."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    async def find_variables(self, tools: Any) -> frozenset[str]:
        """Return the names that the template for a chat with these tools reads. Raises TemplateError."""
        template = self.processor.chat_template
        if isinstance(template, dict):
            template = template["tool_use" if tools and "tool_use" in template else "default"]
        if template not in _variables:
            _variables[template] = await shared_process().find_variables(template)
        return _variables[template]

    async def render(self, job: bytes | str) -> str:
        """Return the text of a chat. Raises TemplateError.

        job  the job from `prepare`
        """
        return job if isinstance(job, str) else await shared_process().render(job)

    def prepare(self, messages: Any, tools: Any, settings: Mapping[str, Any]) -> bytes | str:
        """Return the job for `render`, or the text if the tokenizer formats chats without a template."""

        def stop(arguments: dict[str, Any]) -> str:
            raise _RenderRequest(encode_render_job(arguments))

        with _replace_rendering(stop):
            try:
                return str(self._apply(messages, tools, settings, tokenize=False))
            except _RenderRequest as request:
                job: bytes = request.args[0]
                return job

    def tokenize(self, text: str, messages: Any, tools: Any, settings: Mapping[str, Any]) -> Any:
        """Return the model's inputs for a chat whose rendered text is given."""
        with _replace_rendering(lambda _: text):
            return self._apply(messages, tools, settings, tokenize=True, return_dict=True, return_tensors="pt")

    def _apply(self, messages: Any, tools: Any, settings: Mapping[str, Any], **options: Any) -> Any:
        return self.processor.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, **settings, **options
        )


def find_effort_settings(variables: Collection[str], effort: str | None) -> dict[str, Any]:
    """Return the settings for a reasoning effort of a chat template that reads these names.

    Most templates can only turn reasoning on or off. Those of models that do not reason have no setting.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in variables:
        return {"reasoning_effort": effort}
    return {"enable_thinking": effort != "none"} if "enable_thinking" in variables else {}


class Prompts:
    """The tokenizer and the limits of a loaded model.

    context     most tokens of prompt and answer together
    vocabulary  number of token ids
    """

    def __init__(self, model: Any, processor: Any) -> None:
        self.context = context_length(model.config) or DEFAULT_CONTEXT
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.processor = copy.deepcopy(processor)  # two threads must not use the same fast tokenizer
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.template = ChatTemplate(self.processor)
        self._lock = asyncio.Lock()
        self._rendering = asyncio.Semaphore(MAX_RENDERING)

    async def run_in_thread(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Return the result of a function in a thread, one at a time.

        The event loop answers other requests while a long text is tokenized or decoded.
        """
        async with self._lock:
            return await asyncio.to_thread(function, *arguments, **options)

    async def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a completion's prompt. Raises RequestError for invalid ids and an empty prompt."""
        if not isinstance(prompt, str):
            self.check_token_ids("prompt", prompt)
            return list(prompt)
        await self._check_length(prompt, "prompt")
        ids = (await self.run_in_thread(self.tokenizer, prompt))["input_ids"]
        if not ids:
            raise RequestError(400, "prompt: has no tokens; give some text", "prompt")
        return list(ids)

    def check_token_ids(self, param: str, ids: Sequence[int] | Mapping[int, Any]) -> None:
        """Raise RequestError for token ids that the model does not have."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise RequestError(400, f"{param}: this model's token ids are 0 to {self.vocabulary - 1}", param)

    async def encode_chat(
        self, messages: Any, tools: Any, settings: Mapping[str, Any], effort: str | None, param: str
    ) -> Any:
        """Return the model's inputs for a chat, rendered by its chat template.

        settings  settings of the template
        effort    reasoning effort, which settings override
        param     the request's parameter with the messages

        Raises RequestError for messages, tools or settings that the template does not support.
        """
        kind = Modality.LLM if self.tokenizer is self.processor else Modality.VLM
        template = self.template

        def prepare() -> tuple[Any, bytes | str]:
            converted = BaseHandler.get_processor_inputs_from_messages(messages, kind)
            return converted, template.prepare(converted, tools, settings)

        try:
            async with self._rendering:
                variables = await template.find_variables(tools)
            self._check_settings(variables, tools, settings)
            settings = {**find_effort_settings(variables, effort), **settings}
            converted, job = await asyncio.to_thread(prepare)
            async with self._rendering:
                text = await template.render(job)
            await self._check_length(text, param)
            inputs = await self.run_in_thread(template.tokenize, text, converted, tools, settings)
        except RequestError:
            raise
        except Exception as error:  # a template is a program that comes with the model
            raise RequestError(400, f"{param}: the model's chat template rejects this: {error}", param) from error
        if inputs["input_ids"].shape[-1] == 0:
            raise RequestError(400, f"{param}: the model's chat template returns no tokens; give some text", param)
        return inputs

    def _check_settings(self, variables: Collection[str], tools: Any, settings: Mapping[str, Any]) -> None:
        """Raise RequestError for arguments that the template does not use."""
        if tools and "tools" not in variables:
            raise RequestError(400, "tools: the model's chat template does not support tools; leave them out", "tools")
        reserved = {"messages", *inspect.signature(type(self.tokenizer).apply_chat_template).parameters}
        for name, value in settings.items():
            param = f"chat_template_kwargs.{name}"
            if name in reserved or name not in variables:
                raise RequestError(400, f"{param}: the model's chat template has no such setting", param)
            if not isinstance(value, str | int | float):
                raise RequestError(400, f"{param}: has to be a string, a number, true or false", param)

    async def _check_length(self, text: str, param: str) -> None:
        """Raise RequestError for a text of more than twice the context, without tokenizing all of it.

        Each token of it would take 200 bytes of memory.
        """
        limit = 2 * self.context
        chunks = (text[begin : begin + CHUNK] for begin in range(0, len(text), CHUNK))

        def is_too_long() -> bool:
            count = 0
            return any((count := count + len(self.tokenizer(chunk)["input_ids"])) > limit for chunk in chunks)

        if len(text) > LONG and await self.run_in_thread(is_too_long):
            raise self._too_long(f"more than {limit}", param)

    def count_remaining_tokens(self, length: int, param: str) -> int:
        """Return how many tokens the context leaves after a prompt of this length. Raises RequestError for none."""
        if length >= self.context:
            raise self._too_long(str(length), param)
        return self.context - length

    def _too_long(self, count: str, param: str) -> RequestError:
        problem = f"{param}: {count} tokens, and the model's context is {self.context}, answer included"
        return RequestError(400, f"{problem}; shorten it", param, "context_length_exceeded")
