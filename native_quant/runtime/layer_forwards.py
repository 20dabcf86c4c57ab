"""Forwards of one layer for torch tensors, on the CPU or in the order of a CUDA stream, and deferred experts.

kt-kernel's interface names only a directory and a number of a layer, and several models of a process may have the same
ones. `ModelMember` finds the wrappers of one model, which share pinned buffers and deferred experts.

Deferred experts are as in kt-kernel 0.7.2: with max_deferred_experts_per_token = d, layer L computes the topk - d
experts of largest weight immediately (`split_immediate`), then starts the others with the same inputs. Their sum,
rounded to BF16, is added to the output of layer L + 1 before that is rounded. An expert that is immediate for one token
of a batch is immediate for all of them. The deferred experts of the last layer would never be added: give it d = 0, as
SGLang does. Unlike kt-kernel,

- deferred are the d experts of smallest weight among those that the CPU computes: experts in gpu_experts_mask are never
  deferred, as this would spare the CPU no work;
- we add deferred experts only once, not with every call of layer L;
- we raise ValueError if the next layer is called with a different number of tokens (kt-kernel reads another buffer).

A program may assign a different selection to KTMoEWrapper.select_deferred_experts.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from ktconvert.layouts.errors import ArgumentError, StateError
from ktconvert.native_quant.runtime import streams
from ktconvert.native_quant.runtime.arguments import describe
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import Job, Pool
from ktconvert.native_quant.runtime.streams import DEPTH, SUBMIT, WAIT, BufferCache, Buffers
from ktconvert.native_quant.runtime.warn import warn_user

CPU = torch.device("cpu")
FLOATS = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point}
INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}


# Splits ids [T, k] by their weights [T, k] into those to compute immediately and those to defer (None: none).
Submitted = TypeVar("Submitted")
Split = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def split_immediate(
    ids: torch.Tensor, weights: torch.Tensor, immediate: int, on_gpu: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split ids [T, k] into immediate and deferred experts, each with -1 at the positions of the others.

    Of each token, `immediate` experts are immediate: first ids that the CPU does not compute, then those of largest
    weight. More ids that the CPU does not compute are immediate, too. The second result is None if nothing is deferred.

    on_gpu: bool [E] on the CPU, experts that the CPU does not compute. A captured graph reads it again in each replay
    """
    require_tensors(expert_ids=ids, expert_scores=weights)
    topk = ids.shape[-1]
    immediate = max(0, min(immediate, topk))
    if immediate == topk:
        return ids, None
    experts = len(on_gpu)
    valid_ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    # The last element stands for ids that are no expert. Graph capture accepts a copy only from pinned memory.
    is_immediate = torch.nn.functional.pad(on_gpu.to(ids.device, non_blocking=True), (0, 1), value=True)
    ranks = weights.masked_fill(is_immediate[valid_ids], torch.inf)
    immediate_ids = valid_ids.gather(-1, ranks.topk(immediate, dim=-1, sorted=False).indices)
    is_immediate.scatter_(0, immediate_ids.reshape(-1), True)
    mask = is_immediate[valid_ids]
    return ids.masked_fill(~mask, -1), ids.masked_fill(mask, -1)


class DeferredExperts(NamedTuple):
    """The deferred experts of a layer: the job that computes their sum into `out` (BF16 [tokens, H])."""

    job: Job
    pool: Pool
    out: torch.Tensor
    device: torch.device  # device of the layer's input


class Model:
    """State that the layers of a model share.

    pending  layer -> its deferred experts that no layer has added yet
    buffers  pinned buffers
    """

    def __init__(self) -> None:
        self.pending: dict[int, DeferredExperts] = {}
        self.buffers = BufferCache()


