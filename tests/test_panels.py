"""Weights in panels, as BF16, FP8 and MXFP4: kernels equal the definition, and the definition equals the rule.

FP8 and MXFP4 sources keep their codes and scales.
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
from ktconvert.quantizers.reference import E4M3, e8m0_to_f32
from rig import floats, isas, reference
from rig.golden import FOLDER
from rig.safetensors import bits_of, read_file

Bits = Any
Codes = npt.NDArray[np.uint8]
ISAS = st.sampled_from(kernels.available_isas())
MULTIPLES = {"BF16": 32, "FP8": 128, "MXFP4": 32}


def pack(method: str, matrix: Matrix) -> list[Bits]:
    """Pack by the kernels; return codes [n, k] and scales (only the bits for BF16)."""
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


def pack_by_definition(method: str, bits: Bits) -> list[Bits]:
    """Return the same by the definition."""
    return (
        [bits]
        if method == "BF16"
        else [*(reference.quantize_fp8 if method == "FP8" else reference.quantize_mxfp4)(bits)]
    )


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert that scales and codes are equal."""
    for one, other in zip(reversed(ours), reversed(theirs), strict=True):
        assert (one == other).all()


def any_bits(shape: tuple[int, int], rng: np.random.Generator) -> Bits:
    """Draw any finite BF16 values, including subnormal ones and -0."""
    values = rng.integers(0, 1 << 16, shape, np.uint16)
    values[(values & 0x7F80) == 0x7F80] = 0x8000
    return values


def close_values(shape: tuple[int, int], rng: np.random.Generator) -> Bits:
    """Draw values of about 20 exponents, so that all codes occur, and a block of zeros."""
    values = rng.integers(0, 1 << 7, shape, np.uint16) | rng.integers(0, 2, shape, np.uint16) << 15
    values |= (rng.integers(0, 20, shape, np.uint16) + np.uint16(rng.integers(1, 230))) << 7
    values[:128, :128] &= 0x8000
    return values


def gaussian_values(shape: tuple[int, int], rng: np.random.Generator) -> Bits:
    """Draw Gaussian values."""
    return reference.f32_to_bf16(rng.standard_normal(shape).astype(np.float32) * 0.02)


EXPONENTS = st.integers(0, 254) | st.sampled_from((0, 1, 2, 3, 4, 15, 16, 17, 252, 253, 254))


@st.composite
def blocks(draw: st.DrawFn) -> Bits:
    """Draw 32 BF16 values within some powers of two of the largest, with many ties of E2M1, zeros and subnormals."""
    top, spread = draw(EXPONENTS), draw(st.integers(0, 8))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    fractions = rng.choice([0, 32, 64, 96], 32) if draw(st.booleans()) else rng.integers(0, 128, 32)
    magnitudes = np.maximum(top - rng.integers(0, spread + 1, 32), 0) << 7 | fractions
    magnitudes[rng.random(32) < draw(st.sampled_from((0, 0.1, 1)))] = 0
    return (magnitudes | rng.integers(0, 2, 32) << 15).astype(np.uint16)


