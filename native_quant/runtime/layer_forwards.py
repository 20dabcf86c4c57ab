"""A layer's forwards: of tensors on the CPU, and of tensors on a GPU, as copies and jobs in a CUDA stream's order."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ktconvert.native_quant.runtime import streams
from ktconvert.native_quant.runtime.experts import Experts
from ktconvert.native_quant.runtime.models import Deferred, Member, select
from ktconvert.native_quant.runtime.pool import Job
from ktconvert.native_quant.runtime.streams import DEPTH, SUBMIT, WAIT, Buffers

CPU = torch.device("cpu")


@dataclass
class WrappedLayer:
    """mask: bool [E] on the CPU, experts to skip, read at each forward. may_defer: of a token, to the next layer."""

    experts: Experts
    member: Member
    mask: torch.Tensor
    topk: int
    may_defer: int

    def split(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The ids to compute now, and those to defer to the next layer, if this one defers."""
        if self.may_defer < 1:
            return ids, None
        return select(ids, weights, self.topk - self.may_defer, self.experts.num_experts)

    def call(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, add: bool = False
    ) -> Any:
        """The ktq_call; the tensors are as OnCpu._inputs returns them and must live as long as the call is used."""
        tokens, topk = ids.shape
        addresses = (hidden.data_ptr(), ids.data_ptr(), weights.data_ptr(), self.mask.data_ptr(), out.data_ptr())
        call = self.experts.call_at(tokens, topk, *addresses)
        call.add = add
        return call


