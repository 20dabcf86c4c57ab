"""A few tokens of a model on the CPU: linears by section 5e of numerics.md, and attention with shared keys."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.few_tokens import MOST_TOKENS, FewTokensLinear, accelerate_linears, attend
from ktconvert.native_quant.runtime.pool import Pool
from rig import isas

# Rows and columns around the number of rows that a task and a kernel take at once.
SHAPES = [(1, 32), (3, 64), (64, 96), (67, 160), (130, 2048)]


def multiply_by_definition(weight: Any, bias: Any, x: Any) -> Any:
    """Compute section 5e: 16 sums of fused multiply-adds; products of BF16 are exact in float64."""
    products = weight[None] * x[:, None]  # [tokens, rows, columns]
    pairs = products.reshape(*products.shape[:2], -1, 16, 2)
    lanes = np.zeros((*products.shape[:2], 16), np.float32)
    for group in range(pairs.shape[2]):
        for column in (1, 0):
            lanes = (lanes.astype(np.float64) + pairs[:, :, group, :, column]).astype(np.float32)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return torch.from_numpy(lanes[..., 0] + bias).bfloat16()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.usefixtures("isa")
def test_linears_equal_the_definition(threads: int) -> None:
    rng, pool = np.random.default_rng(1), Pool(threads)
    for n, k in SHAPES:
        for tokens in range(1, MOST_TOKENS + 1):
            # Integers: sums of these are exact, so that float64 is as good as a fused multiply-add.
            numbers = [rng.integers(-9, 10, shape).astype(np.float32) for shape in ((n, k), (n,), (tokens, k))]
            linear = torch.nn.Linear(k, n, dtype=torch.bfloat16)
            for parameter, values in zip((linear.weight, linear.bias), numbers, strict=False):
                parameter.data = torch.from_numpy(values).bfloat16()
            x = torch.from_numpy(numbers[2]).bfloat16()
            accelerate_linears(linear, pool)
            with torch.no_grad():
                out = linear(x)
            assert torch.equal(out, multiply_by_definition(*numbers))


def test_linears_have_the_same_bits_on_all_instruction_sets() -> None:
    torch.manual_seed(0)
    pool, results = Pool(2), []
    linears = [torch.nn.Linear(k, n, bias=n % 2 == 0, dtype=torch.bfloat16) for n, k in SHAPES]
    inputs = [torch.randn(2, tokens, linear.in_features).bfloat16() for linear in linears for tokens in (1, 2)]
    for _ in isas.each():
        modules = copy.deepcopy(linears)
        for module in modules:
            accelerate_linears(module, pool)
        with torch.no_grad():
            results.append([modules[i // 2](x) for i, x in enumerate(inputs)])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    for i, (x, out) in enumerate(zip(inputs, results[0], strict=True)):
        expected = torch.nn.functional.linear(x.double(), *(p.detach().double() for p in linears[i // 2].parameters()))
        assert float((out.double() - expected).norm() / expected.norm()) < 2**-8


def test_other_inputs_take_torchs_linear() -> None:
    linear = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    inputs = [torch.randn(MOST_TOKENS + 1, 64).bfloat16(), torch.randn(0, 64).bfloat16()]
    expected = [linear(x) for x in inputs]
    accelerate_linears(linear, Pool(1))
    assert isinstance(linear, FewTokensLinear)
    with torch.no_grad():
        assert all(torch.equal(linear(x), y) for x, y in zip(inputs, expected, strict=True))
    linear(inputs[0][:1]).sum().backward()  # with gradients
    assert linear.weight.grad is not None
    wide = torch.nn.Linear(64, 32)
    narrow = torch.nn.Linear(40, 32, dtype=torch.bfloat16)
    for module in (wide, narrow):
        x = torch.randn(1, module.in_features, dtype=module.weight.dtype)
        with torch.no_grad():
            before = module(x)
            accelerate_linears(module, Pool(1))
            assert torch.equal(module(x), before)
    assert type(narrow) is torch.nn.Linear


def test_wrong_sizes_are_refused() -> None:
    pool, buffer = Pool(1), ffi.new("uint16_t[64]")
    for tokens, n, k, error in (
        (0, 1, 32, lib.KTQ_EINVAL),
        (MOST_TOKENS + 1, 1, 32, lib.KTQ_EINVAL),
        (1, 0, 32, lib.KTQ_EINVAL),
        (1, 1, 16, lib.KTQ_ESHAPE),
        (1, 1, 0, lib.KTQ_ESHAPE),
    ):
        assert lib.ktq_multiply_rows(pool.pointer, tokens, n, k, buffer, ffi.NULL, buffer, buffer) == error
    assert lib.ktq_multiply_rows(pool.pointer, 1, 1, 32, ffi.NULL, ffi.NULL, buffer, buffer) == lib.KTQ_EINVAL


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("mask", [None, "shared", "of heads"])
def test_attention_equals_that_of_transformers(tokens: int, heads: tuple[int, int], mask: str | None) -> None:
    torch.manual_seed(tokens)
    module = torch.nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]  # type: ignore[assignment]
    query = torch.randn(2, heads[0], tokens, 16)
    key, value = torch.randn(2, 2, heads[1], 50, 16)
    of_heads = None if mask is None else torch.rand(2, 1 if mask == "shared" else heads[0], tokens, 50) < 0.7
    expected, _ = sdpa_attention_forward(module, query, key, value, of_heads, scaling=0.3)
    out, weights = attend(module, query, key, value, of_heads, scaling=0.3)
    assert weights is None and out.shape == expected.shape
    torch.testing.assert_close(out, expected)
