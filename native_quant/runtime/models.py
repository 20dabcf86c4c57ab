"""Which wrappers are the layers of one model: kt-kernel's interface names a directory and a number only, and several
models of a process may have the same ones. They share pinned buffers and deferred experts.

As in kt-kernel 0.7.2: with max_deferred_experts_per_token = d, layer L
computes the topk - d experts of largest weight at once (`select`); the others begin right after, on the same inputs,
and their sum, rounded to BF16, is added to the output of layer L + 1 before that is rounded. An expert that is
immediate for one token of a batch is immediate for all of them. The last layer's deferred experts would never be added:
give it d = 0, as SGLang does. Unlike kt-kernel we add deferred experts only once, not with every call of layer L, and
raise ValueError where the next layer is called with another number of tokens (kt-kernel reads another buffer).
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from typing import Any, ClassVar, NamedTuple

import torch

from ktconvert.native_quant.runtime.pool import Job, Pool
from ktconvert.native_quant.runtime.streams import BufferCache


def select(
    ids: torch.Tensor, weights: torch.Tensor, immediate: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ids [T, k] as (now, later), each with -1 in place of the other's: now has the `immediate` of largest weight of
    each token, and ids that are of no expert; later is None where nothing is deferred.
    """
    topk = ids.shape[-1]
    immediate = max(0, min(immediate, topk))
    if immediate == topk:
        return ids, None
    if immediate == 0:
        return torch.full_like(ids, -1), ids.clone()
    known = torch.where((ids >= 0) & (ids < experts), ids, experts)
    first = known.gather(-1, weights.topk(immediate, dim=-1, sorted=False).indices)
    is_now = torch.zeros(experts + 1, dtype=torch.bool, device=ids.device)
    is_now[experts:].fill_(True)  # assigning to is_now[experts] copies from the host, which graph capture refuses
    is_now.scatter_(0, first.reshape(-1), True)
    now = is_now[known]
    return ids.masked_fill(~now, -1), ids.masked_fill(now, -1)


class Deferred(NamedTuple):
    """The deferred experts of a layer: the job that computes their sum into `out` (BF16 [tokens, H])."""

    job: Job
    pool: Pool
    out: torch.Tensor
    device: torch.device  # of the layer's input


class Model:
    """What the layers of a model share: by layer, its deferred experts that no layer has added yet; pinned buffers."""

    def __init__(self) -> None:
        self.pending: dict[int, Deferred] = {}
        self.buffers = BufferCache()


class Member:
    """A wrapper's place in its model. Those with one weight_path are dealt out to models when the first computes: as
    many as there are wrappers of one layer, each with the layers that were made in ascending order; one that is made
    later joins the first model that has no wrapper of its layer (any more).
    """

    _made: ClassVar[weakref.WeakValueDictionary[int, Member]] = weakref.WeakValueDictionary()  # in their order
    _numbers: ClassVar[itertools.count[int]] = itertools.count()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: str, layer: int) -> None:
        self.path, self.layer = path, layer
        self._model: Model | None = None
        self._has_next: bool | None = None
        with self._lock:
            self._made[next(self._numbers)] = self

    @property
    def model(self) -> Model:
        if self._model is None:
            with self._lock:
                self._deal(self.path)
        assert self._model is not None
        return self._model

    def take(self, tokens: int, device: torch.device) -> Deferred | None:
        """The deferred experts of the layer before, if any, to be added. Raises ValueError for other tokens."""
        deferred = self.model.pending.pop(self.layer - 1, None)
        if deferred is not None and (len(deferred.out) != tokens or deferred.device != device):
            here, before = f"{tokens} tokens on {device}", f"{len(deferred.out)} tokens on {deferred.device}"
            what = f"was called with {here}, but layer {self.layer - 1} deferred experts of {before} to it"
            raise ValueError(f"layer {self.layer} {what}; call the layers one after the other with the same tokens")
        return deferred

    def leave(self, deferred: Deferred) -> None:
        """Keep this layer's deferred experts for the next one. A warning, once, where there is none."""
        self.model.pending[self.layer] = deferred
        if self._has_next is None:
            with self._lock:
                self._has_next = self.layer + 1 in _layers(self.model, list(self._made.values()))
            if not self._has_next:
                warnings.warn(
                    f"layer {self.layer} of {self.path} defers experts, and its model has no layer {self.layer + 1} "
                    "that would add them: they are left out. Give the last layer max_deferred_experts_per_token=0, and "
                    "make the layers of a model in their order.",
                    stacklevel=4,
                )

    @classmethod
    def _deal(cls, path: str) -> None:
        members = [member for member in cls._made.values() if member.path == path]
        groups: list[list[Member]] = []
        for member in reversed([member for member in members if member._model is None]):
            group = next((group for group in groups if member.layer < group[-1].layer), [])
            if not group:
                groups.append(group)
            group.append(member)
        for group in reversed(groups):
            layers = {member.layer for member in group}
            models = dict.fromkeys(member._model for member in members if member._model is not None)
            joined = next((model for model in models if not layers & _layers(model, members)), None) or Model()
            for member in group:
                member._model = joined
                joined.pending.pop(member.layer, None)  # of the one that it takes the place of

    @classmethod
    def clear(cls) -> None:
        """Forget all deferred experts, and free all pinned buffers."""
        with cls._lock:
            models = {member._model for member in cls._made.values() if member._model is not None}
        for model in models:
            model.pending.clear()
            model.buffers.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Member:
        return Member(self.path, self.layer)


def _layers(model: Model, members: list[Member]) -> set[int]:
    return {member.layer for member in members if member._model is model}