class OnCpu:
    """Forwards of a layer; the caller's thread computes too, unless it only submits."""

    def __init__(self, layer: WrappedLayer) -> None:
        self._layer = layer
        self._submitted: tuple[Job, Deferred | None, torch.Tensor] | None = None

    def forward(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Compute and return the result; deferred experts are computed in the background."""
        layer = self._layer
        hidden, ids, weights = self._inputs(hidden_states, topk_ids, topk_weights)
        previous = layer.member.take(len(hidden), CPU) if layer.member.model.pending else None
        if previous is not None:
            previous.job.wait()
        out = torch.empty_like(hidden) if previous is None else previous.out
        now, later = layer.split(ids, weights)
        layer.experts.forward_call(layer.call(hidden, now, weights, out, previous is not None))
        if later is not None:
            self._defer(hidden.clone(), later, weights.clone())
        return _like(out, hidden_states)

    def submit(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        """Start in the background, with copies of the arguments."""
        layer = self._layer
        inputs = self._inputs(hidden_states, topk_ids, topk_weights)
        hidden, ids, weights = (tensor.clone() for tensor in inputs)
        previous = layer.member.take(len(hidden), CPU)
        if previous is not None and previous.pool is not layer.experts.pool:
            previous.job.wait()  # only jobs of the same pool run in order
        out = torch.empty_like(hidden) if previous is None else previous.out
        now, later = layer.split(ids, weights)
        call = layer.call(hidden, now, weights, out, previous is not None)
        job = layer.experts.job(call, (hidden, now, weights, out, layer.mask, previous))
        job.submit()
        if later is not None:
            self._defer(hidden, later, weights)
        self._submitted = (job, previous, out)

    def sync(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Wait for the forward of the last submit() and return its result."""
        if self._submitted is None:
            raise RuntimeError(f"layer {self._layer.member.layer}: sync_forward without a submit_forward before it")
        (job, previous, out), self._submitted = self._submitted, None
        job.wait()
        if previous is not None:
            previous.job.wait()  # ended before ours; raises its error, if any
        return _like(out, hidden_states)

    def _inputs(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As C reads them: BF16 [T, H], int64 [T, k], float32 [T, k], contiguous on the CPU; copied if necessary."""
        check_shapes(self._layer, hidden, ids, weights)
        if hidden.dim() != 2:
            hidden, ids, weights = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (hidden, ids, weights))
        if hidden.dtype is not torch.bfloat16 or not hidden.is_contiguous():
            hidden = hidden.to(torch.bfloat16).contiguous()
        if ids.dtype is not torch.int64 or not ids.is_cpu or not ids.is_contiguous():
            ids = ids.to(CPU, torch.int64).contiguous()
        if weights.dtype is not torch.float32 or not weights.is_cpu or not weights.is_contiguous():
            weights = weights.to(CPU, torch.float32).contiguous()
        return hidden, ids, weights

    def _defer(self, hidden: torch.Tensor, later: torch.Tensor, weights: torch.Tensor) -> None:
        """Start the deferred experts, which the next layer adds. No one else may write to the tensors."""
        layer, out = self._layer, torch.empty_like(hidden)
        job = layer.experts.job(layer.call(hidden, later, weights, out), (hidden, later, weights, out, layer.mask))
        job.submit()
        layer.member.leave(Deferred(job, layer.experts.pool, out, CPU))


def check_shapes(layer: WrappedLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Raises ValueError for shapes that do not go together."""
    shape, pairs = hidden.shape, ids.shape
    if shape[-1] != layer.experts.hidden or pairs != weights.shape or pairs[:-1] != shape[:-1] or len(shape) < 2:
        raise ValueError(
            f"hidden_states must be [tokens, {layer.experts.hidden}], topk_ids and topk_weights [tokens, k]; these are "
            f"{tuple(shape)}, {tuple(pairs)} and {tuple(weights.shape)}"
        )


def _like(out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    if out.dtype is not hidden.dtype:
        out = out.to(hidden.dtype)
    return out if out.shape == hidden.shape else out.view(hidden.shape)


class OnStream:
    """Forwards of a layer. Jobs are created once for each set of buffers, so that a graph can run them again."""

    def __init__(self, layer: WrappedLayer) -> None:
        self._layer = layer
        self._set = layer.member.layer % DEPTH  # which of the two sets this layer uses
        self._jobs: weakref.WeakKeyDictionary[Buffers, dict[str, Job]] = weakref.WeakKeyDictionary()
        self._submitted: tuple[Job, Buffers] | None = None
        self._device: torch.device | None = None

    def submit(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, cuda_stream: Any) -> None:
        """Copy the arguments and start, once the stream reaches this point."""
        with streams.current(hidden.device, cuda_stream) as stream:
            self._submit(stream, hidden, ids, weights)

    def sync(self, hidden_states: torch.Tensor, cuda_stream: Any) -> torch.Tensor:
        """A tensor that holds the result once the stream reaches this point."""
        if self._submitted is None:
            raise RuntimeError(f"layer {self._layer.member.layer}: sync_forward without a submit_forward before it")
        (job, buffers), self._submitted = self._submitted, None
        with streams.current(hidden_states.device, cuda_stream) as stream:
            streams.launch(stream, WAIT, job)
            buffers.readers[self._set].remove(job)
            out = hidden_states.new_empty(hidden_states.shape)
            out.copy_(buffers.out[self._set].view(hidden_states.shape), non_blocking=True)
        return out

    def _submit(self, stream: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        layer, here, following = self._layer, self._set, (self._set + 1) % DEPTH
        check_shapes(layer, hidden, ids, weights)
        layer.experts.packed.require_whole()  # what was lost in forwards that nobody waited for
        tokens, topk = hidden.shape[:-1].numel(), ids.shape[-1]
        hidden, ids, weights = (tensor.reshape(tokens, tensor.shape[-1]) for tensor in (hidden, ids, weights))
        self._device = hidden.device
        buffers = layer.member.model.buffers.get(hidden.device, tokens, layer.experts.hidden, topk)
        previous = layer.member.take(tokens, hidden.device)
        if previous is not None and previous.pool is not layer.experts.pool:
            streams.launch(stream, WAIT, previous.job)  # only jobs of the same pool run in order
        for reader in buffers.readers[here]:
            streams.launch(stream, WAIT, reader)
        now, later = layer.split(ids.long(), weights)
        pairs = (buffers.hidden, hidden), (buffers.weights, weights), (buffers.ids, now), (buffers.late_ids, later)
        for buffer, tensor in pairs:
            if tensor is not None:
                buffer[here].copy_(tensor, non_blocking=True)
        job = self._job(buffers, "now" if previous is None else "add")
        streams.launch(stream, SUBMIT, job)
        buffers.readers[here] = [job]
        if later is not None:
            late = self._job(buffers, "late")
            streams.launch(stream, SUBMIT, late)
            buffers.readers[here].append(late)
            layer.member.leave(Deferred(late, layer.experts.pool, buffers.out[following], hidden.device))
        self._submitted = (job, buffers)

    def _job(self, buffers: Buffers, kind: str) -> Job:
        """The job of these buffers: "now", "add" (now, added to the previous layer's deferred experts) or "late"."""
        jobs = self._jobs.setdefault(buffers, {})
        if kind not in jobs:
            here, layer = self._set, self._layer
            ids, at = (buffers.late_ids, (here + 1) % DEPTH) if kind == "late" else (buffers.ids, here)
            call = layer.call(buffers.hidden[here], ids[here], buffers.weights[here], buffers.out[at], kind == "add")
            jobs[kind] = layer.experts.job(call, (layer.mask,))  # not buffers: they own the jobs
        return jobs[kind]

    def __del__(self) -> None:
        # CUDA may still hold jobs that are freed with this object.
        if self._device is not None and len(self._jobs) and not sys.is_finalizing() and not streams.capturing():
            streams.finish(self._device)
