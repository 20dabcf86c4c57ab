"""KTMoEWrapper on a CUDA stream: what is launched, in which buffers, and again when a graph is replayed.

The tests marked by `gpu` need one. The others stand in for the stream: the same C functions, by the same addresses, are
called by another thread in the order of their launch, and tensors on the CPU take the place of those on the GPU.
"""

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktconvert.native_quant import KTMoEWrapper
from ktconvert.native_quant._ktq import ffi
from ktconvert.native_quant.runtime import streams
from ktconvert.native_quant.runtime.pool import Job
from ktconvert.native_quant.runtime.streams import SUBMIT, WAIT, BufferCache
from rig.wrappers import TOPK, Batch, clear_state, equal_bits, load, make_inputs  # noqa: F401

LAYERS = 2
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")


@pytest.fixture(scope="module")
def folder(packed_example: Callable[..., Path]) -> Path:
    return packed_example("int8")


def model(folder: Path, defer: int, threads: tuple[int, int] = (2, 2)) -> list[KTMoEWrapper]:
    """Load both layers; the first defers."""
    deferred = (defer, 0)
    return [
        load(folder, layer_idx=n, cpuinfer_threads=threads[n], max_deferred_experts_per_token=deferred[n])
        for n in range(LAYERS)
    ]


def run(wrappers: list[KTMoEWrapper], batch: Batch) -> list[torch.Tensor]:
    """Through the layers on the CPU's path."""
    hidden, ids, weights = batch
    outs = []
    for wrapper in wrappers:
        hidden = wrapper.forward(hidden, ids, weights)
        outs.append(hidden)
    return outs


def buffers_of(wrapper: KTMoEWrapper) -> BufferCache:
    """Return the buffers of a model."""
    return wrapper._member.model.buffers


