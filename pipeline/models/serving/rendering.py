"""Chat templates as transformers applies them, but rendered in another process, in bounded time and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import processing_utils, tokenization_utils_base
from transformers.utils import chat_template_utils

from ktconvert.pipeline.models.serving.template_process import job_to_render, the_process

_render, _find_variables = chat_template_utils.render_jinja_template, chat_template_utils._get_template_variables
_variables: dict[str, frozenset[str]] = {}  # of templates that were compiled in the process
# What `apply_chat_template` gets in place of a rendered chat, in the context in which this is set.
_in_place: ContextVar[Callable[[dict[str, Any]], str] | None] = ContextVar("in_place", default=None)


def _render_or_replace(*chats: Any, **arguments: Any) -> Any:
    replace = _in_place.get()
    return _render(*chats, **arguments) if replace is None else ([replace(arguments)], [[]])


def _list_variables(template: str) -> frozenset[str]:
    return _variables.get(template) or _find_variables(template)


of_tokenizers: Any = tokenization_utils_base
of_processors: Any = processing_utils
of_tokenizers.render_jinja_template = of_processors.render_jinja_template = _render_or_replace
of_processors._get_template_variables = _list_variables  # theirs would compile it here


@contextmanager
def _replace_rendering(replace: Callable[[dict[str, Any]], str]) -> Any:
    token = _in_place.set(replace)
    try:
        yield
    finally:
        _in_place.reset(token)


class _RenderRequest(Exception):
    """The rendering that `apply_chat_template` came to."""


class ChatTemplate:
    """The chat template of a processor, or of a tokenizer."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    async def find_variables(self, tools: Any) -> frozenset[str]:
        """Return what the template for a chat with these tools reads. Raises TemplateError."""
        template = self.processor.chat_template
        if isinstance(template, dict):
            template = template["tool_use" if tools and "tool_use" in template else "default"]
        if template not in _variables:
            _variables[template] = await the_process().find_variables(template)
        return _variables[template]

    async def render(self, job: bytes | str) -> str:
        """Return the text of a chat; job: of `prepare`. Raises TemplateError."""
        return job if isinstance(job, str) else await the_process().render(job)

    def prepare(self, messages: Any, tools: Any, settings: Mapping[str, Any]) -> bytes | str:
        """Return what is to be rendered, or the text where the tokenizer has its own way without a template."""

        def stop(arguments: dict[str, Any]) -> str:
            raise _RenderRequest(job_to_render(arguments))

        with _replace_rendering(stop):
            try:
                return str(self._apply(messages, tools, settings, tokenize=False))
            except _RenderRequest as request:
                job: bytes = request.args[0]
                return job

    def tokenize(self, text: str, messages: Any, tools: Any, settings: Mapping[str, Any]) -> Any:
        """Return the model's inputs for a chat whose text was rendered."""
        with _replace_rendering(lambda _: text):
            return self._apply(messages, tools, settings, tokenize=True, return_dict=True, return_tensors="pt")

    def _apply(self, messages: Any, tools: Any, settings: Mapping[str, Any], **how: Any) -> Any:
        return self.processor.apply_chat_template(messages, tools=tools, add_generation_prompt=True, **settings, **how)
