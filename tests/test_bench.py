"""Tests of `ktconvert bench`: measurements, counts and reports. No test depends on timing."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from ktconvert.layouts.errors import InputError
from ktconvert.layouts.extras import install_command
from ktconvert.native_quant import machine
from ktconvert.native_quant._ktq import ffi, lib
from ktconvert.native_quant.runtime import benchmark
from ktconvert.native_quant.runtime.benchmark import STREAMS, read_memory
from ktconvert.native_quant.runtime.experts import KTExperts
from ktconvert.native_quant.runtime.pool import get_shared_pool
from ktconvert.pipeline.cli.bench import bench, find_experts_per_token


@pytest.fixture(scope="module")
def output(packed_example: Callable[..., Path]) -> Path:
    """The bundled model as INT4, for two NUMA nodes."""
    return packed_example("int4", 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SECONDS", 0)
    monkeypatch.setattr(benchmark, "CACHES", 0)
    monkeypatch.setattr(benchmark, "SLICE", 1 << 20)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(bench, [str(argument) for argument in arguments])


def test_json_report_has_consistent_numbers(output: Path) -> None:
    report = json.loads(run(output, "--json", "--tokens", "1,16,4", "--layer", 1, "--threads", 2).stdout)
    assert (report["layer"], report["layers"], report["threads"]) == (1, [0, 1], min(2, machine.usable_cpus()))
    assert (report["method"], report["numa"], report["experts"]) == ("AMXINT4", 2, 8)
    assert (report["experts_per_token"], report["experts_per_token_from"]) == (2, "config.json: num_experts_per_tok")
    assert report["expert_bytes"] == 3 * 256 * 256 // 2 + 4 * (256 + 256 + 2 * 256)
    assert report["layer_bytes"] == 8 * report["expert_bytes"]
    assert list(report["memory_by_streams"]) == ["1", "2", "4"]
    assert report["memory_bytes_per_second"] == max(report["memory_by_streams"].values()) > 0
    assert [timing["tokens"] for timing in report["timings"]] == [1, 16, 4]
    for timing in report["timings"]:
        assert timing["runs"] == benchmark.LEAST_RUNS
        assert 0 < timing["seconds_best"] <= timing["seconds_median"]
        assert timing["bytes"] == pytest.approx(timing["experts_touched"] * report["expert_bytes"], abs=1)
        assert timing["seconds_all_layers"] == 2 * timing["seconds_median"]
        assert timing["share_of_memory"] > 0
    assert report["timings"][0]["experts_touched"] == 2  # a single token uses only its own experts


CACHES = [(1, 1 << 30, "fits in the last-level cache (1.0 GiB)"), (1, 1 << 10, "")]
CACHES += [(1 << 10, 1 << 12, "is not much larger than the last-level cache (4.0 KiB)")]


@pytest.mark.parametrize(("caches", "cache_bytes", "note"), CACHES)
def test_text_report_explains_small_layers_and_lowered_threads(caches, cache_bytes, note, output, monkeypatch):
    monkeypatch.setattr(benchmark, "CACHES", caches)
    monkeypatch.setattr(benchmark, "last_level_cache", lambda: cache_bytes)
    result = run(output, "--tokens", "1,4", "--threads", 100000)
    assert note in result.stdout and ("note" in result.stdout) == bool(note)
    assert "--threads 100000 is capped at the" in result.stderr and f"{machine.usable_cpus()} thread" in result.stdout
    lines = result.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("tokens "))
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["1", "4"]
    assert any(re.match(r"memory .* GB/s read by .* threads?, (1 stream|[24] streams) each$", line) for line in lines)


def test_plot_is_written_if_matplotlib_is_installed(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    assert run(output, "--tokens", "1,4", "--plot", tmp_path / "bench.png").exception is None
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG\r")
    monkeypatch.setattr("ktconvert.layouts.extras.find_spec", lambda name: None)
    failure = run(output, "--plot", tmp_path / "b.png").exception
    assert f"--plot needs matplotlib, not installed here: `{install_command('plot')}`." in str(failure)


def test_bench_refuses_bad_arguments_and_damaged_outputs(output: Path, tmp_path: Path) -> None:
    shutil.copytree(output, tmp_path / "damaged")
    shard = tmp_path / "damaged" / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4096])
    for arguments, code, message in (
        ((output, "--layer", 7), 3, "layers 0-1"),
        ((tmp_path,), 5, "has no .safetensors file"),
        ((tmp_path / "none",), 5, "none"),
        *(((output, "--tokens", wrong), 2, "list of numbers") for wrong in ("0", "1,x", "", "-4")),
        ((output, "--plot", tmp_path / "b.txt"), 2, "b.txt"),
        ((output, "--plot", tmp_path / "none" / "b.png"), 7, "does not exist; create it first"),
        ((tmp_path / "damaged",), 5, shard.name),
    ):
        result = run(*arguments)
        exit_code, text = (
            getattr(result.exception, "exit_code", result.exit_code),
            f"{result.output} {result.exception}",
        )
        assert exit_code == code and message in text, text


CONFIGS: list[tuple[dict[str, Any], int]] = [({"num_experts_per_tok": 6}, 6), ({"moe_topk": [1, 3]}, 3), ({}, 8)]
CONFIGS += [({"text_config": {"top_k_experts": 4}}, 4), ({"num_experts_per_tok": 99}, 8)]


def test_experts_per_token_is_read_from_the_config_or_assumed() -> None:
    for config, expected in CONFIGS:
        number, origin = find_experts_per_token(config, 1, 64)
        assert number == expected and origin.startswith("config.json: " if expected != 8 else "assumed")
    assert find_experts_per_token({}, 0, 4)[0] == 4
    with pytest.raises(InputError, match=r'num_experts_per_tok = "8", which is not a whole number'):
        find_experts_per_token({"num_experts_per_tok": "8"}, 0, 64)


@pytest.mark.parametrize(("topk", "experts"), [(1, 8), (2, 8), (3, 8), (8, 8), (8, 129)])
def test_routing_uses_every_expert_and_no_expert_twice_per_token(topk: int, experts: int) -> None:
    ids = benchmark.random_routing(np.random.default_rng(0), 500, topk, experts)
    assert ids.dtype == np.int64 and ids.shape == (500, topk)
    assert all(len(set(row)) == topk for row in ids.tolist())
    assert set(ids.ravel().tolist()) == set(range(experts))
    every = benchmark.every_expert(topk, experts)
    assert len(every) == -(-experts // topk)
    assert set(every.ravel().tolist()) == set(range(experts))
    assert all(len(set(row)) == topk for row in every.tolist())


def test_each_timed_forward_has_a_different_routing(
    random_experts: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = KTExperts.from_bf16(**random_experts(16, 128, 128), pool=get_shared_pool(2))
    seen: list[bytes] = []
    forward = experts.forward

    def spy(hidden: Any, ids: Any, weights: Any, **options: Any) -> Any:
        seen.append(ids.tobytes())
        assert weights.sum(axis=1) == pytest.approx(1)
        return forward(hidden, ids, weights, **options)

    monkeypatch.setattr(experts, "forward", spy)
    timing = benchmark.time_forward(experts, 4, 2)
    assert len(set(seen)) == timing.runs == benchmark.LEAST_RUNS


def test_last_level_cache_sums_the_caches_of_all_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared cache counts once; without information the size is 0."""
    monkeypatch.setattr("ktconvert.native_quant.machine.affinity", lambda: frozenset(range(4)))
    assert benchmark.last_level_cache(tmp_path) == 0
    for number in range(4):
        for index, level, kib, shared in ((0, 1, 32, f"{number}"), (3, 3, 1024, "0-1" if number < 2 else "2-3")):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("size", f"{kib}K"), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n")
    assert benchmark.last_level_cache(tmp_path) == 2 << 20