class Stream:
    """The recorded launches, and a thread that runs them."""

    def __init__(self) -> None:
        self.log: list[tuple[int, Job]] = []

    def launch(self, stream: int, function: int, job: Job) -> None:
        assert stream == 7
        self.log.append((function, job))
        self.call(function, job)

    def call(self, function: int, job: Job) -> None:
        c = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        thread = threading.Thread(target=c, args=(int(ffi.cast("uintptr_t", job.pointer)),))
        thread.start()
        thread.join()

    def replay(self) -> None:
        for function, job in list(self.log):
            self.call(function, job)

    def run(self, wrappers: list[KTMoEWrapper], batch: Batch) -> list[torch.Tensor]:
        """Through the layers on the GPU's path."""
        hidden, ids, weights = batch
        outs = []
        for wrapper in wrappers:
            assert wrapper._stream is not None
            wrapper._stream.submit(hidden, ids, weights, wrapper._split, 7)
            hidden = wrapper._stream.sync(hidden, 7)
            outs.append(hidden)
        return outs


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Return a substitute for a CUDA stream, number 7."""
    result = Stream()
    monkeypatch.setattr(streams, "launch", result.launch)
    monkeypatch.setattr(streams, "use_stream", lambda device, number: contextlib.nullcontext(number))
    return result


@pytest.mark.parametrize("defer", [0, 1, 2])
def test_stream_gives_the_bits_of_the_cpu(folder, stream, defer):
    wrappers = model(folder, defer)
    for seed, tokens in enumerate((4, 1, 4, 4, 9)):
        batch = make_inputs(tokens, seed)
        expected = run(wrappers, batch)
        assert all(map(equal_bits, stream.run(wrappers, batch), expected))


def test_the_order_of_launches_is_fixed(folder, stream):
    stream.run(model(folder, 1), make_inputs(3, 0))
    functions, jobs = [f for f, _ in stream.log], [j for _, j in stream.log]
    assert functions == [SUBMIT, SUBMIT, WAIT, SUBMIT, WAIT]  # now, late, now; now
    assert jobs[0] is jobs[2] and jobs[3] is jobs[4] and len(set(map(id, jobs))) == 3


def test_layers_with_their_own_threads_wait_for_each_other(folder, stream):
    wrappers = model(folder, 1, threads=(1, 2))
    batch = make_inputs(5, 3)
    expected = run(wrappers, batch)
    assert all(map(equal_bits, stream.run(wrappers, batch), expected))
    assert [f for f, _ in stream.log] == [SUBMIT, SUBMIT, WAIT, WAIT, SUBMIT, WAIT]


def test_models_of_one_directory_do_not_mix_on_a_stream(folder, stream):
    """Layer by layer, both submitted before either result is taken."""
    models, batches = [model(folder, 1), model(folder, 1)], [make_inputs(5, 1), make_inputs(5, 2)]
    expected = [run(each, batch) for each, batch in zip(models, batches, strict=True)]
    hidden = [batch[0] for batch in batches]
    for layer in range(LAYERS):
        wrappers = [each[layer] for each in models]
        for wrapper, x, (_, ids, weights) in zip(wrappers, hidden, batches, strict=True):
            assert wrapper._stream is not None
            wrapper._stream.submit(x, ids, weights, wrapper._split, 7)
        streams_of = [wrapper._stream for wrapper in wrappers if wrapper._stream is not None]
        hidden = [on.sync(x, 7) for on, x in zip(streams_of, hidden, strict=True)]
        assert all(equal_bits(got, outs[layer]) for got, outs in zip(hidden, expected, strict=True))


@pytest.mark.filterwarnings("ignore:layer 0 of .* defers experts")
def test_a_deferred_job_without_a_next_layer_is_awaited(folder, stream):
    first = model(folder, 1)[:1]
    batch = make_inputs(5, 3)
    expected = run(first, batch)
    for _ in range(3):
        assert equal_bits(stream.run(first, batch)[0], expected[0])
    assert [f for f, _ in stream.log] == [SUBMIT, SUBMIT, WAIT] + 2 * [WAIT, SUBMIT, SUBMIT, WAIT]


@pytest.mark.parametrize("defer", [0, 1])
def test_a_recorded_graph_can_be_replayed(folder, stream, defer):
    KTMoEWrapper.set_capture_batch_sizes([4])
    wrappers = model(folder, defer)
    stream.run(wrappers, make_inputs(4, 0))
    (buffers,) = buffers_of(wrappers[0]).kept.values()
    wrappers_again = model(folder, defer)
    for seed in (1, 2):
        _, ids, weights = batch = make_inputs(4, seed)
        # A graph's copies: what comes in for both layers, here without one layer's output going into the next.
        expected = [wrappers_again[0].forward(*batch), wrappers_again[1].forward(*batch)]
        now, later = wrappers[0].select_deferred_experts(ids, weights, TOPK - defer)
        for place in range(LAYERS):
            buffers.hidden[place].copy_(batch[0])
            buffers.weights[place].copy_(weights)
        buffers.ids[0].copy_(now)
        buffers.ids[1].copy_(ids)
        if later is not None:
            buffers.deferred_ids[0].copy_(later)
        stream.replay()
        assert equal_bits(buffers.out[0], expected[0]) and equal_bits(buffers.out[1], expected[1])
    stream.run(wrappers, make_inputs(9, 0))
    assert list(buffers_of(wrappers[1]).kept.values()) == [buffers]  # another size did not take their place


def test_only_captured_sizes_and_the_last_are_kept(folder, stream):
    KTMoEWrapper.set_capture_batch_sizes([2, 4])
    assert KTMoEWrapper.get_capture_batch_sizes() == [2, 4]
    wrappers = model(folder, 0)
    for tokens in (2, 3, 4, 5, 2, 6):
        stream.run(wrappers, make_inputs(tokens, 0))
    assert sorted(key[-1] for key in buffers_of(wrappers[0]).kept) == [2, 4]
    assert [tokens for tokens, _ in buffers_of(wrappers[0]).last.values()] == [6]
    assert wrappers[0]._stream is not None and len(wrappers[0]._stream._jobs) == 3
    KTMoEWrapper.clear_buffer_cache()
    KTMoEWrapper.clear_sft_buffer_cache()
    stream.log.clear()
    gc.collect()
    assert len(wrappers[0]._stream._jobs) == 0
    assert equal_bits(stream.run(wrappers, make_inputs(4, 0))[1], run(wrappers, make_inputs(4, 0))[1])


def test_masks_are_read_at_every_run(folder, stream):
    wrapper = model(folder, 0)[0]
    batch = make_inputs(6, 1)
    stream.run([wrapper], batch)
    wrapper.gpu_experts_mask[:] = True
    assert not stream.run([wrapper], batch)[0].any()


def test_experts_of_the_gpu_are_not_deferred_on_a_stream(folder, stream):
    """Immediate ids in the buffers include them, and the split follows changes of the mask."""
    wrappers, batch = model(folder, 1), make_inputs(6, 1)
    for expert in batch[1][:, 0].unique().tolist():
        wrappers[0].gpu_experts_mask[:] = False
        wrappers[0].gpu_experts_mask[expert] = True
        expected = run(wrappers, batch)
        assert all(map(equal_bits, stream.run(wrappers, batch), expected))
        (_, buffers) = next(iter(buffers_of(wrappers[0]).last.values()))
        assert not (buffers.deferred_ids[0] == expert).any()


def test_an_assigned_selection_decides_on_a_stream(folder, stream):
    wrappers, batch = model(folder, 1), make_inputs(6, 1)
    wrappers[0].select_deferred_experts = lambda ids, scores, protected: (torch.full_like(ids, -1), ids.int())
    expected = run(wrappers, batch)
    outs = stream.run(wrappers, batch)
    assert not outs[0].any() and all(map(equal_bits, outs, expected))


def on_gpu(batch: Batch) -> Batch:
    hidden, ids, weights = batch
    return hidden.cuda(), ids.cuda().int(), weights.cuda()


@gpu
@pytest.mark.parametrize("defer", [0, 1])
def test_gpu_tensors_compute(folder, defer):
    wrappers = model(folder, defer)
    for tokens in (1, 4, 40):
        batch = make_inputs(tokens, tokens)
        expected = run(wrappers, batch)
        outs = run(wrappers, on_gpu(batch))
        assert all(out.is_cuda for out in outs) and all(map(equal_bits, outs, expected))


@gpu
@pytest.mark.parametrize("name", ["number", "stream", "none"])
def test_forwards_keep_the_order_of_a_stream(folder, name):
    """Earlier work on the stream is visible, later work waits, although the host does not."""
    wrapper = model(folder, 0)[0]
    batch = make_inputs(16, 5)
    expected = wrapper.forward(*batch)
    own = torch.cuda.Stream()
    cuda_stream: Any = {"number": own.cuda_stream, "stream": own, "none": None}[name]
    source = on_gpu(batch)
    for _ in range(5):
        late = torch.zeros_like(source[0])
        torch.cuda.synchronize()
        with torch.cuda.stream(own):
            torch.cuda._sleep(20_000_000)
            late.copy_(source[0])
            wrapper.submit_forward(late, source[1], source[2], cuda_stream)
            late.zero_()
            out = wrapper.sync_forward(late, cuda_stream).clone()
        own.synchronize()
        assert equal_bits(out, expected)


@gpu
@pytest.mark.parametrize("defer", [0, 1])
def test_forwards_can_be_captured(folder, defer):
    """A replay reads the mask again, also where it decides what is deferred."""
    KTMoEWrapper.set_capture_batch_sizes([4])
    wrappers = model(folder, defer)
    hidden, ids, weights = on_gpu(make_inputs(4, 0))
    run(wrappers, (hidden, ids, weights))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(wrappers, (hidden, ids, weights))
    run(wrappers, on_gpu(make_inputs(40, 9)))  # another size in between
    for seed in (1, 2, 3):
        batch = make_inputs(4, seed)
        others = model(folder, defer)
        for wrapper in (wrappers[0], others[0]):
            wrapper.gpu_experts_mask[:] = torch.arange(8) % 3 == seed % 3
        expected = run(others, batch)
        for place, value in zip((hidden, ids, weights), on_gpu(batch), strict=True):
            place.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(equal_bits, outs, expected))
