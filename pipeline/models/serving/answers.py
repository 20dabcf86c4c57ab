"""Conversion of the handlers' answers and streams to OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ktconvert.pipeline.models.serving.authentication import RequestError
from ktconvert.pipeline.models.serving.request_options import RequestOptions

DONE = b"data: [DONE]\n\n"  # the end of streams of chats and completions
ITEMS = ("content", "reasoning_content", "tool_calls")  # fields of a stream's event that has an item of the answer


def format_event(content: Any) -> bytes:
    """Return a server-sent event with JSON content."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def parse_events(chunk: str) -> list[Any]:
    """Return the contents of the complete events of which a chunk of a handler's stream consists."""
    return [_parse_event(text) for text in chunk.split("\n\n")[:-1]]


def _parse_event(text: str) -> Any:
    text = text.removeprefix("data: ")
    try:
        content = json.loads(text)
    except ValueError:  # the handlers do not escape quotes in an error
        content = {"error": text.removeprefix('{"error": "').removesuffix('"}')}
    return RequestError(500, content["error"]).body() if isinstance(content.get("error"), str) else content


def convert_event(content: Any, options: RequestOptions, number: int) -> Any:
    """Return the content of an event in OpenAI's format.

    number  index of the choice to which the event belongs
    """
    if content.get("type") == "response.completed":
        content["response"] = set_finish_reason(content["response"], options.truncated)
        content["type"] = f"response.{content['response']['status']}"
    elif content.get("type") == "response.output_item.done" and options.truncated:
        content["item"]["status"] = "incomplete"
    for choice in content.get("choices", ()):
        choice["index"] = number
        choice |= {"finish_reason": choice.get("finish_reason"), "logprobs": choice.get("logprobs")}
        if choice.get("finish_reason"):
            set_finish_reason(content, options.truncated)
        delta = choice.get("delta", {})
        if options.top_logprobs is not None and any(delta.get(name) for name in ITEMS):
            choice["logprobs"] = {"content": options.scores.popleft()}
    return content


def convert_answer(answer: dict[str, Any], options: RequestOptions) -> dict[str, Any]:
    """Return a whole answer in OpenAI's format."""
    if options.top_logprobs is not None:
        scores = [score for item_scores in options.scores for score in item_scores]
        answer["choices"][0]["logprobs"] = {"content": scores}
    return set_finish_reason(answer, options.truncated)


def set_finish_reason(answer: dict[str, Any], truncated: bool) -> dict[str, Any]:
    """Return an answer, or a stream's last event, that says how it ended.

    The handlers call every response completed, and call a text truncated whose last token is the last permitted one.
    """
    if answer.get("object") == "response":
        if truncated:
            answer |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            for item in answer["output"][-1:]:
                item["status"] = "incomplete"
        return answer
    for choice in answer["choices"]:
        if choice.get("finish_reason", "stop") in ("stop", "length"):
            choice["finish_reason"] = "length" if truncated else "stop"
    return answer


def merge_answers(answers: Sequence[dict[str, Any]], choices: int) -> dict[str, Any]:
    """Return one answer with the choices of several.

    choices  number of answers for each prompt, whose tokens count once
    """
    if len(answers) == 1:
        return answers[0]
    prompt_tokens = sum(answer["usage"]["prompt_tokens"] for answer in answers[::choices])
    completion_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    merged = [{**answer["choices"][0], "index": number} for number, answer in enumerate(answers)]
    return {**answers[0], "choices": merged, "usage": count_usage(prompt_tokens, completion_tokens)}


def count_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return OpenAI's `usage`."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
