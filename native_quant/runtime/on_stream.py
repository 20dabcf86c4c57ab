"""A layer's forwards for tensors on a GPU: copies and jobs, all ordered by a CUDA stream, also under graph capture."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from ktconvert.native_quant.runtime import streams
from ktconvert.native_quant.runtime.models import Deferred
from ktconvert.native_quant.runtime.on_cpu import WrappedLayer, check_shapes
from ktconvert.native_quant.runtime.pool import Job
from ktconvert.native_quant.runtime.streams import DEPTH, SUBMIT, WAIT, Buffers

if TYPE_CHECKING:
    import torch


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
        shape, pairs = check_shapes(layer, hidden, ids, weights)
        layer.experts.packed.require_whole()  # what was lost in forwards that nobody waited for
        tokens, topk = shape[:-1].numel(), pairs[-1]
        hidden, ids, weights = (tensor.reshape(tokens, tensor.shape[-1]) for tensor in (hidden, ids, weights))
        self._device = hidden.device
        buffers = layer.member.model.buffers.get(hidden.device, tokens, layer.experts.hidden, topk)
        previous = layer.member.take(tokens, hidden.device)
        if previous is not None and previous.pool is not layer.experts.pool:
            streams.launch(stream, WAIT, previous.job)  # only jobs of the same pool run in order
        for reader in buffers.readers[here]:
            streams.launch(stream, WAIT, reader)
        now, later = layer.split(ids.long(), weights)
        for buffer, tensor in (
            (buffers.hidden, hidden),
            (buffers.weights, weights),
            (buffers.ids, now),
            (buffers.late_ids, later),
        ):
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
