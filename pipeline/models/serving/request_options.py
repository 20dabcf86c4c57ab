"""Options of a request for the generation of its answer.

A generation_config has most of them. RequestOptions has those that transformers' handlers do not pass on: they are
registered under the request's id, and the scheduler looks them up.
"""

from __future__ import annotations

from asyncio import Event
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ktconvert.pipeline.models.generating import Speed, clamp_temperature
from ktconvert.pipeline.models.serving.schemas import CommonRequest, WithTools

if TYPE_CHECKING:
    import torch

    from ktconvert.pipeline.models.serving.constraints import Constraint

DEFAULT_LENGTH = 1024  # new tokens, as in transformers' server
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass
class RequestOptions:
    """Options that transformers' handlers do not pass on, and one result.

    ids          token ids of a completion's prompt, used instead of the text in the request
    model        name of the model or of an adapter
    seed         seed of this answer's random numbers
    presence_penalty, frequency_penalty   as in OpenAI's API: subtracted from the logits of tokens that were generated
                 before, once and for each time
    logit_bias   added to the logits of these token ids
    top_logprobs number of likeliest tokens to return at each position, besides the token's own log probability; None:
                 neither
    logits       [vocabulary], of the latest pass through the model, if top_logprobs is set
    scores       a result: for each item of the answer, OpenAI's log probabilities of its tokens
    constraint   what the answer must match; None: anything
    calls_tool   whether the answer is a call in the grammar of its constraint
    single_call  whether the answer ends after its first call of a tool
    cancelled    set when nobody waits for the answer any more
    truncated    a result: whether the text ended with neither an end token nor a stop string
    speed        a result: tokens and seconds of the generation; None before its first new token
    """

    ids: Sequence[int] | None = None
    model: str | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    logits: torch.Tensor | None = None
    scores: deque[list[dict[str, Any]]] = field(default_factory=deque)
    constraint: Constraint | None = None
    calls_tool: bool = False
    single_call: bool = False
    cancelled: Event = field(default_factory=Event)
    truncated: bool = True
    speed: Speed | None = None

    @classmethod
    def from_request(
        cls, request: CommonRequest, cancelled: Event, number: int, ids: Sequence[int] | None
    ) -> RequestOptions:
        """Return the options of one of a request's choices.

        number  index of the choice, which is added to the seed
        ids     token ids of a completion's prompt
        """
        names = ("presence_penalty", "frequency_penalty", "logit_bias")
        values = {name: getattr(request, name) for name in names if getattr(request, name, None) is not None}
        if getattr(request, "logprobs", None) is True:
            values["top_logprobs"] = getattr(request, "top_logprobs", None) or 0
        if isinstance(request, WithTools):
            values["calls_tool"] = bool(request.list_forced_functions())
            values["single_call"] = request.parallel_tool_calls is False
        seed = None if request.seed is None else request.seed + number
        return cls(ids, request.model, seed, cancelled=cancelled, **values)

    def logits_processors(self, prompt_length: int) -> list[Any]:
        """Return the logits_processor argument of model.generate. Penalties do not count tokens of the prompt."""

        def penalize(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            counts = ids[0, prompt_length:].bincount(minlength=scores.shape[-1])[None].to(scores.dtype)
            return scores - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)

        def add_bias(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            tokens = ids.new_tensor(list(self.logit_bias))
            return scores.index_add(-1, tokens, scores.new_tensor([list(self.logit_bias.values())]))

        def enforce(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert self.constraint is not None
            return self.constraint.mask(scores)

        penalty = self.presence_penalty or self.frequency_penalty
        steps = ((penalize, penalty), (add_bias, self.logit_bias), (enforce, self.constraint))
        return [process for process, is_used in steps if is_used]


_registered: dict[str, RequestOptions] = {}


@contextmanager
def register_options(request_id: str, options: RequestOptions) -> Iterator[RequestOptions]:
    """Register options under a request's id until the end of the context."""
    _registered[request_id] = options
    try:
        yield options
    finally:
        del _registered[request_id]


def find_options(request_id: str) -> RequestOptions:
    """Return the options registered under a request's id, or defaults."""
    return _registered.get(request_id) or RequestOptions()


def generation_config(request: CommonRequest, defaults: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """Return the model's own generation_config (`defaults`), changed by the request.

    max_length  maximum number of new tokens

    The model samples if the request sets a temperature above 0, or top_p, top_k or min_p and no temperature.
    """
    config = dict(defaults)
    lengths = [length for name in LENGTHS if (length := getattr(request, name, None)) is not None]
    lengths = lengths or [max(config.get("max_new_tokens") or 0, DEFAULT_LENGTH)]
    config["max_new_tokens"] = min(max_length, *lengths)
    sampling = {name: getattr(request, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    config |= sampling
    if request.temperature is not None:
        config |= {"do_sample": request.temperature > 0, "temperature": clamp_temperature(request.temperature)}
    elif sampling.keys() & {"top_p", "top_k", "min_p"}:
        config["do_sample"] = True
    if not config.get("do_sample"):
        config = {name: value for name, value in config.items() if name not in ("temperature", "top_p", "top_k")}
    if stop := getattr(request, "stop", None):
        config["stop_strings"] = stop
    return config
