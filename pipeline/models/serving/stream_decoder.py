"""Decoding of a model's token ids into the pieces of text, reasoning and tool calls that a client gets.

transformers' parser of answers expects a certain beginning. If the chat template does not write it, transformers'
server has the parser read the whole prompt, and the answer begins with the user's words. Here the parser gets only the
beginning that the template writes, or nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from transformers.cli.serving import chat_completion, response, utils
from transformers.utils.chat_parsing.response_templates import load_response_template

from ktconvert.layouts.errors import UnsupportedError
from ktconvert.pipeline.models.serving.prompts import ChatTemplate

# Texts of a user that show what the template writes, independent of the text.
PROBES = ("a", "b")
THINKING: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})
MAX_HELD = 64  # tokens to hold back because their text may still change
_get_template, _decode_prefix = utils.get_response_template, utils._decode_prefix  # transformers' own functions
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the text of an incomplete character
MIN_LOGPROB = -9999.0  # OpenAI's value for tokens without a probability


class StreamDecoder:
    """A decoder that takes one token at a time and returns the items for transformers' handlers that are final.

    parser     a ResponseParser of transformers, which also gets special tokens; None: everything is text
    end_ids    token ids that end an answer and are no part of it
    stop       strings that end an answer and are no part of it
    stopped    whether a stop string ended the answer
    ended      whether a stop string or an end token ended the answer; otherwise the text is truncated
    """

    def __init__(self, tokenizer: Any, parser: Any, end_ids: Sequence[int], stop: Sequence[str]) -> None:
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.parser = parser
        self.end_ids = frozenset(end_ids)
        self.stop = tuple(stop)
        self.stopped = self.ended = False
        self._ids: list[int] = []
        self._returned = 0  # number of ids with returned text
        self._held = ""  # text that may begin a stop string
        self._unparsed = ""  # text that the parser has read but not returned

    def add(self, token: int) -> list[Any]:
        """Return the items that a token completes. There are none after a stop string."""
        self.ended = self.stopped or token in self.end_ids
        if self.ended:
            return []
        self._ids.append(token)
        returned_text = self.decode(self._ids[: self._returned])
        text = self.decode(self._ids)
        if len(text) <= len(returned_text) or (
            text.endswith(INCOMPLETE) and len(self._ids) - self._returned < MAX_HELD
        ):
            return []
        # Keep the last ids for the next decoding: many tokenizers decode the first word of a text differently.
        self._ids, self._returned = self._ids[self._returned :], len(self._ids) - self._returned
        return self._take_text(text[len(returned_text) :])

    def end(self) -> list[Any]:
        """Return the items for the remaining text."""
        items = list[Any]()
        if not self.stopped:
            items += self._take_text(self.decode(self._ids)[len(self.decode(self._ids[: self._returned])) :])
        if not self.stopped:
            items += self._parse(self._held)
        return items + (self._run_parser(lambda parser: parser.finalize()[1]) if self.parser is not None else [])

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, with special tokens only if there is a parser."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.parser is None))

    def _take_text(self, text: str) -> list[Any]:
        """Return the items of a text up to the first stop string. Hold back an end that may begin one."""
        text = self._held + text
        if positions := [position for position in map(text.find, self.stop) if position >= 0]:
            self.stopped = True
            self.ended = True
            self._held = ""
            return self._parse(text[: min(positions)])
        held_length = max(
            (length for stop in self.stop for length in range(1, len(stop)) if text.endswith(stop[:length])), default=0
        )
        self._held = text[len(text) - held_length :]
        return self._parse(text[: len(text) - held_length])

    def _parse(self, text: str) -> list[Any]:
        if not text or self.parser is None:
            return [text] if text else []
        self._unparsed += text
        return self._run_parser(lambda parser: parser.feed(text))

    def _run_parser(self, step: Callable[[Any], list[dict[str, Any]]]) -> list[Any]:
        """Return the parser's items. An invalid tool call (truncated, or no JSON) becomes text."""
        try:
            events = step(self.parser)
            items = utils.response_events_to_chunks(events)
        except (ValueError, KeyError, TypeError, RuntimeError):
            self.parser = None
            unparsed, self._unparsed = self._unparsed, ""
            return [unparsed] if unparsed else []
        if events and not any(event.get("dirty") for event in events):
            self._unparsed = ""
        return items