@settings(max_examples=150)
@given(
    method=st.sampled_from(list(MULTIPLES)), n=st.integers(1, 5), k=st.integers(1, 5), transposed=st.booleans(), isa=ISAS,
    make=st.sampled_from((any_bits, close_values, gaussian_values)), data=st.data(),
)  # fmt: skip
def test_every_kernel_equals_the_definition(method, n, k, transposed, isa, make, data):
    rng, unit = np.random.default_rng(data.draw(st.integers(0, 99))), MULTIPLES[method]
    values = make((n * unit, k * unit), rng)
    if method == "MXFP4":
        drawn = np.stack([data.draw(blocks()) for _ in range(6)])[rng.integers(0, 6, values.size // 32)]
        drawn = drawn.reshape(values.shape) ^ rng.integers(0, 1 << 7, values.shape, np.uint16) * data.draw(
            st.booleans()
        )
        values = np.where(rng.random((len(values), 1)) < 0.8, drawn, values)
    with isas.use(isa):
        ours = pack(method, Matrix(values.T.copy().T if transposed else values, BF16))
    assert_same(ours, pack_by_definition(method, values))
    assert method != "FP8" or not ((ours[0] & 0x7F) == 0x7F).any()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["bf16", "fp16", "f32", "fp8_e4m3"])
@pytest.mark.parametrize("grid", FLOAT_GRIDS.values(), ids=lambda grid: grid.name)
def test_results_equal_golden_bytes(grid, kind):
    """After a change of values, raise the grid's version and run `make golden`."""
    if not (path := FOLDER / f"{grid.name}.v{grid.version}.{kind}.safetensors").exists():
        pytest.skip(f"{grid.name} has no golden file of this kind")
    tensors = bits_of(read_file(path))
    options: dict[str, Any] = {}
    if "in.scales" in tensors:
        options = {"scales": tensors["in.scales"], "block": tuple(tensors["in.block"].tolist())}
    matrix = Matrix(tensors["in.values"], KINDS[kind], **options)
    encoding = next(fmt.encoding for fmt in FORMATS.values() if fmt.encoding.grid == grid)
    for tensor, output in zip(encoding.tensors(*matrix.shape), quantize(encoding, matrix), strict=True):
        assert output.tobytes() == tensors[f"out.{tensor.name}"].tobytes()


def quantize(encoding: Any, matrix: Matrix) -> list[Bits]:
    """Quantize by an encoding."""
    out = [np.empty(tensor.nbytes, np.uint8) for tensor in encoding.tensors(*matrix.shape)]
    encoding.quantize(matrix, out)
    return out


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("method", MULTIPLES)
@pytest.mark.parametrize("row", [0, 15, 31, 32, 127, 128, 255])
def test_non_finite_numbers_are_reported_with_their_position(method, row):
    values = np.ones((256, 256), np.float32)
    values[row, 191] = np.nan
    values[255, 3] = np.inf
    with pytest.raises(kernels.NonFinite) as raised:
        pack(method, Matrix(values, F32))
    assert (raised.value.row, raised.value.column) == (row, 3 if row == 255 else 191)


def test_each_element_has_the_documented_position():
    """Checks the formulas of bytes.md element by element."""
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
    """Equal to torch between all neighbours; values above 448 become 448."""
    torch = pytest.importorskip("torch")
    grid = E4M3[:127].astype(np.float64)
    between = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([between, np.nextafter(between, 0), np.nextafter(between, 1e9), grid]).astype(np.float32)
    x = np.concatenate([x, -x])
    assert (reference.fp8_codes(x) == torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()).all()
    assert reference.fp8_codes(np.array([463, 1e9, -1e9], np.float32)).tolist() == [0x7E, 0x7E, 0xFE]


def draw_fp8(n: int, k: int, seed: int) -> tuple[Codes, npt.NDArray[np.float32]]:
    """Draw FP8 codes and scales."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[:128, :128] = 0
    return codes, rng.uniform(1e-40, 1e-2, (n // 128, k // 128)).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 3), k=st.integers(1, 3), seed=st.integers(0, 9), transposed=st.booleans(), isa=ISAS)
def test_codes_and_scales_in_the_same_blocks_are_kept(n, k, seed, transposed, isa):
    codes, scales = draw_fp8(128 * (n + 1), 128 * (k + 1), seed)
    matrix = Matrix(codes.T.copy().T if transposed else codes, FP8_E4M3, scales, (128, 128))
    with isas.use(isa):
        output = pack("FP8", matrix.rows(128, 128 * (n + 1)).columns(128, 128 * (k + 1)))
    assert_same(output, (codes[128:, 128:], scales[1:, 1:]))


def make_reader(out: list[Any]) -> Any:
    """Return a function that reads parts of tensors."""
    return lambda tensor, start=0, stop=None: out[tensor][start:stop]


def write_and_decode(matrix: Matrix) -> npt.NDArray[np.float32]:
    """Quantize a matrix to FP8; check that it keeps its values, and return them."""
    encoding = FORMATS["FP8"].encoding
    out = quantize(encoding, matrix)
    assert error_sums(encoding, matrix, out)[3] == 0
    assert not any(defect(make_reader(out), *matrix.shape) for defect in encoding.defect_checks if defect)
    return encoding.decode(out, *matrix.shape)


def test_nonpositive_scales_keep_all_values():
    codes, scales = draw_fp8(256, 256, 1)
    scales[0, 1], scales[1, 0], scales[1, 1] = 0, -2.5, -0.0
    numbers = write_and_decode(Matrix(codes, FP8_E4M3, scales, (128, 128)))
    expected = E4M3[codes] * reference.repeat_blocks(scales)
    assert (numbers.view(np.uint32) == expected.view(np.uint32)).all()


def test_kept_values_must_be_finite():
    codes, scales = draw_fp8(256, 256, 1)
    scales[1, 1] = 3e38
    codes[128:, 128:] = 0
    codes[200, 255] = 0x40
    with pytest.raises(kernels.NonFinite) as raised:
        write_and_decode(Matrix(codes, FP8_E4M3, scales, (128, 128)))
    assert (raised.value.row, raised.value.column) == (200, 255)
    codes[200, 255] = 0x38  # 1
    write_and_decode(Matrix(codes, FP8_E4M3, scales, (128, 128)))


@pytest.mark.parametrize("name", ["FP8", "KT_FP8"])
def test_scales_that_cause_infinity_are_rejected(name):
    """A scale is rejected only because of the codes in its own block, here the second block of the second row."""
    codes, scales = draw_fp8(256, 384, 1)
    encoding = FORMATS[name].encoding
    out = [np.empty(tensor.nbytes, np.uint8) for tensor in encoding.tensors(256, 384)]
    codes[128:, 128:256] &= 0x87  # below 1
    encoding.quantize(Matrix(codes, FP8_E4M3, scales, (128, 128)), out)
    scales_of_output, (_, defect), read = out[1].view(np.float32), encoding.defect_checks, make_reader(out)
    assert not defect(read, 256, 384)
    scales_of_output[4] = 3e38
    assert not defect(read, 256, 384)
    scales_of_output[5] = 3e38
    assert defect(read, 256, 384) == "scale 5, 3e+38, makes a number infinite"


@pytest.mark.parametrize("name", ["FP8", "KT_FP8"])
def test_unusual_scales_need_memory_for_a_few_rows(name):
    encoding, (n, k) = FORMATS[name].encoding, (1024, 1024)
    codes, scales = draw_fp8(n, k, 1)
    codes[:128, :128] = 0x38  # 1
    scales[0, 0], scales[1, 1], scales[2, 2] = 3e38, -1, 0
    matrix = Matrix(codes, FP8_E4M3, scales, (128, 128))
    out = [np.empty(tensor.nbytes, np.uint8) for tensor in encoding.tensors(n, k)]
    encoding.quantize(matrix, out)
    peak = peak_memory(lambda: encoding.quantize(matrix, out))
    assert peak < 2 * ROWS * k + (16 << 10)  # what a plan counts, and Python's objects


def peak_memory(run: Callable[[], object]) -> int:
    """Return the peak number of bytes that Python allocates during a call."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_mxfp4_needs_memory_for_a_few_rows():
    """The intermediate panels do not grow with the linear, and a value that is not finite is reported with its row."""
    encoding, values = fp4.ROWS, np.full((4096, 256), 0x3F80, np.uint16)
    out = quantize(encoding, Matrix(values, BF16))
    peak = peak_memory(lambda: encoding.quantize(Matrix(values, BF16), out))
    assert peak < 2 * fp4.ROWS_AT_A_TIME * 256
    values[300, 7] = 0x7FC0
    with pytest.raises(kernels.NonFinite, match="row 300, column 7"):
        encoding.quantize(Matrix(values, BF16), out)


def store_mxfp4(kind: str, codes: Bits, exponents: Bits) -> Matrix:
    """Return codes [n, k] and exponents [n, k/32] as safetensors or ggml store them."""
    n, k = codes.shape
    if kind == "fp4":
        return Matrix(codes[:, ::2] | codes[:, 1::2] << 4, FP4_E2M1, e8m0_to_f32(exponents), (1, 32))
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
    matrix = store_mxfp4(kind, codes, exponents).rows(*rows).columns(*columns)
    expected = codes[slice(*rows), slice(*columns)], exponents[slice(*rows), columns[0] // 32 : columns[1] // 32]
    with isas.use(isa):
        assert_same(pack("MXFP4", matrix), expected)
    assert (reference.bf16_to_f32(kernels.decode(matrix)) == fp4.dequantize(*expected)).all()


def pack_nan(transposed: bool) -> list[Bits]:
    """Pack kept FP8 codes with a NaN."""
    codes, scales = draw_fp8(256, 256, 0)
    codes[130, 77] = 0xFF
    return pack("FP8", Matrix(codes.T.copy().T if transposed else codes, FP8_E4M3, scales, (128, 128)))


def pack_overflow(kind: str, code: int, exponent: int) -> list[Bits]:
    """Pack kept MXFP4 codes of which one overflows."""
    codes, exponents = np.zeros((256, 96), np.uint8), np.full((256, 3), 120, np.uint8)
    codes[130, 77], exponents[130, 2] = code, exponent
    return pack("MXFP4", store_mxfp4(kind, codes, exponents))


def reorder_nan(nan: int) -> None:
    """Reorder FP8 codes with a NaN."""
    values = np.zeros((256, 96), np.uint8)
    values[130, 77] = nan
    kernels.reorder_fp8(values, np.empty((8, 32 * 96), np.uint8))


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        *((pack_nan, (transposed,)) for transposed in (False, True)),
        *(
            (pack_overflow, (kind, *at))
            for kind in ("fp4", "ggml")
            for at in ((6, 253), (15, 253), (4, 254), (12, 254))
        ),
        *((reorder_nan, (nan,)) for nan in (0x7F, 0xFF)),
    ],
)
def test_kept_codes_must_be_finite(call, arguments):
    with pytest.raises(kernels.NonFinite) as raised:
        call(*arguments)
    assert (raised.value.row, raised.value.column) == (130, 77)


