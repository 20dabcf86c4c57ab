"""Constraints of answers: a JSON schema, or a call of a tool. llguidance finds the tokens that may come next."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import llguidance.hf
from llguidance import LLMatcher

from ktconvert.pipeline.models.serving.authentication import RequestError
from ktconvert.pipeline.models.serving.messages import Function

if TYPE_CHECKING:
    import torch

# Whitespace as json.dumps writes it: a model may otherwise write whitespace without end.
WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_PROBLEM = 200  # characters of llguidance's message
MAX_CLOSING = 16  # tokens that the end of reasoning may have


@dataclass
class Constraint:
    """The state of one answer.

    matcher         follows the answer after the model's reasoning
    opening         tokens with which reasoning may begin, instead of the answer
    closing         the text with which reasoning ends
    is_reasoning    whether the model reasons, so that every token is allowed
    """

    matcher: LLMatcher
    opening: Sequence[int]
    closing: str
    is_reasoning: bool
    _ids: list[int] = field(default_factory=list)

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, vocabulary] with minus infinity for tokens that must not come next.

        Raises ValueError if llguidance fails, for example because a schema is too complex.
        """
        import torch

        if self.is_reasoning:
            return scores
        bias = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)
        if self.matcher.is_error():
            raise ValueError(f"the format cannot be enforced: {_shorten(self.matcher.get_error())}")
        is_allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        is_allowed[: len(bias)] = bias > 0
        if not self._ids:
            is_allowed[[*self.opening]] = True
        return scores.masked_fill(~is_allowed.to(scores.device), -torch.inf)

    def add(self, token: int, decode: Callable[[list[int]], str]) -> bool:
        """Add a token that was generated, and return whether the answer is complete.

        decode  returns the text of token ids
        """
        self._ids.append(token)
        if self.is_reasoning:
            self.is_reasoning = self.closing not in decode(self._ids[-MAX_CLOSING:])
        elif len(self._ids) == 1 and token in self.opening:
            self.is_reasoning = True
        else:
            self.matcher.consume_token(token)
            return self.matcher.is_stopped()
        return False


class Constraints:
    """The constraints of a model's answers."""

    def __init__(
        self, tokenizer: Any, vocabulary: int, end_ids: Sequence[int], reasoning: tuple[str, str] | None
    ) -> None:
        """Prepare the tokenizer, once for all requests.

        vocabulary  number of token ids
        end_ids     token ids that end an answer
        reasoning   the texts between which the model reasons before its answer; None if it does not

        Raises ValueError for a tokenizer that is not a fast one.
        """
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(end_ids) or None)
        self._reasoning = reasoning
        opening = tokenizer(reasoning[0], add_special_tokens=False)["input_ids"] if reasoning else []
        self._opening = opening[:1]

    def make_json_grammar(self, schema: Mapping[str, Any], param: str) -> str:
        """Return the grammar of JSON with a schema. Raises RequestError for an invalid or unsupported one."""
        grammar = LLMatcher.grammar_from_json_schema(dict(schema), overrides=WHITESPACE)  # type: ignore[arg-type]
        if problem := LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise RequestError(400, f"{param}: the schema is not supported: {_shorten(problem)}", param)
        return grammar

    def make_call_grammar(self, functions: Sequence[Function]) -> str:
        """Return the grammar of a call of one of these functions. Raises RequestError for an unsupported schema."""
        rules = [f"start: {' | '.join(f'call{number}' for number in range(len(functions)))}"]
        for number, function in enumerate(functions):
            schema = (function.model_extra or {}).get("parameters") or {"type": "object"}
            param = f"tools[{number}]"
            if not isinstance(schema, dict):
                raise RequestError(400, f"{param}: parameters has to be an object", param)
            self.make_json_grammar(schema, param)
            begin = json.dumps({"name": function.name}, ensure_ascii=False)[:-1] + ', "arguments": '
            schema = {**schema, "x-guidance": WHITESPACE}
            rules.append(f'call{number}: {json.dumps(begin)} %json {json.dumps(schema)} "}}"')
        return LLMatcher.grammar_from_lark("\n".join(rules))

    def start(self, grammar: str, prompt_end: str) -> Constraint:
        """Return the state of a new answer.

        prompt_end  the text of the prompt after the words that begin an answer
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if self._reasoning is None:
            return Constraint(matcher, (), "", is_reasoning=False)
        opening, closing = self._reasoning
        _, has_begun, after = prompt_end.rpartition(opening)
        is_reasoning = bool(has_begun) and closing not in after
        return Constraint(matcher, () if has_begun else self._opening, closing, is_reasoning)


def read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call with the grammar of `make_call_grammar`; None if it is incomplete."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    return call["name"], json.dumps(call["arguments"], ensure_ascii=False)


def _shorten(problem: str) -> str:
    return " ".join(problem.split())[:MAX_PROBLEM]
