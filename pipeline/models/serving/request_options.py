"""What a request says of generation: a generation_config, and what transformers' handlers do not pass on. That is noted
under the request's id, by which whoever generates looks it up.
"""

from __future__ import annotations

from asyncio import Event
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ktconvert.pipeline.models.generating import sampled_at
from ktconvert.pipeline.models.serving.schemas import CommonRequest

if TYPE_CHECKING:
    import torch

ANSWER = 1024  # tokens, where a request names no number; transformers' server has it too
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass
class RequestOptions:
    """ids: the prompt, in place of the text in the request; model: who answers, itself or an adapter; seed: of this
    request's random numbers alone; penalties as OpenAI defines them: subtracted from the logit of a token that was
    generated before, once, and for each time; logit_bias: added to the logits of these token ids; gone: set when nobody
    waits for the answer any more. cut is the answer to it: whether the generated text ended with neither an end token
    nor a stop string.
    """

    ids: Sequence[int] | None = None
    model: str | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    gone: Event = field(default_factory=Event)
    cut: bool = True

    @classmethod
    def of(cls, request: CommonRequest, gone: Event, ids: Sequence[int] | None = None) -> RequestOptions:
        """What the handlers would not pass on of this request."""
        names = ("presence_penalty", "frequency_penalty", "logit_bias")
        given = {name: getattr(request, name) for name in names if getattr(request, name, None) is not None}
        return cls(ids, request.model, request.seed, gone=gone, **given)

    def processors(self, prompt: int) -> list[Any]:
        """What model.generate takes as logits_processor; prompt: the number of its tokens, which count for nothing."""

        def penalize(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            counts = ids[0, prompt:].bincount(minlength=scores.shape[-1])[None].to(scores.dtype)
            return scores - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)

        def add_bias(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            tokens = ids.new_tensor(list(self.logit_bias))
            return scores.index_add(-1, tokens, scores.new_tensor([list(self.logit_bias.values())]))

        steps = ((penalize, self.presence_penalty or self.frequency_penalty), (add_bias, self.logit_bias))
        return [process for process, given in steps if given]


_noted: dict[str, RequestOptions] = {}


@contextmanager
def noted(request_id: str, options: RequestOptions) -> Iterator[RequestOptions]:
    _noted[request_id] = options
    try:
        yield options
    finally:
        del _noted[request_id]


def noted_for(request_id: str) -> RequestOptions:
    return _noted.get(request_id) or RequestOptions()


def generation_config(request: CommonRequest, defaults: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The model's own generation_config (`defaults`), changed as the request says; most: new tokens. A temperature
    above 0 samples, as top_p, top_k and min_p do.
    """
    config = dict(defaults)
    lengths = [length for name in LENGTHS if (length := getattr(request, name, None)) is not None]
    config["max_new_tokens"] = min([most, *(lengths or [max(config.get("max_new_tokens") or 0, ANSWER)])])
    given = {name: getattr(request, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    given = {name: value for name, value in given.items() if value is not None}
    config |= given
    if request.temperature is not None:
        config |= {"do_sample": request.temperature > 0, "temperature": sampled_at(request.temperature)}
    elif given.keys() & {"top_p", "top_k", "min_p"}:
        config["do_sample"] = True
    if not config.get("do_sample"):
        config = {name: value for name, value in config.items() if name not in ("temperature", "top_p", "top_k")}
    if stop := getattr(request, "stop", None):
        config["stop_strings"] = stop
    return config