class ModelMember:
    """Membership of a wrapper in its model.

    When the first wrapper of a weight_path computes, all of them are assigned to models: as many models as there are
    wrappers of one layer, each with layers that were created in ascending order. A wrapper that is created later joins
    the first model that has no wrapper of its layer (any more).
    """

    # In the order of creation.
    _members: ClassVar[weakref.WeakValueDictionary[int, ModelMember]] = weakref.WeakValueDictionary()
    _numbers: ClassVar[itertools.count[int]] = itertools.count()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: str, layer: int) -> None:
        self.path, self.layer = path, layer
        self._model: Model | None = None
        self._has_next: bool | None = None
        with self._lock:
            self._members[next(self._numbers)] = self

    @property
    def model(self) -> Model:
        if self._model is None:
            with self._lock:
                self._assign_models(self.path)
        assert self._model is not None
        return self._model

    def take_deferred(self, tokens: int, device: torch.device) -> DeferredExperts | None:
        """Remove and return the deferred experts of the previous layer, if any, for this layer to add.

        Raises ValueError if they are of a different number of tokens or on a different device.
        """
        deferred = self.model.pending.pop(self.layer - 1, None)
        if deferred is not None and (len(deferred.out) != tokens or deferred.device != device):
            current, previous = f"{tokens} tokens on {device}", f"{len(deferred.out)} tokens on {deferred.device}"
            problem = f"was called with {current}, but layer {self.layer - 1} deferred experts of {previous}"
            raise ValueError(f"layer {self.layer} {problem}; call the layers in order, with the same tokens")
        return deferred

    def store_deferred(self, deferred: DeferredExperts) -> None:
        """Store this layer's deferred experts for the next layer. Warn once if the model has no next layer."""
        self.model.pending[self.layer] = deferred
        if self._has_next is None:
            with self._lock:
                self._has_next = self.layer + 1 in _layers(self.model, list(self._members.values()))
            if not self._has_next:
                warn_user(
                    f"layer {self.layer} of {self.path} defers experts, but its model has no layer {self.layer + 1} "
                    "to add them: they are lost. Give the last layer max_deferred_experts_per_token=0, and "
                    "create the layers of a model in order."
                )

    @classmethod
    def _assign_models(cls, path: str) -> None:
        members = [member for member in cls._members.values() if member.path == path]
        groups: list[list[ModelMember]] = []
        for member in reversed([member for member in members if member._model is None]):
            group = next((group for group in groups if member.layer < group[-1].layer), [])
            if not group:
                groups.append(group)
            group.append(member)
        for group in reversed(groups):
            layers = {member.layer for member in group}
            models = dict.fromkeys(member._model for member in members if member._model is not None)
            chosen = next((model for model in models if not layers & _layers(model, members)), None) or Model()
            for member in group:
                member._model = chosen
                chosen.pending.pop(member.layer, None)  # deferred experts of a wrapper that this one replaces

    @classmethod
    def clear(cls) -> None:
        """Forget all deferred experts, and free all pinned buffers."""
        with cls._lock:
            models = {member._model for member in cls._members.values() if member._model is not None}
        for model in models:
            model.pending.clear()
            model.buffers.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelMember:
        return ModelMember(self.path, self.layer)


def _layers(model: Model, members: list[ModelMember]) -> set[int]:
    return {member.layer for member in members if member._model is model}


@dataclass
class WrappedLayer:
    """A layer of a wrapper.

    mask  bool [E] on the CPU, experts to skip, read at each forward
    """

    experts: KTExperts
    member: ModelMember
    mask: torch.Tensor

    def load_missing(self) -> None:
        """Load the experts that the mask no longer skips. After this call, only a replayed CUDA graph finds some."""
        self.experts._load_missing(self.mask.numpy())

    def make_call(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, add: bool = False
    ) -> Any:
        """Return a ktq_call for tensors as CpuForward._prepare returns them, which must live as long as the call."""
        tokens, topk = ids.shape
        addresses = (hidden.data_ptr(), ids.data_ptr(), weights.data_ptr(), self.mask.data_ptr(), out.data_ptr())
        call = self.experts._make_call(tokens, topk, *addresses)
        call.add = add
        return call


