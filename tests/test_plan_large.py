"""A plan for 160 shards and 100,000 tensors, of headers and holes: it reads only headers, and writes nothing."""

import ctypes
import json
import mmap
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rig.safetensors import data_start
from rig.scripts import load_benchmark

ROOT = Path(__file__).resolve().parents[1]
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, SHARDS = 67, 256, 7168, 2048, 160
MOE = LAYERS - 3  # the first three are dense
# Bytes after a header that the kernel may prefetch: twice the largest readahead of any disk.
READAHEAD = max(1 << 20, *(int(path.read_text()) << 11 for path in Path("/sys/class/bdi").glob("*/read_ahead_kb")), 0)


# The peak memory of a process includes that of the process that started it, so a small process starts the command.
MEASURE = (
    "import dataclasses, json, sys; sys.path.insert(0, sys.argv[1]); import timing;"
    "print(json.dumps(dataclasses.asdict(timing.run(sys.argv[2:]))))"
)


def measure(command: list[str]) -> SimpleNamespace:
    """Return what benchmarks/timing.py measures of a command."""
    arguments = [sys.executable, "-c", MEASURE, str(ROOT / "benchmarks"), *command]
    result = subprocess.run(arguments, check=True, capture_output=True, text=True)
    return SimpleNamespace(**json.loads(result.stdout))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the checkpoint: 750 GB by its headers, about 20 MB on disk."""
    folder = tmp_path_factory.mktemp("large") / "model"
    models = load_benchmark("models")
    tensors, config = models.deepseek(LAYERS, EXPERTS)
    assert len(tensors) > 100_000
    models.write_model(folder, tensors, config, SHARDS)
    return folder


def run_plan(source: Path, output: Path, *more: str) -> tuple[Any, dict[str, Any]]:
    """Return the measurement of `cpu --dry-run --json`, and the plan that it reported."""
    command = [sys.executable, "-m", "ktconvert.pipeline.cli", "cpu", "-i", str(source), "-o", str(output), "--dry-run"]
    run = measure([*command, "--json", "-q", *more])
    if run.read is None:
        pytest.skip("this kernel does not count what a process reads (/proc/PID/io)")
    events = [json.loads(line) for line in run.output.splitlines() if line.startswith("{")]
    return run, next(e for e in events if e["event"] == "plan")


def header_bytes(folder: Path) -> dict[Path, int]:
    """Return the size of each shard's header."""
    return {path: data_start(path) for path in sorted(folder.glob("*.safetensors"))}


def cached_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache, where any reading of its weights leaves them."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            code = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), resident)
        finally:
            del start
        assert code == 0, f"mincore: errno {ctypes.get_errno()}"
        return (pages - bytes(resident).count(b"\0")) * mmap.PAGESIZE


def state(folder: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of everything below a folder."""
    return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*"))


def test_dry_run_of_a_large_checkpoint_reads_headers_only(tmp_path, model):
    output = tmp_path / "never-made"
    baseline, _ = run_plan(ROOT / "examples" / "qwen3-moe-small", output)  # read by Python and the libraries
    headers = header_bytes(model)
    before = state(model)
    run, report = run_plan(model, output)

    expert_tensors = MOE * EXPERTS * 3
    scale_grid = (INTERMEDIATE // 128) * (HIDDEN // 128) * 4
    packed = INTERMEDIATE * HIDDEN // 2
    # Two NUMA slices: gate and up split their rows, down splits its columns and so has all its row scales twice.
    scales = 4 * (INTERMEDIATE + INTERMEDIATE + 2 * HIDDEN)
    assert len(headers) == SHARDS and report["model"]["layers"] == list(range(3, LAYERS))
    assert report["model"]["experts"] == EXPERTS and report["model"]["dtypes"] == ["F8_E4M3"]
    assert any("MTP" in note for note in report["notes"])
    assert len(report["units"]) == report["shards"] == MOE
    assert all(not unit["done"] for unit in report["units"])
    assert len({unit["fingerprint"] for unit in report["units"]}) == MOE
    assert [unit["final"] for unit in report["units"]] == [
        f"model-{n:05d}-of-{MOE:05d}.safetensors" for n in range(1, MOE + 1)
    ]
    assert report["bytes_in"] == expert_tensors * (INTERMEDIATE * HIDDEN + scale_grid)
    assert report["bytes_out"] == MOE * EXPERTS * (3 * packed + scales)
    assert report["disk_needed"] > report["bytes_out"] and report["peak_memory"] < 400 << 20

    index = (model / "model.safetensors.index.json").stat().st_size
    expected = sum(headers.values()) + index
    assert expected * 0.99 < run.read - baseline.read < expected * 1.05 + (1 << 20)
    assert run.max_rss < 600 << 20
    for path, size in list(headers.items())[::8]:
        assert cached_bytes(path) <= size + READAHEAD, f"weights of {path.name} were read"

    assert run.dirtied is not None and run.dirtied < 1 << 20  # writing access times counts
    assert list(tmp_path.iterdir()) == [] and state(model) == before


def test_layers_option_limits_the_plan_of_a_large_checkpoint(tmp_path, model):
    options = ("--layers", "3-4,60", "--quant-method", "int8", "--max-shard-size", "5GB")
    _, report = run_plan(model, tmp_path / "never-made", *options)
    assert report["model"]["layers"] == [3, 4, 60]
    each = 3 * INTERMEDIATE * HIDDEN + 4 * (2 * INTERMEDIATE + 2 * HIDDEN)
    assert report["bytes_out"] == 3 * EXPERTS * each
    assert len(report["units"]) == 3 * -(-EXPERTS // (5_000_000_000 // each))
    assert all(unit["bytes_out"] <= 5_000_000_000 for unit in report["units"])
