"""The text that a client gets of a model's token ids, in pieces as they come, and never a word of the prompt.

Where a chat template does not begin an answer as transformers' parser of answers expects, transformers' server has the
parser read the whole prompt, and the answer begins with what the user said. Here the parser gets the beginning that the
template writes, or nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from transformers.cli.serving import chat_completion, response, utils
from transformers.utils.chat_parsing.response_templates import load_response_template

from ktconvert.pipeline.models.serving.rendering import ChatTemplate

# What a user says where only the template matters; it must not depend on it.
PROBES = ("a", "b")
THINKING: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})
HELD = 64  # tokens whose text may still change before it is given nevertheless
_template, _decoded = utils.get_response_template, utils._decode_prefix  # before `parse_answers_of`
CUT = "\N{REPLACEMENT CHARACTER}"  # what a character decodes to while some of its bytes are missing


class StreamDecoder:
    """Takes ids one at a time and gives what is certain already, as the handlers of transformers' server take it.

    parser     a ResponseParser of transformers, which is fed the special tokens too; None: all is text
    ends, stop ids, and strings, that end an answer and are no part of it
    """

    def __init__(self, tokenizer: Any, parser: Any, ends: Sequence[int], stop: Sequence[str]) -> None:
        self.tokenizer, self.parser = getattr(tokenizer, "tokenizer", tokenizer), parser
        self.ends, self.stop = frozenset(ends), tuple(stop)
        self.stopped = False  # at a stop string
        self.ended = False  # there, or with an end token; else the text is cut off
        self._ids: list[int] = []
        self._given = 0  # ids of which the text was given
        self._held = ""  # text that may be the beginning of a stop string
        self._unread = ""  # text that the parser has taken and not given back

    def put(self, token: int) -> list[Any]:
        """What this token completes. After a stop string nothing comes any more."""
        self.ended = self.stopped or token in self.ends
        if self.ended:
            return []
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._given]), self._decode(self._ids)
        if len(now) <= len(before) or (now.endswith(CUT) and len(self._ids) - self._given < HELD):
            return []
        # What came before stays for the next decoding: many tokenizers write the first word of a text differently.
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return self._text(now[len(before) :])

    def end(self) -> list[Any]:
        last = list[Any]()
        if not self.stopped:
            last += self._text(self._decode(self._ids)[len(self._decode(self._ids[: self._given])) :])
        if not self.stopped:
            last += self._parsed(self._held)
        return last + (self._guarded(lambda parser: parser.finalize()[1]) if self.parser is not None else [])

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.parser is None))

    def _text(self, text: str) -> list[Any]:
        """Text up to the first stop string, less an end that may be the beginning of one."""
        text = self._held + text
        if found := [at for at in map(text.find, self.stop) if at >= 0]:
            self.stopped, self.ended, self._held = True, True, ""
            return self._parsed(text[: min(found)])
        held = max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - held :]
        return self._parsed(text[: len(text) - held])

    def _parsed(self, text: str) -> list[Any]:
        if not text or self.parser is None:
            return [text] if text else []
        self._unread += text
        return self._guarded(lambda parser: parser.feed(text))

    def _guarded(self, step: Callable[[Any], list[dict[str, Any]]]) -> list[Any]:
        """What the parser gives; a tool call that is none (cut short, or no JSON) comes as the text that it is."""
        try:
            events = step(self.parser)
            items = utils.response_events_to_chunks(events)
        except (ValueError, KeyError, TypeError, RuntimeError):
            self.parser = None
            rest, self._unread = self._unread, ""
            return [rest] if rest else []
        if events and not any(event.get("dirty") for event in events):
            self._unread = ""
        return items


class GeneratedIds(list[int]):
    """A generation's new ids, and what StreamDecoder gave of them."""

    items: Sequence[Any] = ()


def parse_answers_of(chat_template: ChatTemplate, model: Any) -> None:
    """Have the handlers of transformers' server read this model's answers by `parse_message`, and parse them only where
    its chat template writes the words from which parsing starts, beginning with what it writes after these ("<think>");
    other answers are plain text. The handlers look these functions up in their modules.
    """
    template = _template(chat_template.processor, model)
    beginnings = set() if template is None else asyncio.run(_beginnings(chat_template, template))
    # Tokens that hold these words: each has at least a byte, and the first may lose a space.
    most = max((len(f"{words}{more}".encode()) for words, more in beginnings), default=0) + 1

    def prefix(tokenizer: Any, input_ids: Any) -> str:
        prompt = _decoded(tokenizer, input_ids[..., -most:])
        more = (more for words, more in beginnings if prompt.endswith(words + more))
        return max(more, key=len, default="").rstrip()  # a parser keeps spaces for later, and these are not generated

    modules: Any = utils, chat_completion, response
    modules[0].get_response_template = lambda processor, model: template if beginnings else None
    modules[0]._decode_prefix = prefix
    modules[1].parse_assistant_message = modules[2].parse_assistant_message = parse_message


async def _beginnings(chat_template: ChatTemplate, template: Any) -> set[tuple[str, str]]:
    """How this chat template may begin an answer: the words from which parsing starts, and what it writes after."""
    anchor, found = load_response_template(template).start_anchor_re, set[tuple[str, str]]()
    for settings in THINKING:
        ends = set[tuple[str, str] | None]()
        for text in PROBES:
            messages = [{"role": "user", "content": text}]
            try:
                await chat_template.find_variables(None)  # compiled there before it is here
                prompt = await chat_template.render(chat_template.prepare(messages, None, settings))
            except Exception:  # a template is a program that comes with the model, and may refuse so short a chat
                ends.add(None)
                continue
            last = max(anchor.finditer(prompt), key=lambda match: match.end(), default=None)
            ends.add(last and (last[0], prompt[last.end() :]))
        if len(ends) == 1:
            found |= {end for end in ends if end is not None}
    return found


def parse_message(
    processor: Any, model: Any, generated_ids: GeneratedIds, **more: Any
) -> tuple[str, str | None, list[Any] | None]:
    """A whole answer as (text, reasoning, tool calls): what a stream of it would give, in one piece."""
    items = generated_ids.items
    calls = [item for item in items if isinstance(item, utils.ToolCall)]
    reasoning = "".join(item for item in items if isinstance(item, utils.ReasoningText))
    return "".join(filter(is_text, items)), reasoning or None, calls or None


def is_text(item: Any) -> bool:
    return isinstance(item, str) and not isinstance(item, utils.ReasoningText)
