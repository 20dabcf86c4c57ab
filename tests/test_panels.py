"""Weights in panels, as BF16, FP8 and MXFP4: every kernel is the definition, the definition is the rule, and what is FP8 or
MXFP4 already keeps its codes and scales.
"""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktconvert.layouts.encodings import fp4
from ktconvert.layouts.encodings.encoding import error_sums
from ktconvert.layouts.outputs import FORMATS
from ktconvert.native_quant import kernels
from ktconvert.native_quant.matrix import BF16, F32, FP4_E2M1, FP8_E4M3, GGML_MXFP4, KINDS, Matrix
from ktconvert.pipeline.stages.quantize_experts import ROWS
from ktconvert.quantizers import FLOAT_GRIDS, panels
from ktconvert.quantizers.reference import E4M3, e8m0
from rig import floats, isas, reference
from rig.golden import FOLDER
from rig.safetensors import bits_of, read_file

Bits = Any
Codes = npt.NDArray[np.uint8]
ISAS = st.sampled_from(kernels.available_isas())
MULTIPLES = {"BF16": 32, "FP8": 128, "MXFP4": 32}


def packed(method: str, matrix: Matrix) -> list[Bits]:
    """Codes [n, k] and scales (BF16: the bits alone) by the kernels."""
    n, k = matrix.shape
    if method == "BF16":
        codes: Bits = np.empty((n // 32, 32 * k), np.uint16)
        kernels.pack_bf16(matrix, codes)
        return [panels.from_panels(codes)]
    if method == "FP8":
        codes, scales = np.full((n // 32, 32 * k), 0xAA, np.uint8), np.full((n // 128, k // 128), np.nan, np.float32)
        kernels.pack_fp8(matrix, codes, scales)
        return [panels.from_panels(codes), scales]
    codes, exponents = np.full((n // 32, 16 * k), 0xAA, np.uint8), np.full((n // 32, k), 0xAA, np.uint8)
    kernels.pack_mxfp4(matrix, codes, exponents)
    return [fp4.codes_from_panels(codes), fp4.exponents_from_panels(exponents)]


def defined(method: str, bits: Bits) -> list[Bits]:
    return (
        [bits]
        if method == "BF16"
        else [*(reference.quantize_fp8 if method == "FP8" else reference.quantize_mxfp4)(bits)]
    )


def assert_same(ours: Any, theirs: Any) -> None:
    for one, other in zip(reversed(ours), reversed(theirs), strict=True):
        assert (one == other).all()


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


EXPONENTS = st.integers(0, 254) | st.sampled_from((0, 1, 2, 3, 4, 15, 16, 17, 252, 253, 254))


@st.composite
def blocks(draw: st.DrawFn) -> Bits:
    """32 BF16 values within some powers of two of the largest, with many ties of E2M1; zeros and subnormal ones."""
    top, spread = draw(EXPONENTS), draw(st.integers(0, 8))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    fractions = rng.choice([0, 32, 64, 96], 32) if draw(st.booleans()) else rng.integers(0, 128, 32)
    magnitudes = np.maximum(top - rng.integers(0, spread + 1, 32), 0) << 7 | fractions
    magnitudes[rng.random(32) < draw(st.sampled_from((0, 0.1, 1)))] = 0
    return (magnitudes | rng.integers(0, 2, 32) << 15).astype(np.uint16)


@settings(max_examples=150)
@given(
    method=st.sampled_from(list(MULTIPLES)), n=st.integers(1, 5), k=st.integers(1, 5), turned=st.booleans(), isa=ISAS,
    make=st.sampled_from((any_bits, near_each_other, plain)), data=st.data(),
)  # fmt: skip
def test_every_kernel_equals_the_definition(method, n, k, turned, isa, make, data):
    rng, unit = np.random.default_rng(data.draw(st.integers(0, 99))), MULTIPLES[method]
    values = make((n * unit, k * unit), rng)
    if method == "MXFP4":
        drawn = np.stack([data.draw(blocks()) for _ in range(6)])[rng.integers(0, 6, values.size // 32)]
        drawn = drawn.reshape(values.shape) ^ rng.integers(0, 1 << 7, values.shape, np.uint16) * data.draw(
            st.booleans()
        )
        values = np.where(rng.random((len(values), 1)) < 0.8, drawn, values)
    with isas.use(isa):
        ours = packed(method, Matrix(values.T.copy().T if turned else values, BF16))
    assert_same(ours, defined(method, values))
    assert method != "FP8" or not ((ours[0] & 0x7F) == 0x7F).any()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["bf16", "fp16", "f32", "fp8_e4m3"])
@pytest.mark.parametrize("grid", FLOAT_GRIDS.values(), ids=lambda grid: grid.name)
def test_results_equal_golden_bytes(grid, kind):
    """Red after a change to the numbers: raise the grid's version and run `make golden`."""
    if not (path := FOLDER / f"{grid.name}.v{grid.version}.{kind}.safetensors").exists():
        pytest.skip(f"{grid.name} has no golden file of this kind")
    tensors = bits_of(read_file(path))
    options: dict[str, Any] = {}
    if "in.scales" in tensors:
        options = {"scales": tensors["in.scales"], "block": tuple(tensors["in.block"].tolist())}
    matrix = Matrix(tensors["in.values"], KINDS[kind], **options)
    form = next(form.encoding for form in FORMATS.values() if form.encoding.grid == grid)
    for tensor, made in zip(form.tensors(*matrix.shape), quantized(form, matrix), strict=True):
        assert made.tobytes() == tensors[f"out.{tensor.name}"].tobytes()


def quantized(form: Any, matrix: Matrix) -> list[Bits]:
    out = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(*matrix.shape)]
    form.quantize(matrix, out)
    return out


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("method", MULTIPLES)
@pytest.mark.parametrize("row", [0, 15, 31, 32, 127, 128, 255])
def test_non_finite_numbers_are_reported_with_their_position(method, row):
    values = np.ones((256, 256), np.float32)
    values[row, 191] = np.nan
    values[255, 3] = np.inf
    with pytest.raises(kernels.NonFinite) as raised:
        packed(method, Matrix(values, F32))
    assert (raised.value.row, raised.value.column) == (row, 3 if row == 255 else 191)


def test_each_element_has_the_documented_position():
    """bytes.md's formulas, element by element."""
    n, k = 64, 96
    rng = np.random.default_rng(0)
    values = np.arange(n * k, dtype=np.uint16).reshape(n, k)
    flat = floats.to_panels(values).reshape(-1).view(np.uint8)
    codes, exponents = rng.integers(0, 16, (n, k), np.uint8), rng.integers(0, 255, (n, k // 32), np.uint8)
    in_panels, scales = floats.pack_codes(codes).reshape(-1), fp4.exponents_to_panels(exponents).reshape(-1)
    for r in range(n):
        for c in range(k):
            s, h, i, b, j = r // 32, r % 32 // 16, r % 16, c // 32, c % 32
            at = 64 * s * k + 2048 * b + 1024 * h + 64 * (j // 2) + 4 * i + 2 * (j % 2)
            assert flat[at : at + 2].view(np.uint16)[0] == values[r, c]
            at = 16 * s * k + 512 * b + 256 * h + 64 * (j // 8) + 4 * i + 2 * (j % 2) + j % 8 // 4
            assert in_panels[at] >> 4 * (j % 8 // 2 % 2) & 15 == codes[r, c]
            assert scales[s * k + 32 * b + r % 32] == exponents[r, b]
    assert (panels.from_panels(floats.to_panels(values)) == values).all()
    assert (fp4.codes_from_panels(in_panels.reshape(2, -1)) == codes).all()
    assert (fp4.exponents_from_panels(scales.reshape(2, -1)) == exponents).all()


def test_codes_round_to_nearest_even():
    """As torch has it, between all neighbours; and what is larger than 448 becomes that."""
    torch = pytest.importorskip("torch")
    grid = E4M3[:127].astype(np.float64)
    between = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([between, np.nextafter(between, 0), np.nextafter(between, 1e9), grid]).astype(np.float32)
    x = np.concatenate([x, -x])
    assert (reference.fp8_codes(x) == torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()).all()
    assert reference.fp8_codes(np.array([463, 1e9, -1e9], np.float32)).tolist() == [0x7E, 0x7E, 0xFE]


def stored_fp8(n: int, k: int, seed: int) -> tuple[Codes, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[:128, :128] = 0
    return codes, rng.uniform(1e-40, 1e-2, (n // 128, k // 128)).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 3), k=st.integers(1, 3), seed=st.integers(0, 9), turned=st.booleans(), isa=ISAS)
def test_codes_and_scales_in_the_same_blocks_are_kept(n, k, seed, turned, isa):
    codes, scales = stored_fp8(128 * (n + 1), 128 * (k + 1), seed)
    whole = Matrix(codes.T.copy().T if turned else codes, FP8_E4M3, scales, (128, 128))
    with isas.use(isa):
        made = packed("FP8", whole.rows(128, 128 * (n + 1)).columns(128, 128 * (k + 1)))
    assert_same(made, (codes[128:, 128:], scales[1:, 1:]))


def reader(out: list[Any]) -> Any:
    return lambda tensor, start=0, stop=None: out[tensor][start:stop]


def written(matrix: Matrix) -> npt.NDArray[np.float32]:
    """The numbers of a matrix as FP8."""
    form = FORMATS["FP8"].encoding
    out = quantized(form, matrix)
    assert error_sums(form, matrix, out)[3] == 0
    assert not any(defect(reader(out), *matrix.shape) for defect in form.defects if defect)
    return form.decode(out, *matrix.shape)


def test_nonpositive_scales_keep_all_values():
    codes, scales = stored_fp8(256, 256, 1)
    scales[0, 1], scales[1, 0], scales[1, 1] = 0, -2.5, -0.0
    numbers = written(Matrix(codes, FP8_E4M3, scales, (128, 128)))
    expected = E4M3[codes] * reference.repeat_blocks(scales)
    assert (numbers.view(np.uint32) == expected.view(np.uint32)).all()


def test_kept_values_must_be_finite():
    codes, scales = stored_fp8(256, 256, 1)
    scales[1, 1] = 3e38
    codes[128:, 128:] = 0
    codes[200, 255] = 0x40
    with pytest.raises(kernels.NonFinite) as raised:
        written(Matrix(codes, FP8_E4M3, scales, (128, 128)))
    assert (raised.value.row, raised.value.column) == (200, 255)
    codes[200, 255] = 0x38  # 1
    written(Matrix(codes, FP8_E4M3, scales, (128, 128)))


@pytest.mark.parametrize("name", ["FP8", "KT_FP8"])
def test_scales_that_cause_infinity_are_rejected(name):
    """Only with the codes of their own block, here the second of the second row."""
    codes, scales = stored_fp8(256, 384, 1)
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
def test_unusual_scales_need_memory_for_a_few_rows(name):
    form, (n, k) = FORMATS[name].encoding, (1024, 1024)
    codes, scales = stored_fp8(n, k, 1)
    codes[:128, :128] = 0x38  # 1
    scales[0, 0], scales[1, 1], scales[2, 2] = 3e38, -1, 0
    matrix = Matrix(codes, FP8_E4M3, scales, (128, 128))
    out = [np.empty(tensor.nbytes, np.uint8) for tensor in form.tensors(n, k)]
    form.quantize(matrix, out)
    peak = peak_memory(lambda: form.quantize(matrix, out))
    assert peak < 2 * ROWS * k + (16 << 10)  # what a plan counts, and Python's objects


def peak_memory(run: Callable[[], object]) -> int:
    """Bytes that Python allocates at most meanwhile."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_mxfp4_needs_memory_for_a_few_rows():
    """What is in panels meanwhile does not grow with the linear, and a number that is not finite is named by its row."""
    form, values = fp4.ROWS, np.full((4096, 256), 0x3F80, np.uint16)
    out = quantized(form, Matrix(values, BF16))
    peak = peak_memory(lambda: form.quantize(Matrix(values, BF16), out))
    assert peak < 2 * fp4.ROWS_AT_A_TIME * 256
    values[300, 7] = 0x7FC0
    with pytest.raises(kernels.NonFinite, match="row 300, column 7"):
        form.quantize(Matrix(values, BF16), out)


def stored_mxfp4(kind: str, codes: Bits, exponents: Bits) -> Matrix:
    """Codes [n, k] and exponents [n, k/32] as safetensors or ggml store them."""
    n, k = codes.shape
    if kind == "fp4":
        return Matrix(codes[:, ::2] | codes[:, 1::2] << 4, FP4_E2M1, e8m0(exponents), (1, 32))
    split = codes.reshape(n, k // 32, 2, 16)
    return Matrix(
        np.concatenate([exponents[..., None], split[:, :, 0] | split[:, :, 1] << 4], 2).reshape(n, -1), GGML_MXFP4
    )


@given(
    kind=st.sampled_from(("fp4", "ggml")),
    seed=st.integers(0, 99),
    rows=st.sampled_from(((0, 128), (64, 128))),
    columns=st.sampled_from(((0, 320), (64, 256), (256, 320))),
    isa=ISAS,
)
def test_codes_and_exponents_are_kept(kind, seed, rows, columns, isa):
    rng = np.random.default_rng(seed)
    codes, exponents = rng.integers(0, 16, (128, 320), np.uint8), rng.integers(0, 255, (128, 10), np.uint8)
    exponents[7], exponents[9] = 0, 254
    limit = np.repeat(np.select([exponents < 253, exponents == 253], [7, 5], 3), 32, axis=1)
    codes = np.minimum(codes & 7, limit).astype(np.uint8) | codes & 8
    matrix = stored_mxfp4(kind, codes, exponents).rows(*rows).columns(*columns)
    expected = codes[slice(*rows), slice(*columns)], exponents[slice(*rows), columns[0] // 32 : columns[1] // 32]
    with isas.use(isa):
        assert_same(packed("MXFP4", matrix), expected)
    assert (reference.bf16_to_f32(kernels.decode(matrix)) == fp4.dequantize(*expected)).all()


def kept_nan(turned: bool) -> list[Bits]:
    codes, scales = stored_fp8(256, 256, 0)
    codes[130, 77] = 0xFF
    return packed("FP8", Matrix(codes.T.copy().T if turned else codes, FP8_E4M3, scales, (128, 128)))


def infinite(kind: str, code: int, exponent: int) -> list[Bits]:
    codes, exponents = np.zeros((256, 96), np.uint8), np.full((256, 3), 120, np.uint8)
    codes[130, 77], exponents[130, 2] = code, exponent
    return packed("MXFP4", stored_mxfp4(kind, codes, exponents))


def codes_alone(nan: int) -> None:
    values = np.zeros((256, 96), np.uint8)
    values[130, 77] = nan
    kernels.reorder_fp8(values, np.empty((8, 32 * 96), np.uint8))


@pytest.mark.parametrize(
    ("call", "how"),
    [
        *((kept_nan, (turned,)) for turned in (False, True)),
        *((infinite, (kind, *at)) for kind in ("fp4", "ggml") for at in ((6, 253), (15, 253), (4, 254), (12, 254))),
        *((codes_alone, (nan,)) for nan in (0x7F, 0xFF)),
    ],
)
def test_kept_codes_must_be_finite(call, how):
    with pytest.raises(kernels.NonFinite) as raised:
        call(*how)
    assert (raised.value.row, raised.value.column) == (130, 77)


@given(
    n=st.sampled_from((32, 160)),
    k=st.sampled_from((32, 64, 352)),
    start=st.integers(0, 3),
    isa=ISAS,
    rest=st.booleans(),
)
def test_codes_without_scales_are_put_into_panels(n, k, start, isa, rest):
    """Also columns of a wider matrix, from any address on."""
    rng = np.random.default_rng(n + k + start)
    wide = rng.integers(0, 127, (n, k + start + 5 * rest), np.uint8) | rng.integers(0, 2, 1, np.uint8) << 7
    values, codes = wide[:, start : start + k], np.empty((n // 32, 32 * k), np.uint8)
    with isas.use(isa):
        kernels.reorder_fp8(values, codes)
    np.testing.assert_array_equal(codes, floats.to_panels(values))


@pytest.mark.parametrize(("group", "factor"), [(16, 1), (32, 3)])
def test_other_scales_are_rounded(group, factor):
    """NVFP4 has the codes, and scales that MXFP4 has not."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, (64, 64), np.uint8)
    scales = (2.0 ** rng.integers(-9, -3, (64, 128 // group)) * factor).astype(np.float32)
    matrix = Matrix(codes, FP4_E2M1, scales, (1, group))
    assert_same(packed("MXFP4", matrix), reference.quantize_mxfp4(reference.decode(matrix)))
