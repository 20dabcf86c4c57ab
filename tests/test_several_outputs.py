"""Several outputs from one read: each equals a single conversion, all or none are begun, the source is read once."""

import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from ktconvert.layouts.errors import ResourceError
from ktconvert.native_quant import machine
from ktconvert.pipeline.engine import lock
from ktconvert.pipeline.plans import commands
from ktconvert.pipeline.report.progress import Reporter
from rig import conversion

METHODS = ("int4", "int8", "rawint4")
TOGETHER = ("--quant-method", ",".join(METHODS), "--cpuinfer-threads", "1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.checkpoint(tmp_path_factory.mktemp("input") / "small")


@pytest.fixture(scope="module")
def single_outputs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, conversion.Tree]:
    """Convert with each method separately."""
    base = tmp_path_factory.mktemp("alone")
    for method in METHODS:
        result = conversion.run_in_process("cpu", "-i", source, "-o", base / method, "--quant-method", method, "-q")
        assert result.exit_code == 0, result.output
    return {f"out-{method}": conversion.tree(base / method) for method in METHODS}


def require_equal(folder: Path, wanted: dict[str, conversion.Tree]) -> None:
    assert conversion.names(folder) == sorted(wanted)
    for name, files in wanted.items():
        assert conversion.find_differences(conversion.tree(folder / name), files) == []


def test_outputs_equal_single_conversions_and_share_reads(source, single_outputs, tmp_path):
    result = conversion.ktconvert("cpu", "-i", source, "-o", tmp_path / "out", *TOGETHER, "--json")
    assert result.returncode == 0, result.stderr
    require_equal(tmp_path, single_outputs)
    said = conversion.parse_events(result.stdout)
    order = [(each["unit"], Path(each["output"]).name) for each in said if each["event"] == "start"]
    assert order == [(f"experts.layer-{layer:03d}", name) for layer in range(3) for name in single_outputs]
    finished = [each["output"] for each in said if each["event"] == "finished"]
    assert finished == [str(tmp_path / name) for name in single_outputs]
    (begin,) = (each for each in said if each["event"] == "begin")
    assert begin["total_bytes"] == 3 * 3 * 2 * 3 * 2 * conversion.HIDDEN * conversion.WIDTH


def test_finished_outputs_stay_and_missing_ones_are_made(source, single_outputs, tmp_path):
    result = conversion.run_in_process("cpu", "-i", source, "-o", tmp_path / "out-int8", "--quant-method", "int8", "-q")
    assert result.exit_code == 0, result.output
    before = conversion.identity(tmp_path / "out-int8")
    result = conversion.run_in_process("cpu", "-i", source, "-o", tmp_path / "out", *TOGETHER)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'out-int8'} is finished: nothing to do" in result.output
    assert conversion.identity(tmp_path / "out-int8") == before
    require_equal(tmp_path, single_outputs)


def test_input_is_hashed_once(source, tmp_path, capsys):
    asked = {"input": source, "output": tmp_path / "out", "quant_method": "int4,int8", "verify_inputs": True}
    plans = commands.make_plans(commands.make_options("cpu", **asked), Reporter(json_events=True, verbosity=-2))
    hashed = [event["bytes"] for event in conversion.parse_events(capsys.readouterr().out)]
    assert sorted(hashed) == sorted(path.stat().st_size for path in source.glob("*.safetensors"))
    assert all(file.sha256 for plan in plans for file in plan.source if file.name.endswith(".safetensors"))


def test_executor_makes_the_same_outputs(source, single_outputs, tmp_path):
    order = commands.make_options("cpu", input=source, output=tmp_path / "out", quant_method=",".join(METHODS))
    with ProcessPoolExecutor(2) as executor:
        assert commands.run(commands.make_plans(order), executor)
    require_equal(tmp_path, single_outputs)


# What makes one output impossible, and what is said of it.
IMPOSSIBLE: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "one cannot be made": (("--quant-method", "int4,awq"), 3, ("awq",)),
    "one has no such choice of codes": (("--quant-method", "int4,fp8", "--scale", "mse"), 2, ("--scale mse", "FP8")),
    "one is not for these sizes": (("--quant-method", "fp8,int4", "--threadpool-count", "8"), 3, ("fp8 or int4",)),
    "a calibration run for each": (
        ("--quant-method", "int4,int8", "--scale", "gptq"),
        2,
        ("int4,int8", "GPTQ", "at a time"),
    ),
    "parts": (("--quant-method", "int4,int8", "--part", "0/2"), 2, ("int4,int8", "--part")),
}


@pytest.mark.parametrize("dry", [False, True], ids=["run", "dry run"])
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_one_impossible_output_prevents_all_writes(case, dry, source, tmp_path):
    options, code, words = IMPOSSIBLE[case]
    more = ["--dry-run"] if dry else []
    result = conversion.ktconvert("cpu", "-i", source, "-o", tmp_path / "out", *options, *more)
    conversion.check_refusal(result, code, *words)
    assert conversion.names(tmp_path) == []


def occupied(folder: Path, source: Path) -> None:
    (folder / "out-rawint4").mkdir()
    (folder / "out-rawint4" / "theirs").write_bytes(b"")


def linked(folder: Path, source: Path) -> None:
    (folder / "out-rawint4").symlink_to("out-int8")


def begun_with_other_options(folder: Path, source: Path) -> None:
    options = ("--quant-method", "int8", "--layers", "0-1", "--part", "0/2", "-q")
    result = conversion.ktconvert("cpu", "-i", source, "-o", folder / "out-int8", *options)
    assert result.returncode == 0, result.stderr


def in_use(folder: Path, source: Path) -> None:
    lock.acquire(folder / "out-rawint4.work", folder / "out-rawint4")


@pytest.mark.parametrize(
    ("prepare", "code", "word"),
    [
        (occupied, 7, "out-rawint4"),
        (linked, 2, "are the same folder"),
        (begun_with_other_options, 7, "--layers was 0-1"),
        (in_use, 7, "out-rawint4"),
    ],
)
def test_one_existing_output_prevents_all_work(prepare, code, word, source, tmp_path):
    folder = tmp_path / "outputs"
    folder.mkdir()
    prepare(folder, source)
    before = conversion.tree(folder)
    result = conversion.ktconvert("cpu", "-i", source, "-o", folder / "out", *TOGETHER)
    conversion.check_refusal(result, code, word)
    assert conversion.tree(folder) == before


def test_disk_must_hold_all_outputs(source, tmp_path, monkeypatch):
    """There is room for each of them, and not for all."""
    command = ("cpu", "-i", source, "-o", tmp_path / "out")
    result = conversion.run_in_process(*command, *TOGETHER, "--dry-run", "--json")
    *plans, together = (each for each in conversion.parse_events(result.stdout) if each["event"] in ("plan", "plans"))
    (disk,) = together["disks"]
    assert disk["outputs"] == together["outputs"] == [plan["output"] for plan in plans]
    assert disk["disk_needed"] == sum(plan["disk_needed"] for plan in plans)
    assert together["bytes_in"] == sum(plan["bytes_in"] for plan in plans)
    assert conversion.names(tmp_path) == []
    monkeypatch.setattr(machine, "disk_free", lambda path: disk["disk_needed"] - 1)
    result = conversion.run_in_process(*command, *TOGETHER)
    assert isinstance(result.exception, ResourceError)
    assert re.search(r"out-int4\.work, .*out-int8\.work, .*out-rawint4\.work: ", str(result.exception))
    assert conversion.names(tmp_path) == []
    result = conversion.run_in_process(*command, "--quant-method", "int4")
    assert result.exit_code == 0
