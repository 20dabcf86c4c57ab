"""Scales of least squared error, of rows and of groups, by values, importance of columns or second moments: NumPy = scalar
C = AVX2 = AVX-512, the errors that they promise, and no code that kt-kernel cannot multiply.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden import assert_equal_bytes, read_slices
from test_kernels import KINDS, difficult_values, in_columns, make_matrix, make_source

from ktconvert.layouts.encodings import fp4
from ktconvert.layouts.encodings.amx import AMXINT4, AMXINT8
from ktconvert.layouts.encodings.encoding import scales_to_f32
from ktconvert.layouts.encodings.pack_quantized import RAWINT4
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.pipeline.stages.quantize_experts import quantize_slice
from ktconvert.quantizers import FLOAT_GRIDS, ROW_GRIDS, SIGNED_GRIDS
from ktconvert.quantizers.quantizer import ABSMAX, IMATRIX, MSE, minimize_squares
from rig import group_search, isas, reference, scale_search, statistics
from rig.golden import FOLDER
from rig.safetensors import bits_of, read_file

GRIDS = {**ROW_GRIDS, "mxfp4": FLOAT_GRIDS["mxfp4"], **SIGNED_GRIDS}
FORMS = {"int4": AMXINT4, "int8": AMXINT8, "mxfp4": fp4.PANELS, "mxfp4 in rows": fp4.ROWS, "rawint4": RAWINT4}
ROWS = {4: AMXINT4, 8: AMXINT8}


def defined(grid: str, bf16: Any, importance: Any = None) -> tuple[Any, Any]:
    return statistics.search_reference(GRIDS[grid], bf16, importance)


def searched(grid: str, bf16: Any, importance: Any = None) -> tuple[Any, Any]:
    return minimize_squares(bf16, GRIDS[grid], importance)


def both_equal(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    for name, one, other in zip(("codes", "scales"), ours, theirs, strict=True):
        assert_equal_bytes(name, one.reshape(-1), np.ascontiguousarray(other).reshape(-1))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("grid", ROW_GRIDS)
def test_results_equal_golden_bytes(grid: str) -> None:
    """Red after a change to the numbers: raise the version of MSE and run `make golden`. Also rows of zeros, of one
    element, of 1e-20, constant ones, outliers, -0 and ties, as kt-kernel was given them.
    """
    golden = bits_of(read_file(FOLDER / f"mse.v{MSE.version}.safetensors"))
    for name in ("gauss", "t5"):
        for how, importance in (("mse", None), ("weighted", golden["importance"])):
            key = f"out.{name}.{grid}.{how}"
            for search in (searched, defined):
                made = search(grid, golden[f"in.{name}"], importance)
                both_equal(made, (golden[f"{key}.codes"], golden[f"{key}.scale"]))
    for key, part, _, _ in read_slices(grid, "edge_t1"):
        _, _, projection, expert = key.replace("ffn_", "").replace("_exps", "").split(".")[:4]
        codes, scale = searched(grid, part)
        assert_equal_bytes(key, scale[:, 0], golden[f"edge.{grid}.{projection}.{expert}.scale"])
        digest = golden[f"edge.{grid}.{projection}.{expert}.codes_sha256"]
        assert hashlib.sha256(codes).digest() == digest.tobytes(), key


def moments_of(rng: np.random.Generator, k: int, tokens: int, wide: float = 1.0) -> Any:
    """Draw second moments of tokens with correlated columns, whose sizes differ by 10 to the power of `wide`."""
    x = rng.standard_normal((tokens, k)) + rng.standard_normal((tokens, 1)) * rng.standard_normal(k)
    x *= 10.0 ** rng.uniform(-wide, wide, k)
    return (x.T @ x).astype(np.float32)


def hostile_moments(rng: np.random.Generator, k: int) -> Any:
    """Draw second moments that may be singular, with columns that no input had."""
    moments = np.zeros((k, k + 5), np.float32)[:, :k]
    moments[:] = moments_of(rng, k, int(rng.choice([0, 1, 30, 500])), rng.choice([0.0, 3.0, 15.0]))
    moments[:32] = moments[:, :32] = 0
    return moments


IMPORTANCES = {
    "none": lambda rng, k: None,
    "squares": lambda rng, k: (rng.standard_normal(k) ** 2).astype(np.float32),
    "wide": lambda rng, k: (10.0 ** rng.uniform(-44, 38, k)).astype(np.float32),
    "one column": lambda rng, k: (np.arange(k) == rng.integers(k)).astype(np.float32),
    "half": lambda rng, k: rng.integers(0, 2, k).astype(np.float32) * np.float32(3e38),
    "zeros": lambda rng, k: np.zeros(k, np.float32),
}
KINDS_OF_ROWS = st.sampled_from(["bits", "ugly", "gauss", "t2"])
SEEDS = st.integers(0, 1 << 30)


def rows(rng: np.random.Generator, n: int, k: int, kind: str) -> Any:
    """Draw BF16 bits [n, k]: any finite bits, values at any scale, or rows that once gave errors."""
    if kind == "bits":
        return rng.integers(0, 0x7F80, (n, k), np.uint16) | rng.integers(0, 2, (n, k), np.uint16) << 15
    if kind == "ugly":
        return reference.f32_to_bf16(difficult_values(64, k, int(rng.integers(1 << 30)))[:n])
    drawn = {"gauss": rng.standard_normal, "t2": lambda shape: rng.standard_t(2, shape)}[kind]((n, k))
    scaled = drawn * 10.0 ** rng.uniform(-43, 38, (n, 1))
    return reference.f32_to_bf16(np.clip(scaled, -3.38e38, 3.38e38).astype(np.float32))


@pytest.mark.parametrize("grid", GRIDS)
@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, n=st.integers(1, 40), k=st.sampled_from([64, 128, 192, 384]), kind=KINDS_OF_ROWS, data=st.data())
def test_every_instruction_set_equals_the_definition(
    grid: str, seed: int, n: int, k: int, kind: str, data: Any
) -> None:
    """Some groups are zeros, alone or together; rows lie apart, at odd addresses."""
    rng, how = np.random.default_rng(seed), data.draw(st.sampled_from(["moments", *IMPORTANCES]))
    bf16 = rows(rng, n, k, kind)
    bf16 = np.where(np.repeat(rng.random((n, k // 32)) < 0.1, 32, axis=1), np.uint16(0x8000), bf16)
    importance = hostile_moments(rng, k) if how == "moments" else IMPORTANCES[how](rng, k)
    expected = defined(grid, bf16, importance)
    space = np.full(n * (2 * k + 6) + 1, 0xFF, np.uint8)
    spaced = space[1:].view(np.uint16).reshape(n, k + 3)[:, :k]
    spaced[:] = bf16
    for _ in isas.each():
        both_equal(searched(grid, spaced, importance), expected)


def errors(bf16: Any, numbers: Any, weights: Any, group: int) -> Any:
    """Return sqrt(sum h (x - y)^2 / sum h x^2) of each group, in float64."""
    x = reference.bf16_to_f32(bf16).astype(np.float64).reshape(len(bf16), -1, group)
    y = numbers.astype(np.float64).reshape(x.shape)
    total = np.maximum((weights * x**2).sum(axis=2), 1e-300)
    return np.sqrt((weights * (x - y) ** 2).sum(axis=2) / total)


@pytest.mark.parametrize("name", FORMS)
@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, weighted=st.sampled_from(list(IMPORTANCES)))
def test_errors_are_at_most_those_of_the_largest_value(name: str, seed: int, weighted: str) -> None:
    """This holds for the minimized error, with any importance; the chosen codes are packed unchanged."""
    rng, form = np.random.default_rng(seed), FORMS[name]
    n, k = 128, 128
    drawn = rng.standard_t(rng.uniform(1, 8), (n, k)) * 10.0 ** rng.uniform(-30, 30, (n, 1))
    bf16, importance = (
        reference.f32_to_bf16(np.clip(drawn, -3e38, 3e38).astype(np.float32)),
        IMPORTANCES[weighted](rng, k),
    )
    if form.grid.has_row_scales:
        weights = scale_search.normalize(importance) if importance is not None else None
        weights = np.ones((1, k)) if weights is None else weights.astype(np.float64)[None]
    else:
        weights = group_search.weights(k, importance).astype(np.float64)
    found = []
    for choice in (IMATRIX, ABSMAX):
        stored = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(n, k)]
        quantize_slice(form, choice, Matrix(bf16, BF16), stored, importance)
        numbers = form.decode(stored, n, k, slice(None))
        found.append(errors(bf16, numbers, weights, form.grid.group or k))
        if choice is IMATRIX:
            codes, scales = searched(form.grid.name, bf16, importance)
            chosen = (
                codes.reshape(n, scales.shape[1], -1) * np.float32(form.grid.step) * scales_to_f32(scales)[..., None]
            )
            assert_equal_bytes("numbers", numbers.reshape(-1), chosen.astype(np.float32).reshape(-1))
    assert (found[0] <= found[1] + 1e-5).all()


@pytest.mark.parametrize(("grid", "most"), [("int4", 0.93), ("int8", 1.0), ("mxfp4", 0.95), ("rawint4", 0.7)])
def test_second_moments_reduce_the_error_of_outputs(grid: str, most: float) -> None:
    """Sums of e M eT beside those of the search without the metric; more columns than are multiplied at once."""
    rng, k = np.random.default_rng(4), 576
    bf16 = reference.f32_to_bf16(rng.standard_normal((64, k)).astype(np.float32))
    moments = moments_of(rng, k, 2000, 0.5)

    def error(importance: Any) -> float:
        codes, scales = searched(grid, bf16, importance)
        y = codes.reshape(64, scales.shape[1], -1) * GRIDS[grid].step * scales_to_f32(scales).astype(float)[..., None]
        e = reference.bf16_to_f32(bf16) - y.reshape(64, k)
        return float(np.einsum("ni,ij,nj->", e, moments.astype(np.float64), e))

    assert error(moments) < most * error(None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_encodings_are_decoded_a_few_rows_at_a_time(bits: int, kind: str) -> None:
    """Matrices with contiguous columns, such as backward matrices, are covered, too."""
    form, n, k = ROWS[bits], 384, 128
    for turn in (np.asarray, in_columns):
        values, about = make_source(kind, n, k, block=(48, 80))
        matrix = make_matrix(turn(values), kind, **about)
        codes, scale = scale_search.search(bits, reference.decode(matrix))
        weight, scales = (np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(n, k))
        quantize_slice(form, MSE, matrix, (weight, scales))
        both_equal((weight, scales.view(np.float32)), (reference.pack(bits, codes), scale))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("bad", [0x7F80, 0xFFC1])
def test_non_finite_values_are_reported_with_their_position(name: str, bad: int) -> None:
    bf16, form = np.full((256, 128), 0x3F80, np.uint16), FORMS[name]
    bf16[150, 9] = bad
    for choice in (ABSMAX, MSE):
        with pytest.raises(kernels.NonFinite) as caught:
            quantize_slice(
                form, choice, Matrix(bf16, BF16), [np.empty(t.nbytes, np.uint8) for t in form.tensors(256, 128)]
            )
        assert (caught.value.row, caught.value.column) == (150, 9)


def test_numerics_lists_the_candidates() -> None:
    page = (Path(__file__).parents[1] / "docs/explanation/numerics.md").read_text()
    listed = re.search(r"INT4: +g_i = (.*) eighths", page)
    assert listed and listed[1] == ", ".join(f"{ratio * 8:g}" for ratio in scale_search.RATIOS[4])
    assert re.search(r"INT8: +g_i = 32, 33, \.\. 47 thirty-seconds", page)
    assert (scale_search.RATIOS[8] * 32 == np.arange(32, 48)).all()
