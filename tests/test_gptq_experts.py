"""GPTQ of one group of experts in AMXINT4 and AMXINT8.

Codes that kt-kernel can multiply, experts with few tokens, Hessians without a factor, and the judgement of `verify`.
"""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.layouts.encodings.amx import AMXINT4, AMXINT8
from ktconvert.layouts.outputs.slices import Slicing, cut_slices
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.pipeline.calibration.expert_visitors import ExpertGroup, ExpertWeights
from ktconvert.pipeline.calibration.gptq_experts import GptqVisitor
from ktconvert.pipeline.stages.quantize_experts import quantize_slice
from ktconvert.pipeline.verify.expert_checks import ROWS, judge_calibrated
from ktconvert.quantizers.quantizer import GPTQ
from rig import reference, scale_search

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from ktconvert.quantizers import gptq

ENCODINGS = {4: AMXINT4, 8: AMXINT8}
HIDDEN, WIDTH = 128, 256
SHAPES = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}


def weights_of(rng: np.random.Generator, kind: str) -> dict[str, Any]:
    """Return BF16 bits of an expert's linears; the first rows are zeros, subnormals and one large value."""
    linears = {}
    for projection, (n, k) in SHAPES.items():
        values = rng.standard_normal((n, k)) if kind == "gauss" else rng.standard_t(2, (n, k))
        if kind == "wide":
            values *= 10.0 ** rng.uniform(-40, 15, (n, 1))
        bits = reference.f32_to_bf16(np.clip(values, -3.38e38, 3.38e38).astype(np.float32))
        bits[0], bits[1], bits[2, 1:] = 0, np.arange(k) % 128, 0
        linears[projection] = bits
    return linears


def hessian_of(rng: np.random.Generator, k: int, tokens: int) -> gptq.Hessian:
    """Return a Hessian of random inputs whose columns differ in size."""
    hessian = gptq.Hessian.empty(k)
    mixing = rng.standard_normal((k, k)) * np.linspace(0.05, 2, k)
    hessian.add(torch.from_numpy(rng.standard_normal((tokens, k)) @ mixing).bfloat16())
    return hessian


def compensate(
    bits: int,
    experts: list[dict[str, Any]],
    gate_up: list[gptq.Hessian],
    down: list[gptq.Hessian],
    *,
    tokens: list[int],
    calibrate: str = "mixed",
    floor: int = 1,
    numa: int = 1,
) -> tuple[GptqVisitor, dict[tuple[int, str], Any]]:
    """Quantize a group; return the visitor and the slices of each linear that it wrote."""
    encoding, stored = ENCODINGS[bits], {}
    grid = Slicing(0, HIDDEN, WIDTH, numa)

    def nearest(expert: int, projection: str, importance: Any) -> Any:
        slices = []
        chunks = cut_slices(projection, experts[expert][projection], numa)
        for numa_slice, chunk in zip(grid.slices(expert, projection), chunks, strict=True):
            out = [np.empty(tensor.nbytes, np.uint8) for tensor in encoding.tensors(numa_slice.n, numa_slice.k)]
            quantize_slice(
                encoding, GPTQ, Matrix(np.ascontiguousarray(chunk), BF16), out, numa_slice.cut_columns(importance)
            )
            slices.append((numa_slice, out))
        return slices

    def write(expert: int, projection: str, slices: Any) -> None:
        stored[expert, projection] = slices

    visitor = GptqVisitor(encoding, 0.01, "float32", calibrate, floor, nearest, write, numa)
    weights = {
        e: ExpertWeights({p: torch.from_numpy(linears[p].view(np.int16)).view(torch.bfloat16) for p in SHAPES})
        for e, linears in enumerate(experts)
    }
    group = ExpertGroup(0, np.array(tokens), weights, dict(enumerate(gate_up)), dict(enumerate(down)))
    visitor.visit(group)
    return visitor, stored


def codes_of(bits: int, slices: Any) -> list[tuple[Any, Any]]:
    """Return codes int8 [n, k] and scales of each NUMA slice."""
    return [
        (reference.unpack(bits, out[0], numa_slice.n, numa_slice.k), out[1].view(np.float32))
        for numa_slice, out in slices
    ]


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 1 << 30),
    bits=st.sampled_from([4, 8]),
    kind=st.sampled_from(["gauss", "t2", "wide"]),
    tokens=st.sampled_from([0, 1, 7, 400]),
    calibrate=st.sampled_from(["all", "mixed", "routed"]),
    numa=st.sampled_from([1, 2]),
)
def test_codes_are_in_a_symmetric_range(
    seed: int, bits: int, kind: str, tokens: int, calibrate: str, numa: int
) -> None:
    """-8 and -128 never occur; scales are finite, and rows of zeros stay zero."""
    rng = np.random.default_rng(seed)
    largest = (1 << bits - 1) - 1
    tokens_seen = max(tokens, 1) if calibrate == "all" else tokens
    shared = hessian_of(rng, HIDDEN, 400 if calibrate == "mixed" else tokens_seen)
    down = hessian_of(rng, WIDTH, tokens_seen)
    _, stored = compensate(
        bits, [weights_of(rng, kind)], [shared], [down], tokens=[tokens], calibrate=calibrate, numa=numa
    )
    for (_, projection), slices in stored.items():
        first, *_ = all_slices = codes_of(bits, slices)
        for codes, scales in all_slices if projection == "down" else [first]:
            assert not codes[:2].any() and not scales[:2].any(), projection  # zeros and subnormals
        for codes, scales in all_slices:
            assert -largest <= codes.min() and codes.max() <= largest
            assert np.isfinite(scales).all() and (scales >= 0).all()
            assert not codes[scales == 0].any()