class GeneratedIds(list[int]):
    """The new token ids of a generation, and the items into which StreamDecoder decoded them."""

    items: Sequence[Any] = ()


def install_parser(chat_template: ChatTemplate, model: Any) -> None:
    """Replace functions of transformers' handlers, so that they parse this model's answers correctly.

    Whole answers are parsed by `parse_message`. Answers are parsed only if the chat template writes the words at which
    parsing starts; the parser begins with the text that the template writes after them ("<think>"). Other answers are
    plain text. The handlers look these functions up in their modules.
    """
    template = _get_template(chat_template.processor, model)
    beginnings = set() if template is None else asyncio.run(_find_beginnings(chat_template, template))
    # Tokens that contain these words: each has at least a byte, and the first may lose a space.
    count = max((len(f"{words}{more}".encode()) for words, more in beginnings), default=0) + 1

    def prefix(tokenizer: Any, input_ids: Any) -> str:
        prompt = _decode_prefix(tokenizer, input_ids[..., -count:])
        more = (more for words, more in beginnings if prompt.endswith(words + more))
        return max(more, key=len, default="").rstrip()  # otherwise the parser would add its spaces to the answer

    modules: Any = utils, chat_completion, response
    modules[0].get_response_template = lambda processor, model: template if beginnings else None
    modules[0]._decode_prefix = prefix
    modules[1].parse_assistant_message = modules[2].parse_assistant_message = parse_message


async def _find_beginnings(chat_template: ChatTemplate, template: Any) -> set[tuple[str, str]]:
    """Return the beginnings of answers that a chat template writes: words where parsing starts, and text after them."""
    anchor = load_response_template(template).start_anchor_re
    beginnings: set[tuple[str, str]] = set()
    for settings in THINKING:
        ends = set[tuple[str, str] | None]()
        for text in PROBES:
            messages = [{"role": "user", "content": text}]
            try:
                await chat_template.find_variables(None)  # compiles it in the other process first
                prompt = await chat_template.render(chat_template.prepare(messages, None, settings))
            except Exception:  # a template is a program from the model, and may reject such a short chat
                ends.add(None)
                continue
            last = max(anchor.finditer(prompt), key=lambda match: match.end(), default=None)
            ends.add(last and (last[0], prompt[last.end() :]))
        if len(ends) == 1:
            beginnings |= {end for end in ends if end is not None}
    return beginnings


def find_reasoning_texts(processor: Any, model: Any) -> tuple[str, str] | None:
    """Return the texts between which the model reasons before its answer, after install_parser; None for neither.

    Raises UnsupportedError if more than that precedes an answer.
    """
    fields = (utils.get_response_template(processor, model) or {}).get("fields", {})
    if {"open", "open_pattern"} & fields.get("content", {}).keys():
        raise UnsupportedError("the model writes its answers in a format of its own")
    reasoning = fields.get("thinking", {})
    return (reasoning["open"], reasoning["close"]) if {"open", "close"} <= reasoning.keys() else None


def parse_message(
    processor: Any, model: Any, generated_ids: GeneratedIds, **more: Any
) -> tuple[str, str | None, list[Any] | None]:
    """Return a whole answer as (text, reasoning, tool calls), the same as its stream."""
    items = generated_ids.items
    calls = [item for item in items if isinstance(item, utils.ToolCall)]
    reasoning = "".join(item for item in items if isinstance(item, utils.ReasoningText))
    return "".join(filter(is_text, items)), reasoning or None, calls or None


def is_text(item: Any) -> bool:
    """Return whether an item is text of the answer."""
    return isinstance(item, str) and not isinstance(item, utils.ReasoningText)


def name_token(tokenizer: Any, token: int) -> str:
    """Return a token's text. Incomplete characters all look the same: return their name in the vocabulary."""
    text = str(tokenizer.decode([token]))
    return str(tokenizer.convert_ids_to_tokens(token)) if INCOMPLETE in text else text


def format_score(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    """Return a token and its log probability in OpenAI's format; `bytes` is None for an incomplete character."""
    text = str(tokenizer.decode([token]))
    is_complete = INCOMPLETE not in text
    name = name_token(tokenizer, token)
    return {"token": name, "logprob": max(logprob, MIN_LOGPROB), "bytes": [*text.encode()] if is_complete else None}
