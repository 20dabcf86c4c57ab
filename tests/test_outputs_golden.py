"""Conversions give the same fingerprints and bytes as earlier versions, in each format and arrangement.

The expected hashes are in tests/golden/outputs.json. `KTCONVERT_WRITE_GOLDEN=1 pytest tests/test_outputs_golden.py`
writes them again.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktconvert.pipeline.cli.conversion import cpu, gpu, merge
from ktconvert.pipeline.plans.commands import make_options, make_plan

GOLDEN = Path(__file__).parent / "golden" / "outputs.json"
COMMANDS = {"cpu": cpu, "gpu": gpu, "merge": merge}
SHARD_SIZE = "600KB"  # three of the example's experts in 8 bits, five in 4
CASES = {
    "int4_t1": "cpu --quant-method int4 --threadpool-count 1",
    "int4_t2_cut_copied": f"cpu --max-shard-size {SHARD_SIZE} --non-experts copy",
    "int4_t2_loose": "cpu --no-merge-safetensor --layers 1",
    "int8_t1_loose_backward": "cpu --quant-method int8 --threadpool-count 1 --no-merge-safetensor --save-backward-weights",
    "int8_t2_backward": "cpu --quant-method int8 --save-backward-weights --layers 0",
    "w4a16": "gpu --quant-method RTN --quant-type W4A16",
    "w8a16_cut_float32": f"gpu --quant-method RTN --quant-type W8A16 --rounding float32 --max-shard-size {SHARD_SIZE}",
}
# Settings of plans with GPTQ. Their bytes depend on the machine; their fingerprints depend on these settings.
CALIBRATED: dict[str, Any] = {
    "quant_method": "GPTQ",
    "group_size": 128,
    "rounding": "library",
    "ignore_patterns": [],
    "torch_dtype": "bfloat16",
    "max_shard_size": None,
    "arch_file": None,
    "dataset": "org/texts",
    "dataset_split": "train",
    "num_calibration_samples": 8,
    "sequence_length": 64,
    "dampening_frac": 0.1,
    "seed": 42,
    "calibrate": "all",
    "min_expert_tokens": 128,
    "engine": "stream",
    "trust_remote_code": False,
    "machine": {"device": "a CPU", "device_type": "cpu", "threads": 2, "group_bytes": 1 << 20},
}


@pytest.fixture(autouse=True)
def fixed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a fixed version, since cards, configs and manifests contain it."""
    monkeypatch.setattr("ktconvert.pipeline.engine.plan.__version__", "0")


@pytest.fixture
def golden() -> Iterator[dict[str, Any]]:
    """Return the hashes by case; write them afterwards if the environment requests it."""
    hashes = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    yield hashes
    if os.environ.get("KTCONVERT_WRITE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")


def short_hash(data: bytes) -> str:
    """Return a short hash."""
    return hashlib.sha256(data).hexdigest()[:16]


def unit_fingerprints(command: str, source: Path, settings: dict[str, Any], **tuning: Any) -> dict[str, str]:
    """Return the fingerprint of each unit of a plan, by its name in the store."""
    options = {"input": source, "output": source.parent / "none", **settings, **tuning}
    planned = make_plan(make_options(command, **options))
    return {unit.stored_name: unit.fingerprint[16:32] for unit in planned.units}


def convert_and_hash(command: str, source: Path, output: Path, *options: str) -> dict[str, Any]:
    """Run a real conversion; return hashes of its units and files."""
    COMMANDS[command].main(["-i", str(source), "-o", str(output), "-q", *options], standalone_mode=False)
    settings = json.loads((output / "manifest.json").read_bytes())["settings"]
    files = {p.relative_to(output).as_posix(): short_hash(p.read_bytes()) for p in output.rglob("*") if p.is_file()}
    if settings.get("no_merge_safetensor"):  # hundreds of files: one hash for each layer
        weights = {name: files.pop(name) for name in sorted(files) if name.endswith(".kt")}
        for layer in sorted({name.partition("/")[0] for name in weights}):
            lines = [f"{name} {value}" for name, value in weights.items() if name.startswith(f"{layer}/")]
            files[layer] = short_hash("\n".join(lines).encode())
    return {"units": unit_fingerprints(command, source, settings), "files": files}


def compare(golden: dict[str, Any], case: str, actual: dict[str, Any]) -> None:
    """Compare a case with the golden hashes."""
    if os.environ.get("KTCONVERT_WRITE_GOLDEN") == "1":
        golden[case] = actual
    assert actual == golden[case]


@pytest.mark.parametrize("case", CASES)
def test_conversions_give_the_same_bytes(case, example, tmp_path, golden):
    command, *options = CASES[case].split()
    compare(golden, case, convert_and_hash(command, example, tmp_path / "output", *options))


def test_merge_gives_the_same_bytes(example, tmp_path, golden):
    loose, merged = tmp_path / "loose", tmp_path / "merged"
    cpu.main(["-i", str(example), "-o", str(loose), "-q", "--no-merge-safetensor"], standalone_mode=False)
    # Fingerprints contain the sizes of files, but not their times.
    compare(golden, "merge", convert_and_hash("merge", loose, merged, "--max-tensors", "100"))


@pytest.mark.parametrize("kind", ["W4A16", "W8A16"])
def test_gptq_plans_have_the_same_fingerprints(kind, example, golden):
    pytest.importorskip("llmcompressor")
    tuning = {"threads": 2, "force_cpu": True, "max_gpu_memory": None, "allow_machine_change": False}
    settings = {**CALIBRATED, "quant_type": kind}
    compare(golden, f"gptq_{kind}", {"units": unit_fingerprints("gpu", example, settings, **tuning)})
