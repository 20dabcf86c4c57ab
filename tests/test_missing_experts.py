"""Experts that something else computes are not loaded: they take no memory until a forward or a buffer needs them."""

import contextlib
import ctypes
import gc
import mmap
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktconvert.layouts.errors import InputError
from ktconvert.native_quant import KTExperts, KTMoEWrapper
from ktconvert.native_quant._ktq import ffi
from ktconvert.native_quant.runtime import streams
from rig import gguf
from rig.wrappers import EXPERTS, HIDDEN, Batch, clear_state, equal_bits, load, make_inputs  # noqa: F401

GPU = np.array([False, True, True, False, False, True, True, True])
# Converted directories, merged and loose; checkpoints that are copied; and a GGUF.
FORMS: dict[str, tuple[str, ...]] = {
    "int4": (),
    "int8 loose": ("--no-merge-safetensor",),
    "mxfp4": (),
    "fp8": (),
    "bf16": (),
    "fp8 kt": ("--layout", "kt"),
    "mxfp4 kt": ("--layout", "kt"),
    "gguf": (),
}


@pytest.fixture(scope="module")
def find_form(packed_example: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the path of a row of FORMS."""

    def find(form: str) -> Path:
        if form != "gguf":
            return packed_example(form.split()[0], 1, *FORMS[form])
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        tensors = gguf.model([("Q4_K", "Q8_0", "Q6_K")], experts=EXPERTS, hidden=HIDDEN, width=256)
        sizes = {"embedding_length": HIDDEN, "expert_count": EXPERTS, "expert_feed_forward_length": 256}
        gguf.write(path, tensors, gguf.model_metadata(1, **sizes))
        return path

    return find


def compute(experts: KTExperts, batch: Batch, skip: Any = None) -> Any:
    hidden, ids, weights = batch
    return experts.forward(hidden.view(torch.uint16).numpy(), ids.numpy(), weights.numpy(), skip=skip)


def count_resident_pages(data: Any) -> int:
    """Return the number of whole pages inside an array that are in memory."""
    address, size = data.__array_interface__["data"][0], data.nbytes
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (address + size - start) // mmap.PAGESIZE
    if pages <= 0:
        return 0
    states = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * mmap.PAGESIZE), states) == 0, ctypes.get_errno()
    return sum(state & 1 for state in states)


def find_resident_experts(experts: KTExperts) -> set[int]:
    """Return the file's experts of which some page is in memory."""
    arrays = experts._packed.arrays.items()
    return {numa_slice.expert for numa_slice, stored in arrays if any(map(count_resident_pages, stored))}


@pytest.mark.parametrize("form", FORMS)
def test_skipped_experts_take_no_memory_until_they_are_needed(form, find_form):
    path = find_form(form)
    complete = KTExperts.load(path, 0, memory="copy")
    experts = KTExperts.load(path, 0, memory="copy", skip=GPU)
    assert find_resident_experts(complete) == set(range(EXPERTS))
    assert find_resident_experts(experts) == {0, 3, 4}
    assert experts.nbytes * EXPERTS == complete.nbytes * 3
    batch = make_inputs(20)
    np.testing.assert_array_equal(compute(experts, batch, GPU), compute(complete, batch, GPU))
    assert find_resident_experts(experts) == {0, 3, 4}
    one = make_inputs(1)[0], torch.tensor([[0, 5]]), torch.ones(1, 2)
    np.testing.assert_array_equal(compute(experts, one), compute(complete, one))
    assert find_resident_experts(experts) == {0, 3, 4, 5}
    np.testing.assert_array_equal(compute(experts, batch), compute(complete, batch))
    assert experts.nbytes == complete.nbytes and not experts._packed.missing


@pytest.mark.parametrize("parts", [1, 2])
def test_all_experts_may_be_skipped(packed_example, parts):
    path = packed_example("int4", parts)
    experts = KTExperts.load(path, 1, memory="copy", skip=np.ones(EXPERTS, bool))
    assert experts.nbytes == 0 and not find_resident_experts(experts)
    batch = make_inputs(3)
    assert not compute(experts, batch, np.ones(EXPERTS, bool)).any()
    np.testing.assert_array_equal(compute(experts, batch), compute(KTExperts.load(path, 1), batch))


def test_mapped_experts_are_loaded_when_they_are_needed(packed_example):
    path = packed_example("fp8", 1)
    experts, complete = KTExperts.load(path, 0, memory="map", skip=GPU), KTExperts.load(path, 0, memory="copy")
    batch = make_inputs(5)
    np.testing.assert_array_equal(compute(experts, batch), compute(complete, batch))


@pytest.mark.parametrize("method", ["int4", "mxfp4", "bf16"])
def test_requested_pages_change_no_result(packed_example, method):
    """Weights that exceed the memory are requested before they are computed."""
    path, batch = packed_example(method, 1), make_inputs(9)
    mapped = KTExperts.load(path, 0, memory="map")
    assert not mapped._packed.read_ahead
    requested = KTExperts(replace(mapped._packed, read_ahead=True))
    np.testing.assert_array_equal(compute(requested, batch), compute(mapped, batch))


def test_a_map_of_experts_decides_which_ones_are_loaded(packed_example):
    """An expert of the file is missing if the expert that computes with it is skipped."""
    path, order = packed_example("int8", 1), np.array([3, 1, 0, 7, 6, 5, 2, 4])
    experts = KTExperts.load(path, 0, memory="copy", order=order, skip=GPU)
    assert find_resident_experts(experts) == {3, 7, 6}
    batch = make_inputs(20)
    np.testing.assert_array_equal(compute(experts, batch), compute(KTExperts.load(path, 0, order=order), batch))
    with pytest.raises(ValueError, match=r"skip must be a NumPy array of bool or uint8 \[8\], not bool \[7\]"):
        KTExperts.load(path, 0, skip=GPU[1:])


def test_closed_experts_free_their_memory_at_once(packed_example):
    experts = KTExperts.load(packed_example("int4", 1), 0, memory="copy", skip=GPU)
    packed = weakref.ref(experts._packed)
    gc.disable()
    try:
        experts.close()
        assert packed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["forward", "submit", "stream"])
