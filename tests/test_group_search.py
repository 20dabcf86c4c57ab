"""Scales of least squared error for groups: NumPy = scalar C = AVX2 = AVX-512, and no error above that by the largest value."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden import same
from test_scale_search import IMPORTANCES, rows

from ktconvert.layouts.encodings import fp4 as encodings
from ktconvert.layouts.encodings.pack_quantized import RAWINT4
from ktconvert.native_quant import kernels
from ktconvert.native_quant.kernels import search_groups
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.pipeline.stages.quantize_experts import quantize
from ktconvert.quantizers import FLOAT_GRIDS, SIGNED_GRIDS, mxfp4
from ktconvert.quantizers.choice import ABSMAX, IMATRIX, MSE
from ktconvert.quantizers.reference import e8m0
from rig import group_search, isas, reference

GRID = FLOAT_GRIDS["mxfp4"]
GRIDS = {"mxfp4": GRID, **SIGNED_GRIDS}
FORMS = {"panels": encodings.PANELS, "rows": encodings.ROWS}


def drawn(rng: np.random.Generator, n: int, k: int, kind: str) -> Any:
    """Rows, some of whose groups are zeros, alone or together."""
    values = rows(rng, n, k, kind)
    return np.where(np.repeat(rng.random((n, k // 32)) < 0.1, 32, axis=1), np.uint16(0x8000), values)


@settings(deadline=None, max_examples=40)
@given(
    grid=st.sampled_from(list(GRIDS)),
    seed=st.integers(0, 1 << 30),
    n=st.integers(1, 30),
    k=st.sampled_from([32, 64, 96, 256]),
    kind=st.sampled_from(["bits", "ugly", "gauss", "t2"]),
    weighted=st.sampled_from(list(IMPORTANCES)),
)
def test_every_instruction_set_is_the_definition(
    grid: str, seed: int, n: int, k: int, kind: str, weighted: str
) -> None:
    rng = np.random.default_rng(seed)
    bf16, importance = drawn(rng, n, k, kind), IMPORTANCES[weighted](rng, k)
    codes, scales = group_search.search(GRIDS[grid], bf16, importance)
    space = np.full(n * (2 * k + 6) + 1, 0xFF, np.uint8)  # rows lie apart, at odd addresses
    spaced = space[1:].view(np.uint16).reshape(n, k + 3)[:, :k]
    spaced[:] = bf16
    for _ in isas.each():
        ours = search_groups(grid, spaced, importance)
        same("codes", ours[0], codes)
        same("scales", ours[1], scales)


def errors(bf16: Any, numbers: Any, weights: Any) -> Any:
    """Of each group, sqrt(sum h (x - y)^2 / sum h x^2), in float64."""
    x = reference.bf16_to_f32(bf16).astype(np.float64).reshape(len(bf16), -1, 32)
    y = numbers.astype(np.float64).reshape(x.shape)
    total = np.maximum((weights * x**2).sum(axis=2), 1e-300)
    return np.sqrt((weights * (x - y) ** 2).sum(axis=2) / total)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 30), weighted=st.sampled_from(list(IMPORTANCES)))
def test_no_group_is_worse_than_by_its_largest_value(seed: int, weighted: str) -> None:
    """In the error that is made small, whichever importance; and both orders hold the numbers that were chosen."""
    rng = np.random.default_rng(seed)
    n, k = 64, 128
    values = rng.standard_t(rng.uniform(1, 8), (n, k)) * 10.0 ** rng.uniform(-30, 30, (n, 1))
    bf16 = reference.f32_to_bf16(np.clip(values, -3e38, 3e38).astype(np.float32))
    importance = IMPORTANCES[weighted](rng, k)
    codes, exponents = search_groups("mxfp4", bf16, importance)
    numbers = codes.reshape(n, -1, 32) * (e8m0(exponents) * np.float32(GRID.step))[:, :, None]
    weights = group_search.weights(k, importance).astype(np.float64)
    nearest = mxfp4.dequantize(*reference.quantize_mxfp4(bf16))
    assert (errors(bf16, numbers, weights) <= errors(bf16, nearest, weights) + 1e-5).all()
    for form in FORMS.values():
        stored = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(n, k)]
        quantize(form, IMATRIX, Matrix(bf16, BF16), stored, importance)
        same("numbers", form.decode(stored, n, k, slice(None)), numbers.reshape(n, k))


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1 << 30), weighted=st.sampled_from(list(IMPORTANCES)))
def test_no_group_of_rawint4_is_worse_than_by_its_largest_value(seed: int, weighted: str) -> None:
    rng = np.random.default_rng(seed)
    n, k = 64, 128
    bf16 = reference.f32_to_bf16((rng.standard_t(4, (n, k)) * 10.0 ** rng.uniform(-30, 30, (n, 1))).astype(np.float32))
    importance = IMPORTANCES[weighted](rng, k)
    weights = group_search.weights(k, importance).astype(np.float64)
    found = []
    for choice in (IMATRIX, ABSMAX):
        stored = [np.empty(tensor.nbytes, np.uint8) for tensor in RAWINT4.tensors(n, k)]
        quantize(RAWINT4, choice, Matrix(bf16, BF16), stored, importance)
        found.append(errors(bf16, RAWINT4.decode(stored, n, k, slice(None)), weights))
    assert (found[0] <= found[1] + 1e-5).all()
    assert found[0].mean() < 0.98 * found[1].mean()


def test_importance_counts() -> None:
    """A group whose largest value hardly counts cuts it, for the sake of the others."""
    values = np.full((1, 32), 0.4, np.float32)
    values[0, 0] = 4
    bf16, importance = reference.f32_to_bf16(values), np.ones(32, np.float32)
    importance[0] = 1e-4
    for weights, exponent in ((None, 127), (importance, 125)):
        assert search_groups("mxfp4", bf16, weights)[1].tolist() == [[exponent]]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_numbers_of_mxfp4_stay(form: Any) -> None:
    rng = np.random.default_rng(7)
    codes, exponents = rng.integers(0, 16, (64, 128), np.uint8), rng.integers(3, 250, (64, 4), np.uint8)
    codes[5] = rng.integers(0, 3, 128)  # groups whose largest number is small
    numbers = mxfp4.dequantize(codes, exponents)
    stored = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(*codes.shape)]
    quantize(form, MSE, Matrix(reference.f32_to_bf16(numbers), BF16), stored)
    np.testing.assert_array_equal(form.decode(stored, *codes.shape, slice(None)), numbers)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("choice", [ABSMAX, MSE], ids=lambda choice: choice.name)
def test_what_is_not_finite_is_named(choice: Any, form: Any) -> None:
    bf16 = np.full((192, 64), 0x3F80, np.uint16)
    bf16[150, 9] = 0xFF80
    with pytest.raises(kernels.NonFinite) as caught:
        quantize(form, choice, Matrix(bf16, BF16), [np.empty(t.nbytes, np.uint8) for t in form.tensors(192, 64)])
    assert (caught.value.row, caught.value.column) == (150, 9)


@pytest.mark.parametrize(
    ("bf16", "importance", "words"),
    [
        (np.zeros((2, 48), np.uint16), None, "must be uint16 [n, multiple of 32]"),
        (np.zeros(64, np.uint16), None, "not uint16 of shape (64,)"),
        (np.zeros((2, 64), np.uint16), np.ones(63, np.float32), "importance must be float32 [64]"),
        (np.zeros((2, 64), np.uint16), np.full(64, np.nan, np.float32), "finite"),
    ],
)
def test_wrong_calls_are_refused(bf16: Any, importance: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        search_groups("mxfp4", bf16, importance)