class CpuForward:
    """Forwards of a layer for tensors on the CPU. The caller's thread also computes, unless it only submits."""

    def __init__(self, layer: WrappedLayer) -> None:
        self._layer = layer
        self._submitted: tuple[Job, DeferredExperts | None, torch.Tensor] | None = None

    def forward(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, split: Split
    ) -> torch.Tensor:
        """Compute and return the result; deferred experts are computed in the background."""
        layer = self._layer
        hidden, ids, weights = self._prepare(hidden_states, topk_ids, topk_weights)
        layer.load_missing()
        previous = layer.member.take_deferred(len(hidden), CPU) if layer.member.model.pending else None
        if previous is not None:
            previous.job.wait()
        out = torch.empty_like(hidden) if previous is None else previous.out
        immediate, deferred = split(ids, weights)
        layer.experts._forward_call(layer.make_call(hidden, immediate, weights, out, previous is not None))
        if deferred is not None:
            self._defer(hidden.clone(), deferred, weights.clone())
        return _match_input(out, hidden_states)

    def submit(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, split: Split
    ) -> None:
        """Start a forward in the background, with copies of the arguments."""
        layer = self._layer
        inputs = self._prepare(hidden_states, topk_ids, topk_weights)
        layer.load_missing()
        hidden, ids, weights = (tensor.clone() for tensor in inputs)
        previous = layer.member.take_deferred(len(hidden), CPU)
        if previous is not None and previous.pool is not layer.experts._pool:
            previous.job.wait()  # only jobs of the same pool run in order
        out = torch.empty_like(hidden) if previous is None else previous.out
        immediate, deferred = split(ids, weights)
        call = layer.make_call(hidden, immediate, weights, out, previous is not None)
        job = layer.experts._make_job(call, (hidden, immediate, weights, out, layer.mask, previous))
        job.submit()
        if deferred is not None:
            self._defer(hidden, deferred, weights)
        self._submitted = (job, previous, out)

    def sync(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Wait for the forward of the last submit() and return its result, like hidden_states.

        Raises ArgumentError for other hidden_states; a later call may then return the result.
        """
        job, previous, out = require_submitted(self._submitted, self._layer.member.layer)
        is_right = _is_tensor(hidden_states, FLOATS) and hidden_states.numel() == out.numel()
        _require(is_right, "hidden_states", FLOATS, out.shape, hidden_states)
        self._submitted = None
        job.wait()
        if previous is not None:
            previous.job.wait()  # it ended before our job; raises its error, if any
        return _match_input(out, hidden_states)

    def _prepare(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs for C: BF16 [T, H], int64 [T, k], float32 [T, k], contiguous on the CPU; copies if needed."""
        check_inputs(self._layer, hidden, ids, weights)
        if hidden.dim() != 2:
            hidden, ids, weights = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (hidden, ids, weights))
        if hidden.dtype is not torch.bfloat16 or not hidden.is_contiguous():
            hidden = hidden.to(torch.bfloat16).contiguous()
        if ids.dtype is not torch.int64 or not ids.is_cpu or not ids.is_contiguous():
            ids = ids.to(CPU, torch.int64).contiguous()
        if weights.dtype is not torch.float32 or not weights.is_cpu or not weights.is_contiguous():
            weights = weights.to(CPU, torch.float32).contiguous()
        return hidden, ids, weights

    def _defer(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Start the deferred experts, which the next layer adds. Nobody else may write to the tensors."""
        layer = self._layer
        out = torch.empty_like(hidden)
        call = layer.make_call(hidden, ids, weights, out)
        job = layer.experts._make_job(call, (hidden, ids, weights, out, layer.mask))
        job.submit()
        layer.member.store_deferred(DeferredExperts(job, layer.experts._pool, out, CPU))


def require_submitted(
    value: Submitted | None, layer: int, sync: str = "sync_forward", submit: str = "submit_forward"
) -> Submitted:
    """Return what the method `submit` left for the method `sync`. Raises StateError if it is None."""
    if value is None:
        raise StateError(f"layer {layer}: {sync} without a {submit} before it; call that first")
    return value


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_cuda


def require_tensors(**values: object) -> None:
    """Raise ArgumentError for the first argument that is not a tensor."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(f"{name} must be a tensor, not {describe(value)}")


def check_inputs(layer: WrappedLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise ArgumentError for anything but tensors of matching shapes, of these kinds of dtypes, on a CPU or GPU."""
    size = layer.experts.hidden
    is_right = _is_tensor(hidden, FLOATS) and hidden.dim() > 1 and hidden.shape[-1] == size
    _require(is_right, "hidden_states", FLOATS, ["tokens", size], hidden)
    tokens = hidden.shape[:-1]
    is_right = _is_tensor(ids, INTEGERS) and ids.shape[:-1] == tokens and ids.dim() == hidden.dim()
    _require(is_right, "topk_ids", INTEGERS, [*tokens, "experts per token"], ids)
    is_right = _is_tensor(weights, FLOATS) and weights.shape == ids.shape
    _require(is_right, "topk_weights", FLOATS, ids.shape, weights)


def _is_tensor(value: object, dtypes: set[torch.dtype]) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in dtypes and (value.is_cpu or value.is_cuda)


def _require(is_right: bool, name: str, dtypes: set[torch.dtype], shape: Sequence[object], value: object) -> None:
    """Raise ArgumentError, which says what the value must be, unless it is right."""
    if not is_right:
        kind = "floating-point numbers" if dtypes is FLOATS else "integers"
        needed = f"{kind} [{', '.join(map(str, shape))}] on the CPU or a GPU"
        given, remedy = describe(value), ""
        if isinstance(value, np.ndarray):
            given, remedy = f"a NumPy array {given}", f"; pass torch.from_numpy({name})"
        raise ArgumentError(f"{name} must be a tensor of {needed}, not {given}{remedy}")


def _match_input(out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    if out.dtype is not hidden.dtype:
        out = out.to(hidden.dtype)
    return out if out.shape == hidden.shape else out.view(hidden.shape)


class StreamForward:
    """Forwards of a layer for tensors on a GPU: copies and jobs in the order of a CUDA stream.

    Jobs are created once for each set of buffers, so that a graph can run them again.
    """

    def __init__(self, layer: WrappedLayer) -> None:
        self._layer = layer
        self._set = layer.member.layer % DEPTH  # index of this layer's set of buffers
        self._jobs: weakref.WeakKeyDictionary[Buffers, dict[str, Job]] = weakref.WeakKeyDictionary()
        self._submitted: tuple[Job, Buffers] | None = None
        self._device: torch.device | None = None

    def submit(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, split: Split, cuda_stream: Any
    ) -> None:
        """Copy the arguments and start a forward when the stream reaches this point."""
        with streams.use_stream(hidden.device, cuda_stream) as stream:
            self._submit(stream, hidden, ids, weights, split)

    def sync(self, hidden_states: torch.Tensor, cuda_stream: Any) -> torch.Tensor:
        """Return a tensor that holds the result when the stream reaches this point."""
        job, buffers = require_submitted(self._submitted, self._layer.member.layer)
        self._submitted = None
        with streams.use_stream(hidden_states.device, cuda_stream) as stream:
            streams.launch(stream, WAIT, job)
            buffers.pending[self._set].remove(job)
            out = hidden_states.new_empty(hidden_states.shape)
            out.copy_(buffers.out[self._set].view(hidden_states.shape), non_blocking=True)
        return out

    def _submit(
        self, stream: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, split: Split
    ) -> None:
        """Launch on a stream the copies of the inputs to the CPU and the jobs of immediate and deferred experts."""
        layer = self._layer
        own_set = self._set
        next_set = (self._set + 1) % DEPTH
        check_inputs(layer, hidden, ids, weights)
        layer.experts._packed.check_reads()  # raises errors of earlier forwards without a wait
        layer.load_missing()
        tokens = hidden.shape[:-1].numel()
        topk = ids.shape[-1]
        hidden, ids, weights = (tensor.reshape(tokens, tensor.shape[-1]) for tensor in (hidden, ids, weights))
        self._device = hidden.device
        buffers = layer.member.model.buffers.get(hidden.device, tokens, layer.experts.hidden, topk)
        previous = layer.member.take_deferred(tokens, hidden.device)
        if previous is not None and previous.pool is not layer.experts._pool:
            streams.launch(stream, WAIT, previous.job)  # only jobs of the same pool run in order
        for pending in buffers.pending[own_set]:
            streams.launch(stream, WAIT, pending)
        immediate, deferred = split(ids.long(), weights)
        copies = (
            (buffers.hidden, hidden),
            (buffers.weights, weights),
            (buffers.ids, immediate),
            (buffers.deferred_ids, deferred),
        )
        for buffer, tensor in copies:
            if tensor is not None:
                buffer[own_set].copy_(tensor, non_blocking=True)
        job = self._get_job(buffers, "immediate" if previous is None else "add")
        streams.launch(stream, SUBMIT, job)
        buffers.pending[own_set] = [job]
        if deferred is not None:
            later = self._get_job(buffers, "deferred")
            streams.launch(stream, SUBMIT, later)
            buffers.pending[own_set].append(later)
            out = buffers.out[next_set]
            layer.member.store_deferred(DeferredExperts(later, layer.experts._pool, out, hidden.device))
        self._submitted = (job, buffers)

    def _get_job(self, buffers: Buffers, kind: str) -> Job:
        """Return the job of these buffers for immediate or deferred experts.

        kind: "immediate", "deferred", or "add" (immediate ones, added to the previous layer's deferred experts).
        """
        jobs = self._jobs.setdefault(buffers, {})
        if kind not in jobs:
            own_set = self._set
            layer = self._layer
            is_deferred = kind == "deferred"
            ids = buffers.deferred_ids if is_deferred else buffers.ids
            out = buffers.out[(own_set + 1) % DEPTH if is_deferred else own_set]
            call = layer.make_call(buffers.hidden[own_set], ids[own_set], buffers.weights[own_set], out, kind == "add")
            jobs[kind] = layer.experts._make_job(call, (layer.mask,))  # not buffers: they own the jobs
        return jobs[kind]

    def __del__(self) -> None:
        # CUDA may still hold jobs that are freed with this object.
        if self._device is not None and len(self._jobs) and not sys.is_finalizing() and not streams.is_capturing():
            streams.synchronize(self._device)
