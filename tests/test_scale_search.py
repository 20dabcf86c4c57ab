"""Scales of least squared error: NumPy = scalar C = AVX2 = AVX-512, the errors that they promise, and no code that
kt-kernel cannot multiply.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden import FOLDER as GOLDEN
from test_golden import parts, same
from test_kernels import KINDS, source, transposed, ugly
from test_kernels import Matrix as of_kind

from ktconvert.layouts.encodings.amx import AMXINT4, AMXINT8
from ktconvert.native_quant import kernels
from ktconvert.native_quant.kernels import search_scales
from ktconvert.native_quant.matrix import BF16, Matrix
from ktconvert.pipeline.stages.quantize_experts import quantize
from ktconvert.quantizers import ROW_GRIDS
from ktconvert.quantizers.choice import ABSMAX, MSE, QUANTIZERS
from rig import reference, scale_search
from rig.safetensors import bits_of, read_file

FORMS = {4: AMXINT4, 8: AMXINT8}


def both_equal(codes_and_scale: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for name, ours, theirs in zip(("codes", "scale"), codes_and_scale, expected, strict=True):
        same(name, ours.reshape(-1), np.ascontiguousarray(theirs).reshape(-1))


def relative_error(bits: int, bf16: Any, codes: Any, scale: Any, weights: Any = 1.0) -> Any:
    """Of each row, sqrt(sum h (x - y)^2 / sum h x^2), in float64."""
    x = reference.bf16_to_f32(bf16).astype(np.float64)
    y = codes.astype(np.float64) * scale_search.STEP[bits] * scale[:, None].astype(np.float64)
    return np.sqrt((weights * (x - y) ** 2).sum(axis=1) / np.maximum((weights * x**2).sum(axis=1), 1e-300))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", [4, 8])
def test_golden_rows(bits):
    """Red after a change to the numbers: raise the version of MSE and run `make golden`."""
    golden = bits_of(read_file(GOLDEN / f"mse.v{MSE.version}.safetensors"))
    for name in ("gauss", "t5"):
        for how, importance in (("mse", None), ("weighted", golden["importance"])):
            key = f"out.{name}.int{bits}.{how}"
            expected = golden[f"{key}.codes"], golden[f"{key}.scale"]
            both_equal(scale_search.search(bits, golden[f"in.{name}"], importance), expected)
            both_equal(search_scales(bits, golden[f"in.{name}"], importance), expected)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("method", ["int4", "int8"])
def test_golden_edges(method):
    """Rows of zeros, of one element, of 1e-20, constant ones, outliers, -0 and ties, as kt-kernel was given them."""
    golden = bits_of(read_file(GOLDEN / f"mse.v{MSE.version}.safetensors"))
    for key, part, _, _ in parts(method, "edge_t1"):
        _, _, projection, expert = key.replace("ffn_", "").replace("_exps", "").split(".")[:4]
        codes, scale = search_scales(ROW_GRIDS[method].bits, part)
        stored = f"edge.{method}.{projection}.{expert}"
        same(key, scale, golden[f"{stored}.scale"])
        assert hashlib.sha256(codes).digest() == golden[f"{stored}.codes_sha256"].tobytes(), key


IMPORTANCES = {
    "none": lambda rng, k: None,
    "squares": lambda rng, k: (rng.standard_normal(k) ** 2).astype(np.float32),
    "wide": lambda rng, k: (10.0 ** rng.uniform(-44, 38, k)).astype(np.float32),
    "one column": lambda rng, k: (np.arange(k) == rng.integers(k)).astype(np.float32),
    "half": lambda rng, k: rng.integers(0, 2, k).astype(np.float32) * np.float32(3e38),
    "zeros": lambda rng, k: np.zeros(k, np.float32),
}


def rows(rng: np.random.Generator, n: int, k: int, kind: str) -> Any:
    """BF16 bits [n, k]: any finite bits, values of a distribution at any scale, or rows that went wrong once."""
    if kind == "bits":
        return rng.integers(0, 0x7F80, (n, k), np.uint16) | rng.integers(0, 2, (n, k), np.uint16) << 15
    if kind == "ugly":
        return reference.f32_to_bf16(ugly(64, k, int(rng.integers(1 << 30)))[:n])
    drawn = {"gauss": rng.standard_normal, "t2": lambda shape: rng.standard_t(2, shape)}[kind]((n, k))
    scaled = drawn * 10.0 ** rng.uniform(-43, 38, (n, 1))
    return reference.f32_to_bf16(np.clip(scaled, -3.38e38, 3.38e38).astype(np.float32))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    bits=st.sampled_from([4, 8]),
    n=st.integers(1, 40),
    k=st.sampled_from([64, 128, 192, 384, 1024]),
    kind=st.sampled_from(["bits", "ugly", "gauss", "t2"]),
    weighted=st.sampled_from(list(IMPORTANCES)),
)
def test_every_instruction_set_is_the_definition(seed, bits, n, k, kind, weighted):
    rng = np.random.default_rng(seed)
    bf16, importance = rows(rng, n, k, kind), IMPORTANCES[weighted](rng, k)
    expected = scale_search.search(bits, bf16, importance)
    space = np.full(n * (2 * k + 6) + 1, 0xFF, np.uint8)  # rows lie apart, at odd addresses
    spaced = space[1:].view(np.uint16).reshape(n, k + 3)[:, :k]
    spaced[:] = bf16
    before = kernels.isa()
    try:
        for isa in kernels.available_isas():
            kernels.set_isa(isa)
            both_equal(search_scales(bits, spaced, importance), expected)
    finally:
        kernels.set_isa(before)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 30), bits=st.sampled_from([4, 8]), weighted=st.sampled_from(list(IMPORTANCES)))
def test_no_row_is_worse_than_by_its_largest_value(seed, bits, weighted):
    """In the error that is made small, whichever importance."""
    rng = np.random.default_rng(seed)
    drawn = rng.standard_t(rng.uniform(1, 8), (24, 256)) * 10.0 ** rng.uniform(-30, 30, (24, 1))
    bf16 = reference.f32_to_bf16(np.clip(drawn, -3e38, 3e38).astype(np.float32))
    importance = IMPORTANCES[weighted](rng, 256)
    weights = scale_search.normalized(importance) if importance is not None else None
    ours, theirs = search_scales(bits, bf16, importance), reference.quantize(bits, bf16)
    counted = 1.0 if weights is None else weights.astype(np.float64)
    assert (relative_error(bits, bf16, *ours, counted) <= relative_error(bits, bf16, *theirs, counted) + 1e-5).all()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1 << 30),
    bits=st.sampled_from([4, 8]),
    kind=st.sampled_from(["bits", "ugly", "gauss", "t2"]),
    weighted=st.sampled_from(list(IMPORTANCES)),
)
def test_no_output_holds_the_code_that_has_no_negative(seed, bits, kind, weighted):
    """-8 as a byte of an INT8 is -128, which kt-kernel's AVX-512 path negates: of every choice, as it is packed."""
    rng = np.random.default_rng(seed)
    n, k, form = 128, 256, FORMS[bits]
    bf16 = np.resize(rows(rng, 40, k, kind), (n, k))
    largest = (1 << bits - 1) - 1
    for choice in QUANTIZERS.values():
        weight, scale = (np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(n, k))
        quantize(form, choice, Matrix(bf16, BF16), (weight, scale), IMPORTANCES[weighted](rng, k))
        codes, scales = reference.unpack(bits, weight, n, k), scale.view(np.float32)
        assert -largest <= codes.min() and codes.max() <= largest
        assert np.isfinite(form.decode((weight, scale), n, k)).all()
        assert not ((scales < reference.SMALLEST_NORMAL) & (scales != 0)).any()
        assert not codes[scales == 0].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_encodings_are_decoded_some_rows_at_a_time(bits, kind):
    """Also where columns are contiguous: as for the matrices of fine-tuning."""
    form, n, k = FORMS[bits], 384, 128
    for turn in (np.asarray, transposed):
        values, about = source(kind, n, k, block=(48, 80))
        matrix = of_kind(turn(values), kind, **about)
        codes, scale = scale_search.search(bits, reference.decode(matrix))
        weight, scales = (np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(n, k))
        quantize(form, MSE, matrix, (weight, scales))
        same("weight", weight, reference.pack(bits, codes))
        same("scale", scales.view(np.float32), scale)


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC1, 0xFFFF])
def test_what_is_not_finite_is_named(bad):
    bf16 = np.full((200, 64), 0x3F80, np.uint16)
    bf16[150, 9] = bad
    weight, scale = (np.empty(tensor.nbytes, np.uint8) for tensor in AMXINT8.tensors(192, 64))
    with pytest.raises(kernels.NonFinite) as caught:
        search_scales(4, bf16)
    assert (caught.value.row, caught.value.column) == (150, 9)
    for choice in (ABSMAX, MSE):
        with pytest.raises(kernels.NonFinite) as caught:
            quantize(AMXINT8, choice, Matrix(bf16[:192], BF16), (weight, scale))
        assert (caught.value.row, caught.value.column) == (150, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 5}, "bits must be 4 or 8"),
        ({"bf16": np.zeros((2, 65), np.uint16)}, "multiple of 64"),
        ({"bf16": np.zeros((2, 64), np.int16)}, "must be uint16"),
        ({"bf16": np.zeros((64, 2), np.uint16).T}, "each row of values must be contiguous"),
        ({"importance": np.ones(63, np.float32)}, "importance must be float32 [64]"),
        ({"importance": np.ones(64)}, "importance must be float32 [64]"),
        ({"importance": np.full(64, -1, np.float32)}, "nowhere negative"),
        ({"importance": np.full(64, np.nan, np.float32)}, "finite"),
        ({"importance": np.full(64, np.inf, np.float32)}, "finite"),
    ],
)
def test_wrong_calls_are_refused(change, words):
    call: dict[str, Any] = {"bits": 4, "bf16": np.zeros((2, 64), np.uint16), **change}
    with pytest.raises(ValueError, match=re.escape(words)):
        search_scales(**call)


def test_numerics_lists_the_candidates():
    page = (Path(__file__).parents[1] / "docs/explanation/numerics.md").read_text()
    listed = re.search(r"INT4: +g_i = (.*) eighths", page)
    assert listed and listed[1] == ", ".join(f"{ratio * 8:g}" for ratio in scale_search.RATIOS[4])
    assert re.search(r"INT8: +g_i = 32, 33, \.\. 47 thirty-seconds", page)
    assert (scale_search.RATIOS[8] * 32 == np.arange(32, 48)).all()
