"""Codes that were chosen elsewhere, packed: every instruction set writes what the NumPy definition
does, and nothing else."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktconvert.native_quant import kernels
from rig import reference

LARGEST = {4: 7, 8: 127}
relaxed = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def random_codes(bits: int, n: int, pitch: int, seed: int) -> Any:
    """int8 [n, pitch] of all legal codes."""
    largest = LARGEST[bits]
    return np.random.default_rng(seed).integers(-largest, largest + 1, (n, pitch)).astype(np.int8)


def pack(bits: int, codes: Any, offset: int = 0) -> Any:
    """The packed weight, written `offset` bytes after a boundary; what lies around it stays as it was."""
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
def test_every_instruction_set_packs_as_defined(bits, data):
    """Any size, any distance between rows, any alignment; and what was packed is unpacked."""
    rows, columns = kernels.GEOMETRIES[bits]
    n = rows * data.draw(st.integers(1, 3), "row blocks")
    k = columns * data.draw(st.sampled_from([1, 2, 3, 3584 // columns, 3584 // columns + 1, 7168 // columns]), "tiles")
    gap, skew = data.draw(st.integers(0, 70), "gap"), data.draw(st.integers(0, 63), "skew")
    codes = random_codes(bits, n, k + gap, data.draw(st.integers(0, 2**32 - 1), "seed")).reshape(-1)
    shifted = np.concatenate([np.zeros(skew, np.int8), codes])[skew:].reshape(n, k + gap)[:, :k]
    weight = pack(bits, shifted, data.draw(st.integers(0, 63), "offset"))
    np.testing.assert_array_equal(weight, reference.pack(bits, np.ascontiguousarray(shifted)))
    np.testing.assert_array_equal(reference.unpack(bits, weight, n, k), shifted)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", [4, 8])
@relaxed
@given(data=st.data())
def test_a_code_out_of_range_is_named(bits, data):
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
        pack(bits, codes)


def test_broadcast_rows_are_packed():
    codes = np.broadcast_to(random_codes(8, 1, 128, 0), (64, 128))
    np.testing.assert_array_equal(pack(8, codes), reference.pack(8, np.array(codes)))
