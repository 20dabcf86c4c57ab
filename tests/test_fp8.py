"""Experts as FP8: codes and scales are those of the NumPy definition on every instruction set, and those of a source
that is FP8 in the same blocks.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.layouts.encodings.encoding import error_sums
from ktconvert.layouts.outputs import FORMATS
from ktconvert.native_quant import kernels, kernels_panels
from ktconvert.native_quant.matrix import BF16, F32, FP8_E4M3, KINDS, Matrix
from ktconvert.pipeline.stages.experts import ROWS
from ktconvert.quantizers import FLOAT_GRIDS, fp8, panels, reference
from ktconvert.quantizers.scales import E4M3
from rig.safetensors import bits_of, read_file

Bits = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.uint8]
SIZES = st.sampled_from((128, 256, 384))
ISAS = st.sampled_from(kernels.available_isas())
GOLDEN = Path(__file__).parent / "golden"


def any_bits(shape: tuple[int, int], rng: np.random.Generator) -> Bits:
    """Any finite BF16 numbers, subnormal ones and -0 among them."""
    values = rng.integers(0, 1 << 16, shape, np.uint16)
    values[(values & 0x7F80) == 0x7F80] = 0x8000
    return values


def near_each_other(shape: tuple[int, int], rng: np.random.Generator) -> Bits:
    """Numbers of about 20 exponents, so that codes of all kinds come out; and a block of zeros."""
    values = rng.integers(0, 1 << 7, shape, np.uint16) | rng.integers(0, 2, shape, np.uint16) << 15
    values |= (rng.integers(0, 20, shape, np.uint16) + np.uint16(rng.integers(1, 230))) << 7
    values[:128, :128] &= 0x8000
    return values


def plain(shape: tuple[int, int], rng: np.random.Generator) -> Bits:
    return reference.f32_to_bf16(rng.standard_normal(shape).astype(np.float32) * 0.02)


def packed(matrix: Matrix, isa: str | None = None) -> tuple[Codes, npt.NDArray[np.float32]]:
    """Codes [n, k] and scales [n/128, k/128] by the kernels."""
    n, k = matrix.shape
    codes, scales = np.full((n // 32, 32 * k), 0xAA, np.uint8), np.full((n // 128, k // 128), np.nan, np.float32)
    kernels.set_isa(isa)
    try:
        kernels_panels.pack_fp8(matrix, codes, scales)
    finally:
        kernels.set_isa(None)
    return panels.unlay(codes), scales


# --- the definition ---


def test_codes_are_the_nearest_with_ties_to_even() -> None:
    """Against all 127 magnitudes, not by the formula."""
    grid = E4M3[:127].astype(np.float64)
    between = (grid[1:] + grid[:-1]) / 2
    near = np.concatenate([between, np.nextafter(between, 0), np.nextafter(between, 1e9), grid, [448, 463, 1e9]])
    x = near.astype(np.float32)
    distance = np.abs(x.astype(np.float64)[:, None] - grid)
    nearest = distance == distance.min(axis=1, keepdims=True)
    even = np.arange(127) % 2 == 0
    wanted = np.where(nearest.sum(axis=1) == 2, (nearest & even).argmax(axis=1), nearest.argmax(axis=1))
    assert (fp8.codes_of(x) == wanted).all()
    assert (fp8.codes_of(-x) == wanted + 0x80).all()
    assert fp8.codes_of(np.array([0.0, -0.0], np.float32)).tolist() == [0, 0x80]


def test_codes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    bits = plain((256, 256), np.random.default_rng(1))
    codes, scales = fp8.quantize(bits)
    x = reference.bf16_to_f32(bits) / fp8.each(scales)
    assert (codes == torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()).all()


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(0, 1.0), (0x3F80, np.float32(1) / np.float32(448)), (0x43E0, 1.0), (0x0001, 2.0**-126), (0x7F7F, None)],
)
def test_scales(amax: int, scale: float | None) -> None:
    """1 for zeros; 448 / 448; the smallest one, and the largest."""
    bits = np.zeros((128, 128), np.uint16)
    bits[77, 3] = amax | 0x8000
    codes, scales = packed(Matrix(bits, BF16))
    wanted = reference.bf16_to_f32(np.array([amax], np.uint16))[0] / np.float32(448) if scale is None else scale
    assert scales[0, 0] == np.float32(wanted) == fp8.block_scales(bits)[0, 0]
    assert codes[77, 3] == {0: 0x80, 1: 0x84}.get(amax, 0xFE)


@settings(max_examples=60, deadline=None)
@given(
    n=SIZES, k=SIZES, seed=st.integers(0, 99), turned=st.booleans(), isa=ISAS,
    make=st.sampled_from((any_bits, near_each_other, plain)),
)  # fmt: skip
def test_kernels_are_the_definition(
    n: int, k: int, seed: int, turned: bool, isa: str, make: Callable[[tuple[int, int], np.random.Generator], Bits]
) -> None:
    values = make((n, k), np.random.default_rng(seed))
    codes, scales = packed(Matrix(values.T.copy().T if turned else values, BF16), isa)
    wanted, wanted_scales = fp8.quantize(values)
    assert (scales == wanted_scales).all()
    assert (codes == wanted).all()
    assert not ((codes & 0x7F) == fp8.NAN).any()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["fp16", "f32", "fp8_e4m3"])
@pytest.mark.parametrize("grid", FLOAT_GRIDS.values(), ids=lambda grid: grid.name)
def test_golden_bytes(grid: Any, kind: str) -> None:
    """Red after a change to the numbers: raise the grid's version and run `make golden`."""
    if not (path := GOLDEN / f"{grid.name}.v{grid.version}.{kind}.safetensors").exists():
        pytest.skip(f"{grid.name} has no golden file of this kind")
    tensors = bits_of(read_file(path))
    options: dict[str, Any] = {}
    if "in.scales" in tensors:
        options = {"scales": tensors["in.scales"], "block": tuple(tensors["in.block"].tolist())}
    matrix = Matrix(tensors["in.values"], KINDS[kind], **options)
    form = next(form.encoding for form in FORMATS.values() if form.encoding.grid == grid)
    out = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(*matrix.shape)]
    form.quantize(matrix, out)
    for tensor, made in zip(form.tensors(*matrix.shape), out, strict=True):
        assert made.tobytes() == tensors[f"out.{tensor.name}"].tobytes()