@given(
    n=st.sampled_from((32, 160)),
    k=st.sampled_from((32, 64, 352)),
    start=st.integers(0, 3),
    isa=ISAS,
    rest=st.booleans(),
)
def test_codes_without_scales_are_put_into_panels(n, k, start, isa, rest):
    """Columns of a wider matrix, at any address, are put into panels, too."""
    rng = np.random.default_rng(n + k + start)
    wide = rng.integers(0, 127, (n, k + start + 5 * rest), np.uint8) | rng.integers(0, 2, 1, np.uint8) << 7
    values, codes = wide[:, start : start + k], np.empty((n // 32, 32 * k), np.uint8)
    with isas.use(isa):
        kernels.reorder_fp8(values, codes)
    np.testing.assert_array_equal(codes, floats.to_panels(values))


@pytest.mark.parametrize(("group", "factor"), [(16, 1), (32, 3)])
def test_other_scales_are_rounded(group, factor):
    """NVFP4 has the codes of MXFP4, but scales that MXFP4 lacks."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, (64, 64), np.uint8)
    scales = (2.0 ** rng.integers(-9, -3, (64, 128 // group)) * factor).astype(np.float32)
    matrix = Matrix(codes, FP4_E2M1, scales, (1, group))
    assert_same(pack("MXFP4", matrix), reference.quantize_mxfp4(reference.decode(matrix)))
