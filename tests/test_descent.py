"""Fitted scales and coordinate descent: kernels equal the NumPy definition, and the error in the metric never grows."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.native_quant import compensation
from ktconvert.native_quant.compensation import CodeRange
from ktconvert.quantizers import FLOAT_GRIDS, ROW_GRIDS, SIGNED_GRIDS
from ktconvert.quantizers.reference import e8m0_exponents, e8m0_to_f32
from rig import group_search, isas

GRIDS = {grid.name: grid for grid in (*ROW_GRIDS.values(), SIGNED_GRIDS["rawint4"], FLOAT_GRIDS["mxfp4"])}
with_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def definition(code_range: CodeRange, hessian: Any, scale: Any, codes: Any, gradient: Any) -> tuple[Any, Any]:
    """Compute section 7b of numerics.md, a column at a time."""
    codes, gradient = codes.copy(), gradient.copy()
    group = codes.shape[1] // scale.shape[1]
    with np.errstate(all="ignore"):
        for j in range(codes.shape[1]):
            curvature = hessian[j, j] * scale[:, j // group]
            best = group_search.nearest_codes(codes[:, j] + gradient[:, j] / curvature, code_range)
            moves = (hessian[j, j] > 0) & (curvature != 0) & (best != codes[:, j]) & ~np.isnan(best)
            step = (codes[:, j] - best) * scale[:, j // group]
            gradient[moves] += step[moves, None] * hessian[j]
            codes[moves, j] = best[moves]
    return codes, gradient


def problem(rng: np.random.Generator, name: str, n: int, groups: int, group: int) -> tuple[Any, ...]:
    """Return a metric with dead columns, weights, scales and codes rounded to nearest. Some scales are 0."""
    grid, k = GRIDS[name], groups * group
    inputs = rng.standard_normal((3 * k, k)) @ (rng.standard_normal((k, k)) * np.linspace(0.05, 2, k))
    inputs[:, rng.random(k) < 0.05] = 0
    hessian = (inputs.T @ inputs / len(inputs)).astype(np.float32)
    weight = rng.standard_normal((n, k)).astype(np.float32)
    amax = np.abs(weight.reshape(n, groups, group)).max(2)
    scale = (amax / grid.high).astype(np.float32)
    scale = np.exp2(np.ceil(np.log2(scale))) if grid.scale_dtype == "U8" else scale.view(np.uint32) & 0xFFFF0000
    scale = np.ascontiguousarray(scale).view(np.float32).copy() if scale.dtype != np.float32 else scale
    scale[0, 0] = 0
    spread = np.repeat(np.where(scale == 0, 1, scale), group, 1)
    codes = np.where(np.repeat(scale, group, 1) == 0, 0, group_search.nearest_codes(weight / spread, grid.code_range))
    return hessian, weight, scale, codes.astype(np.int8)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(GRIDS)),
    n=st.integers(1, 70),
    groups=st.integers(1, 3),
    group=st.sampled_from([1, 7, 32, 41]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_descent_kernels_equal_the_definition(
    name: str, n: int, groups: int, group: int, threads: int, seed: int
) -> None:
    hessian, weight, scale, codes = problem(np.random.default_rng(seed), name, n, groups, group)
    gradient = ((weight - codes * np.repeat(scale, group, 1)) @ hessian).astype(np.float32)
    gradient[-1, 0] = np.nan
    expected = definition(GRIDS[name].code_range, hessian, scale, codes, gradient)
    for _ in isas.each():
        actual = codes.copy(), gradient.copy()
        changed = compensation.descend(GRIDS[name].code_range, hessian, scale, *actual, threads=threads)
        assert changed == np.count_nonzero(actual[0] != codes)
        for actual_array, expected_array in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(actual_array, expected_array)


def compensate_problem(seed: int, n: int, k: int, name: str, threads: int = 1) -> tuple[Any, Any, Any]:
    """Return the quantized values, the gradient of the kernel, and the gradient in float64, of a random problem."""
    rng, grid = np.random.default_rng(seed), GRIDS[name]
    inputs = rng.standard_normal((3 * k, k)) @ (np.eye(k) + rng.standard_normal((k, k)) / k**0.5)
    metric = inputs.T @ inputs / len(inputs)
    upper = np.linalg.cholesky(np.linalg.inv(metric)).T
    combined = upper + np.triu(upper / np.diag(upper)[:, None], 1).T
    slices = np.ascontiguousarray(combined.reshape(k, -1, compensation.SLICE).swapaxes(0, 1), np.float32)
    weight = rng.standard_normal((n, k)).astype(np.float32)
    scale = np.repeat(np.abs(weight).max(1, keepdims=True) / np.float32(grid.high), k, 1)
    values, gradient = weight.copy(), np.full_like(weight, 7)
    compensation.compensate(grid.code_range, slices, scale, values, gradient, threads=threads)
    codes = values / scale
    assert np.abs(codes - np.rint(codes)).max() < 1e-4 and codes.min() > grid.low - 0.1
    return values, gradient, (weight.astype(np.float64) - values) @ metric


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(list(GRIDS)),
    n=st.integers(1, 70),
    slices=st.sampled_from([1, 3, 8, 11]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_compensation_leaves_the_gradient(name: str, n: int, slices: int, threads: int, seed: int) -> None:
    """All instruction sets and numbers of threads give the same bits, close to the gradient in float64."""
    by_isa = {isa: compensate_problem(seed, n, slices * compensation.SLICE, name, threads) for isa in isas.each()}
    values, gradient, expected = by_isa.pop("scalar")
    # The values are also rounded to float32.
    assert np.abs(gradient - expected).max() < 1e-4 * np.abs(expected).max() + 1e-5
    for others in by_isa.values():
        for ours, scalar_array in zip(others[:2], (values, gradient), strict=True):
            np.testing.assert_array_equal(ours, scalar_array)
    one_thread = compensate_problem(seed, n, slices * compensation.SLICE, name)
    np.testing.assert_array_equal(one_thread[1], gradient)


def test_wrong_arguments_are_refused() -> None:
    hessian, weight, scale, codes = problem(np.random.default_rng(0), "rawint4", 5, 2, 32)
    ones = np.ones((5, 32), np.float32)
    descend = {"hessian": hessian, "scale": scale, "codes": codes, "gradient": weight}
    compensate = {"scale": ones + 1, "weight": ones, "gradient": ones + 2, "slices": np.ones((2, 32, 16), np.float32)}
    wrong_for_both: list[tuple[dict[str, Any], str]] = [
        ({"code_range": CodeRange(1, 7)}, "code_range must contain 0"),
        ({"threads": 0}, "threads must be"),
    ]
    wrong_for_descend: list[tuple[dict[str, Any], str]] = [
        ({"scale": np.zeros((5, 3), np.float32)}, "do not divide into groups"),
        ({"scale": np.zeros((4, 2), np.float32)}, "scale must be"),
        ({"hessian": hessian[:-1]}, "hessian must be"),
        ({"codes": codes.astype(np.int16)}, "codes must be"),
        ({"gradient": weight[:, ::-1]}, "contiguous"),
    ]
    wrong_for_compensate: list[tuple[dict[str, Any], str]] = [
        ({"weight": ones[:, :24]}, "multiples of 16"),
        ({"slices": np.ones((32, 32), np.float32)}, "slices must be"),
        ({"scale": np.ones((5, 1), np.float32)}, "scale must be"),
        ({"gradient": ones.astype(np.float64)}, "gradient must be"),
        ({"gradient": ones}, "may share memory"),
    ]
    for name, arrays, wrong in (
        ("descend", descend, wrong_for_descend),
        ("compensate", compensate, wrong_for_compensate),
    ):
        good = {"code_range": CodeRange(-8, 7), **arrays}
        getattr(compensation, name)(**good)
        for arguments, message in wrong_for_both + wrong:
            with pytest.raises(ValueError, match=message):
                getattr(compensation, name)(**(good | arguments))


@with_torch
@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(list(GRIDS)), n=st.integers(1, 40), groups=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_errors_never_grow(name: str, n: int, groups: int, seed: int) -> None:
    """Codes stay in range, scales can be stored and keep their sign, and rows do not depend on each other."""
    import torch

    from ktconvert.quantizers import descent, gptq

    rng, grid = np.random.default_rng(seed), GRIDS[name]
    hessian, weight, scale, _ = problem(rng, name, n, groups, 32)
    weight[0, :32] = 0  # such weights have a scale of 0
    inputs = gptq.Hessian(torch.from_numpy(hessian), 1)
    factor = gptq.factorize_hessian(inputs, 0.01)
    metric = descent.make_metric(inputs, factor, 0.01)

    def choose(rows: Any) -> tuple[Any, Any]:
        choice = descent.choose_codes(torch.from_numpy(weight[rows]), metric, torch.from_numpy(scale[rows]), grid)
        return choice.codes.numpy(), choice.scale.numpy()

    def error(codes: Any, scale: Any) -> Any:
        difference = (weight - codes * np.repeat(scale, 32, 1)).astype(np.float64)
        return ((difference @ metric.hessian.double().numpy()) * difference).sum(1)

    codes_found, steps = choose(slice(None))
    values = gptq.round_columns(torch.from_numpy(weight), factor, torch.from_numpy(scale), grid.code_range)
    before = error(gptq.find_codes(values, torch.from_numpy(scale), grid.code_range).numpy(), scale)
    after = error(codes_found, steps)
    assert after.sum() <= before.sum() * (1 + 1e-4)
    assert (after <= 1.2 * before + 1e-6).all()  # codes may differ from those of torch's GPTQ
    assert codes_found.min() >= grid.low and codes_found.max() <= grid.high
    assert ((steps > 0) == (scale > 0)).all() and not codes_found[0, :32].any()
    if grid.scale_dtype == "BF16":
        assert not (steps.view(np.uint32) & 0xFFFF).any()
    if grid.scale_dtype == "U8":
        positive = steps[steps > 0]
        np.testing.assert_array_equal(e8m0_to_f32(e8m0_exponents(positive)), positive)
    # torch adds these numbers without rounding, so that a row gives the same codes at any position.
    order = rng.permutation(n)
    permuted = choose(order)
    np.testing.assert_array_equal(permuted[0], codes_found[order])
    np.testing.assert_allclose(permuted[1], steps[order], rtol=1e-2 if grid.scale_dtype == "BF16" else 1e-5)
