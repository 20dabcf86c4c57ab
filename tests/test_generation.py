"""Generation on the CPU: attention of prompts and by section 5f of numerics.md, the growing cache, torch's threads."""

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import cache_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ktconvert.native_quant import machine
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime import generation
from ktconvert.native_quant.runtime.generation import GrowingLayer, attend
from ktconvert.native_quant.runtime.pool import Pool
from rig import isas

# Heads with keys, heads that share them, keys, their size, and that of values: around spans, blocks of queries, vectors.
CASES = [(1, 1, 1, 32, 32), (2, 3, 256, 64, 32), (1, 16, 257, 128, 160), (3, 20, 600, 192, 128), (4, 8, 31, 96, 96)]


def make_states(case: tuple[int, ...], more: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value of one token; keys and values are the first of more, as in a cache."""
    torch.manual_seed(sum(case))
    heads, queries, keys, size, value_size = case
    query = torch.randn(1, heads * queries, 1, size).bfloat16()
    key, value = (torch.randn(1, heads, keys + more, n).bfloat16()[:, :, :keys] for n in (size, value_size))
    return query, key, value


def make_module(query: torch.Tensor, key: torch.Tensor) -> Any:
    module: Any = torch.nn.Module()
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    return module


def test_attention_of_one_token_has_the_same_bits_on_all_instruction_sets_and_threads() -> None:
    for case in CASES:
        states = make_states(case)
        module = make_module(*states[:2])
        exact, _ = sdpa_attention_forward(module, *(tensor.double() for tensor in states), None, scaling=0.3)
        results = [attend(module, *states, None, 0.3, pool=Pool(n))[0] for _ in isas.each() for n in (1, 3)]
        assert results[0].shape == exact.shape
        assert all(torch.equal(result, results[0]) for result in results)
        assert float((results[0].double() - exact).norm() / exact.norm()) < 2**-8


def test_attention_is_compiled_as_that_of_torch() -> None:
    for case in CASES:
        states = make_states(case)
        module = make_module(*states[:2])
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        result, _ = compiled(module, *states, None, 0.3, pool=Pool(1))
        assert torch.equal(result, sdpa_attention_forward(module, *states, None, scaling=0.3)[0])


def test_attention_weighs_large_products_without_overflow() -> None:
    query, key, value = make_states((2, 2, 700, 32, 32))
    query[:], key[:] = 40.0, -40.0
    key[:, :, 300], key[:, :, 650] = 40.0, 40.0  # their products are 51200 and, of the others, -51200
    out, _ = attend(make_module(query, key), query, key, value, None, 1.0, pool=Pool(2))
    expected = (value[:, :, 300].float() + value[:, :, 650].float()) / 2
    torch.testing.assert_close(out.view(2, 2, 32).float(), expected.view(2, 1, 32).expand(2, 2, 32), rtol=2**-8, atol=0)
    key[:, 1, 3, 4] = torch.nan
    out, _ = attend(make_module(query, key), query, key, value, None, 1.0, pool=Pool(2))
    assert out[0, 0, 2:].isnan().all() and out[0, 0, :2].isfinite().all()


@pytest.mark.parametrize("change", ["tokens", "batch", "mask", "dtype", "size", "gaps", "gradients"])
def test_other_attention_is_that_of_transformers(change: str) -> None:
    states = make_states((2, 3, 40, 48 if change == "size" else 64, 64))
    mask = torch.rand(1, 1, 1, 40) < 0.7 if change == "mask" else None
    query, key, value = states
    if change == "tokens":
        query = torch.randn(1, 6, 3, 64).bfloat16()
    elif change == "batch":
        query, key, value = (tensor.repeat(2, 1, 1, 1) for tensor in states)
    elif change == "dtype":
        query, key, value = (tensor.float() for tensor in states)
    elif change == "gaps":
        key = key.repeat(1, 1, 1, 2)[..., ::2]
    elif change == "gradients":
        value = value.clone().requires_grad_()
    module = make_module(query, key)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    out, weights = attend(module, query, key, value, mask, 0.3, pool=Pool(1))
    assert weights is None and torch.equal(out, expected)


@pytest.mark.parametrize(
    ("heads", "queries", "size", "value_size"), [(2, 3, 64, 64), (1, 4, 64, 32), (20, 1, 48, 32), (3, 1, 32, 64)]
)
@pytest.mark.parametrize("masks", [0, 1, None])
def test_attention_of_a_prompt_is_that_of_transformers(
    heads: int, queries: int, size: int, value_size: int, masks: int | None
) -> None:
    """masks: number of masks; 0 for one of each head. Without a mask, each token sees itself and those before it."""
    torch.manual_seed(heads)
    tokens, keys, count = 7, 7 if masks is None else 30, heads * queries
    query = torch.randn(2, count, tokens, size)
    key, value = torch.randn(2, heads, keys, size), torch.randn(2, heads, keys, value_size)
    mask = None if masks is None else torch.rand(2, masks or count, tokens, keys) < 0.7
    module = make_module(query, key)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    out, weights = generation._attend_by_heads(module, query, key, value, mask, scaling=0.3)
    assert weights is None and out.is_contiguous()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(("heads", "queries", "size"), [(32, 1, 192), (4, 16, 128)])
def test_attention_of_a_prompt_needs_no_memory_for_the_keys_of_all_heads(heads: int, queries: int, size: int) -> None:
    tokens, keys = 64, 4096
    query = torch.randn(1, heads * queries, tokens, size).bfloat16()
    key, value = (torch.randn(1, heads, keys, n).bfloat16() for n in (size, 128))
    states = query, key, value, torch.ones(1, 1, tokens, keys).bool()
    module = make_module(query, key)
    needed = measure_memory(lambda: attend(module, *states, pool=Pool(1)))
    all_heads = 2 * heads * queries * keys * size
    assert needed < 0.7 * all_heads < measure_memory(lambda: sdpa_attention_forward(module, *states))


def measure_memory(function: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory grows at most while a function runs for the second time.

    Meanwhile, the C library returns each released block of 1 MiB or more to the system at once.
    """
    libc, m_mmap_threshold = ctypes.CDLL(None), -3
    libc.mallopt(m_mmap_threshold, 1 << 20)
    try:
        function()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the largest resident memory becomes the current one
        except OSError:
            pytest.skip("the system does not let a process reset its largest resident memory")
        before = machine.read_table(Path("/proc/self/status"))["VmRSS"]
        function()
        return 1024 * (machine.read_table(Path("/proc/self/status"))["VmHWM"] - before)
    finally:
        libc.mallopt(m_mmap_threshold, 32 << 20)  # the most to which it grows by default


def test_wrong_sizes_are_refused() -> None:
    pool, buffer = Pool(1), ffi.new("uint16_t[64]")
    good = (1, 1, 1, 32, 32, 32, 32, 1.0, buffer, buffer, buffer, buffer)
    assert lib.ktq_attend(pool.pointer, ffi.new("ktq_attention *", good)) == lib.KTQ_OK
    for place, wrong, error in (
        (0, 0, lib.KTQ_EINVAL),
        (1, 0, lib.KTQ_EINVAL),
        (2, 0, lib.KTQ_EINVAL),
        (3, 16, lib.KTQ_ESHAPE),
        (4, 0, lib.KTQ_ESHAPE),
        (9, ffi.NULL, lib.KTQ_EINVAL),
    ):
        attention = ffi.new("ktq_attention *", (*good[:place], wrong, *good[place + 1 :]))
        assert lib.ktq_attend(pool.pointer, attention) == error


# A number of tokens to append, or another change of a cache.
STEPS = st.lists(st.one_of(st.integers(1, 300), st.sampled_from(["crop", "reorder", "repeat", "copy"])), max_size=12)


@given(STEPS)
def test_a_growing_cache_holds_what_transformers_cache_holds(steps: list[int | str]) -> None:
    torch.manual_seed(0)
    growing: Any = GrowingLayer()
    plain: Any = cache_utils.DynamicLayer()
    batch, seen = 2, []
    for step in steps:
        if isinstance(step, int):
            states = torch.randn(2, batch, 1, step, 2)
            results = [layer.update(*states) for layer in (growing, plain)]
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            seen.append((results[0][0], results[1][0]))
        elif step == "copy":
            growing = copy.deepcopy(growing)
        elif plain.get_seq_length() > 1:
            if step == "crop":
                removed = plain.get_seq_length() // 2
                for layer in (growing, plain):
                    layer.crop(-removed)
                seen.clear()  # what follows overwrites the tokens that were cropped
            elif step == "reorder":
                for layer in (growing, plain):
                    layer.reorder_cache(torch.arange(batch).flip(0))
            elif batch < 8:
                batch *= 2
                for layer in (growing, plain):
                    layer.batch_repeat_interleave(2)
        assert growing.get_seq_length() == plain.get_seq_length()
    assert all(torch.equal(a, b) for a, b in seen)  # no update changes what an earlier one returned


def test_tokens_are_written_in_place_and_gradients_are_kept() -> None:
    layer = GrowingLayer()
    keys, _ = layer.update(*torch.zeros(2, 1, 2, 10, 4))
    with torch.inference_mode():
        copies = 0
        for _ in range(1000):
            more, _ = layer.update(*torch.ones(2, 1, 2, 1, 4))
            copies += more.data_ptr() != keys.data_ptr()
            keys = more
    assert keys.shape[-2] == 1010 and copies <= 4
    states = torch.zeros(2, 1, 2, 10, 4, requires_grad=True)
    with_gradients = GrowingLayer()
    with_gradients.update(*states)
    with_gradients.update(*states)[0].sum().backward()
    assert states.grad is not None and bool((states.grad[0] == 2).all())


def test_a_few_tokens_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(torch.nn.Module):
        def forward(self, input_ids: Any = None, inputs_embeds: Any = None) -> int:
            if input_ids is not None and bool((input_ids < 0).any()):
                raise ValueError("negative")
            return torch.get_num_threads()

    monkeypatch.setattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING))
    monkeypatch.setattr(generation.AttentionInterface, "register", lambda *_: None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        model = Model()
        generation.accelerate_generation(model, Pool(1))
        assert cache_utils.DYNAMIC_LAYER_TYPE_MAPPING["full_attention"] is GrowingLayer
        threads = [model(input_ids=torch.ones(1, n, dtype=torch.long)) for n in (1, 4, 5)]
        threads += [model(inputs_embeds=torch.ones(1, n, 8)) for n in (1, 5)]
        assert threads == [1, 1, 3, 1, 3] and torch.get_num_threads() == 3
        with pytest.raises(ValueError):
            model(input_ids=torch.tensor([[-1]]))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
