"""Reading memory as a ceiling: every line is read once, whatever the streams, the length and the address."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.memory_read import STREAMS, read_memory
from ktconvert.native_quant.runtime import benchmark

BYTES = np.random.default_rng(0).integers(0, 256, 40000, np.uint8)


def expected(block: np.ndarray) -> int:
    """The exclusive or of the first 8 bytes of each 64, absent ones 0."""
    lines = np.zeros((-(-block.size // 64), 64), np.uint8)
    lines.reshape(-1)[: block.size] = block
    return int(np.bitwise_xor.reduce(np.ascontiguousarray(lines[:, :8]).view(np.uint64).ravel()))


@given(st.integers(0, 200), st.integers(0, 39000), st.sampled_from(STREAMS))
def test_every_line_is_read(offset: int, size: int, streams: int) -> None:
    block = BYTES[offset : offset + size]
    assert read_memory(block, streams) == expected(block)


def test_arguments_that_c_does_not_see() -> None:
    with pytest.raises(ValueError, match="streams must be 1, 2 or 4, not 3"):
        read_memory(BYTES, 3)
    with pytest.raises(ValueError, match="contiguous"):
        read_memory(BYTES[::2], 1)


def test_arguments_that_c_refuses() -> None:
    total, data = ffi.new("uint64_t *"), ffi.from_buffer(BYTES)
    for streams, size, start, out in ((0, 1, data, total), (8, 1, data, total), (1, -1, data, total)):
        assert lib.ktq_read(streams, size, start, out) == lib.KTQ_EINVAL
    assert lib.ktq_read(1, 1, ffi.NULL, total) == lib.ktq_read(1, 1, data, ffi.NULL) == lib.KTQ_EINVAL
    assert lib.ktq_read(1, 0, ffi.NULL, total) == lib.KTQ_OK and total[0] == 0


def test_the_bandwidth_of_each_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread reads as often in one number of streams as in another, one slice after the other."""
    monkeypatch.setattr(benchmark, "SECONDS", 0)
    monkeypatch.setattr(benchmark, "CACHES", 1)
    monkeypatch.setattr(benchmark, "last_level_cache", lambda: 8 << 20)
    monkeypatch.setattr(benchmark, "SLICE", 1 << 20)
    seen: list[tuple[int, int]] = []
    addresses: set[int] = set()

    def spy(block: np.ndarray, streams: int) -> int:
        seen.append((streams, block.nbytes))
        addresses.add(block.ctypes.data)
        return read_memory(block, streams)

    monkeypatch.setattr(benchmark, "read_memory", spy)
    rates = benchmark.read_bandwidth(2)
    assert set(rates) == set(STREAMS) and min(rates.values()) > 0
    assert sorted(seen) == sorted([(streams, 1 << 20) for streams in STREAMS] * 2 * benchmark.LEAST_RUNS)
    assert len(addresses) == 2 * 4  # each has half of four slices