@pytest.mark.parametrize("change", ["assign", "copy", "clear one"])
def test_a_changed_mask_loads_experts_before_they_are_computed(packed_example, monkeypatch, way, change):
    path = packed_example("int8", 1)
    wrapper, complete = load(path, num_gpu_experts=5, gpu_experts_mask=torch.from_numpy(GPU)), load(path)
    assert wrapper.moe is not None and wrapper.moe._packed.missing == {1, 2, 5, 6, 7}
    monkeypatch.setattr(streams, "launch", launch)
    monkeypatch.setattr(streams, "use_stream", lambda device, number: contextlib.nullcontext(number))
    new = torch.tensor([True, True, False, True, False, False, True, True])
    if change == "assign":
        wrapper.gpu_experts_mask = new
    elif change == "copy":
        wrapper.gpu_experts_mask.copy_(new)
    else:
        wrapper.gpu_experts_mask[5] = False
    complete.gpu_experts_mask = wrapper.gpu_experts_mask
    batch = make_inputs(12)
    assert equal_bits(run(wrapper, batch, way), complete.forward(*batch))
    # Experts that moved to the GPU stay loaded.
    assert wrapper.moe._packed.missing == ({1, 2, 6, 7} if change == "clear one" else {1, 6, 7})


def launch(stream: int, function: int, job: Any) -> None:
    """Call a C function in another thread, as a CUDA stream does."""
    c = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    thread = threading.Thread(target=c, args=(int(ffi.cast("uintptr_t", job.pointer)),))
    thread.start()
    thread.join()


def run(wrapper: KTMoEWrapper, batch: Batch, way: str) -> torch.Tensor:
    if way == "forward":
        return wrapper.forward(*batch)
    if way == "submit":
        wrapper.submit_forward(*batch)
        return wrapper.sync_forward(batch[0])
    assert wrapper._stream is not None
    wrapper._stream.submit(*batch, wrapper._split, 7)
    return wrapper._stream.sync(batch[0], 7)