def test_experts_with_too_few_tokens_use_searched_scales() -> None:
    """Down of an expert without tokens has the codes of mse; with few tokens, its inputs weight the search."""
    rng = np.random.default_rng(5)
    experts = [weights_of(rng, "gauss") for _ in range(4)]
    tokens = [0, 1, 3, 400]
    shared = hessian_of(rng, HIDDEN, 404)
    down = [hessian_of(rng, WIDTH, count) for count in tokens]
    visitor, stored = compensate(4, experts, [shared] * 4, down, tokens=tokens, floor=4)
    assert visitor.too_few_tokens == [0, 1, 2] and visitor.not_factorized == []

    def check(stored: Any, expert: int, projection: str, codes_equal: bool) -> None:
        ((codes, scales),) = codes_of(4, stored[expert, projection])
        importance = torch.diagonal((down[expert] if projection == "down" else shared).sum).numpy().copy()
        search = scale_search.search(4, experts[expert][projection], importance if importance.any() else None)
        np.testing.assert_array_equal(scales, search[1])
        assert np.array_equal(codes, search[0]) == codes_equal, (expert, projection)

    for expert in range(4):
        for projection in SHAPES:
            check(stored, expert, projection, expert != 3 and projection == "down")
    visitor_with_floor_1, stored = compensate(4, experts, [shared] * 4, down, tokens=tokens, floor=1)
    assert visitor_with_floor_1.too_few_tokens == [0]
    check(stored, 1, "down", False)


def test_hessian_without_a_factor_rounds_with_searched_scales() -> None:
    """The visitor lists such linears; the others of the group are compensated."""
    rng = np.random.default_rng(6)
    experts = [weights_of(rng, "gauss") for _ in range(2)]
    shared, down = hessian_of(rng, HIDDEN, 400), [hessian_of(rng, WIDTH, 400) for _ in range(2)]
    down[1].sum[3, 5] = down[1].sum[5, 3] = 1e9  # not positive definite
    visitor, stored = compensate(4, experts, [shared] * 2, down, tokens=[400, 400])
    assert visitor.not_factorized == [(1, "down")] and visitor.too_few_tokens == []
    ((codes, scales),) = codes_of(4, stored[1, "down"])
    importance = torch.diagonal(down[1].sum).numpy().copy()
    _, expected_scales = scale_search.search(4, experts[1]["down"], importance)
    np.testing.assert_array_equal(scales, expected_scales)
    x, step = reference.bf16_to_f32(experts[1]["down"]), 16 * np.where(scales == 0, 1, scales)[:, None]
    np.testing.assert_array_equal(codes[2:], np.clip(np.rint(x / step), -7, 7)[2:])
    ((other, _),) = codes_of(4, stored[0, "down"])
    x = reference.bf16_to_f32(experts[0]["down"])
    assert not np.array_equal(other, np.clip(np.rint(x / step), -7, 7))


@pytest.fixture(scope="module")
def linear() -> tuple[Matrix, list[Any], list[Any]]:
    """Return a linear of 256 rows, its tensors by GPTQ, and its tensors by rounding to nearest."""
    rng = np.random.default_rng(7)
    bf16 = weights_of(rng, "gauss")["gate"]
    bf16[:3] = bf16[3]
    matrix = Matrix(bf16, BF16)
    rounded, stored = ([np.empty(t.nbytes, np.uint8) for t in AMXINT4.tensors(*bf16.shape)] for _ in range(2))
    AMXINT4.quantize(matrix, rounded)
    quantize_slice(AMXINT4, GPTQ, matrix, stored)
    return matrix, stored, rounded


def change_code(stored: list[Any], row: int, code: int) -> list[Any]:
    """Return the tensors with a different code in the fifth column of a row."""
    codes = reference.unpack(4, stored[0], WIDTH, HIDDEN)
    codes[row, 5] = code
    return [reference.pack(4, codes).reshape(-1).view(np.uint8), stored[1]]


@pytest.mark.parametrize("all_rows", [True, False])
def test_verify_finds_illegal_codes_and_scales(linear: Any, all_rows: bool) -> None:
    """verify finds them in any row, even if it measures the error of only some rows."""
    matrix, stored, rounded = linear
    assert judge_calibrated(AMXINT4, matrix, stored, rounded, all_rows=all_rows)[2] == ""
    sampled = np.unique(np.linspace(0, WIDTH - 1, ROWS).astype(int))
    for row in (0, int(np.setdiff1d(np.arange(WIDTH), sampled)[9]), WIDTH - 1):
        assert judge_calibrated(AMXINT4, matrix, change_code(stored, row, 7), rounded, all_rows=all_rows)[2] == ""
        problem = judge_calibrated(AMXINT4, matrix, change_code(stored, row, -8), rounded, all_rows=all_rows)[2]
        assert problem == "has a code outside -7 to 7", row
        scales = stored[1].view(np.float32).copy()
        scales[row] = np.nan
        problem = judge_calibrated(AMXINT4, matrix, [stored[0], scales.view(np.uint8)], rounded, all_rows=all_rows)[2]
        assert problem == "has a scale that is not finite", row


def test_verify_finds_codes_of_a_different_expert(linear: Any) -> None:
    matrix, _, rounded = linear
    other = [np.empty_like(tensor) for tensor in rounded]
    quantize_slice(AMXINT4, GPTQ, Matrix(weights_of(np.random.default_rng(8), "gauss")["gate"], BF16), other)
    assert "times that of rounding to nearest" in judge_calibrated(AMXINT4, matrix, other, rounded, all_rows=False)[2]
