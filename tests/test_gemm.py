"""Dot products of integer codes are exact with every instruction set, for any number of tokens, rows and columns."""

import functools
from typing import Any

import numpy as np
import pytest

from rig.gemm import gemm

pytestmark = pytest.mark.usefixtures("isa")

# Numbers of tokens around every block size of a kernel.
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 31, 32, 33, 47, 49, 64, 70)
# (rows, columns): one panel, two row blocks, panels of unequal size, and more than one column block of 3584.
SHAPES = {
    8: ((64, 64), (128, 320), (64, 768), (192, 1024), (64, 1088), (64, 3648), (64, 3712), (64, 7168)),
    4: ((128, 128), (256, 384), (128, 768), (128, 1024), (128, 1408), (128, 3712)),
}
CASES = [(bits, n, k) for bits, shapes in SHAPES.items() for n, k in shapes]


def codes_of(bits: int, weight: Any, n: int, k: int) -> Any:
    """Return the codes of packed bytes as float64 [n, k], in the order of bytes.md."""
    block_rows, tile_columns = (64, 64) if bits == 8 else (128, 128)
    codes = np.empty((n, k))
    start = 0
    for row in range(0, n, block_rows):
        for column in range(0, k, 3584):
            columns = min(3584, k - column)
            size = block_rows * columns * bits // 8
            # panels, tiles, halves, quads, rows, columns
            shape = (block_rows // 32, columns // tile_columns, 2, 16, 16, 4)
            halves = weight[start : start + size].reshape(shape).transpose(0, 2, 4, 1, 3, 5)
            parts = [halves] if bits == 8 else [halves << 4, halves & 0xF0]
            tile = np.concatenate([np.ascontiguousarray(part).view(np.int8).reshape(-1, 64) for part in parts], axis=1)
            codes[row : row + block_rows, column : column + columns] = (tile >> (8 - bits)).reshape(block_rows, columns)
            start += size
    return codes


def check(bits: int, activations: Any, weight: Any, n: int) -> None:
    # float64 holds every sum exactly: |sum| <= 7168 * 128 * 127 < 2**53.
    expected = activations.astype(np.float64) @ codes_of(bits, weight, n, activations.shape[1]).T
    np.testing.assert_array_equal(gemm(bits, activations, weight, n), expected)


@functools.cache
def case(bits: int, n: int, k: int) -> tuple[Any, Any, Any]:
    """Return weight, activations and their products, cached for all instruction sets."""
    rng = np.random.default_rng(n * k + bits)
    # An odd address, because weights can have any offset in a file.
    weight = rng.integers(0, 256, n * k * bits // 8 + 1, np.uint8)[1:]
    activations = rng.integers(-127, 128, (max(TOKENS), k), np.int8)
    return weight, activations, activations.astype(np.float64) @ codes_of(bits, weight, n, k).T


@pytest.mark.parametrize(("bits", "n", "k"), CASES)
def test_sums_are_exact(isa: str, bits: int, n: int, k: int) -> None:
    weight, activations, expected = case(bits, n, k)
    for m in TOKENS if isa != "scalar" else (1, 13):
        np.testing.assert_array_equal(gemm(bits, activations[:m], weight, n), expected[:m])


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8, 9, 12, 13, 17, 33, 40, 128, 150])
@pytest.mark.parametrize("bits", [8, 4])
def test_sums_are_exact_with_more_rows_than_planned(bits: int, m: int) -> None:
    """Rows of remainders are added to an expert's tokens, which can double their number."""
    n, k = 128, 1408
    rng = np.random.default_rng(m)
    weight = rng.integers(0, 256, n * k * bits // 8, np.uint8)
    activations = rng.integers(-127, 128, (2 * m, k), np.int8)
    expected = activations.astype(np.float64) @ codes_of(bits, weight, n, k).T
    for rows in {m + 1, m + m // 3, 2 * m}:
        sums = gemm(bits, activations[:rows], weight, n, tiled_for=m)
        np.testing.assert_array_equal(sums, expected[:rows])


@pytest.mark.parametrize("m", [1, 3, 6, 8, 12, 40])
@pytest.mark.parametrize("bits", [8, 4])
def test_nothing_saturates(bits: int, m: int) -> None:
    """The largest codes meet the largest activations, with equal and with alternating signs."""
    n, k = 128, 768
    lowest, highest = (0x80, 0x7F) if bits == 8 else (0x88, 0x77)
    for byte in (lowest, highest, 0xFF):
        weight = np.full(n * k * bits // 8, byte, np.uint8)
        for activations in (np.full((m, k), 127, np.int8), np.full((m, k), -127, np.int8)):
            check(bits, activations, weight, n)
            activations[:, ::2] *= -1
            check(bits, activations, weight, n)
    weight = np.random.default_rng(m).choice(np.array([lowest, highest], np.uint8), n * k * bits // 8)
    check(bits, np.random.default_rng(bits).choice(np.array([-127, 127], np.int8), (m, k)), weight, n)
