"""A few tokens of a model on the CPU: linears by section 5e of numerics.md, in BF16 and int8."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime.few_tokens import (
    MOST_TOKENS,
    FewTokensLinear,
    Int8Linear,
    accelerate_linears,
    quantize_groups,
    quantize_linears,
)
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


def multiply_int8_by_definition(linear: Any, x: Any) -> Any:
    """Compute section 5e for int8: x rounded to 16 bits, exact sums of two products, and 16 sums in float32."""
    numbers = x.float().numpy().reshape(-1, x.shape[-1])
    amax = np.abs(numbers).max(1, keepdims=True)
    is_zero = amax < 2.0**-100
    rounded = np.rint(numbers * np.where(is_zero, np.float32(0), np.float32(32767) / np.where(is_zero, 1, amax)))
    pairs = rounded[:, None] * linear.codes.numpy().astype(np.float64)
    pairs = pairs.reshape(*pairs.shape[:2], -1, 16, 2).sum(-1)
    scales = linear.scales.double().numpy()
    lanes = np.zeros((*pairs.shape[:2], 16), np.float32)
    for group in range(pairs.shape[2]):  # 23 + 8 bits: exact in float64
        lanes = (lanes.astype(np.float64) + pairs[:, :, group] * scales[None, :, group, None]).astype(np.float32)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    sums = lanes[..., 0] * np.where(is_zero, np.float32(0), amax / np.float32(32767))
    return torch.from_numpy(sums + linear.bias.detach().float().numpy()).bfloat16()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.usefixtures("isa")
def test_int8_linears_equal_the_definition(threads: int) -> None:
    torch.manual_seed(2)
    for n, k in SHAPES:
        linear = torch.nn.Linear(k, n, dtype=torch.bfloat16)
        accelerate_linears(linear, Pool(threads))
        quantize_linears(linear)
        assert isinstance(linear, Int8Linear)
        for tokens in range(1, MOST_TOKENS + 1):
            x = (torch.randn(tokens, k) * torch.tensor([1e-35, 1.0, 1e4, 1e30])[:tokens, None]).bfloat16()
            with torch.no_grad():
                out = linear(x)
            expected = multiply_int8_by_definition(linear, x)
            assert float((out.float() - expected.float()).norm()) <= 2**-8 * float(expected.float().norm())
            assert float((out != expected).float().mean()) < 0.02  # float64 rounds its sums once more


def test_int8_linears_have_the_same_bits_on_all_instruction_sets() -> None:
    torch.manual_seed(3)
    linears = [torch.nn.Linear(k, n, dtype=torch.bfloat16) for n, k in SHAPES]
    inputs = [torch.randn(tokens, linear.in_features).bfloat16() for linear in linears for tokens in (1, 2, 3, 4)]
    expected = [linears[i // 4](x).detach().float() for i, x in enumerate(inputs)]
    for linear in linears:
        accelerate_linears(linear, Pool(2))
        quantize_linears(linear)
    with torch.no_grad():
        results = [[linears[i // 4](x) for i, x in enumerate(inputs)] for _ in isas.each()]
        for result in results:
            assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
        for i, x in enumerate(inputs):
            linear: Any = linears[i // 4]
            groups = linear.codes.double().view(*linear.scales.shape, -1) * linear.scales.double()[..., None]
            same = torch.nn.functional.linear(x.double(), groups.view(linear.codes.shape), linear.bias.double())
            assert float((results[0][i].double() - same).norm() / same.norm()) < 2**-8
            assert float((results[0][i].float() - expected[i]).norm() / expected[i].norm()) < 0.02


def test_int8_weights_are_near_the_stored_ones() -> None:
    """Half a step of a group's scale, which is rounded to BF16; zeros stay zeros."""
    weight = torch.randn(300, 96) * torch.rand(300, 1).exp2()
    weight[:, 32:64] = 0
    weight[7, 5] = 1000.0
    codes, scales = quantize_groups(weight.bfloat16())
    groups = codes.view(300, 3, 32).float() * scales.float()[..., None]
    exact = weight.bfloat16().float().view(300, 3, 32)
    steps = exact.abs().amax(-1, keepdim=True) / 127
    assert bool(((groups - exact).abs() <= steps * (0.5 + 127 / 256)).all()) and not groups[:, 1].any()
    assert float((groups - exact)[8:].norm() / exact[8:].norm()) < 0.008


def test_int8_linears_with_more_tokens_and_unusable_numbers() -> None:
    linear: Any = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    accelerate_linears(linear, Pool(1))
    quantize_linears(linear)
    assert [name for name, _ in linear.named_parameters()] == ["bias"]
    x = torch.randn(9, 64).bfloat16()
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))
    x[1, 3], x[2, 4] = torch.inf, torch.nan
    with torch.no_grad():
        out = linear(x[:4])
    assert out[1:3].isnan().all() and out[[0, 3]].isfinite().all()
    pool, buffer = Pool(1), ffi.new("uint16_t[64]")
    codes = ffi.cast("int8_t *", buffer)
    for tokens, k, error in ((0, 32, lib.KTQ_EINVAL), (1, 16, lib.KTQ_ESHAPE)):
        arguments = (tokens, 1, k, codes, buffer, ffi.NULL, buffer, buffer)
        assert lib.ktq_multiply_int8_rows(pool.pointer, *arguments) == error
    without_scales = (1, 1, 32, codes, ffi.NULL, ffi.NULL, buffer, buffer)
    assert lib.ktq_multiply_int8_rows(pool.pointer, *without_scales) == lib.KTQ_EINVAL