@pytest.mark.parametrize("row", [0, 31, 127, 128, 255])
def test_numbers_that_are_not_finite_are_named(row: int) -> None:
    values = np.ones((256, 128), np.float32)
    values[row, 95] = np.inf
    with pytest.raises(kernels.NonFinite) as raised:
        packed(Matrix(values, F32))
    assert (raised.value.row, raised.value.column) == (row, 95)


# --- FP8 that stays as it is ---


def stored(n: int, k: int, seed: int) -> tuple[Codes, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    codes[(codes & 0x7F) == fp8.NAN] = 0
    codes[:128, :128] = 0
    return codes, rng.uniform(1e-40, 1e-2, (n // 128, k // 128)).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(n=SIZES, k=SIZES, seed=st.integers(0, 9), turned=st.booleans(), isa=ISAS)
def test_codes_and_scales_in_the_same_blocks_are_kept(n: int, k: int, seed: int, turned: bool, isa: str) -> None:
    codes, scales = stored(n + 128, k + 128, seed)
    whole = Matrix(codes.T.copy().T if turned else codes, FP8_E4M3, scales, (128, 128))
    made, made_scales = packed(whole.rows(128, n + 128).columns(128, k + 128), isa)
    assert (made == codes[128:, 128:]).all()
    assert (made_scales == scales[1:, 1:]).all()


@pytest.mark.parametrize("turned", [False, True])
def test_a_nan_among_kept_codes_is_named(turned: bool) -> None:
    codes, scales = stored(256, 256, 0)
    codes[130, 77] = 0xFF
    with pytest.raises(kernels.NonFinite) as raised:
        packed(Matrix(codes.T.copy().T if turned else codes, FP8_E4M3, scales, (128, 128)))
    assert (raised.value.row, raised.value.column) == (130, 77)


def reader(out: list[Any]) -> Any:
    return lambda tensor, start=0, stop=None: out[tensor][start:stop]


def written(matrix: Matrix) -> npt.NDArray[np.float32]:
    """The numbers of a matrix as FP8."""
    form = FORMATS["FP8"].encoding
    out = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(*matrix.shape)]
    form.quantize(matrix, out)
    assert error_sums(form, matrix, out)[3] == 0
    assert not any(defect(reader(out), *matrix.shape) for defect in form.defects if defect)
    return form.decode(out, *matrix.shape)


def test_scales_that_are_not_positive_lose_no_number() -> None:
    codes, scales = stored(256, 256, 1)
    scales[0, 1], scales[1, 0], scales[1, 1] = 0, -2.5, -0.0
    numbers = written(Matrix(codes, FP8_E4M3, scales, (128, 128)))
    wanted = E4M3[codes] * fp8.each(scales)
    assert (numbers.view(np.uint32) == wanted.view(np.uint32)).all()


def test_kept_numbers_must_be_finite() -> None:
    codes, scales = stored(256, 256, 1)
    scales[1, 1] = 3e38
    codes[128:, 128:] = 0
    codes[200, 255] = 0x40
    with pytest.raises(kernels.NonFinite) as raised:
        written(Matrix(codes, FP8_E4M3, scales, (128, 128)))
    assert (raised.value.row, raised.value.column) == (200, 255)
    codes[200, 255] = 0x38  # 1
    written(Matrix(codes, FP8_E4M3, scales, (128, 128)))


@pytest.mark.parametrize("name", ["FP8", "KT_FP8"])
def test_scales_that_make_numbers_infinite(name: str) -> None:
    """Only with the codes of their own block, here the second of the second row."""
    codes, scales = stored(256, 384, 1)
    form = FORMATS[name].encoding
    out = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(256, 384)]
    codes[128:, 128:256] &= 0x87  # below 1
    form.quantize(Matrix(codes, FP8_E4M3, scales, (128, 128)), out)
    held, (_, defect), read = out[1].view(np.float32), form.defects, reader(out)
    assert not defect(read, 256, 384)
    held[4] = 3e38
    assert not defect(read, 256, 384)
    held[5] = 3e38
    assert defect(read, 256, 384) == "scale 5, 3e+38, makes a number infinite"


@pytest.mark.parametrize("name", ["FP8", "KT_FP8"])
def test_scales_that_are_not_positive_or_large_take_memory_for_some_rows(name: str) -> None:
    form, (n, k) = FORMATS[name].encoding, (1024, 1024)
    codes, scales = stored(n, k, 1)
    codes[:128, :128] = 0x38  # 1
    scales[0, 0], scales[1, 1], scales[2, 2] = 3e38, -1, 0
    matrix = Matrix(codes, FP8_E4M3, scales, (128, 128))
    out = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(n, k)]
    form.quantize(matrix, out)
    tracemalloc.start()
    try:
        form.quantize(matrix, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * ROWS * k + (16 << 10)  # what a plan counts, and Python's objects


# --- codes alone, for scales of other blocks ---------------------------------------------------------------------------


@given(
    n=st.sampled_from((32, 96, 160)),
    k=st.sampled_from((32, 64, 352)),
    start=st.integers(0, 3),
    isa=ISAS,
    rest=st.booleans(),
)
def test_codes_alone_are_put_into_panels(n: int, k: int, start: int, isa: str, rest: bool) -> None:
    """Also columns of a wider matrix, from any address on."""
    rng = np.random.default_rng(n + k + start)
    wide = rng.integers(0, 127, (n, k + start + 5 * rest), np.uint8) | rng.integers(0, 2, 1, np.uint8) << 7
    values, codes = wide[:, start : start + k], np.empty((n // 32, 32 * k), np.uint8)
    kernels.set_isa(isa)
    try:
        kernels_panels.lay_fp8(values, codes)
    finally:
        kernels.set_isa(None)
    np.testing.assert_array_equal(codes, panels.lay(values))


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_a_nan_among_codes_alone_is_refused(nan: int) -> None:
    values, codes = np.zeros((64, 96), np.uint8), np.empty((2, 32 * 96), np.uint8)
    values[33, 95] = nan
    with pytest.raises(kernels.NonFinite, match="row 33, column 95"):
        kernels_panels.lay_fp8(values, codes)


def test_codes_alone_that_do_not_fit_are_refused() -> None:
    values, codes = np.zeros((32, 64), np.uint8), np.empty((1, 32 * 64), np.uint8)
    for wrong, message in (
        (values[:, ::2], "contiguous"),
        (values.view(np.int8), "uint8"),
        (values[:31], "multiples of 32"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels_panels.lay_fp8(wrong, codes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="codes"):
        kernels_panels.lay_fp8(values, codes[:, :-1])
