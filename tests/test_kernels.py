"""Every kernel of every instruction set equals the NumPy definition bit for bit."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktconvert.native_quant import kernels
from ktconvert.native_quant import matrix as matrix_kinds
from rig import reference

KINDS = ("bf16", "fp16", "f32", "fp8_e4m3")


def to_kind(x: Any, kind: str) -> Any:
    """Return float32 values in an encoding (FP8: random codes of the same sign, since any code will do)."""
    if kind == "bf16":
        return reference.f32_to_bf16(x)
    if kind == "fp16":
        with np.errstate(over="ignore"):
            return np.clip(x, -65504, 65504).astype(np.float16).view(np.uint16)
    if kind == "f32":
        return x.astype(np.float32)
    code = np.random.default_rng(x.size).integers(0, 0x7F, x.shape, np.uint8)
    return np.where(x < 0, code | 0x80, code).astype(np.uint8)


def difficult_values(n: int, k: int, seed: int = 0) -> Any:
    """Return float32 [n, k]: Gaussian rows, and rows of values that are difficult or once gave errors."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, k)).astype(np.float32) * 0.03
    x[1] = 0
    x[2] = -0.0
    x[3, :] = 0
    x[3, k // 2] = -3.0
    x[5] = 3e38 * rng.uniform(-1, 1, k)
    x[6] = 1e-38 * rng.uniform(-1, 1, k)
    x[7] = rng.integers(-127, 128, k)  # exact on the INT8 grid
    x[7, 0] = 127
    x[9] = rng.integers(-112, 113, k) + 0.5  # ties of both roundings
    x[9, 0] = 112
    x[10] = rng.integers(0, 15, k) * 8
    x[10, 0] = -112
    x[11] = 2.0**-126 * rng.uniform(-200, 200, k)  # around the smallest nonzero scale
    x[12] = 2.0**-133 * rng.integers(-127, 128, k)  # subnormals only
    x[13] = 1e-20 * rng.standard_normal(k)
    x[17] = 1.7e-38 * rng.uniform(-127, 127, k)
    x[18] *= 1e-39
    x[18, -1] = 1e-35
    x[33] = rng.standard_normal(k) * 1e-3
    x[33, 5] = 1e4  # an outlier
    x[35] = 1.0
    return x


def scales_for(n: int, k: int, block: tuple[int, int], seed: int = 1) -> Any:
    """Draw a grid of scales."""
    grid = -(-n // block[0]), -(-k // block[1])
    return (np.random.default_rng(seed).uniform(1e-4, 2e-2, grid) * [[1.0]]).astype(np.float32)


def make_source(
    kind: str, n: int, k: int, block: tuple[int, int] = (128, 128), x: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Return values of a kind, and the options for their matrix."""
    values = to_kind(difficult_values(n, k) if x is None else x, kind)
    if kind != "fp8_e4m3":
        return values, {}
    return values, {"scales": scales_for(n, k, block), "block": block}


def make_matrix(values: Any, kind: str, **options: Any) -> matrix_kinds.Matrix:
    """Make a matrix of a kind."""
    return matrix_kinds.Matrix(values, matrix_kinds.KINDS[kind], **options)


def quantize_pack(bits: int, values: Any, kind: str, offset: int = 0, **options: Any) -> tuple[Any, Any]:
    """Quantize and pack by the kernel, at an offset; check that it writes nothing else."""
    n, k = values.shape
    buffer = np.full(n * k * bits // 8 + offset, 0xAA, np.uint8)
    weight, scale = buffer[offset:], np.full(n, np.nan, np.float32)
    kernels.quantize_pack(bits, make_matrix(values, kind, **options), weight, scale)
    assert (buffer[:offset] == 0xAA).all()
    return weight, scale


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Assert that weights and scales have equal bytes."""
    for name, a, b in zip(("weight", "scale"), ours, theirs, strict=True):
        different = np.flatnonzero(np.ascontiguousarray(a).view(np.uint8) != np.ascontiguousarray(b).view(np.uint8))
        assert not different.size, f"{name}: {different.size} bytes differ, first at {different[0]}"


def in_columns(values: Any) -> Any:
    """Return the same matrix, stored with its columns contiguous."""
    return np.asfortranarray(values)


SHAPES = {
    8: [(64, 64), (64, 128), (128, 192), (192, 448), (64, 3584), (64, 3648), (128, 7168)],
    4: [(128, 128), (256, 384), (128, 3584), (128, 3712)],
}
SIZES = [(bits, n, k) for bits, shapes in SHAPES.items() for n, k in shapes]


@functools.cache
def pack_by_definition(bits: int, n: int, k: int, kind: str) -> tuple[Any, Any]:
    """Return the result of the definition."""
    values, options = make_source(kind, n, k, block=(48, 80))
    return reference.quantize_pack(bits, reference.decode(make_matrix(values, kind, **options)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bits", "n", "k"), SIZES)
def test_every_kernel_equals_the_definition(bits, n, k, kind):
    values, options = make_source(kind, n, k, block=(48, 80))
    for stored in (values, in_columns(values)):
        assert_same(quantize_pack(bits, stored, kind, **options), pack_by_definition(bits, n, k, kind))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", [4, 8])
def test_kernels_accept_any_exponent(bits):
    """Rows cover all magnitudes of BF16, so that each special case of the scale meets each value."""
    rng = np.random.default_rng(3)
    bits16 = rng.integers(0, 0x7F80, (256, 256)).astype(np.uint16)
    top = np.linspace(0, 0x7F7F, 256).astype(np.uint16)
    bits16 = np.minimum(bits16, top[:, None]) | (rng.integers(0, 2, (256, 256)) << 15).astype(np.uint16)
    assert_same(quantize_pack(bits, bits16, "bf16"), reference.quantize_pack(bits, bits16))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("offset", [0, 1, 16, 63])
def test_kernels_accept_any_alignment(offset):
    """Tensors begin anywhere in a file, and a slice of columns begins anywhere in a row."""
    n, k = 128, 256
    x = to_kind(difficult_values(n, k + 64), "bf16")
    storage = np.zeros(x.nbytes + 64, np.uint8)
    stored = storage[offset : offset + x.nbytes].view(np.uint16).reshape(x.shape)
    stored[:] = x
    for view in (stored[:, :k], stored[:, 7 : 7 + k], stored[:, 64:], stored[:, 1::][:, :k]):
        assert_same(quantize_pack(4, view, "bf16", offset), reference.quantize_pack(4, view))
    assert_same(quantize_pack(4, in_columns(stored)[:, :k], "bf16", offset), reference.quantize_pack(4, stored[:, :k]))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("block", [(1, 1), (1, 10**6), (10**6, 10**6), (128, 128), (33, 50), (64, 1)])
@pytest.mark.parametrize("order", ["rows", "columns"])
def test_kernels_accept_any_scale_block(block, order):
    """Slices of a linear with a grid of scales find their scales by their origin."""
    values, options = make_source("fp8_e4m3", 200, 333, block)
    if order == "columns":
        values = in_columns(values)
    expected = reference.decode(make_matrix(values, "fp8_e4m3", **options))
    for row, column in ((0, 0), (5, 70), (130, 201)):
        part_matrix = make_matrix(values, "fp8_e4m3", **options).rows(row, row + 64).columns(column, column + 128)
        assert part_matrix.origin == (row, column)
        assert (kernels.decode(part_matrix) == expected[row : row + 64, column : column + 128]).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["rows", "columns"])
def test_kernels_decode_any_shape(kind, order):
    for n, k in ((1, 1), (1, 77), (31, 1), (33, 65), (64, 127), (40, 300)):
        x = np.random.default_rng(n).standard_normal((n, k)).astype(np.float32)
        values, options = make_source(kind, n, k, (16, 24), x)
        if order == "columns":
            values = in_columns(values)
        expected = reference.decode(make_matrix(values, kind, **options))
        assert (kernels.decode(make_matrix(values, kind, **options)) == expected).all()


def all_rounding_cases() -> Any:
    """Return float32 values around every value that rounding to BF16 can meet."""
    high = np.arange(0, 0x10000, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (high[:, None] | low).view(np.float32)


@pytest.mark.usefixtures("isa")
def test_every_code_decodes():
    """All 256 FP8 codes times scales of every size, all 65536 FP16 codes, and float32 around every BF16, as in torch."""
    fp8 = np.tile(np.arange(256, dtype=np.uint8), (12, 1))
    scales = np.array([1, 0.3, 1e-4, -2.5, 1e-38, 1e-36, 1e-41, 3e38, 1e36, 0, np.inf, np.nan], np.float32)
    options = {"scales": scales[:, None], "block": (1, 256)}
    without_nan = np.where(fp8 & 0x7F == 0x7F, 0, fp8).astype(np.uint8)
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (fp8, "fp8_e4m3", options),
        (without_nan, "fp8_e4m3", options),  # rows with NaN take a different path
        (np.arange(65536, dtype=np.uint16).reshape(256, 256), "fp16", {}),
        (all_rounding_cases().reshape(1024, -1), "f32", {}),
    ]
    torch = pytest.importorskip("torch")
    rounded = torch.from_numpy(all_rounding_cases()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    ours, is_nan = reference.f32_to_bf16(all_rounding_cases()), np.isnan(all_rounding_cases())
    assert (ours[~is_nan] == rounded[~is_nan]).all() and (ours[is_nan] == 0x7FC0).all()
    for values, kind, options in cases:
        expected = reference.decode(make_matrix(values, kind, **options))
        assert (kernels.decode(make_matrix(values, kind, **options)) == expected).all()
        assert (kernels.decode(make_matrix(in_columns(values), kind, **options)) == expected).all()


NON_FINITE = {
    "bf16": [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81],
    "fp16": [0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7C01],
    "f32": [np.inf, -np.inf, np.nan, 3.4e38],  # the last one overflows to infinity as BF16
    "fp8_e4m3": [0x7F, 0xFF],
}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_values_are_rejected_with_their_position(kind, order):
    n, k = 128, 256
    clean = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
    for i, bad in enumerate(NON_FINITE[kind]):
        row, column = [(0, 0), (15, 255), (16, 64), (100, 31), (127, 254)][i]
        values, options = make_source(kind, n, k, x=clean)
        values[row, column] = bad
        values[127, 255] = bad
        view = in_columns(values) if order == "columns" else values
        for bits in (4, 8):
            with pytest.raises(kernels.NonFinite) as caught:
                quantize_pack(bits, view, kind, **options)
            assert (caught.value.row, caught.value.column) == (row, column)


def add_in_order(terms: Any) -> Any:
    """Return the sum along the first axis, added in order (np.sum does not define an order)."""
    return np.cumsum(terms, axis=0)[-1]


def error_sums_in_order(x: Any, y: Any) -> list[float]:
    """Return error_sums as its comment defines them: over 8 lanes of a row, then lanes, then rows."""
    n, k = x.shape
    sums = []
    for terms in (x * x, y * y, x * y, (x - y) * (x - y)):
        lanes = add_in_order(terms.reshape(n, k // 8, 8).transpose(1, 2, 0))
        sums.append(float(add_in_order(add_in_order(lanes))))
    return sums


@pytest.mark.usefixtures("isa")
def test_dequantize_and_error_sums_equal_the_definition():
    for bits, n, k in SIZES:
        values = to_kind(difficult_values(n, k), "bf16")
        weight, scale = quantize_pack(bits, values, "bf16")
        ours = kernels.dequantize(bits, weight, scale, n, k)
        expected = reference.dequantize(bits, weight, scale, n, k)
        assert (ours.view(np.uint32) == expected.view(np.uint32)).all()
        x, y = reference.bf16_to_f32(values).astype(np.float64), expected.astype(np.float64)
        for stored in (values, in_columns(values)):
            assert list(kernels.error_sums(bits, make_matrix(stored, "bf16"), weight, scale)) == error_sums_in_order(
                x, y
            )


@pytest.mark.usefixtures("isa")
def test_flushing_subnormals_changes_nothing():
    """Some libraries switch on FTZ and DAZ for the thread that loads them; our results do not depend on it."""
    torch = pytest.importorskip("torch")
    values, options = make_source("fp8_e4m3", 128, 256)
    options["scales"] *= np.float32(2.0**-126)

    def compute() -> tuple[Any, ...]:
        matrix, words, grouped = (
            make_matrix(values, "fp8_e4m3", **options),
            np.empty((128, 32), np.int32),
            np.empty((128, 2), np.uint16),
        )
        kernels.quantize_groups(4, matrix, words, grouped)
        return kernels.decode(matrix), words, grouped, *quantize_pack(8, values, "fp8_e4m3", **options)

    expected = compute()
    assert torch.set_flush_denormal(True)
    try:
        flushed = compute()
    finally:
        torch.set_flush_denormal(False)
    assert ((expected[0] & 0x7F80 == 0) & (expected[0] & 0x7F != 0)).any()
    for ours, theirs in zip(flushed, expected, strict=True):
        assert (ours == theirs).all()


@pytest.mark.usefixtures("isa")
def test_every_largest_value_gives_the_specified_scale():
    """All positive BF16 values: INT8 multiplies by fl(1/127), which is not amax / 127; INT4 divides by 112."""
    amax = np.arange(0x7F80, dtype=np.uint16)
    x = reference.bf16_to_f32(amax)
    product = (x.astype(np.float64) * float(np.float32(1 / 127))).astype(np.float32)
    assert np.count_nonzero(product != x / np.float32(127)) == 1488
    values = np.zeros((32640 // 128 * 128 + 128, 128), np.uint16)
    values[: amax.size, 7] = amax
    for bits, expected in ((8, product), (4, x / np.float32(112))):
        expected = np.where(expected < np.float32(2.0**-126), 0, expected)
        assert (reference.row_scales(bits, amax[:, None]) == expected).all()
        assert (quantize_pack(bits, values, "bf16")[1][: amax.size] == expected).all()


# ---- packing of given codes ---------------------------------------------------------------------------------

LARGEST = {4: 7, 8: 127}
relaxed = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def random_codes(bits: int, n: int, pitch: int, seed: int) -> Any:
    """Draw legal codes, int8 [n, pitch]."""
    largest = LARGEST[bits]
    return np.random.default_rng(seed).integers(-largest, largest + 1, (n, pitch)).astype(np.int8)


def pack_codes(bits: int, codes: Any, offset: int = 0) -> Any:
    """Pack codes to `offset` bytes after a boundary; check that the bytes around stay unchanged."""
    size = codes.size * bits // 8
    buffer = np.full(size + 192, 0xAA, np.uint8)
    start = -buffer.ctypes.data % 64 + offset
    kernels.pack_codes(bits, codes, buffer[start : start + size])
    assert (buffer[:start] == 0xAA).all() and (buffer[start + size :] == 0xAA).all()
    return buffer[start : start + size]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", [4, 8])
@relaxed
@given(data=st.data())
def test_every_instruction_set_packs_like_the_definition(bits, data):
    """For any size, row distance and alignment; unpacking gives the codes back."""
    rows, columns = kernels.GEOMETRIES[bits]
    n = rows * data.draw(st.integers(1, 3), "row blocks")
    k = columns * data.draw(st.sampled_from([1, 2, 3, 3584 // columns, 3584 // columns + 1, 7168 // columns]), "tiles")
    gap, skew = data.draw(st.integers(0, 70), "gap"), data.draw(st.integers(0, 63), "skew")
    codes = random_codes(bits, n, k + gap, data.draw(st.integers(0, 2**32 - 1), "seed")).reshape(-1)
    shifted = np.concatenate([np.zeros(skew, np.int8), codes])[skew:].reshape(n, k + gap)[:, :k]
    weight = pack_codes(bits, shifted, data.draw(st.integers(0, 63), "offset"))
    np.testing.assert_array_equal(weight, reference.pack(bits, np.ascontiguousarray(shifted)))
    np.testing.assert_array_equal(reference.unpack(bits, weight, n, k), shifted)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", [4, 8])
@relaxed
@given(data=st.data())
def test_a_code_out_of_range_is_reported_with_its_position(bits, data):
    n, k, largest = 256, 3840, LARGEST[bits]
    codes = random_codes(bits, n, k, 3)
    illegal = st.sampled_from([code for code in range(-128, 128) if abs(code) > largest])
    positions = st.tuples(st.integers(0, n - 1), st.integers(0, k - 1))
    bad = data.draw(st.dictionaries(positions, illegal, min_size=1, max_size=3), "codes out of range")
    for place, code in bad.items():
        codes[place] = code
    row, column = min(bad)
    message = f"row {row}, column {column} is {bad[row, column]}, not in -{largest}..{largest}$"
    with pytest.raises(ValueError, match=message):
        pack_codes(bits, codes)


def test_broadcast_rows_are_packed():
    codes = np.broadcast_to(random_codes(8, 1, 128, 0), (64, 128))
    np.testing.assert_array_equal(pack_codes(8, codes), reference.pack(8, np.array(codes)))
