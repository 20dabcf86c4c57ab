"""What a request wants of generation that transformers' handlers do not pass on, by the request's id.

The layer before transformers' server notes it; whoever generates looks it up, with the request_id that the handlers
hand to `generate_streaming` and `generate_non_streaming`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Asked:
    """ids: the prompt, in place of the text in the request; seed: of this request's random numbers alone; penalties as
    OpenAI defines them: subtracted from the logit of a token that was generated before, once, and for each time.
    """

    ids: Sequence[int] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def processors(self, prompt: int) -> list[Any]:
        """What model.generate takes as logits_processor; prompt: the number of its tokens, which count for nothing."""
        if not self.presence_penalty and not self.frequency_penalty:
            return []

        def penalize(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """ids [1, T], scores [1, vocabulary]."""
            counts = ids[0, prompt:].bincount(minlength=scores.shape[-1])[None].to(scores.dtype)
            return scores - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)

        return [penalize]


NOTHING = Asked()
_asked: dict[str, Asked] = {}


@contextmanager
def asking(request_id: str, asked: Asked) -> Iterator[None]:
    """Note it while the request is answered."""
    _asked[request_id] = asked
    try:
        yield
    finally:
        del _asked[request_id]


def of(request_id: str) -> Asked:
    """What was noted for this request; nothing, if nothing was."""
    return _asked.get(request_id, NOTHING)