BYTES = np.random.default_rng(0).integers(0, 256, 40000, np.uint8)


def xor_of_lines(block: np.ndarray) -> int:
    """Return the exclusive or of the first 8 bytes of every 64-byte line, padded with 0."""
    lines = np.zeros((-(-block.size // 64), 64), np.uint8)
    lines.reshape(-1)[: block.size] = block
    return int(np.bitwise_xor.reduce(np.ascontiguousarray(lines[:, :8]).view(np.uint64).ravel()))


@given(st.integers(0, 200), st.integers(0, 39000), st.sampled_from(STREAMS))
def test_read_memory_reads_every_cache_line(offset: int, size: int, streams: int) -> None:
    block = BYTES[offset : offset + size]
    assert read_memory(block, streams) == xor_of_lines(block)


def test_invalid_arguments_of_read_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="streams must be 1, 2 or 4, not 3"):
        read_memory(BYTES, 3)
    with pytest.raises(ValueError, match="contiguous"):
        read_memory(BYTES[::2], 1)
    total, data = ffi.new("uint64_t *"), ffi.from_buffer(BYTES)
    for streams, size, start, out in ((0, 1, data, total), (8, 1, data, total), (1, -1, data, total)):
        assert lib.ktq_read(streams, size, start, out) == lib.KTQ_EINVAL
    assert lib.ktq_read(1, 1, ffi.NULL, total) == lib.ktq_read(1, 1, data, ffi.NULL) == lib.KTQ_EINVAL
    assert lib.ktq_read(1, 0, ffi.NULL, total) == lib.KTQ_OK and total[0] == 0


def test_bandwidth_is_measured_equally_for_each_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread reads its slices equally often with every number of streams."""
    monkeypatch.setattr(benchmark, "CACHES", 1)
    monkeypatch.setattr(benchmark, "last_level_cache", lambda: 8 << 20)
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
