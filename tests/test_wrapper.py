"""KTMoEWrapper on a CPU: kt-kernel's signature, bits as of KTExperts, deferred experts, and refused calls."""

import inspect
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ktconvert.layouts.errors import ArgumentError, CallError, InputError, KTConvertError, StateError
from ktconvert.native_quant import KTExperts, KTMoEWrapper, generate_gpu_experts_masks, kernels, machine
from rig import isas, programs
from rig.wrappers import EXPERTS, HIDDEN, TOPK, clear_state, equal_bits, load, make, make_inputs  # noqa: F401

Stacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def kt_kernel(  # type: ignore[no-untyped-def]
    layer_idx, num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size, gpu_experts_mask,
    cpuinfer_threads, threadpool_count, weight_path, chunked_prefill_size, cpu_save=False,
    max_deferred_experts_per_token=None, method="AMXINT4", numa_nodes=None, mode="inference", num_gpu_experts=0,
    lora_rank=16, lora_alpha=32.0, lora_dropout=0.0, max_cache_depth=1, group_size=128, zero_point=True,
    full_weight_grad=False, swiglu_limit=0.0, swiglu_alpha=0.0,
):  # fmt: skip
    """Return the parameters of kt-kernel 0.7.2 in their order."""


@pytest.fixture(scope="module")
def stacked(example: Path) -> list[Stacked]:
    """Return gate, up and down of the bundled model's two layers."""
    source = load_file(example / "model.safetensors")

    def stack(layer: int, name: str) -> torch.Tensor:
        return torch.stack([source[f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight"] for e in range(EXPERTS)])

    return [(stack(layer, "gate"), stack(layer, "up"), stack(layer, "down")) for layer in (0, 1)]


def by_experts(experts: KTExperts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = experts.forward(hidden.view(torch.uint16).numpy(), ids.numpy(), weights.numpy())
    return torch.from_numpy(out).view(torch.bfloat16)


def test_the_signature_begins_with_that_of_kt_kernel():
    ours, theirs = (inspect.signature(each).parameters for each in (KTMoEWrapper, kt_kernel))
    assert list(ours) == [*theirs, "situ_beta", "situ_linear_beta", "cold_only_cpu_experts"]
    assert list(inspect.signature(KTMoEWrapper.__new__).parameters)[1:] == list(ours)  # where SGLang's forks look
    for name, parameter in theirs.items():
        if parameter.default is not parameter.empty:
            assert ours[name].default == parameter.default, name


def test_only_the_mask_may_be_omitted(packed_example):
    given = {"layer_idx": 0, "num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 256}
    given |= {"moe_intermediate_size": 256, "threadpool_count": 1, "chunked_prefill_size": 512, "method": "AMXINT8"}
    threads = {"cpuinfer_threads": 2, "weight_path": "x"}
    assert not KTMoEWrapper(**given, **threads | {"weight_path": str(packed_example("int8", 1))}).gpu_experts_mask.any()
    before_06 = KTMoEWrapper(**given, **threads, num_gpu_experts=3)
    assert before_06.gpu_experts_mask.tolist() == [True] * 3 + [False] * 5
    assert not KTMoEWrapper(**given, **threads, num_gpu_experts=3, gpu_experts_mask=None).gpu_experts_mask.any()
    with pytest.raises(CallError, match=r"^KTMoEWrapper needs layer_idx=..., num_experts="):
        KTMoEWrapper()  # type: ignore[call-arg]
    with pytest.raises(CallError, match=r"^KTMoEWrapper needs cpuinfer_threads=..., weight_path=...\.?$"):
        KTMoEWrapper(**given)
    del given["layer_idx"]
    with pytest.raises(TypeError, match=r"^KTMoEWrapper needs layer_idx=..., cpuinfer_threads="):
        KTMoEWrapper(**given)
    given["layer_idx"] = 0
    for number in (-1, 9, None):
        with pytest.raises(ValueError, match=f"num_gpu_experts must be an int from 0 to 8, not {number}"):
            KTMoEWrapper(**given, **threads, num_gpu_experts=number)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("method", ["int4", "int8"])
def test_forward_gives_the_bits_of_experts(packed_example, method, parts):
    path, name = packed_example(method, parts), f"AMX{method.upper()}"
    for layer in (0, 1):
        wrapper = load(path, layer_idx=layer, method=name, threadpool_count=parts)
        experts = KTExperts.load(path, layer)
        for tokens in (0, 1, 40):
            batch = make_inputs(tokens)
            expected = by_experts(experts, *batch)
            assert equal_bits(wrapper.forward(*batch, None), expected)
            wrapper.submit_forward(*batch, None)
            assert equal_bits(wrapper.sync_forward(batch[0], None), expected)


def test_any_dtype_shape_and_stride_computes(packed_example):
    wrapper = load(packed_example("int8", 1))
    hidden, ids, weights = make_inputs(12)
    expected = wrapper.forward(hidden, ids, weights)
    cube = wrapper.forward(hidden.view(3, 4, HIDDEN), ids.view(3, 4, TOPK), weights.view(3, 4, TOPK))
    assert equal_bits(cube, expected.view(3, 4, HIDDEN))
    for dtype in (torch.float32, torch.float64):
        out = wrapper.forward(hidden.to(dtype), ids.int(), weights.double())
        assert out.dtype == dtype and torch.equal(out, expected.to(dtype))
    wide = torch.zeros(12, 2 * HIDDEN, dtype=torch.bfloat16)
    wide[:, ::2] = hidden
    assert equal_bits(wrapper.forward(wide[:, ::2], ids.T.contiguous().T, weights), expected)


def test_outputs_are_new_tensors(packed_example):
    wrapper = load(packed_example("int8", 1))
    first, second = make_inputs(4, seed=1), make_inputs(4, seed=2)
    kept = wrapper.forward(*first)
    copy = kept.clone()
    wrapper.forward(*second)
    assert equal_bits(kept, copy)
    wrapper.submit_forward(*first)
    for tensor in first:
        tensor.zero_()  # kt-kernel copies too: what was submitted may be overwritten
    assert equal_bits(wrapper.sync_forward(first[0]), copy)


def test_masked_experts_add_nothing_even_after_a_change_of_the_mask(packed_example):
    path = packed_example("int8", 1)
    hidden, ids, weights = make_inputs(20)
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[[1, 4]] = True
    everything, masked = load(path), load(path, gpu_experts_mask=mask)
    all_of_them = everything.forward(hidden, ids, weights)
    without = everything.forward(hidden, ids.masked_fill(mask[ids], -1), weights)
    assert masked.num_gpu_experts == 2 and equal_bits(masked.forward(hidden, ids, weights), without)
    masked.gpu_experts_mask.copy_(torch.zeros(EXPERTS, dtype=torch.bool))  # as SGLang does
    assert equal_bits(masked.forward(hidden, ids, weights), all_of_them)
    masked.gpu_experts_mask = mask  # a copy
    mask[:] = False
    assert masked.num_gpu_experts == 2 and equal_bits(masked.forward(hidden, ids, weights), without)
    with pytest.raises(ValueError, match=r"gpu_experts_mask must be a bool tensor \[8\], not Tensor"):
        masked.gpu_experts_mask = torch.zeros(3)
    for wrong, given in (
        (torch.zeros(8), r"Tensor torch.float32 \[8\]"),
        ([False] * 8, r"list; pass torch.tensor\(gpu_"),
    ):
        with pytest.raises(ArgumentError, match=rf"gpu_experts_mask must be a bool tensor \[8\], not {given}"):
            load(path, gpu_experts_mask=wrong)
    masked.gpu_experts_mask = None
    assert equal_bits(masked.forward(hidden, ids, weights), all_of_them)
    assert not everything.forward(hidden, torch.tensor([[-1, EXPERTS]] * 20), weights).any()


def test_a_different_number_of_slices_can_be_rejected(packed_example, monkeypatch):
    monkeypatch.setattr(KTMoEWrapper, "strict", True)
    with pytest.raises(KTConvertError, match="made for 2 NUMA slices"):
        load(packed_example("int4", 2), method="AMXINT4", threadpool_count=1)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("method", ["int4", "int8"])
def test_packed_tensors_equal_converted_files(tmp_path, packed_example, stacked, method, parts):
    loose, name = packed_example(method, parts, "--no-merge-safetensor"), f"AMX{method.upper()}"
    batch = make_inputs(5)
    for layer in (0, 1):
        online = make(tmp_path, layer_idx=layer, method=name, threadpool_count=parts, cpu_save=True)
        online.load_weights_from_tensors(*stacked[layer], torch.arange(EXPERTS))
        expected = load(loose, layer_idx=layer, method=name, threadpool_count=parts).forward(*batch)
        assert equal_bits(online.forward(*batch), expected)
        saved = load(tmp_path, layer_idx=layer, method=name, threadpool_count=parts)
        assert equal_bits(saved.forward(*batch), expected)
    ours, theirs = ({p.relative_to(f): p.read_bytes() for p in f.rglob("*.kt")} for f in (tmp_path, loose))
    assert ours == theirs and len(ours) == 2 * EXPERTS * 3 * parts * 2


def test_physical_experts_use_their_logical_experts(tmp_path, packed_example, stacked):
    order = torch.tensor([3, 1, 0, 7, 6, 5, 2, 4])
    hidden, ids, weights = make_inputs(20)
    expected = load(packed_example("int8", 1)).forward(hidden, order[ids], weights)
    mapped = make(packed_example("int8", 1))
    mapped.load_weights(order)
    assert equal_bits(mapped.forward(hidden, ids, weights), expected)
    make(tmp_path / "new").load_weights_from_tensors(*stacked[0], order)
    assert list(tmp_path.iterdir()) == []  # without cpu_save nothing is written
    online = make(tmp_path, cpu_save=True)
    online.load_weights_from_tensors(*stacked[0], order)
    assert equal_bits(online.forward(hidden, ids, weights), expected)
    assert equal_bits(load(tmp_path).forward(hidden, order[ids], weights), expected)  # files hold logical experts
    for wrong, problem in (
        (torch.arange(EXPERTS - 1), r"be a tensor of integers \[8\], or None, not .* \[7\]"),
        (order.view(2, 4), r"be a tensor of integers \[8\], or None, not .* \[2, 4\]"),
        (torch.tensor([0, 1, 2, 3, 4, 5, 6, 2]), "name each of 8 experts once, .*but names 2 2 times"),
        (order + 1, "name each of 8 experts once, .*but names 8"),
    ):
        with pytest.raises(ValueError, match=f"must {problem}"):
            mapped.load_weights(wrong)


class Plain:
    """Deferred experts as one would write them down, for one NUMA slice and kt-kernel's rounding, in NumPy.

    Each expert's output y is BF16; a layer's sum is fma(y, weight, sum) over its experts in float32, what was left
    before comes last.
    """

    def __init__(self, path: Path, layers: int) -> None:
        self.experts = [KTExperts.load(path, layer, exact=True) for layer in range(layers)]
        self.left: list[Any] = [None] * layers

    def sums(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        total = np.zeros((len(hidden), HIDDEN), np.float32)
        one = torch.ones(len(hidden), 1)
        for j in range(ids.shape[1]):
            y = by_experts(self.experts[layer], hidden, ids[:, j : j + 1].contiguous(), one).double().numpy()
            total = (total + y * weights[:, j : j + 1].double().numpy()).astype(np.float32)
        return total

    def __call__(self, layer: int, defer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        now, later = ids.clone(), torch.full_like(ids, -1)
        if defer:
            invalid = (ids < 0) | (ids >= EXPERTS)  # costs nothing, and is immediate
            best = weights.masked_fill(invalid, torch.inf).argsort(1, descending=True)[:, : ids.shape[1] - defer]
            at_once = set(ids.gather(1, best).flatten().tolist())
            for t, j in np.ndindex(*ids.shape):
                if int(ids[t, j]) not in at_once:
                    now[t, j], later[t, j] = -1, ids[t, j]
        total = self.sums(layer, hidden, now, weights)
        if layer and self.left[layer - 1] is not None:
            total = total + self.left[layer - 1]
        if defer:
            left = torch.from_numpy(self.sums(layer, hidden, later, weights)).to(torch.bfloat16)
            self.left[layer] = left.float().numpy()
        return torch.from_numpy(total).to(torch.bfloat16)


@pytest.mark.parametrize("way", ["forward", "submit", "turns"])
@pytest.mark.parametrize("defer", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 3])
def test_deferred_experts_reach_the_next_layer(packed_example, way, defer, tokens):
    path = packed_example("int8", 1)
    KTMoEWrapper.exact = True
    settings: list[dict[str, Any]] = [{"max_deferred_experts_per_token": defer}, {"layer_idx": 1}]
    layers = [load(path, **more, num_experts_per_tok=3) for more in settings]
    plain = Plain(path, 2)
    for turn in range(3):
        hidden, ids, weights = make_inputs(tokens, seed=10 * turn + tokens, topk=3)
        ids[0, turn] = -1 if turn else EXPERTS  # is no expert
        for layer, wrapper in enumerate(layers):
            expected = plain(layer, defer if layer == 0 else 0, hidden, ids, weights)
            if way == "submit" or (way == "turns" and (turn + layer) % 2):
                wrapper.submit_forward(hidden, ids, weights, None)
                out = wrapper.sync_forward(hidden, None)
            else:
                out = wrapper.forward(hidden, ids, weights, None)
            assert equal_bits(out, expected), (turn, layer)
            hidden, ids = out, ids.flip(0)
        plain.left = [None, None]


def test_deferred_experts_are_added_once_and_only_by_the_next_layer(packed_example):
    path = packed_example("int8", 1)
    batch = make_inputs(4)
    first, second = load(path, max_deferred_experts_per_token=1), load(path, layer_idx=1)
    alone = second.forward(*batch)
    first.forward(*batch)
    assert not equal_bits(second.forward(*batch), alone) and equal_bits(second.forward(*batch), alone)
    first.forward(*batch)
    assert equal_bits(first.forward(*batch), first.forward(*batch))  # nothing comes before layer 0
    first.forward(*batch)
    KTMoEWrapper.clear_buffer_cache()
    assert equal_bits(second.forward(*batch), alone)


@pytest.mark.parametrize("order", ["one by one", "layer by layer", "after an unused layer"])
@pytest.mark.parametrize("way", ["forward", "submit"])
def test_models_do_not_mix(packed_example, way, order):
    """A model that is loaded twice and computes layer by layer with different inputs keeps separate sums."""
    path = packed_example("int8", 1)
    layers = [{"layer_idx": 0, "max_deferred_experts_per_token": 1}, {"layer_idx": 1}]
    batches = [make_inputs(4, seed) for seed in (0, 1)]
    expected = []
    for hidden, ids, weights in batches:
        alone = [load(path, **layer) for layer in layers]
        expected.append([hidden := wrapper.forward(hidden, ids, weights) for wrapper in alone])
    del alone
    unused = [load(path, **layers[0])] if order == "after an unused layer" else []
    if order == "layer by layer":
        models = list(zip(*[[load(path, **layer) for _ in batches] for layer in layers], strict=True))
    else:
        models = [tuple(load(path, **layer) for layer in layers) for _ in batches]
    outs = [hidden for hidden, _, _ in batches]
    for layer in range(2):
        for number, (model, (_, ids, weights)) in enumerate(zip(models, batches, strict=True)):
            if way == "forward":
                outs[number] = model[layer].forward(outs[number], ids, weights)
            else:
                model[layer].submit_forward(outs[number], ids, weights)
                outs[number] = model[layer].sync_forward(outs[number])
        assert all(equal_bits(got, each[layer]) for got, each in zip(outs, expected, strict=True))
    del unused


def test_a_new_wrapper_replaces_one_of_its_layer(packed_example):
    path, batch = packed_example("int8", 1), make_inputs(4)
    first, second = load(path, max_deferred_experts_per_token=1), load(path, layer_idx=1)
    alone = second.forward(*batch)
    first.forward(*batch)
    expected = second.forward(*batch)
    first.forward(*batch)
    del first
    first = load(path, max_deferred_experts_per_token=1)  # has left nothing yet
    first.forward(*batch)
    assert equal_bits(second.forward(*batch), expected) and not equal_bits(expected, alone)
    first.max_deferred_experts_per_token = 0  # may change at any time, as in kt-kernel
    first.forward(*batch)
    assert equal_bits(second.forward(*batch), alone)


def test_the_next_layer_must_get_the_same_tokens(packed_example):
    """A layer that defers experts must have a next layer."""
    path = packed_example("int8", 1)
    last = load(path, layer_idx=1, max_deferred_experts_per_token=1)
    with pytest.warns(
        UserWarning, match=r"layer 1 of .* its model has no layer 2 .* max_deferred_experts_per_token=0"
    ) as given:
        last.forward(*make_inputs(4))
    assert [warning.filename for warning in given] == [__file__]
    del last
    first, second = load(path, max_deferred_experts_per_token=1), load(path, layer_idx=1)
    first.forward(*make_inputs(4))
    with pytest.raises(ValueError, match=r"layer 1 was called with 3 tokens.*layer 0 deferred experts of 4 tokens"):
        second.forward(*make_inputs(3))
    second.forward(*make_inputs(3))


NODES = re.escape(f"from {list(machine.numa_nodes())}, not ")


NOT_YET = "'SYCL_GPTQ_INT4' is not implemented yet.*AMXINT4, AMXINT8"
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mode": "train"}, ValueError, r"unknown mode 'train'; choose 'inference' or 'sft'"),
    ({"method": "INT3"}, ValueError, r"unknown method 'INT3'.*AMXINT4, AMXINT8"),
    ({"method": "AMXINT4", "mode": "sft"}, ValueError, r"unknown method 'AMXINT4' for mode 'sft'.*AMXINT4_SFT"),
    ({"method": "SYCL_GPTQ_INT4"}, NotImplementedError, NOT_YET),
    ({"swiglu_limit": -1.0}, ValueError, "swiglu_limit must be a finite number of at least 0, not -1.0"),
    ({"swiglu_alpha": float("nan")}, ValueError, "swiglu_alpha must be a finite number of at least 0, not nan"),
    *(
        ({size: value}, ArgumentError, "must be an int of at least 1")
        for size, value in (("num_experts", 0), ("hidden_size", -1))
    ),
    ({"num_experts_per_tok": 9}, ArgumentError, "must be an int from 1 to 8, not 9"),
    ({"numa_nodes": machine.numa_nodes()[:1], "threadpool_count": 2}, ValueError, "numa_nodes must name 2 nodes"),
    ({"numa_nodes": [0, 0], "threadpool_count": 2}, ValueError, NODES + r"\[0, 0\]"),
    ({"gpu_experts_mask": torch.zeros(3)}, ValueError, r"gpu_experts_mask must be a bool tensor \[8\], not Tensor"),
    ({"max_deferred_experts_per_token": "1"}, ArgumentError, "must be an int of at least 0, not '1'"),
    *(({"weight_path": value}, ArgumentError, f"weight_path must be a path, not {value}") for value in (None, 5)),
    ({"cpu_save": "no"}, ArgumentError, "cpu_save must be one of False, True, not 'no'"),
    ({"layer": 1}, CallError, r"^KTMoEWrapper has no argument layer; did you mean layer_idx\?$"),
    ({"situ_linear_beta": 25.0}, ValueError, "situ_linear_beta=25 belong to no activation"),
    ({"situ_beta": 4.0, "swiglu_limit": 7.0}, ValueError, "swiglu_limit=7, situ_beta=4 belong to no activation"),
]


@pytest.mark.parametrize(("changed", "error", "sentence"), WRONG)
def test_impossible_arguments_are_rejected(changed, error, sentence):
    with pytest.raises(error, match=sentence):
        make(**changed)


def test_sizes_that_the_files_contradict_are_rejected_before_weights_are_loaded(packed_example, tmp_path):
    with pytest.raises(InputError, match="layer 0 has hidden_size 256, not 512"):
        make(packed_example("int8", 1), hidden_size=512)
    with pytest.raises(KTConvertError, match=f"^{tmp_path}/none: "):
        make(tmp_path / "none", method="RAWINT4")
    make(tmp_path / "none")  # tensors need no files


def test_a_printed_wrapper_shows_path_and_sizes(packed_example):
    path = packed_example("int8", 1)
    sizes = "num_experts=8, num_experts_per_tok=2, hidden_size=256, moe_intermediate_size=256, threadpool_count=1"
    printed = f"KTMoEWrapper(layer_idx=0, method='AMXINT8', weight_path='{path}', {sizes}"
    assert repr(make(path)) == f"{printed}, no weights loaded)" and repr(load(path)) == f"{printed})"


def test_threadpool_count_selects_nodes_of_the_process(monkeypatch):
    cpu = min(machine.affinity())
    monkeypatch.setattr(machine, "node_cpus", lambda *_: {1: (cpu,), 3: (cpu,), 4: (cpu,)})
    nodes = {count: make(cpuinfer_threads=4, threadpool_count=count)._pool.nodes for count in (1, 2, 3, 4)}
    assert nodes == {1: (1,), 2: (1, 3), 3: (1, 3, 4), 4: (1, 3, 4)}
    assert make(cpuinfer_threads=4, threadpool_count=2, numa_nodes=[4, 1])._pool.nodes == (4, 1)


def test_calls_out_of_order_or_of_wrong_shape_are_rejected(packed_example, stacked):
    empty, wrapper = make(), load(packed_example("int8", 1))
    hidden, ids, weights = make_inputs(4)
    for call in (empty.forward, empty.submit_forward):
        with pytest.raises(StateError, match="layer 0 has no weights"):
            call(hidden, ids, weights)
    assert issubclass(StateError, RuntimeError)
    closed = load(packed_example("int8", 1))
    closed.moe.close()
    buffers: list[list[int]] = [[], [], [], []]
    for use in (
        lambda: closed.forward(hidden, ids, weights),
        lambda: closed.submit_forward(hidden, ids, weights),
        lambda: closed.submit_write_weight_scale_to_buffer(1, 0, *buffers),
    ):
        with pytest.raises(StateError, match=r"^the experts of layer 0 were closed; load them again"):
            use()
    with pytest.raises(StateError, match="without a submit_forward"):
        wrapper.sync_forward(hidden)
    few = (hidden[:, :128], ids, weights), (hidden[:3], ids, weights), (hidden, ids, weights[:, :1])
    types = ([[1, 2]], ids, weights), (hidden.long(), ids, weights), (hidden, ids.float(), weights), (hidden, ids, None)
    devices = (hidden.to("meta"), ids, weights), (hidden, ids.to("meta"), weights), (hidden, ids, weights.to("meta"))
    for wrong in (*few, (hidden[0], ids[0], weights[0]), *types, *devices):
        with pytest.raises(ValueError, match=r"(hidden_states|topk_ids|topk_weights) must be a tensor of"):
            wrapper.forward(*wrong)
        with pytest.raises(ArgumentError):
            wrapper.submit_forward(*wrong)
    with pytest.raises(
        CallError, match=r"^KTMoEWrapper\.forward has no argument hidden; did you mean hidden_states\?$"
    ):
        wrapper.forward(hidden=hidden, topk_ids=ids, topk_weights=weights)  # type: ignore[call-arg]
    expected = wrapper.forward(hidden, ids, weights)
    wrapper.submit_forward(hidden, ids, weights)
    for wrong_hidden in (3, None, hidden[:3], hidden.long()):
        with pytest.raises(ArgumentError, match="hidden_states must be a tensor of"):
            wrapper.sync_forward(wrong_hidden)
    assert equal_bits(wrapper.sync_forward(hidden), expected)
    for scores in ((3, weights), (ids, 3)):
        with pytest.raises(ArgumentError, match=r"expert_(ids|scores) must be a tensor, not 3"):
            wrapper.select_deferred_experts(*scores, 1)
    with pytest.raises(ValueError, match="gate_proj must be a tensor"):
        empty.load_weights_from_tensors(stacked[0][0][:4], *stacked[0][1:], torch.arange(8))
    for order in (torch.zeros(3, dtype=torch.int64), torch.arange(8.0), list(range(8))):
        with pytest.raises(
            ArgumentError, match=r"^physical_to_logical_map_cpu must be a tensor of integers \[8\], or "
        ):
            wrapper.load_weights(order)  # type: ignore[arg-type]
    for sizes, name in (("a", "capture_bs"), ([-1], r"capture_bs\[0\]"), ([1, "2"], r"capture_bs\[1\]")):
        with pytest.raises(ArgumentError, match=f"^{name} must be "):
            KTMoEWrapper.set_capture_batch_sizes(sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cpu_save=True is only for"):
        make(cpu_save=True).load_weights(torch.arange(8))
    with pytest.raises(NotImplementedError, match="kt-gpu-prefill-token-threshold"):
        wrapper.submit_write_weight_scale_to_buffer(1, 0, [0], [0], [0], [0])


def test_masks_select_the_most_used_experts():
    frequency = torch.tensor([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])
    masks = generate_gpu_experts_masks(frequency, 3)
    assert masks.dtype == torch.bool and masks.tolist() == [[False, True, False, True], [False, False, True, False]]
    assert not generate_gpu_experts_masks(frequency, -1).any() and generate_gpu_experts_masks(frequency, 99).all()


def python(program: str, **environment: str) -> programs.Done:
    clean = {name: "" for name in os.environ if name.startswith(("KTCONVERT_", "KT_KERNEL_"))}
    return programs.run_python(program, **clean | environment)


def test_kt_kernel_can_be_imported_by_name():
    result = python(
        "import importlib.util, sys\n"
        "from ktconvert.native_quant import install_as_kt_kernel, KTMoEWrapper as ours\n"
        "assert 'kt_kernel' not in sys.modules\n"
        "install_as_kt_kernel(); install_as_kt_kernel()\n"
        "import kt_kernel\n"
        "from kt_kernel import KTMoEWrapper, generate_gpu_experts_masks, kt_kernel_ext\n"
        "assert KTMoEWrapper is ours and importlib.util.find_spec('kt_kernel')\n"
        "assert {'KTMoEWrapper', 'generate_gpu_experts_masks', '__version__'} <= {*dir(kt_kernel)}\n"
        "print(kt_kernel.__version__, kt_kernel.__cpu_variant__, kt_kernel_ext.__cpu_variant__)\n"
        "try: kt_kernel_ext.CPUInfer(4)\n"
        "except AttributeError as error: print(error)\n"
        "try: import kt_kernel.utils\n"
        "except ImportError as error: print(error)\n"
    )
    assert result.returncode == 0, result.stderr
    first, second, third = result.stdout.splitlines()
    version, variant, same_variant = first.split()
    variants = ("amx", "avx512_bf16", "avx512_vnni", "avx512_base", "avx2", "scalar")
    assert version[0].isdigit() and variant == same_variant in variants
    assert "CPUInfer" in second and "kt_kernel.utils" in third


def test_the_real_package_keeps_its_submodules_and_extension(tmp_path):
    """A substitute is installed, whose __init__ must not run. Its extension and its training load at their first use."""
    files = {
        "__init__.py": "raise RuntimeError('the real package was imported')",
        "_cpu_detect.py": "import sys, types\n"
        "def initialize():\n"
        "    extension = sys.modules['kt_kernel_ext.moe'] = types.ModuleType('kt_kernel_ext.moe')\n"
        "    return extension, 'avx2'\n",
        "experts_base.py": "from kt_kernel import kt_kernel_ext",
        "sft/__init__.py": "from .config import KTConfig\nfrom kt_kernel import experts_base\n"
        "import kt_kernel_ext.moe\nget_fp8_runtime = None",
        "sft/config.py": "KTConfig = 'real'",
        "cli/__init__.py": "",
        "cli/main.py": "import sys\nassert 'kt_kernel.kt_kernel_ext' not in sys.modules\ndef main(): print('kt')",
    }
    for name, content in files.items():
        (tmp_path / "kt_kernel" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kt_kernel" / name).write_text(content)
    (tmp_path / "sitecustomize.py").write_text(
        "from ktconvert.native_quant import install_as_kt_kernel\n\ninstall_as_kt_kernel()\n"
    )
    result = python(
        "import kt_kernel\n"
        "from kt_kernel.cli.main import main\n"
        "main()\n"
        "import kt_kernel.sft, sys\n"
        "hasattr(kt_kernel.sft, '__wrapped__')\n"  # as inspect does
        "print('kt_kernel.experts_base' in sys.modules)\n"
        "from kt_kernel.sft import KTConfig\n"
        "import kt_kernel.sft.config as config\n"
        "from ktconvert.native_quant import KTMoEWrapper\n"
        "print(kt_kernel.KTMoEWrapper is KTMoEWrapper, KTConfig is config.KTConfig, kt_kernel.sft.get_fp8_runtime())\n",
        PYTHONPATH=str(tmp_path),
    )
    assert result.stdout.splitlines() == ["kt", "False", "True True namespace(kernel='ktconvert')"], result.stderr


def test_kt_quant_finds_its_script_beside_kt_kernel(tmp_path):
    """`kt quant` passes these arguments, --input-type fp8 for any model."""
    script = "from ktconvert.native_quant import install_as_kt_kernel\ninstall_as_kt_kernel()\n"
    script += "import runpy, sys, pathlib, kt_kernel\n"
    script += (
        "runpy.run_path(str(pathlib.Path(kt_kernel.__file__).parent.parent / 'scripts' / 'convert_cpu_weights.py'))"
    )
    model = Path(__file__).parents[1] / "examples" / "qwen3-moe-small"
    arguments = ["--input-path", model, "--input-type", "fp8", "--output", tmp_path / "out", "--quant-method", "int8"]
    arguments += ["--cpuinfer-threads", 1, "--threadpool-count", 1]
    programs.python_output(script, *arguments)
    assert KTExperts.load(tmp_path / "out", 1, method="AMXINT8").num_experts == 8


def test_names_are_imported_at_first_use():
    """The import does not replace the real kt_kernel."""
    result = python(
        "import sys, types, ktconvert.native_quant as nq\n"
        "nq.KTExperts, nq.__version__, nq.__cpu_variant__, dir(nq)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
        "try: nq.Nothing\n"
        "except AttributeError as error: print(error)\n"
        "sys.modules['kt_kernel'] = types.ModuleType('kt_kernel')\n"
        "nq.install_as_kt_kernel()\n"
    )
    none, error = result.stdout.splitlines()
    assert none == "[]" and "has no attribute 'Nothing'" in error
    assert "RuntimeError: the real kt_kernel is imported already" in result.stderr


SHOW = "from ktconvert.native_quant import kernels; print(kernels.isa()); kernels.isa()"


def test_the_environment_selects_the_instruction_set():
    unknown = "ValueError: KTCONVERT_ISA: 'sse9' is not a known instruction set"
    assert unknown in python(SHOW, KTCONVERT_ISA="sse9").stderr
    result = python(SHOW, KTCONVERT_ISA="")
    assert (result.stdout, result.stderr) == (f"{isas.default_isa()}\n", "")
    assert python(SHOW, KT_KERNEL_CPU_VARIANT="avx2", KTCONVERT_ISA="scalar").stdout == "scalar\n"
    assert python(SHOW, KT_KERNEL_CPU_VARIANT="neon").stdout == f"{isas.default_isa()}\n"  # kt-kernel skips it too
    names = {"avx2": "avx2", "avx512_bf16": "avx512bf16", "avx512_vbmi": "avx512vnni", "avx512_base": "avx512"}
    for variant, name in names.items():
        if name in kernels.available_isas():
            assert python(SHOW, KT_KERNEL_CPU_VARIANT=variant).stdout == f"{name}\n"
    if "amx" not in kernels.available_isas():
        refused = python(SHOW, KT_KERNEL_CPU_VARIANT="amx")
        assert "ValueError: KT_KERNEL_CPU_VARIANT: this machine does not support 'amx'" in refused.stderr
    result = python(SHOW, KTCONVERT_DEBUG="1", KTCONVERT_ISA=" AVX2 ")
    assert result.stdout == "avx2\n" and result.stderr.count("\n") == 1
    assert result.stderr.startswith("ktconvert: computes with avx2 (KTCONVERT_ISA) of scalar, avx2")