def test_a_replayed_graph_loads_what_a_changed_mask_needs(packed_example, monkeypatch):
    """A replay runs no Python of ours except the one that C calls, as sglang-kt changes masks between replays."""
    path = packed_example("int8", 1)
    wrapper, complete = load(path, gpu_experts_mask=torch.from_numpy(GPU)), load(path)
    log: list[tuple[int, int, Any]] = []
    monkeypatch.setattr(streams, "launch", lambda *call: (log.append(call), launch(*call)))
    monkeypatch.setattr(streams, "use_stream", lambda device, number: contextlib.nullcontext(number))
    batch = make_inputs(6)
    run(wrapper, batch, "stream")
    assert wrapper.moe is not None and wrapper.moe._packed.missing == {1, 2, 5, 6, 7}
    wrapper.gpu_experts_mask.copy_(torch.zeros(EXPERTS, dtype=torch.bool))
    for call in list(log):
        launch(*call)
    (_, buffers) = wrapper._member.model.buffers.last[batch[0].device, HIDDEN, 2]
    assert equal_bits(buffers.out[0], complete.forward(*batch))
    assert wrapper.moe._packed.missing == {1, 2, 5, 6, 7} - set(batch[1].flatten().tolist())


def test_buffers_for_prefill_get_skipped_experts_without_loading_them(packed_example):
    path = packed_example("fp8", 1)
    wrapper, complete = (load(path, method="FP8", gpu_experts_mask=mask) for mask in (torch.from_numpy(GPU), None))
    written = []
    for moe in (wrapper, complete):
        outs = [[np.zeros(2 * 256 * 256, np.uint8) for _ in range(4)] for _ in range(EXPERTS)]
        for expert, buffers in enumerate(outs):
            moe.submit_write_weight_scale_to_buffer(1, expert, *([out.ctypes.data] for out in buffers))
        moe.sync_write_weight_scale_to_buffer()
        written.append(np.array(outs))
    np.testing.assert_array_equal(*written)
    assert written[0].any(axis=(1, 2)).all()
    assert wrapper.moe is not None and find_resident_experts(wrapper.moe) == {0, 3, 4}


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_files_that_changed_are_not_read(packed_example, tmp_path, change, monkeypatch):
    shutil.copytree(packed_example("int8", 1), tmp_path / "out")
    wrapper = load(tmp_path / "out", gpu_experts_mask=torch.from_numpy(GPU))
    for shard in (tmp_path / "out").glob("*.safetensors"):
        if change == "removed":
            shard.unlink()
        else:
            shutil.copy(shard, tmp_path / "new")
            (tmp_path / "new").replace(shard)
    batch = make_inputs(6)
    wrapper.forward(*batch)
    monkeypatch.setattr(streams, "launch", launch)
    monkeypatch.setattr(streams, "use_stream", lambda device, number: contextlib.nullcontext(number))
    wrapper.gpu_experts_mask[:] = False
    problem = (
        r"safetensors: changed after experts of layer 0 were loaded, and the others are needed now; load the model"
    )
    for way in ("forward", "submit", "stream"):
        with pytest.raises(InputError, match=problem):
            run(wrapper, batch, way)


def test_a_forward_reports_that_a_file_changed_when_only_c_noticed(packed_example, tmp_path):
    """A job is submitted again after its ids have changed, which only C sees."""
    shutil.copytree(packed_example("int8", 1), tmp_path / "out")
    experts = KTExperts.load(tmp_path / "out", 0, memory="copy", skip=GPU)
    hidden, ids, weights = (
        x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy() for x in make_inputs(1)
    )
    ids[:] = 0, 3
    job = experts._submit(hidden, ids, weights, out=np.empty_like(hidden))
    job.wait()
    for shard in (tmp_path / "out").glob("*.safetensors"):
        os.utime(shard, (1, 1))
    ids[:] = 1, 3
    job.submit()
    with pytest.raises(InputError, match="changed after experts of layer 0 were loaded"):
        job.wait()
    with pytest.raises(InputError, match="changed after experts of layer 0 were loaded"):
        experts.forward(hidden, np.array([[0, 3]]), weights)
