"""What a request wants of generation, and its answer's end, which transformers' handlers do not pass on; by its id.

The layer before transformers' server notes it; whoever generates looks it up, with the request_id that the handlers
hand to `generate_streaming` and `generate_non_streaming`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class RequestOptions:
    """ids: the prompt, in place of the text in the request; seed: of this request's random numbers alone; penalties as
    OpenAI defines them: subtracted from the logit of a token that was generated before, once, and for each time;
    logit_bias: added to the logits of these token ids.

    cut is the answer to it: whether the generated text ended with neither an end token nor a stop string.
    """

    ids: Sequence[int] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    cut: bool = True

    def processors(self, prompt: int) -> list[Any]:
        """What model.generate takes as logits_processor; prompt: the number of its tokens, which count for nothing."""

        def penalize(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """ids [1, T], scores [1, vocabulary]."""
            counts = ids[0, prompt:].bincount(minlength=scores.shape[-1])[None].to(scores.dtype)
            return scores - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)

        def add_bias(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """ids [1, T], scores [1, vocabulary]."""
            tokens = ids.new_tensor(list(self.logit_bias))
            return scores.index_add(-1, tokens, scores.new_tensor([list(self.logit_bias.values())]))

        wanted = ((penalize, self.presence_penalty or self.frequency_penalty), (add_bias, self.logit_bias))
        return [process for process, given in wanted if given]


_asked: dict[str, RequestOptions] = {}


@contextmanager
def asking(request_id: str, asked: RequestOptions) -> Iterator[None]:
    """Note it while the request is answered."""
    _asked[request_id] = asked
    try:
        yield
    finally:
        del _asked[request_id]


def of(request_id: str) -> RequestOptions:
    """What was noted for this request; nothing, if nothing was."""
    return _asked.get(request_id) or RequestOptions()
