"""Fitted scales and coordinate descent: the kernel equals the NumPy definition, and an error never grows in the metric."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.native_quant import compensation
from ktconvert.native_quant.compensation import CodeRange
from ktconvert.quantizers import FLOAT_GRIDS, ROW_GRIDS, SIGNED_GRIDS, group_search, scales
from rig import isas

GRIDS = {grid.name: grid for grid in (*ROW_GRIDS.values(), SIGNED_GRIDS["rawint4"], FLOAT_GRIDS["mxfp4"])}
with_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def definition(code_range: CodeRange, hessian: Any, scale: Any, codes: Any, gradient: Any) -> tuple[Any, Any]:
    """Section 7b of numerics.md, a column at a time."""
    codes, gradient = codes.copy(), gradient.copy()
    group = codes.shape[1] // scale.shape[1]
    with np.errstate(all="ignore"):
        for j in range(codes.shape[1]):
            curvature = hessian[j, j] * scale[:, j // group]
            best = group_search.nearest(codes[:, j] + gradient[:, j] / curvature, code_range)
            moves = (hessian[j, j] > 0) & (curvature != 0) & (best != codes[:, j]) & ~np.isnan(best)
            step = (codes[:, j] - best) * scale[:, j // group]
            gradient[moves] += step[moves, None] * hessian[j]
            codes[moves, j] = best[moves]
    return codes, gradient


def problem(
    rng: np.random.Generator, name: str, n: int, groups: int, group: int, parts: int = 1
) -> tuple[Any, Any, Any, Any]:
    """A metric with dead columns, weights, and codes by rounding to nearest with their scales; some scales are 0."""
    grid, k = GRIDS[name], groups * group
    inputs = rng.standard_normal((3 * k, k)) @ (rng.standard_normal((k, k)) * np.linspace(0.05, 2, k))
    inputs[:, rng.random(k) < 0.05] = 0
    hessian = (inputs.T @ inputs / len(inputs)).astype(np.float32)
    weight = rng.standard_normal((n, k)).astype(np.float32)
    amax = np.abs(weight.reshape(n, groups, group)).max(2)
    scale = (amax / grid.high).astype(np.float32)
    scale = np.exp2(np.ceil(np.log2(scale))) if grid.scales == "U8" else scale.view(np.uint32) & 0xFFFF0000
    scale = np.ascontiguousarray(scale).view(np.float32).copy() if scale.dtype != np.float32 else scale
    scale[0, 0] = 0
    spread = np.repeat(np.where(scale == 0, 1, scale), group, 1)
    codes = np.where(np.repeat(scale, group, 1) == 0, 0, group_search.nearest(weight / spread, grid.code_range))
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
def test_kernels_are_the_definition(name: str, n: int, groups: int, group: int, threads: int, seed: int) -> None:
    hessian, weight, scale, codes = problem(np.random.default_rng(seed), name, n, groups, group)
    gradient = ((weight - codes * np.repeat(scale, group, 1)) @ hessian).astype(np.float32)
    gradient[-1, 0] = np.nan
    want = definition(GRIDS[name].code_range, hessian, scale, codes, gradient)
    for _ in isas.each():
        got = codes.copy(), gradient.copy()
        changed = compensation.descend(GRIDS[name].code_range, hessian, scale, *got, threads=threads)
        assert changed == np.count_nonzero(got[0] != codes)
        for ours, wanted in zip(got, want, strict=True):
            np.testing.assert_array_equal(ours, wanted)


def test_wrong_arguments_are_refused() -> None:
    hessian, weight, scale, codes = problem(np.random.default_rng(0), "rawint4", 5, 2, 32)
    good = {"code_range": CodeRange(-8, 7), "hessian": hessian, "scale": scale, "codes": codes, "gradient": weight}
    compensation.descend(**good)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"code_range": CodeRange(1, 7)}, "code_range must hold 0"),
        ({"scale": np.zeros((5, 3), np.float32)}, "do not fall into groups"),
        ({"scale": np.zeros((4, 2), np.float32)}, "scale must be"),
        ({"hessian": hessian[:-1]}, "hessian must be"),
        ({"codes": codes.astype(np.int16)}, "codes must be"),
        ({"gradient": weight[:, ::-1]}, "contiguous"),
        ({"threads": 0}, "threads must be"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            compensation.descend(**(good | arguments))


@with_torch
@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(list(GRIDS)), n=st.integers(1, 40), groups=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_errors_never_grow(name: str, n: int, groups: int, seed: int) -> None:
    """Codes stay in range, scales can be stored and keep their sign; rows do not depend on each other."""
    import torch

    from ktconvert.quantizers import descent

    rng, grid = np.random.default_rng(seed), GRIDS[name]
    hessian, weight, scale, codes = problem(rng, name, n, groups, 32)
    metric = torch.from_numpy(hessian)

    def refined(rows: Any) -> tuple[Any, Any]:
        chosen = descent.Chosen(torch.from_numpy(codes[rows].copy()), torch.from_numpy(scale[rows].copy()))
        found = descent.refine(torch.from_numpy(weight[rows]), metric, chosen, grid)
        return found.codes.numpy(), found.scale.numpy()

    def error(codes: Any, scale: Any) -> Any:
        apart = (weight - codes * np.repeat(scale, 32, 1)).astype(np.float64)
        return ((apart @ hessian) * apart).sum(1)

    got, steps = refined(slice(None))
    before, after = error(codes, scale), error(got, steps)
    assert (after <= before * (1 + 1e-4) + 1e-6).all()
    assert got.min() >= grid.low and got.max() <= grid.high
    assert ((steps > 0) == (scale > 0)).all() and not got[0, :32].any()
    if grid.scales == "BF16":
        assert not (steps.view(np.uint32) & 0xFFFF).any()
    if grid.scales == "U8":
        positive = steps[steps > 0]
        np.testing.assert_array_equal(scales.e8m0(scales.e8m0_exponents(positive)), positive)
    # With numbers that torch adds without rounding, rows give the same wherever they lie.
    order = rng.permutation(n)
    exact = torch.from_numpy(np.rint(hessian * 4).astype(np.float32))
    wide = np.rint(weight * 16).astype(np.float32)
    whole = descent.Chosen(torch.from_numpy(codes), torch.ones(n, groups))
    there = descent.refine(torch.from_numpy(wide), exact, whole, ROW_GRIDS["int4"])
    moved = descent.Chosen(whole.codes[order], whole.scale[order])
    here = descent.refine(torch.from_numpy(wide[order]), exact, moved, ROW_GRIDS["int4"])
    assert torch.equal(here.codes, there.codes[order]) and torch.equal(here.scale, there.scale[order])
